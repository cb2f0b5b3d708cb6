//! Kernels of users: compiled from the user's source, and launched between operator calls or
//! concurrently with one.

#![allow(unsafe_code, reason = "kernels of users get addresses")]

use iris_heap::{Error, Function, LaunchShape, Result, Stream, SymmetricHeap};

use crate::args::TileView;
use crate::execute::{fits, share};
use crate::rtc::{self, KernelSource, Options};
use crate::target::Target;

/// Kernel of the user on the GPU of a heap, from source that may include the headers of
/// [`crate::source::HEADERS`], such as `#include "iris/sync.h"`.
#[derive(Clone, Debug)]
pub struct UserKernel {
    function: Function,
    resident: u32,
    threads: u32,
    shared_bytes: u32,
    /// Number of multiprocessors that this rank may use: all of the device, or this rank's share if
    /// ranks share the device.
    multiprocessors: u32,
    /// Address of the heap's control block, by which a launch checks that a tile view belongs to
    /// this heap.
    control: u64,
}

impl UserKernel {
    /// Compiles a source, unless it is cached, and loads the kernel `name`, which is declared by
    /// `IRIS_KERNEL` or `extern "C" __global__`. Loading may wait for the device, so call this
    /// function where all ranks call it. The kernel can be launched on streams of this heap only.
    /// `threads` is the number of threads per workgroup, [`THREADS`](crate::gemm_config::THREADS)
    /// for a kernel declared by `IRIS_KERNEL`. `shared_bytes` is the dynamic shared memory per
    /// workgroup.
    ///
    /// # Errors
    /// Errors of [`Executor::new`](crate::Executor::new).
    pub fn new(
        heap: &SymmetricHeap,
        source: KernelSource<'_>,
        options: &Options,
        name: &str,
        (threads, shared_bytes): (u32, u32),
    ) -> Result<Self> {
        let Target { vendor, arch } = Target::of(heap.device())?;
        let image = rtc::compile(vendor, source, options, &arch).map_err(Error::other)?;
        let function = heap.load(&image)?.function(name, shared_bytes)?;
        let resident = share(heap, &function, threads, shared_bytes)?;
        let (multiprocessors, control) = (heap.workgroups(), heap.view().control);
        Ok(Self { function, resident, threads, shared_bytes, multiprocessors, control })
    }

    /// Largest number of workgroups that can be resident at once on the device, or on this rank's
    /// share of the device if ranks share it.
    pub fn max_coresident_workgroups(&self) -> u32 {
        self.resident
    }

    /// Enqueues a launch of `groups` workgroups after the heap's last operator call. The next
    /// operator call waits for the launch. `args` are the bytes of the parameters, in order; a
    /// `HeapView` is passed as `bytemuck::bytes_of(&heap.view())`.
    ///
    /// # Errors
    /// [`Error::TooManyGroups`]; [`Error::Invalid`] for a stream of another heap;
    /// [`Error::Closed`]; [`Error::Device`]. Errors inside the kernel are reported by
    /// [`Stream::sync`].
    ///
    /// # Safety
    /// The contract of [`Function::launch`] applies: `args` match the kernel's parameters, and
    /// memory that the kernel accesses through these parameters is valid until the stream has
    /// finished the launch.
    pub unsafe fn launch(&self, stream: &Stream, groups: u32, args: &[&[u8]]) -> Result<()> {
        let shape = self.shape(groups)?;
        // SAFETY: the caller guarantees that the parameters match the kernel; `groups` are
        // co-resident.
        unsafe { self.function.launch(stream, shape, args) }
    }

    /// Enqueues a launch that runs at the same time as the next operator call, on a stream of its
    /// own. The launch begins after everything that was issued before it; the operator call does
    /// not wait for the launch. The kernel's first parameter is the [`TileView`] that the operator
    /// made for the call; `args` are the bytes of the other parameters. Issue the operator call
    /// next: a kernel that waits for a call which never comes ends with a fault at its deadline.
    ///
    /// A waiting workgroup occupies a multiprocessor, so each workgroup of the operator and of this
    /// kernel needs its own. Together they may have at most [`SymmetricHeap::workgroups`]
    /// workgroups, this rank's share of the multiprocessors. To leave room, plan the operator with
    /// `Options::reserve_sms(groups)` on all ranks. All workgroups are then resident, whatever
    /// resources each needs, as long as no other kernel waits on the device.
    ///
    /// # Errors
    /// [`Error::TooManyGroups`] if there are more workgroups than that; [`Error::Invalid`] for the
    /// stream of the last operator call, and for a stream or a view of another heap;
    /// [`Error::Closed`]; [`Error::Device`]. Errors inside the kernel are reported by
    /// [`Stream::sync`].
    ///
    /// # Safety
    /// The contract of [`UserKernel::launch`] applies. The program runs no other waiting kernel
    /// during the same call. Memory that the kernel reads is not written before the kernel ends. So
    /// make the operator's stream wait for an event after this launch, before the program issues
    /// the next call that writes C or the next call with a concurrent kernel.
    pub unsafe fn launch_concurrent(
        &self,
        stream: &Stream,
        groups: u32,
        view: &TileView,
        args: &[&[u8]],
    ) -> Result<()> {
        let shape = self.shape(groups)?;
        let beside = view.groups;
        if groups + beside > self.multiprocessors {
            return Err(Error::TooManyGroups {
                name: format!(
                    "{}, {groups} workgroups beside {beside} of an operator",
                    self.function.name()
                ),
                groups: groups + beside,
                threads: self.multiprocessors,
            });
        }
        if view.heap.control != self.control {
            return Err(Error::Invalid {
                what: format!("view for {}", self.function.name()),
                value: "one of another heap".into(),
                expected: "a view of the heap that loaded the kernel".into(),
            });
        }
        let args = [&[bytemuck::bytes_of(view)], args].concat();
        // SAFETY: the caller guarantees that the parameters match the kernel. The device has at
        // least as many multiprocessors as the launch has workgroups, so each waiting workgroup
        // gets an empty multiprocessor and becomes resident.
        unsafe { self.function.launch_concurrent(stream, shape, &args) }
    }

    /// Enqueues a launch that is ordered by its stream alone, not with the heap's operator calls.
    ///
    /// # Errors
    /// Errors of [`UserKernel::launch`].
    ///
    /// # Safety
    /// The contract of [`UserKernel::launch`] applies. In addition, the kernel must not wait for
    /// any other kernel or rank.
    pub unsafe fn launch_in_stream(
        &self,
        stream: &Stream,
        groups: u32,
        args: &[&[u8]],
    ) -> Result<()> {
        let shape = self.shape(groups)?;
        // SAFETY: the caller guarantees that the parameters match the kernel, which does not wait.
        unsafe { self.function.launch_in_stream(stream, shape, args) }
    }

    fn shape(&self, groups: u32) -> Result<LaunchShape> {
        fits(self.function.name(), groups, self.resident)?;
        let Self { threads, shared_bytes, .. } = *self;
        Ok(LaunchShape { groups, threads, shared_bytes, early: false })
    }
}
