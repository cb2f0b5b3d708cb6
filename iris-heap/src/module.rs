//! Compiled kernels, with one interface for every device that loads them: [`Module`] and
//! [`Function`].

#![allow(unsafe_code, reason = "kernels get addresses")]

use std::fmt;
use std::sync::{Arc, Weak};

use crate::backend::{GpuFunction, GpuModule, LaunchOrder, LaunchShape};
use crate::control::Control;
use crate::error::Result;
use crate::stream::Stream;

/// Image of compiled kernels that is loaded on a heap's device until the process ends. The kernels
/// can be launched only on streams of this heap.
#[derive(Clone)]
pub struct Module {
    inner: GpuModule,
    heap: Weak<Control>,
}

/// Kernel of a loaded module.
#[derive(Clone)]
pub struct Function {
    inner: GpuFunction,
    heap: Weak<Control>,
}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Module").finish_non_exhaustive()
    }
}

impl fmt::Debug for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Function({})", self.name())
    }
}

impl Module {
    pub(crate) fn new(inner: GpuModule, heap: &Arc<Control>) -> Module {
        Module { inner, heap: Arc::downgrade(heap) }
    }

    /// Returns the kernel called `name`, and allows it `shared_bytes` bytes of dynamic shared
    /// memory. The kernel is loaded now rather than at its first launch.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) if there is no such kernel, or if the device does
    /// not have that much shared memory.
    pub fn function(&self, name: &str, shared_bytes: u32) -> Result<Function> {
        let inner = self.inner.function(name, shared_bytes)?;
        Ok(Function { inner, heap: self.heap.clone() })
    }
}

impl Function {
    /// Name of the kernel in its module.
    pub fn name(&self) -> &str {
        self.inner.name()
    }

    /// Number of registers, and of bytes of local memory, per thread; local memory above zero means
    /// spilled registers or arrays in local memory.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device).
    pub fn resources(&self) -> Result<(u32, u32)> {
        self.inner.resources()
    }

    /// Number of workgroups with `threads` threads and `shared_bytes` bytes of dynamic shared
    /// memory each that are co-resident on the whole device if nothing else runs.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device).
    pub fn max_coresident_workgroups(&self, threads: u32, shared_bytes: u32) -> Result<u32> {
        self.inner.max_coresident_workgroups(threads, shared_bytes)
    }

    /// Number of clusters of `cluster` workgroups that are co-resident on the whole device if
    /// nothing else runs; `cluster` is the size that the kernel was compiled for. Clusters may hold
    /// fewer workgroups than [`Function::max_coresident_workgroups`] reports, because the
    /// workgroups of a cluster must run on neighbouring multiprocessors.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device).
    pub fn resident_clusters(&self, shape: LaunchShape, cluster: u32) -> Result<u32> {
        self.inner.resident_clusters(shape, cluster)
    }

    /// Enqueues a launch on `stream`. The launch waits for the heap's last op, on whichever stream
    /// that op is; the next op waits for this launch. The stream must belong to the heap for which
    /// the module was loaded, because another heap would neither order the launch with its ops nor
    /// wait for it.
    ///
    /// # Errors
    /// [`Error::Closed`](crate::Error::Closed); [`Error::Invalid`](crate::Error::Invalid) for a
    /// stream of another heap; [`Error::Device`](crate::Error::Device).
    ///
    /// # Safety
    /// `args` are the bytes of the kernel's parameters, in order and each of the size that the
    /// kernel expects. All memory that the kernel accesses through them stays valid until the
    /// launch has finished, and every replay of a graph that captured it. Workgroups that wait for
    /// each other or for other ranks are co-resident.
    pub unsafe fn launch(&self, stream: &Stream, shape: LaunchShape, args: &[&[u8]]) -> Result<()> {
        // SAFETY: the caller keeps this function's contract, which is that of `launch_in`.
        unsafe { self.launch_in(LaunchOrder::Op, stream, shape, args) }
    }

    /// Enqueues a launch after the heap's last op; the next op does not wait for it, so the launch
    /// and the next op run at the same time. `stream` must not be the stream of the last op.
    ///
    /// # Errors
    /// Errors of [`Function::launch`]; [`Error::Invalid`](crate::Error::Invalid) for the stream of
    /// the last op.
    ///
    /// # Safety
    /// Contract of [`Function::launch`]. Moreover, the workgroups of this launch and of all ops
    /// launched while it runs must fit on the device together.
    pub unsafe fn launch_concurrent(
        &self,
        stream: &Stream,
        shape: LaunchShape,
        args: &[&[u8]],
    ) -> Result<()> {
        // SAFETY: the caller keeps this function's contract, which is that of `launch_in`.
        unsafe { self.launch_in(LaunchOrder::Beside, stream, shape, args) }
    }

    /// Enqueues a launch that is ordered by its stream alone: it does not wait for the heap's ops
    /// on other streams, and these ops do not wait for it.
    ///
    /// # Errors
    /// Errors of [`Function::launch`].
    ///
    /// # Safety
    /// Contract of [`Function::launch`]. Moreover, the kernel waits for nothing, or its workgroups
    /// and the workgroups of all ops launched while it runs fit on the device together.
    pub unsafe fn launch_in_stream(
        &self,
        stream: &Stream,
        shape: LaunchShape,
        args: &[&[u8]],
    ) -> Result<()> {
        // SAFETY: the caller keeps this function's contract, which is that of `launch_in`.
        unsafe { self.launch_in(LaunchOrder::Stream, stream, shape, args) }
    }

    /// Enqueues a launch on a stream of this function's heap, in the order `order`.
    ///
    /// # Safety
    /// Contract of [`GpuFunction::launch`].
    unsafe fn launch_in(
        &self,
        order: LaunchOrder,
        stream: &Stream,
        shape: LaunchShape,
        args: &[&[u8]],
    ) -> Result<()> {
        stream.check_of(self.heap.as_ptr(), self.name())?;
        // SAFETY: the caller keeps the contract.
        unsafe { self.inner.launch(stream.backend(), order, shape, args) }
    }
}
