//! Message of a collective call, run in launches by an operator of the communicator.

use std::ops::Range;

use iris_heap::{DType, Element};

use super::memory::Bytes;
use super::{Comm, Operators};
use crate::args::Matrices;
use crate::error::{Error, InOp, Result};
use crate::matrix::MatRef;
use crate::nodes::Operator;
use crate::op_names::Op;

/// Collective call of any length, with the address ranges of its input and its output.
pub(super) struct Message {
    pub(super) op: Op,
    pub(super) rank: usize,
    pub(super) input: Bytes,
    /// Number of consecutive parts of which the input consists.
    pub(super) sent: usize,
    pub(super) output: Bytes,
    /// Number of consecutive parts of which the output consists.
    pub(super) got: usize,
    /// Size of a part in bytes.
    pub(super) part: u64,
}

impl Message {
    /// Runs the call by an operator for elements of type `T`, directly on the caller's input and
    /// output.
    pub(super) fn in_words<T: Element>(
        &self,
        comm: &Comm,
        operator: &Operator,
        root: Option<usize>,
    ) -> Result<()> {
        let size = size_of::<T>() as u64;
        let most = operator.plan().largest() as u64 * size;
        comm.in_ranges(self, most, |from, bytes, begun| {
            let shape = |parts| (parts, (bytes / size) as usize, (self.part / size) as usize);
            let a = self.input.matrix::<T>(self.op, from, shape(self.sent))?;
            let c = self.output.matrix::<T>(self.op, from, shape(self.got))?;
            run(operator, &comm.stream.ours, a, c, root)?;
            begun.set(true);
            Ok(())
        })
    }

    /// Runs the call through the communicator's own buffers, by an operator for elements of type `W`,
    /// and copies the parts `kept` of the result to the output. Used for element types with an
    /// alignment of one byte, because addresses and lengths are then not always multiples of a
    /// word, and for calls in which a rank has no memory for its input or result.
    pub(super) fn by_stage<W: Element>(
        &self,
        comm: &Comm,
        all: &Operators,
        root: Option<usize>,
        kept: Range<usize>,
    ) -> Result<()> {
        let operator = find(all, self.op, W::DTYPE)?;
        let parts = self.sent.max(self.got);
        let (sent, got) = (all.stage[0], all.stage[1]);
        // Maximum number of bytes of each part in one launch, rounded down to whole words of four
        // bytes.
        let most = sent.bytes() / parts as u64 / 4 * 4;
        let [sent, got] =
            [Bytes::of(&comm.heap, sent, self.op)?, Bytes::of(&comm.heap, got, self.op)?];
        let reads = root.is_none_or(|root| root == self.rank);
        comm.in_ranges(self, most, |from, bytes, begun| {
            let padded = bytes.next_multiple_of(size_of::<W>() as u64);
            let words = padded as usize / size_of::<W>();
            // A broadcast has one row, whatever its root sends.
            let shape = |parts: usize| match self.op {
                Op::Broadcast => (1, parts * words, parts * words),
                _ => (parts, words, words),
            };
            for part in 0..if reads { self.sent as u64 } else { 0 } {
                let source = (self.input, part * self.part + from);
                self.copy_raw(comm, (sent, part * padded), source, bytes)?;
            }
            let a = sent.matrix::<W>(self.op, 0, shape(self.sent))?;
            let c = got.matrix::<W>(self.op, 0, shape(self.got))?;
            run(operator, &comm.stream.ours, a, c, root)?;
            begun.set(true);
            for (place, part) in kept.clone().enumerate() {
                let target = (self.output, place as u64 * self.part + from);
                self.copy_raw(comm, target, (got, part as u64 * padded), bytes)?;
            }
            Ok(())
        })
    }

    /// Copies the input to the output, for a world of one rank.
    pub(super) fn copy(&self, comm: &Comm) -> Result<()> {
        match self.input.address == self.output.address {
            true => Ok(()),
            false => self.copy_raw(comm, (self.output, 0), (self.input, 0), self.output.bytes),
        }
    }

    #[allow(unsafe_code, reason = "memory that is lent until the call is enqueued, or done")]
    fn copy_raw(
        &self,
        comm: &Comm,
        (to, to_offset): (Bytes, u64),
        (from, from_offset): (Bytes, u64),
        bytes: u64,
    ) -> Result<()> {
        let issuing = comm.heap.issue().in_op(self.op)?;
        let to = to.at(&issuing, to_offset, self.op)?;
        let from = from.at(&issuing, from_offset, self.op)?;
        // SAFETY: one side is in a buffer that only the communicator's calls use, on one stream, or
        // both sides are memory that `Lent` guards borrow from the caller until the call is
        // enqueued. After that, cudarc frees its memory only in the order of the stream, and a
        // thread that frees a slice of the heap waits for `issuing` and then for the copy. For host
        // memory, the caller waits for the call.
        unsafe { comm.heap.copy_raw_on(&comm.stream.ours, to, from, bytes) }.in_op(self.op)
    }
}

fn run(
    operator: &Operator,
    stream: &iris_heap::Stream,
    a: MatRef,
    c: MatRef,
    root: Option<usize>,
) -> Result<()> {
    operator.run(stream, &Matrices { a: Some(a), c: Some(c), root, ..Matrices::default() })
}

pub(super) fn find(operators: &Operators, op: Op, dtype: DType) -> Result<&Operator> {
    let of = |operator: &Operator| operator.plan().request().dtype;
    operators.family(op).find(|operator| of(operator) == dtype).ok_or_else(|| {
        let names: Vec<_> = operators.family(op).map(|operator| of(operator).name()).collect();
        let expected = match names.is_empty() {
            true => "no sum, since Options::sums of the communicator has no type".into(),
            false => format!("one of Options::sums of the communicator: {}", names.join(", ")),
        };
        Error::invalid(op, "element type", dtype, expected)
    })
}
