//! The one error type of the crate.

#[cfg(test)]
mod texts;

use std::sync::Arc;

use iris_heap::{DType, ErrorKind};
use iris_kernels::Then;

use crate::kind::{Op, UnknownName};
use crate::label::OpLabel;

/// Short for a result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Errors of plans and operators. Of those that `run` returns, only [`Error::Step`] can come after something was
/// enqueued: it says what follows.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A name of an op or a variant that there is none of.
    #[error(transparent)]
    Unknown(#[from] UnknownName),
    /// A tuning file cannot be read or written, or is of another machine.
    #[error("tuning file {} {why}", path.display())]
    Tuning {
        /// The file.
        path: std::path::PathBuf,
        /// What is wrong with it, and what was expected.
        why: String,
    },
    /// A workspace was asked for without a plan.
    #[error(
        "0 plans, expected at least one: pass the plans of all operators that the heap or workspace is for"
    )]
    NoPlan,
    /// An argument has a value that the op cannot take.
    #[error("{op}: {what} is {value}, expected {expected}")]
    Invalid {
        /// The op.
        op: OpLabel,
        /// The argument.
        what: String,
        /// Its value.
        value: String,
        /// What would be right.
        expected: String,
    },
    /// A matrix has another shape than the op's plan and the other matrices ask for.
    #[error(
        "{op}: {matrix} is {rows} x {cols}, expected {expected}; pass such a matrix, or plan for this one"
    )]
    Shape {
        /// The op.
        op: OpLabel,
        /// Which matrix.
        matrix: &'static str,
        /// Its rows.
        rows: usize,
        /// Its columns.
        cols: usize,
        /// What would be right, and why.
        expected: String,
    },
    /// A matrix has another element type than the plan.
    #[error(
        "{op}: {matrix} is of {dtype}, expected {expected}, as the plan says: pass {expected}, or plan with \
         Options::dtype (of C: Options::output)"
    )]
    Dtype {
        /// The op.
        op: OpLabel,
        /// Which matrix.
        matrix: &'static str,
        /// Its element type.
        dtype: DType,
        /// That of the plan.
        expected: DType,
    },
    /// Two matrices share memory that the op writes.
    #[error(
        "{op}: {first} and {second} overlap, expected memory of its own for {first}, which is written: allocate it apart"
    )]
    Overlap {
        /// The op.
        op: OpLabel,
        /// The one that is written.
        first: &'static str,
        /// The other.
        second: &'static str,
    },
    /// The call has more rows than the plan has room for.
    #[error(
        "{op}: {rows} rows, expected at most {planned}, which the plan was made for: pass fewer, or plan for {rows}"
    )]
    TooManyRows {
        /// The op.
        op: OpLabel,
        /// Rows of the call.
        rows: usize,
        /// Rows of the plan.
        planned: usize,
    },
    /// A call has more elements than the op was planned for.
    #[error(
        "{op}: {elements} elements, expected at most {planned}, which the plan was made for: pass fewer, or plan for \
         {elements}"
    )]
    TooManyElements {
        /// The op.
        op: OpLabel,
        /// Elements of the call, in each part of the message.
        elements: usize,
        /// Elements of the plan.
        planned: usize,
    },
    /// A plan was made for another rank or world than that of the heap.
    #[error(
        "{op}: planned for rank {planned_rank} of {planned_size}, expected rank {rank} of {size}, that of the heap: plan \
         on each rank, from its world or heap"
    )]
    OtherWorld {
        /// The op.
        op: OpLabel,
        /// The plan's rank.
        planned_rank: usize,
        /// The plan's world.
        planned_size: usize,
        /// The heap's rank.
        rank: usize,
        /// The heap's world.
        size: usize,
    },
    /// An earlier call of the heap failed; it must be closed and opened anew.
    #[error(
        "{op}: the heap takes no calls after a fault, expected one without: {cause}; close it and its world, and open \
         them anew"
    )]
    Poisoned {
        /// The op that was asked.
        op: OpLabel,
        /// What went wrong before.
        cause: Box<iris_heap::Error>,
    },
    /// A step of a call could not be enqueued.
    #[error("{op}: step {step}: {cause}; {then}")]
    Step {
        /// The op.
        op: OpLabel,
        /// The step, as the plan's program shows it.
        step: String,
        /// The heap's error.
        cause: Box<iris_heap::Error>,
        /// Recovery: retry, close the heap, or discard the capture.
        then: Then,
    },
    /// The heap or its world failed.
    #[error("{}", named(op, cause))]
    Heap {
        /// The op.
        op: OpLabel,
        /// The heap's error.
        cause: Box<iris_heap::Error>,
    },
}

/// What went wrong, with the op's name in front, once.
fn named(op: &OpLabel, cause: &iris_heap::Error) -> String {
    let (label, cause) = (op.to_string(), cause.to_string());
    let says = |name: &str| cause.strip_prefix(name).and_then(|rest| rest.strip_prefix(": "));
    let rest = says(&label).or_else(|| says(op.op().name())).unwrap_or(&cause);
    format!("{label}: {rest}")
}

impl Error {
    /// Gives the operator of the error its label, unless it has one.
    pub(crate) fn labelled(mut self, label: &Arc<str>) -> Self {
        match &mut self {
            Error::Invalid { op, .. }
            | Error::Shape { op, .. }
            | Error::Dtype { op, .. }
            | Error::Overlap { op, .. }
            | Error::TooManyRows { op, .. }
            | Error::TooManyElements { op, .. }
            | Error::OtherWorld { op, .. }
            | Error::Poisoned { op, .. }
            | Error::Step { op, .. }
            | Error::Heap { op, .. } => op.set(label),
            Error::Unknown(_) | Error::Tuning { .. } | Error::NoPlan => {}
        }
        self
    }

    /// What a caller can do about it: the same kinds as those of the heap's errors.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::Poisoned { cause, .. }
            | Error::Heap { cause, .. }
            | Error::Step { cause, .. } => cause.kind(),
            _ => ErrorKind::Usage,
        }
    }
}

/// Adds the name of the op to an error of the heap.
pub(crate) trait InOp<T> {
    fn in_op(self, op: Op) -> Result<T>;
}

impl<T> InOp<T> for iris_heap::Result<T> {
    fn in_op(self, op: Op) -> Result<T> {
        self.map_err(|cause| Error::Heap { op: op.into(), cause: Box::new(cause) })
    }
}
