//! Scenarios of the LL protocol (data and call number in one word): [`flow::exchange`] over items
//! of two words.
//!
//! For each item, rank `from` sends the two values `data(from, to, item)` to rank `to`, so the
//! receiver knows the values to expect; summands are checked one by one. Each thread receives the
//! items that it polls. The next kernel on the stream reads items that other threads received.
//!
//! This file is long because one body serves all communication patterns and both kinds of items.

use iris_sync::barrier::Members;
use iris_sync::flow::{self, Exchange, Launch, LlParts, LlRows, LlTile, LlTiles, Parts};
use iris_sync::ll::{HEAD, Ll64, Ll128, LlUnit, Rows, SOURCES, Strip, Used};
use iris_sync::{Aborted, Field, Memory, Workgroup};

use super::ops::value;
use super::{Headers, Place, Scenario, Thread};
use crate::headers::programs;

/// Number of the array with items received from rank 0; those from rank r are in array TAKEN + r.
/// The arrays of [`ops`](super::ops) have lower numbers.
const TAKEN: u32 = 16;

/// Number of the array with the items that this rank sends.
const GIVEN: u32 = TAKEN + 8;

/// Communication pattern: the items that each rank sends to each other rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pattern {
    /// Every rank sends all of its items to all ranks: all_reduce, all_gather.
    All,
    /// Every rank sends different items to each rank, and the last rank receives none:
    /// reduce_scatter, all_to_all.
    Parts,
    /// Rank 0 sends all of its items to all ranks: broadcast.
    Root,
    /// Every rank sends all of its items to all ranks, in rows of a few words. One workgroup
    /// receives a whole row, and reads the row once all of its threads have received their items.
    /// The same workgroup pushes this rank's items of the row.
    Rows,
    /// Every rank sends rows, as in `Rows`, but all workgroups share the pushes.
    SpreadRows,
    /// Every rank sends all items of a GEMM tile to all ranks. Each workgroup handles all rows of
    /// its share of the columns. A thread pushes items that another thread of its workgroup has
    /// multiplied.
    Tiles,
    /// All-reduce in two hops: every rank contributes to the parts of all owners, and each owner
    /// sends its finished part to all ranks.
    TwoShot,
    /// Broadcast in two hops: rank 0 sends each owner its part, which the owner passes on.
    Relay,
    /// Pattern `All` with packs as items. Every third call has pairs instead, in the same channel.
    Packs,
    /// Pattern `TwoShot`, with packs and pairs in turn as in `Packs`.
    TwoShotPacks,
}

/// Number of items of a row: `ROW` in the patterns of rows; `ACROSS` in the pattern of tiles, where
/// the workgroups share the columns.
const ROW: u32 = 6;
const ACROSS: u32 = 4;

/// `PIECE`: number of items of a piece. `AT_ONCE`: number of items that a thread polls at a time.
const PIECE: u32 = 2;
const AT_ONCE: u32 = 4;

impl Pattern {
    /// Patterns whose items are distributed over single threads, with the names of their ops.
    pub const NAMED: [(&'static str, Pattern); 7] = [
        ("all", Pattern::All),
        ("parts", Pattern::Parts),
        ("root", Pattern::Root),
        ("two hops", Pattern::TwoShot),
        ("relay", Pattern::Relay),
        ("packs", Pattern::Packs),
        ("packs in two hops", Pattern::TwoShotPacks),
    ];

    fn name(self) -> &'static str {
        let other = if self == Pattern::Tiles { "tiles" } else { "rows" };
        Self::NAMED.iter().find(|(_, pattern)| *pattern == self).map_or(other, |(name, _)| name)
    }

    fn in_rows(self) -> bool {
        matches!(self, Pattern::Rows | Pattern::SpreadRows)
    }

    pub(crate) fn in_two_hops(self) -> bool {
        matches!(self, Pattern::TwoShot | Pattern::Relay | Pattern::TwoShotPacks)
    }

    pub(crate) fn in_packs(self) -> bool {
        matches!(self, Pattern::Packs | Pattern::TwoShotPacks)
    }
}

/// Pattern of one call: the number of items, and which rank sends them to which.
#[derive(Clone, Copy)]
struct CallPattern {
    pattern: Pattern,
    ranks: u32,
    items: u32,
}

impl Exchange for CallPattern {
    fn sent(&self, from: u32, to: u32) -> u32 {
        match self.pattern {
            Pattern::All
            | Pattern::Rows
            | Pattern::SpreadRows
            | Pattern::Tiles
            | Pattern::Packs => self.items,
            Pattern::Parts if to == self.ranks - 1 && self.ranks > 1 => 0,
            Pattern::Parts => self.items,
            Pattern::Root if from == 0 => self.items,
            Pattern::Root => 0,
            Pattern::TwoShot | Pattern::Relay | Pattern::TwoShotPacks => {
                self.parts().sent(from, to)
            }
        }
    }
}

impl CallPattern {
    fn parts(&self) -> Parts {
        let root = (self.pattern == Pattern::Relay).then_some(0);
        Parts { size: self.ranks, items: self.items, root }
    }
}

/// Items of one call, as one thread sends and receives them.
struct Items<'a, 'b> {
    thread: &'a Thread<'b>,
    call: i32,
    plan: CallPattern,
    /// Number of words of data of an item.
    words: u32,
    /// Whether this rank overwrites an input item as soon as it has received the items with the
    /// same index from all ranks.
    in_place: bool,
}

impl Items<'_, '_> {
    /// Values that rank `from` sends to rank `to` in the words of item `item`.
    fn data(&self, from: u32, to: u32, item: u32) -> Vec<i32> {
        let part = if self.plan.pattern == Pattern::Parts { to * 100 } else { 0 };
        (0..self.words).map(|word| value(from, self.call, part + item, word)).collect()
    }

    /// Cell that holds item `item` of this rank's input.
    fn given(&self, item: u32) -> Place {
        self.thread.cell(self.thread.rank(), GIVEN, item)
    }

    /// Value of item `item` that this rank's GEMM has computed.
    fn partial(&self, item: u32) -> i32 {
        let me = self.thread.rank();
        self.data(me, me, item)[0]
    }

    /// Part of the tile that this thread's workgroup handles: all rows of a range of columns.
    fn strip(&self) -> Strip {
        let line = ACROSS / self.thread.groups();
        let first = self.thread.id().group * line;
        let rows = self.plan.items / ACROSS;
        Strip { rows, across: ACROSS, first, line, there: line, at_once: 2 }
    }

    /// Cell to which word `half` of item `item` from rank `source` is written.
    fn out(&self, source: u32, item: u32, half: u32) -> Place {
        self.thread.cell(self.thread.rank(), TAKEN + source, self.words * item + half)
    }
}

/// Data of an item as words, in the order of the message.
trait Words: Copy {
    fn of_words(words: &[i32]) -> Self;
    fn words(self) -> Vec<u32>;
}

impl Words for [u32; 2] {
    fn of_words(words: &[i32]) -> Self {
        [words[0] as u32, words[1] as u32]
    }

    fn words(self) -> Vec<u32> {
        self.to_vec()
    }
}

/// A pack has three vectors of four words; the fourth quad has their last words.
impl Words for [[u32; 3]; 4] {
    fn of_words(words: &[i32]) -> Self {
        let of_vector = |i: usize| [0, 1, 2].map(|word| words[4 * i + word] as u32);
        let last = [0, 1, 2].map(|i| words[4 * i + 3] as u32);
        [of_vector(0), of_vector(1), of_vector(2), last]
    }

    fn words(self) -> Vec<u32> {
        (0..12).map(|at| if at % 4 < 3 { self[at / 4][at % 4] } else { self[3][at / 4] }).collect()
    }
}

impl<I: LlUnit> LlTiles<I> for Items<'_, '_>
where
    I::Data: Words,
{
    fn give(&mut self, peer: u32, item: u32) -> I::Data {
        if self.in_place {
            self.thread.expect(self.given(item), 0);
        }
        if self.plan.pattern == Pattern::Tiles {
            self.thread.expect(self.given(item), self.partial(item));
        }
        Words::of_words(&self.data(self.thread.rank(), peer, item))
    }

    fn begin(&mut self, _item: u32) {}

    fn take(&mut self, source: u32, item: u32, data: I::Data) {
        let wanted = self.data(source, self.thread.rank(), item);
        self.store(source, item, data, &wanted);
    }

    fn end(&mut self, item: u32) {
        if self.in_place {
            self.thread.write(self.given(item), 1);
        }
    }
}

impl Items<'_, '_> {
    /// Values of item `item` that `owner` has finished: those of rank 0 if they are passed on,
    /// otherwise those of an item with a number of its own.
    fn finished(&self, owner: u32, item: u32) -> Vec<i32> {
        match self.plan.pattern {
            Pattern::Relay => self.data(0, owner, item),
            _ => self.data(owner, 0, 1000 + item),
        }
    }

    fn store(&self, source: u32, item: u32, data: impl Words, wanted: &[i32]) {
        for ((half, seen), &wanted) in (0..).zip(data.words()).zip(wanted) {
            let place = self.out(source, item, half);
            self.thread.check(place, seen as i32, wanted);
            self.thread.write(place, wanted);
        }
    }

    /// Items of this rank that arrive in two hops, with the rank from whose array they are read and
    /// their values: contributions to its own part, and finished items of the others.
    fn arrivals(&self) -> impl Iterator<Item = (u32, u32, Vec<i32>)> + use<'_> {
        let (me, parts) = (self.thread.rank(), self.plan.parts());
        (0..self.plan.ranks).filter(move |&source| source != me).flat_map(move |source| {
            let own = parts.part(me).take(parts.contributed(source, me) as usize);
            let others = parts.part(source).take(parts.finished(source, me) as usize);
            let contributed = own.map(move |item| (source, item, self.data(source, me, item)));
            contributed.chain(others.map(move |item| (source, item, self.finished(source, item))))
        })
    }
}

impl<I: LlUnit> LlParts<I> for Items<'_, '_>
where
    I::Data: Words,
{
    fn give(&mut self, item: u32) -> I::Data {
        LlTiles::<I>::give(self, 0, item)
    }

    fn begin(&mut self, _item: u32) {}

    fn take(&mut self, source: u32, item: u32, data: I::Data) {
        LlTiles::<I>::take(self, source, item, data);
    }

    /// Reads what was taken, so that an item is passed on only after it has arrived.
    fn end(&mut self, item: u32) -> I::Data {
        let (me, parts) = (self.thread.rank(), self.plan.parts());
        let gives = |&source: &u32| source != me && parts.contributed(source, me) > 0;
        for source in (0..self.plan.ranks).filter(gives) {
            for (half, wanted) in (0..).zip(self.data(source, me, item)) {
                self.thread.expect(self.out(source, item, half), wanted);
            }
        }
        Words::of_words(&self.finished(me, item))
    }

    fn keep(&mut self, owner: u32, item: u32, data: I::Data) {
        self.store(owner, item, data, &self.finished(owner, item));
    }
}

impl LlRows for Items<'_, '_> {
    /// Checks the whole row: each thread reads the items that all threads have received.
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
    /// Writes the items that another thread of the workgroup will push.
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
    /// Simulates the next kernel on the stream: each thread reads items that another thread has
    /// received.
    fn consume(&self) {
        let (me, threads) = (self.thread.rank(), self.thread.threads());
        let crossed = (self.thread.id().thread + 1) % threads;
        if self.plan.pattern.in_two_hops() {
            let all = self.arrivals().skip(crossed as usize).step_by(threads as usize);
            for (source, item, wanted) in all {
                for (half, wanted) in (0..).zip(wanted) {
                    self.thread.expect(self.out(source, item, half), wanted);
                }
            }
            return;
        }
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

/// Way in which a scenario deviates from [`flow::exchange`], for mutants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum How {
    /// No deviation from the protocol: the correct protocol runs.
    Right,
    /// Polls the peers' heads before it pushes its own head.
    WaitsFirst,
    /// Overwrites an input item once the items with the same index have arrived from all ranks.
    InPlace,
    /// Counts its workgroup as finished before all threads of the workgroup have read the call
    /// number.
    CountsFirst,
    /// Starts the next launch before this one is over.
    Early,
}

/// Marker in `used` of [`scenario`]: a call in which rank 0 sends one item while the other ranks
/// are in a one_shot.
const TWO_KINDS: u32 = 100;

/// Scenario of one call for each element of `used`: an exchange of that many items or, for 0, a
/// [`one_shot`](super::ops::one_shot) of one tile. The channel has words for `items` items.
fn scenario(pattern: Pattern, ranks: u32, items: u32, used: &'static [u32], how: How) -> Scenario {
    let name = format!("ll {}, {ranks} ranks, {used:?} of {items} items", pattern.name());
    Scenario::new(name, ranks)
        .calls(used.len() as u32, 7)
        .tiles(1, 0)
        .pairs(items)
        .packs(if pattern.in_packs() { items } else { 0 })
        .headers(Headers::new(programs::EXCHANGE, items).option(pattern as u32).used(used))
        .program(move |thread| {
            for (position, &items) in (0..).zip(used) {
                // M is part of the number from which values are computed. Ranks with different M
                // have different layouts. So a rank that uses values of a rank with another M finds
                // that they are wrong.
                let m = thread.record().fields[Field::M as usize];
                let call = thread.call(position).number().wrapping_add(m);
                let items = match items {
                    TWO_KINDS => u32::from(thread.rank() == 0),
                    items => items,
                };
                let plan = CallPattern { pattern, ranks, items };
                let in_place = how == How::InPlace;
                let packs = pattern.in_packs() && position % 3 != 2;
                let words = if packs { 12 } else { 2 };
                let mut body = Items { thread, call, plan, words, in_place };
                if in_place {
                    // Stands in for the previous kernel on the stream, which produces the input
                    // items.
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
                    (_, How::Right | How::InPlace | How::Early) if pattern.in_two_hops() => {
                        let parts = plan.parts();
                        if packs {
                            flow::two_shot_ll::<Ll128, _>(&launch, &parts, &mut body)
                        } else {
                            flow::two_shot_ll::<Ll64, _>(&launch, &parts, &mut body)
                        }
                    }
                    (_, How::Right | How::InPlace | How::Early) => {
                        if packs {
                            flow::exchange::<Ll128, _>(&launch, &plan, &mut body)
                        } else {
                            flow::exchange::<Ll64, _>(&launch, &plan, &mut body)
                        }
                    }
                    (_, How::WaitsFirst | How::CountsFirst) => out_of_order(&launch, how),
                };
                if how == How::Early {
                    continue;
                }
                thread.boundary();
                // Results are not checked if a rank with several workgroups timed out, because one
                // workgroup may have succeeded where another failed.
                if done.is_ok() && how == How::Right && !(thread.gives_up() && thread.groups() > 1)
                {
                    body.consume();
                }
                thread.boundary();
            }
        })
}

/// Call of heads alone, whose steps are not in the order of [`flow::exchange`].
fn out_of_order(launch: &Launch<'_, Thread<'_>>, how: How) -> Result<(), Aborted> {
    let (index, count) = (launch.index, launch.count);
    let mut wg = Workgroup::begin(launch.m, launch.channel, (index, count), launch.record);
    if how == How::CountsFirst {
        wg.count_out();
    }
    let all = Members::all(launch.channel.size);
    let result = wg.begin_push(all).and_then(|()| {
        if how == How::CountsFirst {
            wg.push_head(all);
        }
        let taken = wg.wait_head(all, SOURCES);
        if how == How::WaitsFirst {
            wg.push_head(all);
        }
        wg.leave_together(taken)
    });
    wg.finish_push(iris_sync::End::Advance, result, |_| Used { pairs: HEAD, packs: 0 })
}

/// Scenario of `calls` calls of one item each; of two items in two hops, so that two ranks own one.
pub fn exchange(pattern: Pattern, ranks: u32, calls: u32) -> Scenario {
    const USED: &[u32] = &[1; 8];
    if pattern.in_two_hops() {
        return exchange_two(pattern, ranks, calls);
    }
    scenario(pattern, ranks, 1, &USED[..calls as usize], How::Right)
}

/// Scenario of `calls` calls of two items each.
pub fn exchange_two(pattern: Pattern, ranks: u32, calls: u32) -> Scenario {
    const USED: &[u32] = &[2; 8];
    scenario(pattern, ranks, 2, &USED[..calls as usize], How::Right)
}

/// Scenario of items in rows. Each call has two items in one row or, with `two_rows`, eight items:
/// six in the first row, two in the second. With `spread`, all workgroups share the pushes; without
/// it, each workgroup pushes the items of the rows that it receives.
pub fn exchange_rows(ranks: u32, calls: u32, two_rows: bool, spread: bool) -> Scenario {
    const USED: [&[u32]; 2] = [&[2; 8], &[8; 8]];
    let pattern = if spread { Pattern::SpreadRows } else { Pattern::Rows };
    let used = &USED[usize::from(two_rows)][..calls as usize];
    let items = used[0];
    scenario(pattern, ranks, items, used, How::Right)
}

/// Scenario of GEMM tiles of `rows` rows with four items each; the workgroups share the columns.
pub fn exchange_tiles(ranks: u32, calls: u32, rows: u32) -> Scenario {
    const USED: [&[u32]; 3] = [&[4; 8], &[8; 8], &[12; 8]];
    let used = &USED[rows as usize - 1][..calls as usize];
    scenario(Pattern::Tiles, ranks, used[0], used, How::Right)
}

/// Scenario of a channel with words for two items. Call number `first + i` exchanges `used[i]`
/// items; 0 stands for a one_shot call, which uses no LL words.
pub fn partial(pattern: Pattern, ranks: u32, first: i32, used: &'static [u32]) -> Scenario {
    let mut scenario = scenario(pattern, ranks, 2, used, How::Right);
    scenario.name.push_str(&format!(" from {first}"));
    scenario.calls(used.len() as u32, first)
}

/// Scenario that deviates from the protocol, and does so in Rust alone.
fn deviating(mut scenario: Scenario, what: &str) -> Scenario {
    scenario.name.push_str(what);
    scenario.headers = None;
    scenario
}

/// Mutant in which ranks poll the head words of their peers before they push their own.
pub fn waiting_first() -> Scenario {
    deviating(scenario(Pattern::All, 2, 1, &[1], How::WaitsFirst), ", waits first")
}

/// Mutant that counts a workgroup as finished while some of its threads may not have read the call
/// number.
pub fn counting_first() -> Scenario {
    let scenario = scenario(Pattern::All, 2, 1, &[1], How::CountsFirst).threads(2);
    deviating(scenario, ", counts first")
}

/// Mutant in which a launch begins before the launch before it is over. With two workgroups per
/// rank, one can already be in the next call while the other has not yet begun this call.
pub fn early() -> Scenario {
    let scenario = scenario(Pattern::All, 2, 2, &[2, 2], How::Early).groups(&[2, 2]);
    deviating(scenario, ", launched early")
}

/// Scenario of an in-place call over two rows: each result is written over its input item. With
/// `spread` it is a mutant, because the protocol forbids spread pushes in place.
pub fn in_place(spread: bool) -> Scenario {
    let pattern = if spread { Pattern::SpreadRows } else { Pattern::Rows };
    let scenario = scenario(pattern, 2, 8, &[8], How::InPlace).threads(3).groups(&[3, 3]);
    deviating(scenario, ", in place")
}

/// Mutant with mismatched calls: all ranks make two one_shot calls, then rank 0 enters the third
/// call with the LL protocol while rank 1 enters it as a one_shot.
pub fn two_kinds() -> Scenario {
    let mut scenario = scenario(Pattern::All, 2, 1, &[0, 0, TWO_KINDS], How::Right);
    scenario.name = "ll all, in a call that is a one_shot to rank 1".into();
    scenario
}

/// Scenario in which rank 1 calls with another M than the others.
pub fn different_m() -> Scenario {
    super::ops::of_different_m(exchange(Pattern::All, 2, 1), "ll all, ranks with different M")
}
