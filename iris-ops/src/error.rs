use iris_heap::{DType, ErrorKind};
use iris_kernels::Then;

use crate::kind::{Op, UnknownName};

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
    #[error("a workspace for no plan: expected at least one")]
    NoPlan,
    /// An argument has a value that the op cannot take.
    #[error("{op}: {what} is {value}, expected {expected}")]
    Invalid {
        /// The op.
        op: Op,
        /// The argument.
        what: String,
        /// Its value.
        value: String,
        /// What would be right.
        expected: String,
    },
    /// A matrix has another shape than the op's plan and the other matrices ask for.
    #[error("{op}: {matrix} is {rows} x {cols}, expected {expected}")]
    Shape {
        /// The op.
        op: Op,
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
    #[error("{op}: {matrix} is of {dtype}, the plan says {expected}")]
    Dtype {
        /// The op.
        op: Op,
        /// Which matrix.
        matrix: &'static str,
        /// Its element type.
        dtype: DType,
        /// That of the plan.
        expected: DType,
    },
    /// Two matrices share memory that the op writes.
    #[error("{op}: {first} and {second} overlap")]
    Overlap {
        /// The op.
        op: Op,
        /// The one that is written.
        first: &'static str,
        /// The other.
        second: &'static str,
    },
    /// The call has more rows than the plan has room for.
    #[error("{op}: {rows} rows, but the plan was made for at most {planned}")]
    TooManyRows {
        /// The op.
        op: Op,
        /// Rows of the call.
        rows: usize,
        /// Rows of the plan.
        planned: usize,
    },
    /// A call has more elements than the op was planned for.
    #[error("{op}: {elements} elements, but the plan was made for at most {planned}")]
    TooManyElements {
        /// The op.
        op: Op,
        /// Elements of the call, in each part of the message.
        elements: usize,
        /// Elements of the plan.
        planned: usize,
    },
    /// A plan was made for another rank or world than that of the heap.
    #[error(
        "{op}: planned for rank {planned_rank} of {planned_size}, the heap is of rank {rank} of {size}"
    )]
    OtherWorld {
        /// The op.
        op: Op,
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
    #[error("{op}: the heap is poisoned by an earlier fault: {cause}")]
    Poisoned {
        /// The op that was asked.
        op: Op,
        /// What went wrong before.
        cause: Box<iris_heap::Error>,
    },
    /// A step of a call could not be enqueued.
    #[error("{op}: step {step}: {cause}; {then}")]
    Step {
        /// The op.
        op: Op,
        /// The step, as the plan's program shows it.
        step: String,
        /// The heap's error.
        cause: Box<iris_heap::Error>,
        /// Recovery: retry, close the heap, or discard the capture.
        then: Then,
    },
    /// A communicator could not be opened or closed.
    #[error("communicator: {cause}")]
    Comm {
        /// The error of its heap or its world.
        cause: Box<iris_heap::Error>,
    },
    /// The heap or its world failed.
    #[error("{}", named(op.name(), cause))]
    Heap {
        /// The op.
        op: Op,
        /// The heap's error.
        cause: Box<iris_heap::Error>,
    },
}

/// What went wrong, with the op's name in front, once.
fn named(op: &str, cause: &iris_heap::Error) -> String {
    let cause = cause.to_string();
    let says = cause.strip_prefix(op).is_some_and(|rest| rest.starts_with(": "));
    if says { cause } else { format!("{op}: {cause}") }
}

impl Error {
    /// An error of a communicator's heap or world.
    pub(crate) fn comm(cause: iris_heap::Error) -> Self {
        Error::Comm { cause: Box::new(cause) }
    }

    /// What a caller can do about it: the same kinds as those of the heap's errors.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::Poisoned { cause, .. }
            | Error::Heap { cause, .. }
            | Error::Comm { cause }
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
        self.map_err(|cause| Error::Heap { op, cause: Box::new(cause) })
    }
}
