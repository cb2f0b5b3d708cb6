//! Kernels of users: compiled from their own source, launched in the order of ops or beside a call.

use iris_heap::{Error, Function, LaunchShape, Result, Stream, SymmetricHeap};

use crate::args::TileView;
use crate::execute::{fits, share};
use crate::rtc::{self, KernelSource, Options};
use crate::target::Target;

/// A kernel of the user's on the GPU of a heap, from source that may include the headers of
/// [`crate::source::HEADERS`]: `#include "iris/sync.h"`.
#[derive(Clone, Debug)]
pub struct UserKernel {
    function: Function,
    resident: u32,
    threads: u32,
    shared_bytes: u32,
    /// This rank's part of the device's multiprocessors.
    multiprocessors: u32,
    /// The address of the heap's control block, by which a view of it is known.
    control: u64,
}

impl UserKernel {
    /// Compile a source, unless it was before, and load the kernel `name`, which is declared by
    /// `IRIS_KERNEL` or `extern "C" __global__`. It may wait for the device: call it where all ranks
    /// do. It is launched on streams of this heap only. `threads` a workgroup are [`THREADS`](crate::gemm_config::THREADS) for a
    /// kernel of `IRIS_KERNEL`; `shared_bytes` is its dynamic shared memory.
    ///
    /// # Errors
    /// As [`Executor::new`](crate::Executor::new).
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

    /// Workgroups that run at the same time beside those of the ranks that share the device.
    pub fn resident(&self) -> u32 {
        self.resident
    }

    /// Enqueue a launch behind the last op of the heap; the next op waits for it. `args` are the bytes
    /// of the parameters, in order: of a heap's view, `bytemuck::bytes_of(&heap.view())`.
    ///
    /// # Errors
    /// [`Error::TooManyGroups`]; [`Error::Invalid`] for a stream of another heap; [`Error::Closed`],
    /// [`Error::Device`]. What goes wrong in the kernel comes from [`Stream::sync`].
    ///
    /// # Safety
    /// As for [`Function::launch`]: the parameters are the kernel's, and what it accesses through
    /// them is valid until the stream has finished the launch.
    pub unsafe fn launch(&self, stream: &Stream, groups: u32, args: &[&[u8]]) -> Result<()> {
        let shape = self.shape(groups)?;
        // SAFETY: the caller vouches for the parameters; `groups` are resident.
        unsafe { self.function.launch(stream, shape, args) }
    }

    /// Enqueue a launch beside the next call of an op, on a stream of its own: it runs behind what
    /// was issued before, and the call does not wait for it. The kernel's first parameter is the
    /// `TileView` that the op gave for the call; `args` are the bytes of the others. Run the call
    /// next: a kernel that waits for one that does not come leaves a fault after its deadline.
    ///
    /// A workgroup that waits keeps its place on the device, so there must be a multiprocessor for
    /// each workgroup of both: those of the op and `groups` are together at most
    /// [`SymmetricHeap::workgroups`], this rank's part of the multiprocessors: plan the op with
    /// `Options::beside(groups)`, on all ranks. That all are resident follows, whatever each needs of a
    /// multiprocessor, as long as nothing else waits on the device.
    ///
    /// # Errors
    /// [`Error::TooManyGroups`] if they are more; [`Error::Invalid`] for the stream of the last op, and
    /// for a stream or a view of another heap; [`Error::Closed`], [`Error::Device`]. What goes wrong in
    /// the kernel comes from [`Stream::sync`].
    ///
    /// # Safety
    /// As for [`UserKernel::launch`]. No other kernel that waits, of this program's own, runs beside
    /// the same call. What the kernel reads is not written before it is over: let the op's stream
    /// wait for an event behind it before the next call that writes C, or the next with a kernel
    /// beside it, is issued.
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
        // SAFETY: the caller vouches for the parameters. A workgroup that is not yet resident finds
        // a multiprocessor without one, since there are as many as workgroups, and fits that.
        unsafe { self.function.launch_beside(stream, shape, &args) }
    }

    fn shape(&self, groups: u32) -> Result<LaunchShape> {
        fits(self.function.name(), groups, self.resident)?;
        let Self { threads, shared_bytes, .. } = *self;
        Ok(LaunchShape { groups, threads, shared_bytes, early: false })
    }
}
