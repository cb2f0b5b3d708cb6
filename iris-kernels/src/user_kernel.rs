//! Kernels of users: compiled from their own source, launched in the order of ops or beside a call.

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
    /// Number of multiprocessors of this rank's share of the device.
    multiprocessors: u32,
    /// Address of the heap's control block, by which a launch checks that a tile view belongs to
    /// this heap.
    control: u64,
}

impl UserKernel {
    /// Compiles a source, unless it is cached, and loads the kernel `name`, which is declared by
    /// `IRIS_KERNEL` or `extern "C" __global__`. It may wait for the device, so call it where all
    /// ranks do. The kernel can be launched on streams of this heap only. `threads` is the number
    /// per workgroup, [`THREADS`](crate::gemm_config::THREADS) for a kernel declared by
    /// `IRIS_KERNEL`; `shared_bytes` is the dynamic shared memory per workgroup.
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

    /// Number of co-resident workgroups, beside those of other ranks that share the device.
    pub fn resident(&self) -> u32 {
        self.resident
    }

    /// Enqueues a launch after the last op of the heap; the next op waits for it. `args` are the
    /// bytes of the parameters, in order; for a heap's view `bytemuck::bytes_of(&heap.view())`.
    ///
    /// # Errors
    /// [`Error::TooManyGroups`]; [`Error::Invalid`] for a stream of another heap;
    /// [`Error::Closed`]; [`Error::Device`]. Errors inside the kernel are returned by
    /// [`Stream::sync`].
    ///
    /// # Safety
    /// Contract of [`Function::launch`]: the parameters are those of the kernel, and memory that it
    /// accesses through them is valid until the stream has finished the launch.
    pub unsafe fn launch(&self, stream: &Stream, groups: u32, args: &[&[u8]]) -> Result<()> {
        let shape = self.shape(groups)?;
        // SAFETY: the caller guarantees the parameters; `groups` are co-resident.
        unsafe { self.function.launch(stream, shape, args) }
    }

    /// Enqueues a launch beside the next call of an op, on a stream of its own: it runs after the
    /// work issued before, and the call does not wait for it. The kernel's first parameter is the
    /// `TileView` that the op returned for the call; `args` are the bytes of the others. Run the
    /// call next: a kernel that waits for a missing call leaves a fault after its deadline.
    ///
    /// A waiting workgroup keeps its place on the device, so there must be one multiprocessor for
    /// each workgroup of both: the op's workgroups and `groups` together must not exceed
    /// [`SymmetricHeap::workgroups`], this rank's share of the multiprocessors. So plan the op with
    /// `Options::beside(groups)` on all ranks. Then all workgroups are co-resident, whatever
    /// resources each needs, as long as nothing else waits on the device.
    ///
    /// # Errors
    /// [`Error::TooManyGroups`] if there are more; [`Error::Invalid`] for the stream of the last
    /// op, and for a stream or a view of another heap; [`Error::Closed`]; [`Error::Device`]. Errors
    /// inside the kernel are returned by [`Stream::sync`].
    ///
    /// # Safety
    /// Contract of [`UserKernel::launch`]. No other waiting kernel of the program runs beside the
    /// same call. Data that the kernel reads is not overwritten before the kernel has ended: let
    /// the op's stream wait for an event recorded after the kernel, before the next call that
    /// writes C, or that has a kernel beside it, is issued.
    pub unsafe fn launch_beside(
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
                    "{}, {groups} of them, beside {beside} of an op",
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
                expected: "one of the heap that the kernel was made for".into(),
            });
        }
        let args = [&[bytemuck::bytes_of(view)], args].concat();
        // SAFETY: the caller guarantees the parameters. There are as many multiprocessors as
        // workgroups, so a workgroup that is not resident yet finds an empty multiprocessor, where
        // it fits.
        unsafe { self.function.launch_beside(stream, shape, &args) }
    }

    fn shape(&self, groups: u32) -> Result<LaunchShape> {
        fits(self.function.name(), groups, self.resident)?;
        let Self { threads, shared_bytes, .. } = *self;
        Ok(LaunchShape { groups, threads, shared_bytes, early: false })
    }
}
