//! Labels: names of operators in errors, by which a user finds the operator in the program.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use crate::kind::Op;
use crate::options::Request;

/// Name of an operator in an error message: its kind and shape, and its own name. An operator
/// without a name is identified by the place in the program where it was made.
///
/// A comparison of a label with an [`Op`] compares only the kind of operator, not the name.
#[derive(Clone, Debug)]
pub struct OpLabel {
    op: Op,
    text: Option<Arc<str>>,
}

impl OpLabel {
    /// Kind of the operator that the label names.
    pub fn op(&self) -> Op {
        self.op
    }

    /// Sets the text by which errors name the operator, unless a text was set before.
    pub(crate) fn set(&mut self, text: &Arc<str>) {
        self.text.get_or_insert_with(|| text.clone());
    }
}

impl From<Op> for OpLabel {
    fn from(op: Op) -> Self {
        Self { op, text: None }
    }
}

impl PartialEq<Op> for OpLabel {
    fn eq(&self, op: &Op) -> bool {
        self.op == *op
    }
}

impl fmt::Display for OpLabel {
    /// Formats as `layer3.down (all_reduce of 64 f32)` or, for an operator without a name,
    /// `all_reduce of 64 f32 at src/main.rs:20:14`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.text {
            Some(text) => f.write_str(text),
            None => write!(f, "{}", self.op),
        }
    }
}

impl Request {
    /// Text for the operator with its shape. If the operator has no name of its own, the text also
    /// has the place where the program makes it.
    pub(crate) fn label(&self, place: Option<&Location<'_>>) -> Arc<str> {
        let what = self.shape();
        match (&self.name, place) {
            (Some(name), _) => format!("{name} ({what})"),
            (None, Some(place)) => format!("{what} at {place}"),
            (None, None) => what,
        }
        .into()
    }

    /// Text for the operator with its shape and element type: `matmul_all_reduce of 64 x 256 x 128
    /// f32`.
    pub(crate) fn shape(&self) -> String {
        let Request { m, n, k, dtype, elements, .. } = *self;
        match (self.op(), elements) {
            (Op::Barrier, _) => Op::Barrier.to_string(),
            (op, _) if op.multiplies() => format!("{op} of {m} x {n} x {k} {dtype}"),
            (op, true) => format!("{op} of {n} {dtype}"),
            (op, false) => format!("{op} of {m} x {n} {dtype}"),
        }
    }
}
