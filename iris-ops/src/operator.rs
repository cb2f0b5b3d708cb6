//! Core of all operators: a plan, a workspace, and all data needed to launch a call.

mod beside;
mod make;
mod observe;
mod record;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use iris_heap::{DevWords, IssueGuard, Pulled, RawSlice, Stream, SymmetricHeap};
use iris_kernels::args::{Matrix, OpArgs};
use iris_kernels::{Executor, Failure, Recovery, Workgroups};

use crate::args::Matrices;
use crate::check::{self, Checked};
use crate::error::{Error, InOp, Result};
use crate::matrix::MatRef;
use crate::options::{Request, Shard};
use crate::plan::Plan;
use crate::workspace::Workspace;

/// Op of any kind on one rank: its memory in the heap, and all data needed to launch its calls.
///
/// An op is `Send` and `Sync`. The launches of a call are enqueued under the issue lock of the
/// heap, so calls of several threads do not interleave. The program must make all ranks issue the
/// calls of a heap in the same order. An op that is dropped without `free` keeps its memory until
/// its heap closes.
pub(crate) struct Operator {
    heap: Arc<SymmetricHeap>,
    plan: Plan,
    /// Text that names the operator in errors.
    label: Arc<str>,
    workspace: Arc<Workspace>,
    /// Whether `free` also frees the workspace: true if the operator made it and no other operator
    /// uses it.
    owns: bool,
    /// Device words of the operator: its counters, and the call number for a user kernel that runs
    /// at the same time as a call.
    words: DevWords,
    trace: Option<RawSlice>,
    /// Executors and kernel arguments, one entry for each choice (variant and tile) of the plan.
    ready: Vec<Ready>,
}

/// Executor and kernel arguments for the calls that run one choice (variant and tile) of the plan.
struct Ready {
    executor: Arc<Executor>,
    /// Maximum number of workgroups of a launch.
    groups: u32,
    /// Kernel arguments that are the same for all calls with this variant and tile.
    args: OpArgs,
    /// Sizes of the launches of the most recent call, kept because programs repeat their calls.
    last: Mutex<Option<Sizes>>,
}

/// Sizes of the launches of a call. They depend only on the call's variant, tile and shape.
#[derive(Clone, Copy)]
struct Sizes {
    /// M and N of the call.
    shape: (usize, usize),
    groups: Workgroups,
    /// Number of workgroups that only fetch or only send in calls of this shape, for
    /// [`OpArgs::dedicated_workgroups`].
    dedicated: u32,
}

impl fmt::Debug for Operator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Operator({} in {:?})", self.plan, self.heap)
    }
}

impl Operator {
    /// Checks the matrices of a call and enqueues its steps under the issue lock, so that steps of
    /// other calls of the heap cannot come between them.
    pub(crate) fn run(&self, stream: &Stream, matrices: &Matrices) -> Result<()> {
        self.labelled(self.enqueue(stream, matrices))
    }

    /// Adds this operator's name to the error in `outcome`, if there is one.
    pub(crate) fn labelled<T>(&self, outcome: Result<T>) -> Result<T> {
        outcome.map_err(|error| error.labelled(&self.label))
    }

    fn enqueue(&self, stream: &Stream, matrices: &Matrices) -> Result<()> {
        let op = self.plan.op();
        let call = check::call(&self.plan, matrices)?;
        self.heap.check_stream(op.name(), stream).in_op(op)?;
        let issuing = self.heap.issue().in_op(op)?;
        let sizes = self.sizes(&call);
        let mut args = self.ready(&call).args;
        self.complete(&mut args, &call, (&sizes, &issuing))?;
        // All ranks count every call, so that their call numbers agree. A barrier of only some
        // ranks and a local product are not counted, because the other ranks need not run them.
        let counted = self.plan.request().members.is_none() && !self.plan.row().is_local();
        if counted {
            let pulled = Pulled { offset: args.pulled, ld: args.pulled_ld };
            issuing.announce(stream, args.channel.op, pulled).in_op(op)?;
        }
        let executor = &self.ready(&call).executor;
        // SAFETY: `complete` has checked every matrix against the heap, or the caller of
        // `MatRef::external` has vouched for it. A thread that frees a matrix waits for `issuing` and
        // then for the call. The workspace belongs to this op.
        #[allow(unsafe_code, reason = "the one place where ops hand addresses to kernels")]
        let done = unsafe { executor.run(&self.heap, &issuing, stream, &mut args, sizes.groups) };
        done.map_err(|failure| {
            let Failure { step, cause, recovery } = *failure;
            let retracted =
                if recovery == Recovery::Retry && counted { issuing.retract(stream) } else { Ok(()) };
            if let Err(error) = retracted {
                let rank = self.heap.rank();
                tracing::warn!(%op, rank, %error, "a failed call could not be removed from the count of issued calls");
            }
            Error::Step { op: op.into(), step: step.to_string(), cause: Box::new(cause), recovery }
        })
    }

    fn ready(&self, call: &Checked) -> &Ready {
        &self.ready[self.plan.index_at(call.size(&self.plan))]
    }

    /// Sizes of the launches of a call.
    fn sizes(&self, call: &Checked) -> Sizes {
        let ready = self.ready(call);
        let shape = (call.m, call.n);
        let mut last = ready.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = last.filter(|known| known.shape == shape) {
            return known;
        }
        let choice = self.plan.at(call.size(&self.plan));
        let (count, threads) = (self.groups_for(call), self.plan.threads(choice, shape));
        let packs = self.plan.has_packs(choice, shape);
        let dedicated = match choice.form.fetches {
            true => ready.args.dedicated_workgroups,
            false => self.plan.senders(choice, shape, || count),
        };
        let groups = Workgroups { count, threads, packs };
        *last.insert(Sizes { shape, groups, dedicated })
    }

    /// Number of workgroups for a call. On a GPU there are no workgroups without work: their launch
    /// would take time, and they would poll.
    fn groups_for(&self, call: &Checked) -> u32 {
        let Ready { groups, args, .. } = self.ready(call);
        if self.plan.request().workgroups.is_some() || self.plan.on_cpu() {
            return *groups;
        }
        let choice = self.plan.at(call.size(&self.plan));
        let work = self.plan.work(choice, (call.m, call.n), args.dedicated_workgroups);
        if work <= *groups { work } else { spread(*groups, self.plan.size()) }
    }

    /// Completes the kernel arguments `args` for a call. `args` already contains what follows from
    /// variant and tile; it is changed in place because it is large. Returns an error if an earlier
    /// call has left a fault in the heap.
    fn complete(
        &self,
        args: &mut OpArgs,
        call: &Checked,
        (sizes, issuing): (&Sizes, &IssueGuard<'_>),
    ) -> Result<()> {
        let op = self.plan.op();
        check::no_fault(op, &self.heap)?;
        call.write(&self.plan, issuing, args)?;
        call.matrices.outputs().filter_map(MatRef::slice).for_each(|it| issuing.note_result(it));
        args.dedicated_workgroups = sizes.dedicated;
        let form = self.plan.at(call.size(&self.plan)).form;
        if form.pulls && !self.plan.alone() {
            args.pulled = check::pulled(&self.plan, form, call.matrices.a.as_ref())?;
            args.pulled_ld = self.pulled_ld(&args.a)?;
        }
        self.complete_record(&mut args.record, call, (args.pulled, args.pulled_ld));
        Ok(())
    }

    /// Leading dimension with which peers read this rank's A. It must be equal on all ranks, or A
    /// must be contiguous, for which the result is 0. Contiguous shards have rows of different
    /// lengths if the columns of A are split unevenly.
    fn pulled_ld(&self, a: &Matrix) -> Result<u64> {
        let Request { shard, k, .. } = *self.plan.request();
        let longest = match shard {
            Shard::Rows => k,
            Shard::Columns => k.div_ceil(self.plan.topology().size),
        } as u64;
        let len = u64::from(a.cols);
        if a.ld == len {
            return Ok(0);
        }
        if a.ld > longest {
            return Ok(a.ld);
        }
        let expected = format!(
            "{len} (contiguous), or one value above {longest} on all ranks, because peers read A"
        );
        Err(Error::invalid(self.plan.op(), "leading dimension of A", a.ld, expected))
    }

    /// Returns the fault that enqueued calls of this heap left; `Ok` if there is none.
    pub(crate) fn check(&self) -> Result<()> {
        self.labelled(self.heap.check().in_op(self.plan.op()))
    }

    pub(crate) fn plan(&self) -> &Plan {
        &self.plan
    }

    pub(crate) fn heap(&self) -> &Arc<SymmetricHeap> {
        &self.heap
    }
}

/// Largest number of workgroups, at most `groups`, that has no factor in common with the number of
/// ranks. A workgroup processes every `groups`-th tile, and consecutive tiles are owned by
/// different ranks in turn. With a common factor, all tiles of a workgroup would belong to few
/// ranks.
fn spread(groups: u32, size: u32) -> u32 {
    let common =
        |groups: u32| (2..=size).any(|f| size.is_multiple_of(f) && groups.is_multiple_of(f));
    (1..=groups).rev().find(|&groups| !common(groups)).unwrap_or(1)
}
