//! Launching a kernel on the device of a heap.

use std::sync::Arc;

use iris_heap::{BackendKind, Error, Group, Result, Stream, SymmetricHeap};

use crate::args::OpArgs;
use crate::cpu;
use crate::kernel::Kernel;

/// What an op keeps to launch its kernels: on a GPU the loaded modules, on the CPU nothing.
#[derive(Clone, Debug)]
pub struct Launcher {
    resident: u32,
}

impl Launcher {
    /// Prepare to launch the kernels of one op on the heap's device.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a device that there are no kernels for.
    pub fn new(heap: &SymmetricHeap) -> Result<Self> {
        match heap.backend().device().kind {
            BackendKind::Cpu => Ok(Self { resident: heap.workgroups() }),
            other => Err(Error::Unsupported {
                what: format!("kernels on {other}"),
                why: "this build has kernels for the CPU".into(),
            }),
        }
    }

    /// Workgroups that run at the same time, all of them: a launch may have no more.
    pub fn resident(&self) -> u32 {
        self.resident
    }

    /// Enqueue `kernel` of `op` on `stream`, with `groups` workgroups.
    ///
    /// # Errors
    /// [`Error::TooManyGroups`], [`Error::Closed`]. What goes wrong in the kernel comes from
    /// [`Stream::sync`].
    ///
    /// # Safety
    /// As for [`cpu::run`]: every address in `args` must be live until the stream has finished the
    /// launch. Those of the heap are, since the launch keeps the heap.
    pub unsafe fn launch(
        &self,
        heap: &Arc<SymmetricHeap>,
        stream: &Stream,
        (op, kernel): (&'static str, Kernel),
        args: OpArgs,
        groups: u32,
    ) -> Result<()> {
        let memory = heap.memory();
        let name = if op == kernel.name() { op } else { kernel.name() };
        let run = move |group: Group| {
            // SAFETY: the caller vouches for the matrices; `memory` keeps the rest.
            let result = unsafe { cpu::run(kernel, &args, group.index, group.count) };
            // A fault says more than that there was one; the record is complete, or a peer's is.
            result.or_else(|_stop| memory.control.check())
        };
        stream.launch_cpu(name, groups, Arc::new(run))
    }
}
