//! All-gather of a list of tensors by the LL protocol. A row of the message is a row of each
//! tensor, one after the other, each padded to whole items of eight bytes.

use iris_sync::Aborted;
use iris_sync::flow::{self, LlTiles};

use crate::args::{ListTensor, OpArgs, counter};
use crate::cpu::view;
use crate::cpu::words::Words;
use crate::kernel::Kernel;
use crate::schedule::Items;

pub(crate) fn run(launch: &flow::Launch<'_, Words<'_>>, args: &OpArgs) -> Result<(), Aborted> {
    let items = Kernel::AllGatherListLl.items(args).expect("a kernel of the LL protocol");
    let mut body = Body { args, words: launch.m, items };
    if args.channel.size == 1 {
        // A world of one rank has no words of the protocol.
        let own = launch.index..items.sent(0, 0);
        own.step_by(launch.count as usize).for_each(|item| body.begin(item));
        return Ok(());
    }
    flow::exchange(launch, &items, &mut body)
}

struct Body<'a> {
    args: &'a OpArgs,
    words: &'a Words<'a>,
    items: Items,
}

impl Body<'_> {
    fn me(&self) -> u32 {
        self.args.channel.rank
    }

    /// Address and number of bytes of item `item` of one rank's rows. `row_at` gives the address of
    /// a row of a tensor, counted from the rank's first row.
    fn piece(&self, item: u32, row_at: impl Fn(&ListTensor, u64) -> u64) -> (u64, usize) {
        let row = item / self.items.cols;
        let mut at = u64::from(item % self.items.cols);
        for tensor in &self.args.list {
            if at < tensor.items() {
                let bytes = (tensor.row - at * 8).min(8) as usize;
                return (row_at(tensor, row.into()) + at * 8, bytes);
            }
            at -= tensor.items();
        }
        unreachable!("item {item} is in no tensor");
    }

    fn own(&self, item: u32) -> u64 {
        let (address, bytes) =
            self.piece(item, |tensor, row| tensor.from + row * tensor.from_pitch);
        view::load_bytes(address, bytes)
    }

    fn put(&self, source: u32, item: u32, data: u64) {
        let first = u64::from(self.items.target_row(source, self.me()));
        let (address, bytes) =
            self.piece(item, |tensor, row| tensor.to + (first + row) * tensor.to_pitch);
        view::store_bytes(address, bytes, data);
    }
}

impl LlTiles for Body<'_> {
    fn give(&mut self, _peer: u32, item: u32) -> [u32; 2] {
        self.words.count(counter::PUSHED, super::ll::PAIR_BYTES);
        let data = self.own(item);
        [data as u32, (data >> 32) as u32]
    }

    fn begin(&mut self, item: u32) {
        let me = self.me();
        if item < self.items.sent(me, me) {
            self.put(me, item, self.own(item));
        }
    }

    fn take(&mut self, source: u32, item: u32, data: [u32; 2]) {
        self.put(source, item, u64::from(data[1]) << 32 | u64::from(data[0]));
    }

    fn end(&mut self, _item: u32) {}
}
