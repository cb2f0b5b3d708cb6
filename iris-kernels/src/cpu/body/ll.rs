//! Small messages by the LL protocol (data and flag in one word). An item is eight bytes of a
//! message whose rows are concatenated without gaps.

use iris_sync::Aborted;
use iris_sync::flow::{self, LlParts, LlRows, LlTiles};
use iris_sync::ll::Rows;

use crate::args::{Matrix, OpArgs, counter};
use crate::cpu::body::combine;
use crate::cpu::body::epilogue::{add_matrix, finish_values};
use crate::cpu::body::norm::norm_row;
use crate::cpu::view;
use crate::cpu::words::Words;
use crate::dtype::values;
use crate::kernel::Kernel;
use crate::schedule::{Items, Tile};

/// Number of bytes that a pair of LL words occupies, for the counter of bytes pushed.
pub(super) const PAIR_BYTES: u64 = 16;

/// Largest number of elements in an item: four of a 16-bit type.
const MOST: usize = 4;

pub(crate) fn run(
    launch: &flow::Launch<'_, Words<'_>>,
    kernel: Kernel,
    args: &OpArgs,
) -> Result<(), Aborted> {
    let items = kernel.items(args).expect("a kernel of the LL protocol");
    let Items { collective, per_item, .. } = items;
    let reduces = collective.reduces();
    let dtype = if reduces { args.wire } else { args.c.dtype };
    let (sum, taken) = ([0.0; MOST], [0; 2]);
    let mut body = Body { args, words: launch.m, items, dtype, reduces, sum, own: false, taken };
    if items.size == 1 {
        // A world of one rank has no words of the protocol. An RMSNorm is a launch of its own.
        for item in (launch.index..items.sent(0, 0)).step_by(launch.count as usize) {
            LlTiles::begin(&mut body, item);
            LlTiles::end(&mut body, item);
        }
        return Ok(());
    }
    if let Some(parts) = items.parts() {
        return flow::two_shot_ll(launch, &parts, &mut body);
    }
    if args.normed.address == 0 {
        return flow::exchange(launch, &items, &mut body);
    }
    // Division of the message into rows, for ops that normalise rows. The workgroup that receives a
    // row normalises it. If A and C are the same memory (in place), that workgroup also pushes the
    // row. Otherwise all workgroups share the pushes.
    let len = args.n / per_item;
    let spread = args.a.address != args.c.address;
    let rows = Rows { items: args.m * len, len, piece: 1, at_once: 1, spread };
    flow::exchange_rows(launch, &rows, &mut body)
}

impl flow::Exchange for Items {
    fn sent(&self, from: u32, to: u32) -> u32 {
        Items::sent(self, from, to)
    }
}

struct Body<'a> {
    args: &'a OpArgs,
    words: &'a Words<'a>,
    items: Items,
    /// Element type in which data is sent.
    dtype: u32,
    /// Whether the received data is added up; otherwise it is copied to its destination.
    reduces: bool,
    sum: [f32; MOST],
    /// Whether this rank's own data has already been added to the sum.
    own: bool,
    /// Data of the item (eight bytes of the message) that was received last. In a broadcast in two
    /// hops, the rank that owns the item forwards this data.
    taken: [u32; 2],
}

impl Body<'_> {
    fn me(&self) -> u32 {
        self.args.channel.rank
    }

    /// Elements of item `item` (eight bytes) of the `rows` rows that one rank sends to another.
    /// Each element is given by its index in the item, its row and its column; row 0 is the first
    /// row that is sent.
    fn elements(&self, rows: u32, item: u32) -> impl Iterator<Item = (usize, u32, u32)> + use<> {
        let Items { cols, per_item, .. } = self.items;
        let first = u64::from(item) * u64::from(per_item);
        let left = (u64::from(rows) * u64::from(cols)).saturating_sub(first);
        (0..left.min(u64::from(per_item))).map(move |i| {
            let element = first + i;
            let cols = u64::from(cols);
            (i as usize, (element / cols) as u32, (element % cols) as u32)
        })
    }

    /// Bits of the elements of item `item` of this rank's data for rank `to`, in the transfer type.
    /// Elements after the end of the part are 0.
    fn given(&self, to: u32, item: u32) -> [u32; MOST] {
        let Matrix { dtype, .. } = self.args.a;
        let first = self.items.source_row(to);
        let mut bits = [0; MOST];
        for (i, row, col) in self.elements(self.items.rows_sent(self.me(), to), item) {
            let element = |col| view::bits(&self.args.a, first + row, col);
            bits[i] = if self.args.factors.address != 0 {
                (values(self.dtype).from_f32)(combine::element(self.args, first + row, col))
            } else if dtype == self.dtype {
                element(col)
            } else {
                (values(self.dtype).from_f32)((values(dtype).to_f32)(element(col)))
            };
        }
        bits
    }

    fn pack(&self, bits: [u32; MOST]) -> [u32; 2] {
        let (count, width) = (self.items.per_item, 64 / self.items.per_item);
        let data = (0..count).zip(bits).map(|(i, bits)| u64::from(bits) << (i * width));
        let data = data.fold(0, |all, bits| all | bits);
        [data as u32, (data >> 32) as u32]
    }

    fn unpack(&self, data: [u32; 2]) -> [u32; MOST] {
        let (count, width) = (self.items.per_item as usize, 64 / self.items.per_item);
        let data = u64::from(data[1]) << 32 | u64::from(data[0]);
        let element = |i| (data >> (i as u32 * width)) as u32 & u32::MAX >> (32 - width);
        std::array::from_fn(|i| if i < count { element(i) } else { 0 })
    }

    fn add(&mut self, bits: [u32; MOST]) {
        let to_f32 = values(self.dtype).to_f32;
        for (sum, bits) in self.sum.iter_mut().zip(bits) {
            *sum += to_f32(bits);
        }
    }

    fn add_own(&mut self, item: u32) {
        self.add(self.given(self.me(), item));
        self.own = true;
    }

    /// Data of item `item` (eight bytes) of this rank's own message, in an exchange in two hops.
    /// The root of a broadcast also stores the item in its C.
    fn own_data(&self, item: u32) -> [u32; 2] {
        let me = self.me();
        let bits = self.given(me, item);
        if !self.reduces && self.args.a != self.args.c {
            self.put(me, item, bits);
        }
        self.pack(bits)
    }

    /// Completes the sum of an item (eight bytes of the message): adds this rank's own data if it
    /// is still missing, then applies bias and GELU and adds residual and addend.
    fn finish(&mut self, item: u32) {
        if !self.own {
            self.add_own(item);
        }
        let (me, args) = (self.me(), self.args);
        for (i, row, col) in self.elements(self.items.rows_sent(me, me), item) {
            let area = Tile { row, col, rows: 1, cols: 1 };
            finish_values(args, area, &mut self.sum[i..=i], 1);
            for matrix in [&args.residual, &args.addend] {
                add_matrix(matrix, area, &mut self.sum[i..=i], 1);
            }
        }
    }

    /// Stores the bits of an item from `source` at its destination in C.
    fn put(&self, source: u32, item: u32, bits: [u32; MOST]) {
        let first = self.items.target_row(source, self.me());
        for (i, row, col) in self.elements(self.items.rows_sent(source, self.me()), item) {
            view::set_bits(&self.args.c, first + row, col, bits[i]);
        }
    }
}

impl LlTiles for Body<'_> {
    fn give(&mut self, peer: u32, item: u32) -> [u32; 2] {
        self.words.count(counter::PUSHED, PAIR_BYTES);
        self.pack(self.given(peer, item))
    }

    fn begin(&mut self, item: u32) {
        let me = self.me();
        if !self.reduces {
            let in_place = self.args.a == self.args.c;
            if item < self.items.sent(me, me) && !in_place {
                self.put(me, item, self.given(me, item));
            }
            return;
        }
        // The sum starts from -0.0, the neutral element: starting from 0.0 would turn a sum of -0.0
        // into 0.0.
        (self.sum, self.own) = ([-0.0; MOST], false);
    }

    fn take(&mut self, source: u32, item: u32, data: [u32; 2]) {
        let bits = self.unpack(data);
        if !self.reduces {
            self.put(source, item, bits);
            return;
        }
        if !self.own && source > self.me() {
            self.add_own(item);
        }
        self.add(bits);
    }

    fn end(&mut self, item: u32) {
        if self.reduces {
            self.finish(item);
            let dtype = self.args.c.dtype;
            self.put(self.me(), item, self.sum.map(values(dtype).from_f32));
        }
    }
}

impl LlParts for Body<'_> {
    fn give(&mut self, item: u32) -> [u32; 2] {
        self.words.count(counter::PUSHED, PAIR_BYTES);
        self.own_data(item)
    }

    fn begin(&mut self, item: u32) {
        if self.reduces {
            LlTiles::begin(self, item);
        }
    }

    fn take(&mut self, source: u32, item: u32, data: [u32; 2]) {
        LlTiles::take(self, source, item, data);
        self.taken = data;
    }

    fn end(&mut self, item: u32) -> [u32; 2] {
        let parts = self.items.parts().expect("an exchange in two hops");
        let me = self.me();
        let to = (0..parts.size).filter(|&peer| peer != me && parts.finished(me, peer) > 0);
        self.words.count(counter::PUSHED, to.count() as u64 * PAIR_BYTES);
        match parts.root {
            None => {
                self.finish(item);
                let bits = self.sum.map(values(self.dtype).from_f32);
                self.put(me, item, bits);
                self.pack(bits)
            }
            Some(root) if root == me => self.own_data(item),
            Some(_) => self.taken,
        }
    }

    fn keep(&mut self, owner: u32, item: u32, data: [u32; 2]) {
        self.put(owner, item, self.unpack(data));
    }
}

impl LlRows for Body<'_> {
    fn row(&mut self, row: u32) {
        norm_row(self.args, row);
    }
}
