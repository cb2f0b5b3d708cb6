//! What all operators are: a plan, a workspace, and what is needed to launch a call.

mod beside;
mod make;
mod observe;
mod record;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;

use iris_heap::{DevWords, RawSlice, Stream, SymmetricHeap};
use iris_kernels::args::{Matrix, OpArgs};
use iris_kernels::{Executor, Failure, Then, Workgroups};

use crate::args::Matrices;
use crate::check::{self, Call};
use crate::error::{Error, InOp, Result};
use crate::matrix::MatRef;
use crate::operand::sealed::MatrixArg;
use crate::options::{Request, Shard};
use crate::plan::Plan;
use crate::workspace::Workspace;

/// An op on one rank: its share of the heap and everything needed to launch it.
///
/// It is `Send` and `Sync`. The launches of one call are enqueued under the issue lock of the heap, so
/// that calls of several threads come one after the other; which of two is first is for the program
/// to see to, since all ranks must issue the calls of a heap in one order. An op that is dropped
/// without being freed keeps its blocks until its heap closes.
pub(crate) struct Operator {
    heap: Arc<SymmetricHeap>,
    plan: Plan,
    workspace: Arc<Workspace>,
    /// Whether the workspace goes with the op.
    owns: bool,
    /// Counters, and words for a kernel beside a call.
    words: DevWords,
    trace: Option<RawSlice>,
    /// What is launched, by the choices of the plan.
    ready: Vec<Ready>,
}

/// Executor and arguments for calls of one choice.
struct Ready {
    executor: Arc<Executor>,
    /// Most workgroups of a launch.
    groups: u32,
    /// All arguments but those that a call brings.
    args: OpArgs,
}

impl fmt::Debug for Operator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Operator({} in {:?})", self.plan, self.heap)
    }
}

impl Operator {
    /// Checks the matrices of a call and enqueues its steps, which follow each other, whoever else issues calls of
    /// this heap.
    pub(crate) fn run(&self, stream: &Stream, matrices: &Matrices) -> Result<()> {
        let op = self.plan.op();
        let call = check::call(&self.plan, matrices)?;
        self.heap.check_stream(op.name(), stream).in_op(op)?;
        let issuing = self.heap.issue();
        let args = self.checked(&call)?;
        // All ranks count all calls, except those of some ranks' barrier.
        let counted = self.plan.request().members.is_none();
        if counted {
            issuing.announce(stream, args.channel.op).in_op(op)?;
        }
        let choice = self.plan.at(call.size(&self.plan));
        let threads = self.plan.threads(choice, (call.m, call.n));
        let count = self.groups_for(&call);
        let several_items = self.plan.has_several_items(choice, (call.m, call.n), count);
        let groups = Workgroups { count, threads, several_items };
        let executor = &self.ready(&call).executor;
        // SAFETY: `fill` checked every matrix against the heap, or its maker vouched for it; the workspace is that of
        // this op.
        #[allow(unsafe_code, reason = "the one place where ops hand addresses to kernels")]
        let done = unsafe { executor.run(&self.heap, &issuing, stream, &args, groups) };
        done.map_err(|failure| {
            let Failure { step, cause, then } = *failure;
            let told =
                if then == Then::Retry && counted { issuing.retract(stream) } else { Ok(()) };
            if let Err(error) = told {
                let rank = self.heap.rank();
                tracing::warn!(%op, rank, %error, "a call is counted that was not made");
            }
            Error::Step { op, step: step.to_string(), cause: Box::new(cause), then }
        })
    }

    /// Enqueues a call whose matrices lie in memory that is lent to it.
    pub(crate) fn run_lent<'a, M: MatrixArg + 'a, I: Iterator<Item = &'a M>>(
        &self,
        stream: &Stream,
        lent: impl Fn() -> I,
        matrices: &Matrices,
    ) -> Result<()> {
        let op = self.plan.op();
        lent().try_for_each(|matrix| matrix.check(op, &self.heap, stream))?;
        let outcome = self.run(stream, matrices);
        // Also of a call that failed: some of its steps may be out.
        let told = lent().try_for_each(|matrix| matrix.enqueued(op));
        outcome.and(told)
    }

    fn ready(&self, call: &Call) -> &Ready {
        &self.ready[self.plan.index_at(call.size(&self.plan))]
    }

    /// Workgroups of a call: on a GPU those without work would cost time, and poll.
    fn groups_for(&self, call: &Call) -> u32 {
        let Ready { groups, args, .. } = self.ready(call);
        if self.plan.request().workgroups.is_some() || self.plan.on_cpu() {
            return *groups;
        }
        let choice = self.plan.at(call.size(&self.plan));
        let work = self.plan.work(choice, (call.m, call.n), args.movers);
        if work <= *groups { work } else { spread(*groups, self.plan.size()) }
    }

    /// The arguments of a call, if it can be issued.
    fn checked(&self, call: &Call) -> Result<OpArgs> {
        let op = self.plan.op();
        let poisoned = |cause| Error::Poisoned { op, cause: Box::new(cause) };
        self.heap.control().check().map_err(poisoned)?;
        self.fill(call)
    }

    fn fill(&self, call: &Call) -> Result<OpArgs> {
        let (op, row) = (self.plan.op(), self.plan.row());
        let Matrices { a, b, c, bias, norm, .. } = &call.matrices;
        let resolve = |name, matrix: &Option<MatRef>| match matrix {
            Some(matrix) => matrix.resolve(op, name, &self.heap),
            None => Ok(Matrix::default()),
        };
        let mut args = self.ready(call).args;
        let [input, output] = check::names(self.plan.row());
        (args.a, args.b) = (resolve(input, a)?, resolve("B", b)?);
        (args.c, args.bias) = (resolve(output, c)?, resolve("bias", bias)?);
        let (residual, weight) = (norm.and_then(|norm| norm.residual), norm.map(|it| it.weight));
        let normed = norm.map(|norm| norm.normed);
        args.residual = resolve("residual", &residual)?;
        (args.weight, args.normed) = (resolve("weight", &weight)?, resolve("normed", &normed)?);
        let read = [
            (input, *a, args.a),
            ("B", *b, args.b),
            ("bias", *bias, args.bias),
            ("residual", residual, args.residual),
            ("weight", weight, args.weight),
            (output, *c, args.c),
        ];
        // C is read again to be normalised, by nobody else.
        let written =
            [(output, *c, args.c, &read[..5]), ("normed", normed, args.normed, &read[..])];
        for (first, written, own, others) in written {
            let Some(written) = written else { continue };
            for &(second, other, theirs) in others {
                let Some(other) = other else { continue };
                // An element is read before it is written, by the same thread.
                let may = second == "residual" || second == input && row.in_place;
                let same = first == output && may && own == theirs;
                if !same && written.overlaps(&own, &other, &theirs) {
                    return Err(Error::Overlap { op, first, second });
                }
            }
        }
        (args.m, args.n, args.root) = (call.m as u32, call.n as u32, call.root as u32);
        let choice = self.plan.at(call.size(&self.plan));
        let form = choice.form;
        if !form.fetches {
            args.movers = self.plan.senders(choice, (call.m, call.n), || self.groups_for(call));
        }
        if form.pulls && !self.plan.alone() {
            let place = a.filter(|a| !a.is_transposed()).and_then(|a| a.sym_offset());
            args.pulled = place.ok_or_else(|| {
                let others = row.forms.iter().filter(|form| !form.pulls);
                let names: Vec<_> = others.map(|form| form.variant.name()).collect();
                Error::Invalid {
                    op,
                    what: format!("A of variant {}", form.variant),
                    value: "external or transposed".into(),
                    expected: format!(
                        "rows in the symmetric heap, since peers read it where it lies; any A by {}",
                        names.join(", ")
                    ),
                }
            })?;
            args.pulled_ld = self.pulled_ld(&args.a)?;
        }
        self.say(&mut args.record, call, (args.pulled, args.pulled_ld));
        Ok(args)
    }

    /// The leading dimension of A that peers read where it lies: the same on all ranks, or 0 for
    /// lines without gaps, whose lengths differ where the columns of A are split unevenly.
    fn pulled_ld(&self, a: &Matrix) -> Result<u64> {
        let Request { shard, k, .. } = *self.plan.request();
        let longest = match shard {
            Shard::Rows => k,
            Shard::Columns => k.div_ceil(self.plan.ranks().size),
        } as u64;
        let len = u64::from(a.cols);
        if a.ld == len {
            return Ok(0);
        }
        if a.ld > longest {
            return Ok(a.ld);
        }
        Err(Error::Invalid {
            op: self.plan.op(),
            what: "leading dimension of A".into(),
            value: a.ld.to_string(),
            expected: format!("{len}, or the same above {longest} on all ranks: peers read A"),
        })
    }

    /// Whether a fault of this heap is known; what enqueued work left behind.
    pub(crate) fn check(&self) -> Result<()> {
        self.heap.check().in_op(self.plan.op())
    }

    pub(crate) fn plan(&self) -> &Plan {
        &self.plan
    }
}

/// At most so many workgroups, with no factor in common with the ranks: a workgroup has every so
/// many-th tile, and owners take turns, so that else one would own all of its tiles or none.
fn spread(groups: u32, size: u32) -> u32 {
    let common =
        |groups: u32| (2..=size).any(|f| size.is_multiple_of(f) && groups.is_multiple_of(f));
    (1..=groups).rev().find(|&groups| !common(groups)).unwrap_or(1)
}
