//! A barrier on the device, stream-ordered: what any member's stream did before it is seen by what
//! any member's stream does after it.

use iris_heap::Stream;

use crate::args::Matrices;
use crate::error::Result;
use crate::facade::common_methods;
use crate::kind::{Op, Variant};
use crate::nodes::Operator;
use crate::options::options;
use crate::programs::BARRIER;
use crate::spec::{Common, Dims, Form, Memory, Part, Row, Tiles};

/// A barrier of all ranks of the heap, or of those in [`Options::members`]. All ranks make it; only
/// members run it.
#[derive(Debug)]
pub struct Barrier {
    operator: Operator,
}

common_methods!(Barrier);

impl Barrier {
    /// Enqueue the barrier on `stream`. On a rank that is no member it is an error.
    ///
    /// # Errors
    /// That one; [`Poisoned`](crate::OpError::Poisoned) after a fault of the heap.
    pub fn run(&self, stream: &Stream) -> Result<()> {
        self.operator.run(stream, &Matrices::default())
    }
}

options! { ROW,
    /// What a [`Barrier`] is planned for.
    {
        /// Of all ranks.
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
    tiles: Tiles::Whole,
    in_place: false,
    alone: BARRIER,
    forms: &[Form::push(Variant::Flat, BARRIER, Memory::None)],
};
