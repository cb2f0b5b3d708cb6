//! Device barrier in stream order. Work on any member's stream before the barrier is visible to
//! work on any member's stream after it.

use iris_heap::Stream;

use crate::args::Matrices;
use crate::error::Result;
use crate::nodes::Operator;
use crate::op_names::{Op, Variant};
use crate::op_row::{Common, Composition, Dims, Form, Memory, Part, Row, Tiles};
use crate::operator_macros::{common_methods, plan_and_new};
use crate::options::options;
use crate::programs::BARRIER;

/// Barrier of all ranks of the heap, or of the ranks in [`Options::members`]. All ranks make the
/// operator, but only members run it.
#[derive(Debug)]
pub struct Barrier {
    operator: Operator,
}

plan_and_new!(Barrier);
common_methods!(Barrier);

impl Barrier {
    /// Enqueues the barrier on `stream`.
    ///
    /// # Errors
    /// [`Invalid`](crate::OpError::Invalid) on a rank that is not a member;
    /// [`Step`](crate::OpError::Step) if the launch fails; [`Poisoned`](crate::OpError::Poisoned)
    /// after a fault on the heap.
    pub fn run(&self, stream: &Stream) -> Result<()> {
        self.operator.run(stream, &Matrices::default())
    }
}

options! { ROW,
    /// Options of a [`Barrier`].
    {
        /// Options for a barrier of all ranks.
        nothing();
        members,
    }
}

impl Default for Options {
    fn default() -> Self {
        Self::new()
    }
}

pub(crate) const ROW: Row = Row {
    op: Op::Barrier,
    message: Op::Barrier,
    common: Common { n: false, k: false },
    a: Part::None,
    c: Part::None,
    dims: Dims::message,
    tiles: Tiles::All,
    in_place: false,
    composed: Composition::Barrier,
    alone: BARRIER,
    forms: &[Form::push(Variant::Flat, BARRIER, Memory::None)],
};
