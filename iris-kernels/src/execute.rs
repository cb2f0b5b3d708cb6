//! Executor: enqueues the calls of an operator. A program lists the steps of a call (kernels,
//! GEMMs, copies), in several alternatives.
//!
//! [`Executor::new`] loads the kernels and GEMMs that a program can use on the heap's device.
//! [`Executor::run`] selects the first alternative whose conditions the call meets, visits the
//! steps of this alternative in order (`call.rs`), derives the arguments of each step from the
//! call's operands (`step_operands.rs`) and enqueues the step. If a step cannot be done in this
//! call, the steps that the program names as its replacement are enqueued instead.
//!
//! The first step that a peer can see commits a call. If a later step fails, the call can never
//! end, and the heap is poisoned on all ranks. If a step fails before that point, the call may be
//! retried. In a capture nothing is visible before the graph is launched, so the capture is
//! invalidated instead.

#![allow(unsafe_code, reason = "calls get addresses")]

mod call;
mod gemm;
mod kernels;
mod message;
mod step_operands;

use std::fmt;
use std::sync::Arc;

use iris_heap::abi::abort;
use iris_heap::{Error, IssueGuard, Result, Stream, SymmetricHeap};

use crate::args::OpArgs;
use crate::build::OpBuild;
use crate::kernel::Kernel;
use crate::library::GemmRequest;
use crate::program::{Alternative, Areas, At, Program, Step, Transfer, When, Work};
use call::{Call, Progress};
use gemm::Gemms;
use kernels::KernelSet;

pub use kernels::Workgroups;
pub(crate) use kernels::{fits, share};

/// Executor of a program, which enqueues calls on the device of one heap.
#[derive(Debug)]
pub struct Executor {
    program: Program,
    /// Alternative lists of steps that calls on this device can use, most preferred first.
    alternatives: Vec<&'static Alternative>,
    kernels: KernelSet,
    gemms: Option<Gemms>,
    areas: Areas,
    /// Transfers of rows between ranks that the program's steps carry out.
    transfers: Vec<Transfer>,
    /// Whether workgroups must do the transfers instead of copy engines. They must if transferred
    /// bytes are counted, delays are injected, or ranks share the device.
    by_workgroups: bool,
}

/// Error of a call that failed while it was being enqueued.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Step that could not be enqueued.
    pub step: Work,
    /// Error that the step returned.
    pub cause: Error,
    /// Action that the caller must take.
    pub recovery: Recovery,
}

/// Action that is required after a call has failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Recovery {
    /// Retry the call or leave it: no peer can see any part of the call.
    Retry,
    /// Close the heap: peers may wait in the call, so the heap can no longer be used on any rank.
    Close,
    /// Discard the graph: the call was being captured, and the capture is now invalid.
    Discard,
}

impl fmt::Display for Recovery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Recovery::Retry => "no peer has seen anything of the call, which may be tried again",
            Recovery::Close => {
                "peers may be in the call, so the heap is poisoned on all ranks: close it"
            }
            Recovery::Discard => "the capture is invalid: discard it and capture again",
        })
    }
}

impl Executor {
    /// Prepares to run a program on the heap's device. On a GPU the kernels are loaded, and
    /// compiled if they are not cached. Loading may wait for the device, so call this function
    /// where all ranks make the operator. `op` describes the builds of message kernels, which only
    /// exchange data. `whole` describes the library GEMM of a program with GEMMs; calls of such a
    /// program need a workspace of [`GemmRequest::library_bytes`] plus the program's [`Areas`]. If
    /// `count_traffic`, transferred bytes are counted, so workgroups do the transfers.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a device, element type or tile without kernels; [`Error::Other`]
    /// with an [`crate::rtc::Error`]; [`Error::Device`]; [`Error::TooManyGroups`] if so many ranks
    /// share the device that not even one workgroup of each rank is co-resident.
    pub fn new(
        heap: &SymmetricHeap,
        op: &OpBuild,
        program: &Program,
        whole: Option<&GemmRequest>,
        count_traffic: bool,
    ) -> Result<Self> {
        let shared = heap.ranks_on_device() > 1 && op.fault_injection.whole.is_none();
        let by_workgroups = count_traffic || shared || op.fault_injection.is_by_messages();
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

    /// Names of the GEMM libraries that the executor uses; `None` if it uses none.
    pub fn library(&self) -> Option<String> {
        self.gemms.as_ref()?.library()
    }

    /// Returns a copy of this executor that uses no whole-matrix GEMM, neither the vendor's nor a
    /// built-in one; where bits must not depend on the call, it lacks only the fused GEMM. It is
    /// needed if not all ranks of the world have these GEMMs.
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

    /// Number of workgroups that are co-resident: the upper limit for a launch whose workgroups
    /// wait for each other.
    pub fn max_coresident_workgroups(&self) -> u32 {
        self.kernels.max_coresident_workgroups()
    }

    /// Enqueues one call on `stream`. `groups` is the size of the launches of kernels that process
    /// tiles. `args.record.direct` is cleared if peers must not store into C.
    ///
    /// # Errors
    /// [`Failure`], with the failed step and the recovery. Errors inside a kernel are returned by
    /// [`Stream::sync`].
    ///
    /// # Safety
    /// Every address in `args` is live until the stream has finished the call, and every replay of
    /// a graph that captured the call. Addresses in the heap are live until the heap is closed.
    pub unsafe fn run(
        &self,
        heap: &Arc<SymmetricHeap>,
        issuing: &IssueGuard<'_>,
        stream: &Stream,
        args: &mut OpArgs,
        groups: Workgroups,
    ) -> Result<(), Box<Failure>> {
        let mut progress = Progress::default();
        // SAFETY: the caller keeps this function's contract, which equals that of `Call::new`.
        let call = unsafe { Call::new(self, (heap, stream), args, groups) };
        let Err(failed) = self.steps(call, &mut progress) else { return Ok(()) };
        let (step, cause) = *failed;
        if progress.forked {
            // The call will never end. The streams of its copies must still be joined, so that a
            // graph that captures the copies can be completed.
            warn(heap.gpu().and_then(|gpu| gpu.join_copies(stream)));
        }
        let captured = issuing.discard_capture(stream);
        let recovery = match captured {
            Ok(true) => Recovery::Discard,
            Ok(false) if !progress.visible => Recovery::Retry,
            // The executor cannot tell whether the call is captured. A peer may already wait in the
            // call, so the heap is poisoned.
            Ok(false) | Err(_) => {
                warn(heap.poison(abort::INCOMPLETE));
                Recovery::Close
            }
        };
        Err(Box::new(Failure { step, cause, recovery }))
    }

    /// Enqueues the steps of a call in order, until one fails.
    fn steps(&self, call: Call<'_>, progress: &mut Progress) -> Result<(), Box<(Work, Error)>> {
        let of = call.alternative().map_err(|error| Box::new((self.first_step(), error)))?;
        if !of.direct {
            // `direct` lets peers store into C. It is cleared before the first launch, because all
            // launches of the call must publish equal records.
            call.args.record.direct = 0;
        }
        let parts = if self.transfers.is_empty() { 0 } else { call.places().parts() };
        let peers = || call.args.channel.peers();
        let mut visit = |step: &Step, at: At| call.step(step, at, (parts, &peers), progress);
        self.program.walk(of, (parts, &peers), &mut visit)
    }

    /// First step of the last alternative. An error names this step if the alternative of a call
    /// cannot be determined.
    fn first_step(&self) -> Work {
        let mut first = None;
        if let Some(of) = self.alternatives.last() {
            self.program.each_step_of(of, &mut |step| first = first.or(Some(step.work)));
        }
        first.unwrap_or(Work::RmsNorm)
    }
}

/// Alternatives of `program` whose conditions calls can meet if the GEMMs `gemms` are available.
fn possible(program: &Program, gemms: Option<&Gemms>) -> Vec<&'static Alternative> {
    let may = |when: &When| gemms.is_none_or(|gemms| gemms.may_meet(*when));
    let takes = |of: &&Alternative| program.takes(of) && of.when.iter().all(may);
    program.alternatives.iter().filter(takes).collect()
}

fn warn(result: Result<()>) {
    if let Err(error) = result {
        tracing::warn!(%error, "peers were not told of the failure; their waits end at their deadlines");
    }
}

fn unsupported(what: String, why: &str) -> Error {
    Error::Unsupported { what, why: why.into() }
}
