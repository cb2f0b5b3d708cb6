//! Kernels of the caller that run at the same time as a call and read its tiles of C as they
//! arrive.

use iris_heap::Stream;
use iris_kernels::args::{TileView, arrival};
use iris_sync::Channel;

use super::Operator;
use crate::args::Matrices;
use crate::check;
use crate::error::{Error, InOp, Result};
use crate::memory_needs::COUNTER_WORDS;

impl Operator {
    /// Returns a description of the next call, which has these matrices, for a kernel of the caller
    /// that runs at the same time. Copies of the words with the call number are enqueued on
    /// `stream`.
    pub(crate) fn beside(&self, stream: &Stream, matrices: &Matrices) -> Result<TileView> {
        self.labelled(self.tiles_of_next(stream, matrices))
    }

    fn tiles_of_next(&self, stream: &Stream, matrices: &Matrices) -> Result<TileView> {
        let op = self.plan.op();
        let invalid = |what: &str, value: &str, expected: &str| {
            let what = format!("{what} of a call with a kernel beside it");
            Error::invalid(op, what, value, expected)
        };
        let call = check::call(&self.plan, matrices)?;
        let form = self.plan.at(call.size(&self.plan)).form;
        let issuing = self.heap.issue().in_op(op)?;
        let mut args = self.ready(&call).args;
        let sizes = self.sizes(&call);
        self.complete(&mut args, &call, (&sizes, &issuing))?;
        // With one rank, no tile comes from a peer, and all tiles are complete when the call has
        // ended. So the choice of `arrival` does not matter.
        let alone = self.plan.alone().then_some(arrival::RESULTS);
        let arrival = form.arrival.or(alone).filter(|_| self.plan.request().reserve_sms > 0);
        let arrival = arrival.ok_or_else(|| {
            let expected =
                "the number of the kernel's workgroups: set it by Options::reserve_sms of the plan";
            invalid("multiprocessors", "0", expected)
        })?;
        if args.record.direct == 0 && !self.plan.alone() {
            let expected = "a row-major matrix in the symmetric heap that does not overlap A, so that peers can write it";
            return Err(invalid("C", "external, transposed or A itself", expected));
        }
        let first = (self.words.offset() / 4) as usize + COUNTER_WORDS;
        let copies = [first as u32, first as u32 + 1];
        let channel = args.channel;
        let words = [(COUNTER_WORDS, channel.call), (COUNTER_WORDS + 1, channel.sequence)];
        // SAFETY: freeing the operator, which frees its words, waits for all streams before.
        #[allow(unsafe_code, reason = "copies to words that the operator keeps")]
        unsafe { self.heap.copy_words(stream, self.words, &words) }.in_op(op)?;
        Ok(TileView {
            heap: args.heap,
            channel: Channel { call: copies[0], sequence: copies[1], ..channel },
            record: args.record,
            rows: args.m,
            cols: args.n,
            tile_m: args.tile_m,
            tile_n: args.tile_n,
            arrival,
            root: args.root,
            groups: sizes.groups.count,
            padding: 0,
        })
    }
}
