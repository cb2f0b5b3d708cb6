//! [`Module`] and [`Function`]: compiled kernels, the same interface on every device that loads such.

use std::fmt;
use std::sync::{Arc, Weak};

use crate::backend::{FunctionBackend, LaunchOrder, LaunchShape, ModuleBackend};
use crate::control::Control;
use crate::error::Result;
use crate::stream::Stream;

/// Compiled kernels that a heap's device has loaded, until the process ends. They are launched on
/// streams of this heap only.
#[derive(Clone)]
pub struct Module {
    inner: Arc<dyn ModuleBackend>,
    heap: Weak<Control>,
}

/// A kernel of a module.
#[derive(Clone)]
pub struct Function {
    inner: Arc<dyn FunctionBackend>,
    heap: Weak<Control>,
    name: Arc<str>,
}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Module").finish_non_exhaustive()
    }
}

impl fmt::Debug for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Function({})", self.name)
    }
}

impl Module {
    pub(crate) fn new(inner: Arc<dyn ModuleBackend>, heap: &Arc<Control>) -> Module {
        Module { inner, heap: Arc::downgrade(heap) }
    }

    /// The kernel of this name, loaded now and not at its first launch, with `shared_bytes` of
    /// dynamic shared memory allowed.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) if there is none, or if it cannot have that much.
    pub fn function(&self, name: &str, shared_bytes: u32) -> Result<Function> {
        let inner = self.inner.function(name, shared_bytes)?;
        Ok(Function { inner, heap: self.heap.clone(), name: name.into() })
    }
}

impl Function {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Registers a thread, and bytes of local memory a thread: more than none are spills or arrays.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device).
    pub fn resources(&self) -> Result<(u32, u32)> {
        self.inner.resources()
    }

    /// Workgroups of this size that run at the same time on the whole device, if nothing else does.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device).
    pub fn resident(&self, threads: u32, shared_bytes: u32) -> Result<u32> {
        self.inner.resident(threads, shared_bytes)
    }

    /// Clusters of `cluster` workgroups, as the kernel was compiled for, that run at the same time on the whole
    /// device, of a launch of this shape, if nothing else does. They may be fewer than the workgroups that do
    /// would make: those of a cluster need multiprocessors side by side.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device).
    pub fn resident_clusters(&self, shape: LaunchShape, cluster: u32) -> Result<u32> {
        self.inner.resident_clusters(shape, cluster)
    }

    /// Enqueues a launch behind the heap's last op, on whatever stream that was; the next op waits
    /// for it. The stream is of the heap that the module was loaded for: another heap would neither
    /// order the launch with these ops nor wait for it.
    ///
    /// # Errors
    /// [`Error::Closed`](crate::Error::Closed); [`Error::Invalid`](crate::Error::Invalid) for a stream of
    /// another heap; [`Error::Device`](crate::Error::Device).
    ///
    /// # Safety
    /// `args` are the bytes of the kernel's parameters, in order and each as long as the kernel has
    /// it. What the kernel accesses through them stays valid until the stream has finished the
    /// launch, and so does every replay of a graph that the launch is captured in. Workgroups that
    /// wait for each other or for other ranks all fit the device at the same time.
    pub unsafe fn launch(&self, stream: &Stream, shape: LaunchShape, args: &[&[u8]]) -> Result<()> {
        stream.check_of(self.heap.as_ptr(), &self.name)?;
        // SAFETY: as the caller says.
        unsafe { self.inner.launch(stream.backend(), LaunchOrder::Op, shape, args) }
    }

    /// Enqueues a launch behind the heap's last op, which the next op does not wait for: the two run
    /// at the same time. The stream is not that of the last op.
    ///
    /// # Errors
    /// As [`Function::launch`]; [`Error::Invalid`](crate::Error::Invalid) for the stream of the last op.
    ///
    /// # Safety
    /// As for [`Function::launch`]; and beside the workgroups of this launch all those of the ops
    /// fit the device that are launched while it runs.
    pub unsafe fn launch_beside(
        &self,
        stream: &Stream,
        shape: LaunchShape,
        args: &[&[u8]],
    ) -> Result<()> {
        stream.check_of(self.heap.as_ptr(), &self.name)?;
        // SAFETY: as the caller says.
        unsafe { self.inner.launch(stream.backend(), LaunchOrder::Beside, shape, args) }
    }
}
