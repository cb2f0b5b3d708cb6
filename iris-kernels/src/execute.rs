//! The executor: enqueues the steps of a program for one call.
//!
//! [`Executor::new`] loads the kernels and GEMMs that a program can use on the heap's device. [`Executor::run`] takes
//! the first alternative whose conditions the call meets, goes through its steps in order (`call.rs`), makes the
//! arguments of each from the call's operands (`places.rs`) and enqueues it. A step that cannot be done is replaced by
//! its own alternative.
//!
//! A call is committed by its first step that a peer can see: if a later one fails, the call can never end, and the
//! heap is poisoned on all ranks. Before that, a failed call may be tried again. In a capture, nothing is seen before
//! the graph is launched: the capture is made invalid.

mod call;
mod gemm;
mod kernels;
mod message;
mod places;

use std::fmt;
use std::sync::Arc;

use iris_heap::abi::abort;
use iris_heap::{Error, Issuing, Result, Stream, SymmetricHeap};

use crate::args::OpArgs;
use crate::build::OpBuild;
use crate::kernel::Kernel;
use crate::library::Whole;
use crate::program::{Alternative, Areas, At, Program, Step, Transfer, When, Work};
use call::{Call, Progress};
use gemm::Gemms;
use kernels::KernelSet;

pub use kernels::Workgroups;
pub(crate) use kernels::{fits, share};

/// Runs one program on the device of a heap.
#[derive(Debug)]
pub struct Executor {
    program: Program,
    /// The alternatives that calls on this device can take, by preference.
    alternatives: Vec<&'static Alternative>,
    kernels: KernelSet,
    gemms: Option<Gemms>,
    areas: Areas,
    /// Transfers of the program.
    transfers: Vec<Transfer>,
    /// Whether what is moved is counted or held up, or ranks share the device, so that workgroups must move it.
    by_workgroups: bool,
}

/// A call that was not enqueued as a whole.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The step that failed.
    pub step: Work,
    /// Its error.
    pub cause: Error,
    /// Recovery.
    pub then: Then,
}

/// Recovery after a call has failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Then {
    /// No peer can see anything of the call: it may be tried again.
    Retry,
    /// Peers may be in the call: the heap is poisoned on all ranks.
    Close,
    /// The call was being captured: the capture is invalid, and its graph must be discarded.
    Discard,
}

impl fmt::Display for Then {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Then::Retry => "no peer has seen anything of the call, which may be tried again",
            Then::Close => {
                "peers may be in the call, so the heap is poisoned on all ranks: close it"
            }
            Then::Discard => "the capture is invalid: discard it and capture again",
        })
    }
}

impl Executor {
    /// Prepares to run a program on the heap's device. On a GPU, kernels are compiled, unless they were before, and
    /// loaded, which may wait for the device: call it where all ranks make the operator. `op` is the build of the
    /// message's kernels; `whole` the library GEMM of a program that has GEMMs, whose calls need its
    /// [`Whole::library_bytes`] and the [`Areas`] of the program as workspace; `counted` says whether what is moved is
    /// counted, so that workgroups must move it.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a device, type or tile that there are no kernels for; [`Error::Other`] with an
    /// [`crate::rtc::Error`]; [`Error::Device`]; [`Error::TooManyGroups`] if so many ranks share the device that not
    /// one workgroup of each is resident.
    pub fn new(
        heap: &SymmetricHeap,
        op: &OpBuild,
        program: &Program,
        whole: Option<&Whole>,
        counted: bool,
    ) -> Result<Self> {
        let shared = heap.sharing() > 1 && op.injected.whole.is_none();
        let by_workgroups = counted || shared || op.injected.is_by_messages();
        let new = |whole| Gemms::new(heap, op, program, whole, by_workgroups);
        let gemms = whole.map(new).transpose()?;
        let alternatives = possible(program, gemms.as_ref());
        let mut kernels = Vec::new();
        let mut transfers = Vec::new();
        for of in &alternatives {
            program.each_step_of(of, &mut |step| {
                kernels.extend(program.kernel_of(step.work));
                transfers.extend(step.work.transfer());
            });
        }
        transfers.sort_unstable();
        transfers.dedup();
        if op.observed && gemms.is_some() {
            kernels.push(Kernel::Stamp { after: false, rows: 0 });
        }
        let kernels = KernelSet::new(heap, op, &kernels)?;
        let (program, areas) = (*program, Areas::of(program));
        Ok(Self { program, alternatives, kernels, gemms, areas, transfers, by_workgroups })
    }

    /// The libraries whose GEMMs it uses, if it uses any.
    pub fn library(&self) -> Option<String> {
        self.gemms.as_ref()?.library()
    }

    /// Makes an executor without library GEMMs and without ours: for worlds in which not all ranks have them.
    #[must_use]
    pub fn without_library(&self) -> Self {
        let gemms = self.gemms.as_ref().map(Gemms::without_library);
        Self {
            program: self.program,
            alternatives: possible(&self.program, gemms.as_ref()),
            kernels: self.kernels.clone(),
            gemms,
            areas: self.areas,
            transfers: self.transfers.clone(),
            by_workgroups: self.by_workgroups,
        }
    }

    /// Workgroups that run at the same time: a launch whose workgroups wait may have no more.
    pub fn resident(&self) -> u32 {
        self.kernels.resident()
    }

    /// Enqueues one call on `stream`. `groups` are the workgroups of kernels that work on tiles.
    ///
    /// # Errors
    /// [`Failure`], with the step and what can be done then. What goes wrong in a kernel comes from
    /// [`Stream::sync`].
    ///
    /// # Safety
    /// Every address in `args` must be live until the stream has finished the call, and
    /// every replay of a graph that it is captured in. Those of the heap are until it is closed.
    pub unsafe fn run(
        &self,
        heap: &Arc<SymmetricHeap>,
        issuing: &Issuing<'_>,
        stream: &Stream,
        args: &OpArgs,
        groups: Workgroups,
    ) -> Result<(), Box<Failure>> {
        let mut progress = Progress::default();
        // SAFETY: as the caller says.
        let call = unsafe { Call::new(self, (heap, stream), args, groups) };
        let Err(failed) = self.steps(call, &mut progress) else { return Ok(()) };
        let (step, cause) = *failed;
        if progress.forked {
            // The call will never end; a graph that it is captured in still must.
            warn(heap.gpu().and_then(|gpu| gpu.join_copies(stream)));
        }
        let captured = issuing.discard_capture(stream);
        let then = match captured {
            Ok(true) => Then::Discard,
            Ok(false) if !progress.visible => Then::Retry,
            // Whether it is captured is not known: a peer may wait.
            Ok(false) | Err(_) => {
                warn(heap.poison(abort::INCOMPLETE));
                Then::Close
            }
        };
        Err(Box::new(Failure { step, cause, then }))
    }

    /// Enqueues the steps of a call, as far as it comes.
    fn steps(&self, mut call: Call<'_>, progress: &mut Progress) -> Result<(), Box<(Work, Error)>> {
        let of = call.alternative().map_err(|error| Box::new((self.first_step(), error)))?;
        if !of.direct {
            // A rank says the same of C in all launches of a call.
            call.args.record.direct = 0;
        }
        let parts = if self.transfers.is_empty() { 0 } else { call.places().parts() };
        let peers = || call.args.channel.peers();
        let mut visit = |step: &Step, at: At| call.step(step, at, (parts, &peers), progress);
        self.program.walk(of, (parts, &peers), &mut visit)
    }

    /// The step that a call begins with if it meets no condition.
    fn first_step(&self) -> Work {
        let mut first = None;
        if let Some(of) = self.alternatives.last() {
            self.program.each_step_of(of, &mut |step| first = first.or(Some(step.work)));
        }
        first.unwrap_or(Work::RmsNorm)
    }
}

/// The alternatives that can be taken with these GEMMs.
fn possible(program: &Program, gemms: Option<&Gemms>) -> Vec<&'static Alternative> {
    let may = |when: &When| gemms.is_none_or(|gemms| gemms.may_meet(*when));
    program.alternatives.iter().filter(|of| of.when.iter().all(may)).collect()
}

fn warn(told: Result<()>) {
    if let Err(error) = told {
        tracing::warn!(%error, "the peers learn by their deadlines");
    }
}

fn unsupported(what: String, why: &str) -> Error {
    Error::Unsupported { what, why: why.into() }
}
