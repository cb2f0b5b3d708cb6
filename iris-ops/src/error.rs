//! Error type of the crate.

#[cfg(test)]
mod texts;

use std::sync::Arc;

use iris_heap::{DType, ErrorKind, shortened};
use iris_kernels::Recovery;

use crate::op_label::OpLabel;
use crate::op_names::{Op, UnknownName};

/// Result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Errors of plans and operators. `run` returns [`Error::Step`] if a step failed while it was
/// enqueued, and [`Error::Poisoned`] after a fault on the heap. Every other error of `run` means that
/// nothing was enqueued.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A name belongs to no operator, variant or device.
    #[error(transparent)]
    Unknown(#[from] UnknownName),
    /// A tuning file cannot be read or written, or was measured on another machine.
    #[error("tuning file {} {why}", shortened(&path.to_string_lossy()))]
    Tuning {
        /// Path of the tuning file.
        path: std::path::PathBuf,
        /// Reason for the refusal, and what was expected.
        why: String,
    },
    /// A function that needs at least one plan, such as `Workspace::for_plans`, was called without
    /// plans.
    #[error(
        "0 plans, expected at least one: pass the plans of all operators that the heap or workspace is for"
    )]
    NoPlan,
    /// An argument or option has a value that the operator cannot take.
    #[error("{op}: {what} is {value}, expected {expected}")]
    Invalid {
        /// Operator that refused the argument or option.
        op: OpLabel,
        /// Name of the argument or option.
        what: String,
        /// Value that was refused.
        value: String,
        /// Description of the values that are allowed.
        expected: String,
    },
    /// The shape of a matrix differs from the shape that the plan and the call's other matrices
    /// imply.
    #[error(
        "{op}: {matrix} is {rows} x {cols}, expected {expected}; pass such a matrix, or plan for this one"
    )]
    Shape {
        /// Operator of the call.
        op: OpLabel,
        /// Name of the matrix: A, B, C, input, output, bias, residual, weight or normed.
        matrix: &'static str,
        /// Number of rows of the matrix.
        rows: usize,
        /// Number of columns of the matrix.
        cols: usize,
        /// Shape that was expected, and from where it follows.
        expected: String,
    },
    /// The element type of a matrix differs from the type in the plan.
    #[error(
        "{op}: {matrix} has element type {dtype}, expected {expected}, as in the plan: pass {expected}, or plan with \
         Options::dtype (C of a product: Options::output)"
    )]
    Dtype {
        /// Operator of the call.
        op: OpLabel,
        /// Name of the matrix: A, B, C, input, output, residual or normed.
        matrix: &'static str,
        /// Element type of the matrix.
        dtype: DType,
        /// Element type in the plan.
        expected: DType,
    },
    /// Two matrices of a call overlap, and the operator writes one of them.
    #[error(
        "{op}: {first} and {second} overlap, expected memory of its own for {first}, which is written: allocate it apart"
    )]
    Overlap {
        /// Operator of the call.
        op: OpLabel,
        /// Name of the matrix that the operator writes.
        first: &'static str,
        /// Name of the matrix that overlaps `first`.
        second: &'static str,
    },
    /// A call has more rows than the plan allows.
    #[error(
        "{op}: {rows} rows, expected at most {planned}, which the plan was made for: pass fewer, or plan for {rows}"
    )]
    TooManyRows {
        /// Operator of the call.
        op: OpLabel,
        /// Number of rows of the call.
        rows: usize,
        /// Maximum number of rows, from the plan.
        planned: usize,
    },
    /// A call has more elements than the plan allows.
    #[error(
        "{op}: {elements} elements, expected at most {planned}, which the plan was made for: pass fewer, or plan for \
         {elements}"
    )]
    TooManyElements {
        /// Operator of the call.
        op: OpLabel,
        /// Number of elements of the call, in each part of the message.
        elements: usize,
        /// Maximum number of elements of a part, from the plan.
        planned: usize,
    },
    /// The plan was made for another rank or world than the heap's.
    #[error(
        "{op}: planned for rank {planned_rank} of {planned_size}, expected rank {rank} of {size}, that of the heap: plan \
         on each rank, from its world or heap"
    )]
    OtherWorld {
        /// Operator of the plan.
        op: OpLabel,
        /// Rank for which the plan was made.
        planned_rank: usize,
        /// Number of ranks for which the plan was made.
        planned_size: usize,
        /// Rank of the heap.
        rank: usize,
        /// Number of ranks of the heap.
        size: usize,
    },
    /// The plan was made for another number of nodes than the heap has.
    #[error(
        "{op}: planned for {planned} nodes, expected {nodes}, those of the heap, whose nodes are smaller than its world's \
         if GPUs cannot access each other's memory: plan from the heap, or from the world that World::for_heap returns"
    )]
    OtherNodes {
        /// Operator of the plan.
        op: OpLabel,
        /// Number of nodes for which the plan was made.
        planned: usize,
        /// Number of nodes of the heap.
        nodes: usize,
    },
    /// An earlier call on the heap failed; close the heap and open a new one.
    #[error(
        "{op}: the heap takes no calls after a fault, expected one without: close the heap and its world on all ranks, \
         and open them anew; the fault was: {cause}"
    )]
    Poisoned {
        /// Operator whose call was refused.
        op: OpLabel,
        /// Fault of the earlier call, which causes this error.
        cause: Box<iris_heap::Error>,
    },
    /// A step of a call could not be enqueued. Steps before it may have been enqueued. `recovery`
    /// says what the caller must do.
    #[error("{op}: step {step}: {cause}; {recovery}")]
    Step {
        /// Operator of the call.
        op: OpLabel,
        /// Step that failed, in the notation of [`Plan::program`](crate::Plan::program).
        step: String,
        /// Error of the heap or of the driver that made the step fail.
        cause: Box<iris_heap::Error>,
        /// Action that the caller must take: retry the call, close the heap, or discard the graph
        /// capture.
        recovery: Recovery,
    },
    /// A communicator could not be opened or closed.
    #[error("communicator: {cause}")]
    Comm {
        /// Error of the communicator's heap or world.
        cause: Box<iris_heap::Error>,
    },
    /// The stream of a [`scope`](crate::scope()), or a call in the scope, failed. The cause names
    /// the call.
    #[error("{cause}")]
    Scope {
        /// Error that the wait for the stream returned.
        cause: Box<iris_heap::Error>,
    },
    /// An operator's call of a function of the heap, or of the heap's world, failed.
    #[error("{}", named(op, cause))]
    Heap {
        /// Operator that called the heap.
        op: OpLabel,
        /// Error that the heap or its world returned.
        cause: Box<iris_heap::Error>,
    },
}

/// Text of `cause`. The name of the operator precedes it, unless the text already begins with that
/// name.
fn named(op: &OpLabel, cause: &iris_heap::Error) -> String {
    let (label, cause) = (op.to_string(), cause.to_string());
    let says = |name: &str| cause.strip_prefix(name).and_then(|rest| rest.strip_prefix(": "));
    let rest = says(&label).or_else(|| says(op.op().name())).unwrap_or(&cause);
    format!("{label}: {rest}")
}

impl Error {
    /// Error for an argument or option of `op`, named `what`, that cannot be `value`.
    pub(crate) fn invalid(
        op: Op,
        what: impl Into<String>,
        value: impl ToString,
        expected: impl Into<String>,
    ) -> Self {
        let (what, value, expected) = (what.into(), value.to_string(), expected.into());
        Error::Invalid { op: op.into(), what, value, expected }
    }

    /// Wraps an error of a communicator's heap or world.
    pub(crate) fn comm(cause: iris_heap::Error) -> Self {
        Error::Comm { cause: Box::new(cause) }
    }

    /// Wraps an error of the stream of a scope.
    pub(crate) fn scope(cause: iris_heap::Error) -> Self {
        Error::Scope { cause: Box::new(cause) }
    }

    /// Puts the operator's label into the error, unless the error already has one.
    pub(crate) fn labelled(mut self, label: &Arc<str>) -> Self {
        match &mut self {
            Error::Invalid { op, .. }
            | Error::Shape { op, .. }
            | Error::Dtype { op, .. }
            | Error::Overlap { op, .. }
            | Error::TooManyRows { op, .. }
            | Error::TooManyElements { op, .. }
            | Error::OtherWorld { op, .. }
            | Error::OtherNodes { op, .. }
            | Error::Poisoned { op, .. }
            | Error::Step { op, .. }
            | Error::Heap { op, .. } => op.set(label),
            Error::Comm { .. }
            | Error::Scope { .. }
            | Error::Unknown(_)
            | Error::Tuning { .. }
            | Error::NoPlan => {}
        }
        self
    }

    /// Kind of the error, by which a caller decides how to react. Errors of the heap keep their
    /// kind; an error that this crate detects has the kind [`ErrorKind::Usage`].
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::Poisoned { cause, .. }
            | Error::Heap { cause, .. }
            | Error::Comm { cause }
            | Error::Scope { cause }
            | Error::Step { cause, .. } => cause.kind(),
            _ => ErrorKind::Usage,
        }
    }
}

/// Conversion of heap errors to errors that name the operator.
pub(crate) trait InOp<T> {
    fn in_op(self, op: Op) -> Result<T>;
}

impl<T> InOp<T> for iris_heap::Result<T> {
    fn in_op(self, op: Op) -> Result<T> {
        self.map_err(|cause| Error::Heap { op: op.into(), cause: Box::new(cause) })
    }
}
