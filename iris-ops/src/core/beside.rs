//! Users' kernels that run beside a call and take its tiles as they arrive.

use iris_heap::Stream;
use iris_kernels::args::TileView;
use iris_sync::Channel;

use super::{COUNTER_WORDS, Call, Core};
use crate::error::{Error, InOp, Result};
use crate::plan::Plan;

impl Core {
    /// What a user's kernel needs that runs beside the next call: this one. Copies of the words that
    /// number it are enqueued on `stream`.
    pub(crate) fn beside(
        &self,
        stream: &Stream,
        arrival: Option<u32>,
        call: &Call<'_>,
    ) -> Result<TileView> {
        let Plan { op, variant, options, .. } = &self.plan;
        let invalid = |what: &str, value: String, expected: String| Error::Invalid {
            op,
            what: format!("{what} of a call with a kernel beside it"),
            value,
            expected,
        };
        let args = self.checked(call)?;
        let arrival = arrival.ok_or_else(|| {
            let expected = "one whose peers write C directly: two_shot".into();
            invalid("variant", variant.to_string(), expected)
        })?;
        if args.record.direct == 0 && !self.plan.alone() {
            let expected = "rows of the symmetric heap, apart from A, where peers may write".into();
            return Err(invalid("C", "external, transposed or A itself".into(), expected));
        }
        let first = (self.words.offset() / 4) as usize + self.channel_words + COUNTER_WORDS;
        let copies = [first as u32, first as u32 + 1];
        let channel = args.channel;
        let _issuing = self.heap.issue();
        let words = [(copies[0], channel.call), (copies[1], channel.sequence)];
        self.heap.copy_words(stream, &words).in_op(op)?;
        Ok(TileView {
            heap: args.heap,
            channel: Channel { call: copies[0], sequence: copies[1], ..channel },
            record: args.record,
            rows: args.m,
            cols: args.n,
            tile_m: args.tile_m,
            tile_n: args.tile_n,
            arrival,
            root: options.root as u32,
            groups: self.groups_for(call.m),
        })
    }
}
