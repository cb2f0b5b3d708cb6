//! The scenarios of words that carry their data: [`flow::exchange`] over items of two words.
//!
//! Rank `from` gives `to` the value of `from` in this call for each half of an item, so a reader knows
//! what it must find; the values of a sum are checked one by one. A thread takes the items that it has
//! waited for itself, and the kernel that comes next on the stream reads those of all.

use iris_sync::barrier::Members;
use iris_sync::flow::{self, Exchange, Launch, LlRows, LlTile, LlTiles};
use iris_sync::ll::{HEAD, Rows, SOURCES, Strip};
use iris_sync::{Field, Memory, Record, Stop, Workgroup};

use super::ops::value;
use super::{Headers, Place, Scenario, Thread};
use crate::headers::programs;

/// The arrays of what was taken, behind those of [`ops`](super::ops).
const TAKEN: u32 = 16;

/// The array of what is given.
const GIVEN: u32 = TAKEN + 8;

/// Who sends what.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pattern {
    /// Every rank all of its items to all: all_reduce, all_gather.
    All,
    /// Every rank other items to each, and the last rank gets none: reduce_scatter, all_to_all.
    Parts,
    /// Rank 0 to all.
    Root,
    /// As All, in rows of a few words, which a workgroup takes whole, and looks at when its threads have
    /// taken theirs. It pushes what it takes.
    Rows,
    /// The same, where all workgroups share what is pushed.
    SpreadRows,
    /// As All, of a product's tiles: a workgroup has all rows and its part of the columns, and what a thread
    /// pushes another has multiplied.
    Tiles,
}

/// Items of a row, and of one whose columns workgroups share.
const ROW: u32 = 6;
const ACROSS: u32 = 4;

/// Items of a piece, and items that a thread waits for at once.
const PIECE: u32 = 2;
const AT_ONCE: u32 = 4;

impl Pattern {
    /// Those whose items fall to threads one by one, by the names of the ops.
    pub const NAMED: [(&'static str, Pattern); 3] =
        [("all", Pattern::All), ("parts", Pattern::Parts), ("root", Pattern::Root)];

    fn name(self) -> &'static str {
        let other = if self == Pattern::Tiles { "tiles" } else { "rows" };
        Self::NAMED.iter().find(|(_, pattern)| *pattern == self).map_or(other, |(name, _)| name)
    }

    fn in_rows(self) -> bool {
        matches!(self, Pattern::Rows | Pattern::SpreadRows)
    }
}

/// What goes where in a call of so many items.
#[derive(Clone, Copy)]
struct Plan {
    pattern: Pattern,
    ranks: u32,
    items: u32,
}

impl Exchange for Plan {
    fn sent(&self, from: u32, to: u32) -> u32 {
        match self.pattern {
            Pattern::All | Pattern::Rows | Pattern::SpreadRows | Pattern::Tiles => self.items,
            Pattern::Parts if to == self.ranks - 1 && self.ranks > 1 => 0,
            Pattern::Parts => self.items,
            Pattern::Root if from == 0 => self.items,
            Pattern::Root => 0,
        }
    }
}

/// The items of one call, as one thread moves them.
struct Items<'a, 'b> {
    thread: &'a Thread<'b>,
    call: i32,
    plan: Plan,
    /// Whether what is pushed is overwritten when the same of all has been taken.
    in_place: bool,
}

impl Items<'_, '_> {
    /// What `from` gives `to`.
    fn data(&self, from: u32, to: u32, item: u32) -> [i32; 2] {
        let part = if self.plan.pattern == Pattern::Parts { to * 100 } else { 0 };
        [0, 1].map(|half| value(from, self.call, part + item, half))
    }

    /// Where what this rank gives lies, if it is looked at.
    fn given(&self, item: u32) -> Place {
        self.thread.cell(self.thread.rank(), GIVEN, item)
    }

    /// What this rank has multiplied of an item.
    fn partial(&self, item: u32) -> i32 {
        let me = self.thread.rank();
        self.data(me, me, item)[0]
    }

    /// The part of this thread's workgroup.
    fn strip(&self) -> Strip {
        let line = ACROSS / self.thread.groups();
        let first = self.thread.id().group * line;
        let rows = self.plan.items / ACROSS;
        Strip { rows, across: ACROSS, first, line, there: line, at_once: 2 }
    }

    /// Where half `half` of `item` of `source` is put.
    fn out(&self, source: u32, item: u32, half: u32) -> Place {
        self.thread.cell(self.thread.rank(), TAKEN + source, 2 * item + half)
    }
}

impl LlTiles for Items<'_, '_> {
    fn give(&mut self, peer: u32, item: u32) -> [u32; 2] {
        if self.in_place {
            self.thread.expect(self.given(item), 0);
        }
        if self.plan.pattern == Pattern::Tiles {
            self.thread.expect(self.given(item), self.partial(item));
        }
        self.data(self.thread.rank(), peer, item).map(|value| value as u32)
    }

    fn begin(&mut self, _item: u32) {}

    fn take(&mut self, source: u32, item: u32, data: [u32; 2]) {
        let me = self.thread.rank();
        let wanted = self.data(source, me, item);
        for ((half, seen), wanted) in (0..).zip(data).zip(wanted) {
            let place = self.out(source, item, half);
            self.thread.check(place, seen as i32, wanted);
            self.thread.write(place, wanted);
        }
    }

    fn end(&mut self, item: u32) {
        if self.in_place {
            self.thread.write(self.given(item), 1);
        }
    }
}

impl LlRows for Items<'_, '_> {
    /// Each thread reads what all have taken.
    fn row(&mut self, row: u32) {
        let me = self.thread.rank();
        for source in (0..self.plan.ranks).filter(|&source| source != me) {
            for item in row * ROW..((row + 1) * ROW).min(self.plan.items) {
                let wanted = self.data(source, me, item);
                for (half, wanted) in (0..).zip(wanted) {
                    self.thread.expect(self.out(source, item, half), wanted);
                }
            }
        }
    }
}

impl LlTile for Items<'_, '_> {
    /// Each thread has items that another will push.
    fn multiply(&mut self) {
        let Strip { rows, across, first, line, .. } = self.strip();
        let threads = self.thread.threads();
        let crossed = (self.thread.id().thread + 1) % threads;
        for i in (crossed..rows * line).step_by(threads as usize) {
            let item = i / line * across + first + i % line;
            self.thread.write(self.given(item), self.partial(item));
        }
        self.thread.vote(true);
    }
}

impl Items<'_, '_> {
    /// The next kernel on the stream: each thread reads what another has taken.
    fn consume(&self) {
        let (me, threads) = (self.thread.rank(), self.thread.threads());
        let crossed = (self.thread.id().thread + 1) % threads;
        for source in (0..self.plan.ranks).filter(|&source| source != me) {
            for item in (crossed..self.plan.sent(source, me)).step_by(threads as usize) {
                let wanted = self.data(source, me, item);
                for (half, wanted) in (0..).zip(wanted) {
                    self.thread.expect(self.out(source, item, half), wanted);
                }
            }
        }
    }
}

/// What a mutant does otherwise than [`flow::exchange`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum How {
    /// Nothing.
    Right,
    /// It waits for the head before it pushes its own.
    WaitsFirst,
    /// What it has pushed it overwrites, when it has taken the same of all.
    InPlace,
    /// It counts its workgroup out before the barrier that follows the credit.
    CountsFirst,
    /// Its next launch does not wait until this one is over.
    Early,
}

/// Of [`scenario`]: a call in which rank 0 sends one item, while the others are in a one_shot.
const TWO_KINDS: u32 = 100;

/// Calls of `used` items each, or, where that is 0, of a [`one_shot`](super::ops::one_shot) of one
/// tile, over words for `items`.
fn scenario(pattern: Pattern, ranks: u32, items: u32, used: &'static [u32], how: How) -> Scenario {
    let name = format!("ll {}, {ranks} ranks, {used:?} of {items} items", pattern.name());
    Scenario::new(name, ranks)
        .calls(used.len() as u32, 7)
        .tiles(1, 0)
        .pairs(items)
        .headers(Headers::new(programs::EXCHANGE, items).option(pattern as u32).used(used))
        .program(move |thread| {
            for (position, &items) in (0..).zip(used) {
                // Another M is another layout: what such a rank gives, others cannot use.
                let m = thread.record().fields[Field::M as usize];
                let call = thread.call(position).number().wrapping_add(m);
                let items = match items {
                    TWO_KINDS => u32::from(thread.rank() == 0),
                    items => items,
                };
                let plan = Plan { pattern, ranks, items };
                let in_place = how == How::InPlace;
                let mut body = Items { thread, call, plan, in_place };
                if in_place {
                    // The kernel before leaves there what is pushed.
                    if thread.id().group == 0 && thread.id().thread == 0 {
                        (0..items).for_each(|item| thread.write(body.given(item), 0));
                    }
                    thread.boundary();
                }
                let launch = thread.launch();
                let done = match (items, how) {
                    (0, _) => super::ops::one_tile(&launch, thread, call),
                    (_, How::Right | How::InPlace) if pattern == Pattern::Tiles => {
                        let strip = body.strip();
                        flow::exchange_tile(&launch, &strip, &mut body)
                    }
                    (_, How::Right | How::InPlace) if pattern.in_rows() => {
                        let spread = pattern == Pattern::SpreadRows;
                        let rows = Rows { items, len: ROW, piece: PIECE, at_once: AT_ONCE, spread };
                        flow::exchange_rows(&launch, &rows, &mut body)
                    }
                    (_, How::Right | How::InPlace | How::Early) => {
                        flow::exchange(&launch, &plan, &mut body)
                    }
                    (_, How::WaitsFirst) => waits_first(&launch),
                    (_, How::CountsFirst) => counts_first(&launch),
                };
                if how == How::Early {
                    continue;
                }
                thread.boundary();
                // Of several workgroups one may have got through where another did not.
                if done.is_ok() && how == How::Right && !(thread.gives_up() && thread.groups() > 1)
                {
                    body.consume();
                }
                thread.boundary();
            }
        })
}

fn waits_first(launch: &Launch<'_, Thread<'_>>) -> Result<(), Stop> {
    let (index, count) = (launch.index, launch.count);
    let mut wg = Workgroup::begin(launch.m, launch.channel, (index, count), launch.record);
    let all = Members::all(launch.channel.size);
    let result = wg.begin_push(all).and_then(|()| {
        let taken = wg.wait_head(all, SOURCES);
        wg.push_head(all);
        wg.leave_together(taken)
    });
    wg.finish_push(iris_sync::End::Advance, result, |_| HEAD)
}

fn counts_first(launch: &Launch<'_, Thread<'_>>) -> Result<(), Stop> {
    let (index, count) = (launch.index, launch.count);
    let mut wg = Workgroup::begin(launch.m, launch.channel, (index, count), launch.record);
    wg.count_out();
    let all = Members::all(launch.channel.size);
    let result = wg.begin_push(all).and_then(|()| {
        wg.push_head(all);
        let taken = wg.wait_head(all, SOURCES);
        wg.leave_together(taken)
    });
    wg.finish_push(iris_sync::End::Advance, result, |_| HEAD)
}

/// Calls of one item each.
pub fn exchange(pattern: Pattern, ranks: u32, calls: u32) -> Scenario {
    const USED: &[u32] = &[1; 8];
    scenario(pattern, ranks, 1, &USED[..calls as usize], How::Right)
}

/// Calls of two items each.
pub fn exchange_two(pattern: Pattern, ranks: u32, calls: u32) -> Scenario {
    const USED: &[u32] = &[2; 8];
    scenario(pattern, ranks, 2, &USED[..calls as usize], How::Right)
}

/// Calls of two items each in rows, or of eight, of which a second row has the last two. All workgroups
/// share what is pushed, or each pushes what it takes.
pub fn exchange_rows(ranks: u32, calls: u32, two_rows: bool, spread: bool) -> Scenario {
    const USED: [&[u32]; 2] = [&[2; 8], &[8; 8]];
    let pattern = if spread { Pattern::SpreadRows } else { Pattern::Rows };
    let used = &USED[usize::from(two_rows)][..calls as usize];
    let items = used[0];
    scenario(pattern, ranks, items, used, How::Right)
}

/// Calls of a product's tiles, of so many rows of four items, whose columns workgroups share.
pub fn exchange_tiles(ranks: u32, calls: u32, rows: u32) -> Scenario {
    const USED: [&[u32]; 3] = [&[4; 8], &[8; 8], &[12; 8]];
    let used = &USED[rows as usize - 1][..calls as usize];
    scenario(Pattern::Tiles, ranks, used[0], used, How::Right)
}

/// Words for two items, and calls from number `first` on that use as many as `used` says; 0 is a call
/// that carries no data in words.
pub fn partial(pattern: Pattern, ranks: u32, first: i32, used: &'static [u32]) -> Scenario {
    let mut scenario = scenario(pattern, ranks, 2, used, How::Right);
    scenario.name.push_str(&format!(" from {first}"));
    scenario.calls(used.len() as u32, first)
}

/// The mutant that waits before it pushes.
pub fn waiting_first() -> Scenario {
    let mut scenario = scenario(Pattern::All, 2, 1, &[1], How::WaitsFirst);
    scenario.name.push_str(", waits first");
    scenario.headers = None;
    scenario
}

/// The mutant that counts a workgroup out whose threads may not have read the number of the call.
pub fn counting_first() -> Scenario {
    let mut scenario = scenario(Pattern::All, 2, 1, &[1], How::CountsFirst).threads(2);
    scenario.name.push_str(", counts first");
    scenario.headers = None;
    scenario
}

/// The mutant whose launches begin before the ones ahead of them are over: two workgroups, so that one may be in
/// the next call, as it believes, while the other has not begun this one.
pub fn early() -> Scenario {
    let mut scenario = scenario(Pattern::All, 2, 2, &[2, 2], How::Early).groups(&[2, 2]);
    scenario.name.push_str(", launched early");
    scenario.headers = None;
    scenario
}

/// A call in two rows, of which each item is written where it was read. It must not be one in which all
/// workgroups share what is pushed.
pub fn in_place(spread: bool) -> Scenario {
    let pattern = if spread { Pattern::SpreadRows } else { Pattern::Rows };
    let mut scenario = scenario(pattern, 2, 8, &[8], How::InPlace).threads(3).groups(&[2, 2]);
    scenario.name.push_str(", in place");
    scenario.headers = None;
    scenario
}

/// Two calls of a one_shot, and a third to which rank 0 comes with words that carry their data.
pub fn two_kinds() -> Scenario {
    let mut scenario = scenario(Pattern::All, 2, 1, &[0, 0, TWO_KINDS], How::Right);
    scenario.name = "ll all, in a call that is a one_shot to rank 1".into();
    scenario
}

/// Rank 1 comes with another M.
pub fn different_m() -> Scenario {
    let record = |m| {
        let mut record = Record::default();
        record.fields[Field::M as usize] = m;
        record
    };
    let mut scenario = exchange(Pattern::All, 2, 1).record(0, record(128)).record(1, record(107));
    scenario.name = "ll all, ranks with different M".into();
    scenario
}
