//! Labels: names of operators in errors, by which a user finds the operator in the program.

use std::fmt;
use std::sync::Arc;

use crate::op_names::Op;

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
