//! Scenarios of the ops: the control flow of [`iris_sync::flow`] over tiles of a few cells.
//!
//! Every rank produces `value(rank, call, tile, element)`, so a reader knows exactly which value to
//! expect. A thread writes the element with its own number and reads the element of another thread,
//! so that a missing workgroup barrier shows. Between two calls, a rank's stream runs other
//! kernels: one that reads C and, for ops in which peers pull, one that rewrites the shard.
//!
//! This file is long because every op is a few lines of the same form, which are best compared
//! side by side.

use iris_sync::barrier::Members;
use iris_sync::flow::{self, Launch, Relays, Turns};
use iris_sync::{Aborted, Access, DevWord, End, Field, Memory, Record, SymWord, Workgroup};

use super::headers::programs;
use super::{Headers, Operation, Place, Scenario, Thread};

/// Indices of the arrays of cells that each rank has.
pub(crate) mod array {
    /// Inbox: slots for data from peers that this rank sums up or copies to C.
    pub(crate) const INBOX: u32 = 0;
    /// Slots for results that owners of tiles send, or for sums that copy engines send.
    pub(crate) const RESULT: u32 = 1;
    /// Number of the array that holds the output matrix C.
    pub(crate) const OUT: u32 = 2;
    /// Shard of the input that peers pull.
    pub(crate) const SHARD: u32 = 3;
    /// Workspace in which ranks accumulate under locks or with atomic additions.
    pub(crate) const WORK: u32 = 4;
    /// Staging buffer for units that are fetched from peers.
    pub(crate) const STAGE: u32 = 5;
}

use array::{INBOX, OUT, RESULT, SHARD, STAGE, WORK};

/// Value that `rank` produces for element `element` of `tile` in the call with this number.
pub fn value(rank: u32, call: i32, tile: u32, element: u32) -> i32 {
    let place = rank * 1009 + tile * 17 + element + 1;
    call.wrapping_mul(100_003).wrapping_add(place as i32)
}

/// Tiles of one call as one thread handles them: the thread writes, sends and checks its elements.
#[derive(Clone, Copy)]
struct Tiles<'a, 'b> {
    thread: &'a Thread<'b>,
    call: i32,
    tiles: u32,
    /// Whether data is pulled from the peers' shards; if not, it is read from the inbox.
    pull: bool,
    /// Whether partial results are accumulated by atomic additions; if not, under a lock.
    atomic: bool,
    /// Whether partial results are added as soon as they arrive; if not, once all have been pushed.
    at_once: bool,
}

impl Tiles<'_, '_> {
    fn mine(&self) -> u32 {
        Memory::thread(self.thread)
    }

    /// Index of the element that this thread reads: the element of another thread, if the workgroup
    /// has more than one.
    fn crossed(&self) -> u32 {
        (self.mine() + 1) % self.thread.threads()
    }

    fn at(&self, rank: u32, array: u32, slot: u32, tile: u32, element: u32) -> Place {
        self.thread.cell(rank, array, (slot * self.tiles + tile) * self.thread.threads() + element)
    }

    fn inbox(&self, at: u32, source: u32, tile: u32, parity: u32, element: u32) -> Place {
        self.at(at, INBOX, parity * self.thread.ranks() + source, tile, element)
    }

    fn sum(&self, tile: u32, element: u32) -> i32 {
        (0..self.thread.ranks())
            .fold(0, |sum: i32, rank| sum.wrapping_add(value(rank, self.call, tile, element)))
    }

    fn me(&self) -> u32 {
        self.thread.rank()
    }
}

impl flow::ReduceTiles for Tiles<'_, '_> {
    fn at_once(&self) -> bool {
        self.at_once
    }

    fn produce(&mut self, _tile: u32) {}

    fn push(&mut self, peer: u32, tile: u32, parity: u32) {
        let place = self.inbox(peer, self.me(), tile, parity, self.mine());
        self.thread.write(place, value(self.me(), self.call, tile, self.mine()));
    }

    fn keep(&mut self, tile: u32, parity: u32) {
        flow::ReduceTiles::push(self, self.me(), tile, parity);
    }

    fn reduce(&mut self, tile: u32, parity: u32) {
        let element = self.crossed();
        for source in 0..self.thread.ranks() {
            let place = self.inbox(self.me(), source, tile, parity, element);
            self.thread.expect(place, value(source, self.call, tile, element));
        }
        self.thread.write(self.at(self.me(), OUT, 0, tile, element), self.sum(tile, element));
    }

    fn push_result(&mut self, peer: u32, tile: u32, parity: u32, direct: bool) {
        // Each thread sends the element that it summed in `reduce`: `crossed()`.
        let element = self.crossed();
        let place = if direct {
            self.at(peer, OUT, 0, tile, element)
        } else {
            self.at(peer, RESULT, parity, tile, element)
        };
        self.thread.write(place, self.sum(tile, element));
    }

    fn take_result(&mut self, tile: u32, parity: u32) {
        let element = self.mine();
        self.thread
            .expect(self.at(self.me(), RESULT, parity, tile, element), self.sum(tile, element));
        self.thread.write(self.at(self.me(), OUT, 0, tile, element), self.sum(tile, element));
    }
}

impl flow::DeliverTiles for Tiles<'_, '_> {
    fn produce(&mut self, _tile: u32) {}

    fn push(&mut self, peer: u32, tile: u32, parity: u32, direct: bool) {
        let place = if direct {
            self.at(peer, OUT, self.me(), tile, self.mine())
        } else {
            self.inbox(peer, self.me(), tile, parity, self.mine())
        };
        self.thread.write(place, value(self.me(), self.call, tile, self.mine()));
    }

    fn take(&mut self, source: u32, tile: u32, parity: u32) {
        let element = self.crossed();
        let wanted = value(source, self.call, tile, element);
        self.thread.expect(self.inbox(self.me(), source, tile, parity, element), wanted);
        self.thread.write(self.at(self.me(), OUT, source, tile, element), wanted);
    }
}

impl flow::GatherTiles for Tiles<'_, '_> {
    fn push_part(&mut self, peer: u32, part: u32, parity: u32) {
        flow::ReduceTiles::push(self, peer, part, parity);
    }

    fn multiply(&mut self, tile: u32, source: u32, parity: u32) {
        let element = self.crossed();
        let place = if self.pull {
            self.at(source, SHARD, 0, tile, element)
        } else {
            self.inbox(self.me(), source, tile, parity, element)
        };
        self.thread.expect(place, value(source, self.call, tile, element));
    }

    fn store(&mut self, _tile: u32) {}
}

impl flow::StagedTiles for Tiles<'_, '_> {
    fn fetch(&mut self, unit: u32) {
        let (source, element) = (unit / self.tiles, self.crossed());
        let wanted = value(source, self.call, unit % self.tiles, element);
        self.thread.expect(self.at(source, SHARD, 0, unit % self.tiles, element), wanted);
        self.thread.write(self.at(self.me(), STAGE, 0, unit, element), wanted);
    }

    fn multiply_unit(&mut self, _tile: u32, unit: u32) {
        let (source, element) = (unit / self.tiles, self.mine());
        let wanted = value(source, self.call, unit % self.tiles, element);
        let place = if source == self.me() {
            self.at(source, SHARD, 0, unit % self.tiles, element)
        } else {
            self.at(self.me(), STAGE, 0, unit, element)
        };
        self.thread.expect(place, wanted);
    }

    fn store(&mut self, _tile: u32) {}
}

impl flow::AccumulateTiles for Tiles<'_, '_> {
    fn zero(&mut self, tile: u32) {
        if self.atomic {
            self.thread.store(self.accumulator(self.me(), tile), 0, Access::AbortStore);
        } else {
            self.thread.write(self.at(self.me(), WORK, 0, tile, self.mine()), 0);
        }
    }

    fn produce(&mut self, _tile: u32) {}

    fn add(&mut self, owner: u32, tile: u32) {
        let value = value(self.me(), self.call, tile, self.mine());
        if self.atomic {
            let SymWord { rank, index } = self.accumulator(owner, tile);
            let (order, scope) = (Access::AbortStore.order(), Access::AbortStore.scope());
            self.thread.perform(Operation::Add {
                place: Place::Sym { rank, index },
                value,
                order,
                scope,
            });
        } else {
            let place = self.at(owner, WORK, 0, tile, self.mine());
            self.thread.write(place, self.thread.read(place).wrapping_add(value));
        }
    }

    fn convert(&mut self, owner: u32, tile: u32) {
        if self.atomic {
            let word = self.accumulator(owner, tile);
            let seen = self.thread.load(word, Access::AbortStore);
            let place = Place::Sym { rank: word.rank, index: word.index };
            self.thread.check(place, seen, self.sum(tile, self.mine()));
        } else {
            let element = self.crossed();
            let place = self.at(owner, WORK, 0, tile, element);
            self.thread.expect(place, self.sum(tile, element));
        }
    }
}

impl Tiles<'_, '_> {
    /// Word of rank `owner` to which this thread adds by relaxed atomic additions. Accumulators lie
    /// after all other words of a rank.
    fn accumulator(&self, owner: u32, tile: u32) -> SymWord {
        let element = tile * self.thread.threads() + self.mine();
        SymWord { rank: owner, index: ACCUMULATORS + element }
    }

    /// Simulates the next kernel on the stream, which reads C. A rank that gives up skips this
    /// check, because one of its workgroups may have succeeded where another failed.
    fn consume(&self, slots: impl Iterator<Item = u32>, wanted: impl Fn(u32, u32, u32) -> i32) {
        if self.thread.gives_up() {
            return;
        }
        let element = self.mine();
        for slot in slots {
            for tile in 0..self.tiles {
                let place = self.at(self.me(), OUT, slot, tile, element);
                self.thread.expect(place, wanted(slot, tile, element));
            }
        }
    }
}

/// Runs all calls of a scenario. For each call, `each` receives the launch and the tiles.
fn calls<'b>(
    thread: &Thread<'b>,
    tiles: u32,
    mut each: impl FnMut(&Launch<'_, Thread<'b>>, Tiles<'_, 'b>) -> Result<(), Aborted>,
) {
    for position in 0..thread.calls() {
        // M is part of the number from which values are computed. Ranks with different M have
        // different layouts. So a rank that uses values of a rank with another M finds that they
        // are wrong.
        let m = thread.record().fields[Field::M as usize];
        let call = thread.call(position).number().wrapping_add(m);
        let tiles = Tiles { thread, call, tiles, pull: false, atomic: false, at_once: true };
        // The next call runs even if this one failed, because a stream does so too.
        let _ = each(&thread.launch(), tiles);
        thread.boundary();
    }
}

/// Scenario of an op, to which the caller adds a program; the first call has number 7.
fn scenario(name: &str, ranks: u32, tiles: u32, calls_: u32) -> Scenario {
    Scenario::new(format!("{name}, {ranks} ranks, {tiles} tiles, {calls_} calls"), ranks)
        .calls(calls_, 7)
        .tiles(tiles, 0)
}

/// Changes a scenario so that rank 0 leaves its calls early: its host stops it if `by_host`,
/// otherwise its waits pass their deadline.
fn leaving(scenario: Scenario, by_host: bool) -> Scenario {
    if by_host { scenario.host_stops(0) } else { scenario.expires(|id, _, _| id.rank == 0) }
}

/// Scenario of one_shot all-reduce: each rank pushes its tiles to all ranks, and sums the tiles of
/// all ranks.
pub fn one_shot(ranks: u32, tiles: u32, calls_: u32) -> Scenario {
    scenario("one_shot", ranks, tiles, calls_)
        .headers(Headers::new(programs::ONE_SHOT, tiles))
        .program(move |thread| {
            calls(thread, tiles, |launch, mut body| flow::one_shot(launch, tiles, &mut body));
        })
}

/// Runs one call of [`one_shot`] with one tile. LL scenarios run it between LL calls, to check that
/// both kinds of calls can share the words of a channel.
pub(super) fn one_tile<'b>(
    launch: &Launch<'_, Thread<'b>>,
    thread: &Thread<'b>,
    call: i32,
) -> Result<(), Aborted> {
    let mut body = Tiles { thread, call, tiles: 1, pull: false, atomic: false, at_once: true };
    flow::one_shot(launch, 1, &mut body)
}

/// Special values in the list `used` of [`partial`]: the call runs another op. All other values are
/// numbers of tiles. `cxx/ops.cpp` has constants with the same values.
pub mod instead {
    /// Call of [`pull`](super::pull) with one tile.
    pub const PULL: u32 = 0;
    /// Call of [`two_shot`](super::two_shot) with two tiles.
    pub const TWO_SHOT: u32 = 100;
    /// Call of [`gather`](super::gather) with one part.
    pub const GATHER: u32 = 101;
    /// Call of [`staged`](super::staged); the scenario must have a flag for each rank and tile.
    pub const STAGED: u32 = 102;
}

/// Scenario of [`one_shot`] whose channel has words for `tiles` tiles. Call number `first + i` uses
/// `used[i]` tiles, or runs another op over the same words if `used[i]` is a value of [`instead`].
pub fn partial(ranks: u32, tiles: u32, first: i32, used: &'static [u32]) -> Scenario {
    Scenario::new(format!("one_shot, {ranks} ranks, {used:?} of {tiles} tiles from {first}"), ranks)
        .calls(used.len() as u32, first)
        .tiles(tiles, 0)
        .headers(Headers::new(programs::ONE_SHOT, tiles).used(used))
        .program(move |thread| {
            let mut used = used.iter();
            calls(thread, tiles, |launch, mut body| match used.next() {
                Some(&instead::PULL) => {
                    fill_shard(thread, &body);
                    flow::pull(launch, 1, &mut Tiles { pull: true, ..body })
                }
                Some(&instead::TWO_SHOT) => {
                    flow::two_shot(launch, &Turns { tiles: 2, owners: ranks }, 0, &mut body)
                }
                Some(&instead::GATHER) => gather_once(launch, thread, 1, true, &mut body),
                Some(&instead::STAGED) => {
                    fill_shard(thread, &body);
                    flow::staged(launch, 1, &Staging { ranks, tiles }, &mut body)
                }
                used => flow::one_shot(launch, used.copied().unwrap_or(tiles), &mut body),
            });
        })
}

/// Scenario of two_shot all-reduce: rank `t % ranks` owns and sums tile t. If `direct`, the owner
/// writes the result straight into the C of each peer; if not, into a slot.
pub fn two_shot(ranks: u32, tiles: u32, calls_: u32, direct: bool) -> Scenario {
    let name = if direct { "two_shot, direct" } else { "two_shot" };
    directly(two_shot_in(name, 0, ranks, tiles, calls_), direct)
}

/// Scenario of [`two_shot`] with two workgroups per rank: the first only sends, the second sums.
pub fn two_shot_by_senders(ranks: u32, tiles: u32, calls_: u32) -> Scenario {
    two_shot_in("two_shot, senders", 1, ranks, tiles, calls_).groups(&vec![2; ranks as usize])
}

fn two_shot_in(name: &str, senders: u32, ranks: u32, tiles: u32, calls_: u32) -> Scenario {
    scenario(name, ranks, tiles, calls_)
        .headers(Headers::new(programs::TWO_SHOT, tiles).option(senders))
        .program(move |thread| {
            calls(thread, tiles, |launch, mut body| {
                let owners = Turns { tiles, owners: ranks };
                let done = flow::two_shot(launch, &owners, senders, &mut body);
                thread.boundary();
                done?;
                body.consume(0..1, |_, tile, element| body.sum(tile, element));
                Ok(())
            });
        })
}

fn directly(mut scenario: Scenario, direct: bool) -> Scenario {
    for rank in 0..scenario.ranks {
        let record = Record { direct: direct.into(), c_offset: [4096, 0], ..Record::default() };
        scenario = scenario.record(rank, record);
    }
    scenario
}

/// Scenario of reduce-scatter in which the last rank owns no tile, if there is more than one rank.
pub fn reduce_scatter(ranks: u32, tiles: u32, calls_: u32) -> Scenario {
    scatter("reduce_scatter", 0, ranks, tiles, calls_)
}

/// Scenario of [`reduce_scatter`] with two workgroups per rank: the first only sends, the second
/// sums.
pub fn reduce_scatter_by_senders(ranks: u32, tiles: u32, calls_: u32) -> Scenario {
    let scenario = scatter("reduce_scatter, senders", SENDER, ranks, tiles, calls_);
    scenario.groups(&vec![2; ranks as usize])
}

/// Scenario of [`reduce_scatter`] over GEMM results. A rank sums tiles only after it has pushed all
/// tiles that it sends.
pub fn matmul_reduce_scatter(ranks: u32, tiles: u32, calls_: u32) -> Scenario {
    scatter("matmul_reduce_scatter", PRODUCTS, ranks, tiles, calls_)
}

/// Option bits of the program of a reduce-scatter: PRODUCTS, the input comes from a GEMM; SENDER,
/// one workgroup only sends.
const PRODUCTS: u32 = 1;
const SENDER: u32 = 2;

fn scatter(name: &str, option: u32, ranks: u32, tiles: u32, calls_: u32) -> Scenario {
    let owners = ranks.saturating_sub(1).max(1);
    scenario(name, ranks, tiles, calls_)
        .headers(Headers::new(programs::REDUCE_SCATTER, tiles).option(option))
        .program(move |thread| {
            calls(thread, tiles, |launch, body| {
                let mut body = Tiles { at_once: option != PRODUCTS, ..body };
                let senders = u32::from(option == SENDER);
                flow::reduce_scatter(launch, &Turns { tiles, owners }, senders, &mut body)
            });
        })
}

/// Distribution of the tiles of an all-gather (each rank sends to all) or of a broadcast from rank
/// 0.
struct Delivery {
    tiles: u32,
    me: u32,
    broadcast: bool,
}

impl flow::Delivery for Delivery {
    fn produced(&self) -> u32 {
        if self.broadcast && self.me != 0 { 0 } else { self.tiles }
    }

    fn sent(&self, from: u32, _to: u32) -> u32 {
        if self.broadcast && from != 0 { 0 } else { self.tiles }
    }
}

/// Scenario of all-gather or, if `broadcast`, of broadcast from rank 0. The root of a broadcast may
/// run ahead of its peers. If `direct`, tiles go straight into the C of the peers.
pub fn deliver(ranks: u32, tiles: u32, calls_: u32, broadcast: bool, direct: bool) -> Scenario {
    let (name, option) = if broadcast { ("broadcast", BROADCAST) } else { ("all_gather", 0) };
    let how = if direct { ", direct" } else { "" };
    directly(deliver_in(&format!("{name}{how}"), option, ranks, tiles, calls_), direct)
}

/// Scenario of all-gather with two workgroups per rank: the first only sends, the second receives.
/// If `direct`, tiles go straight into the C of the peers.
pub fn deliver_by_senders(ranks: u32, tiles: u32, calls_: u32, direct: bool) -> Scenario {
    let name = if direct { "all_gather, direct, senders" } else { "all_gather, senders" };
    let scenario = deliver_in(name, SENDER, ranks, tiles, calls_).groups(&vec![2; ranks as usize]);
    directly(scenario, direct)
}

/// Option bit of the program of a delivery: broadcast.
const BROADCAST: u32 = 1;

fn deliver_in(name: &str, option: u32, ranks: u32, tiles: u32, calls_: u32) -> Scenario {
    let broadcast = option == BROADCAST;
    scenario(name, ranks, tiles, calls_)
        .headers(Headers::new(programs::DELIVER, tiles).option(option))
        .program(move |thread| {
            calls(thread, tiles, |launch, mut body| {
                let me = thread.rank();
                let delivery = Delivery { tiles, me, broadcast };
                let senders = u32::from(option == SENDER);
                let done = flow::deliver(launch, &delivery, senders, &mut body);
                thread.boundary();
                done?;
                let sources = (0..if broadcast { 1 } else { ranks }).filter(|&s| s != me);
                body.consume(sources, |source, tile, element| {
                    value(source, body.call, tile, element)
                });
                Ok(())
            });
        })
}

/// Tile operations for a [`relay`]. C gets values of the root only, and each tile has one inbox
/// slot, whichever rank sends it.
struct Relayed<'a, 'b> {
    tiles: Tiles<'a, 'b>,
    root: u32,
}

impl flow::DeliverTiles for Relayed<'_, '_> {
    fn produce(&mut self, _tile: u32) {}

    fn push(&mut self, peer: u32, tile: u32, parity: u32, direct: bool) {
        let Self { tiles, root } = *self;
        // The thread that received an element sends the element on.
        let element = tiles.crossed();
        let sent = if tiles.me() == root {
            value(root, tiles.call, tile, element)
        } else {
            tiles.thread.read(tiles.at(tiles.me(), OUT, 0, tile, element))
        };
        let place = if direct {
            tiles.at(peer, OUT, 0, tile, element)
        } else {
            tiles.inbox(peer, 0, tile, parity, element)
        };
        tiles.thread.write(place, sent);
    }

    fn take(&mut self, _source: u32, tile: u32, parity: u32) {
        let Self { tiles, root } = *self;
        let element = tiles.crossed();
        let wanted = value(root, tiles.call, tile, element);
        tiles.thread.expect(tiles.inbox(tiles.me(), 0, tile, parity, element), wanted);
        tiles.thread.write(tiles.at(tiles.me(), OUT, 0, tile, element), wanted);
    }
}

/// Scenario of broadcast from the last rank; each other rank passes tiles of the root on. If
/// `direct`, tiles go straight into the C of the peers.
pub fn relay(ranks: u32, tiles: u32, calls_: u32, direct: bool) -> Scenario {
    let how = if direct { ", direct" } else { "" };
    let scenario = scenario(&format!("relay{how}"), ranks, tiles, calls_)
        .headers(Headers::new(programs::RELAY, tiles))
        .program(move |thread| {
            let root = ranks - 1;
            let relays = Relays { tiles, root, size: ranks };
            calls(thread, tiles, |launch, body| {
                let done = flow::relay(launch, &relays, &mut Relayed { tiles: body, root });
                thread.boundary();
                done?;
                body.consume((0..1).filter(|_| body.me() != root), |_, tile, element| {
                    value(root, body.call, tile, element)
                });
                Ok(())
            });
        });
    directly(scenario, direct)
}

/// Mutant of [`relay`] with a deadlock: ranks 0 and 1 wait for each other's tile before they pass
/// on their own.
pub fn relay_takes_first() -> Scenario {
    const ROOT: u32 = 2;
    Scenario::new("relay, takes first, 3 ranks, 2 tiles, 1 calls", 3).tiles(2, 0).program(
        |thread| {
            let others = Members::from_bits(0b011);
            let _ = thread.launch().run(End::Advance, |wg| {
                wg.enter()?;
                wg.wait_before_push(others)?;
                match thread.rank() {
                    ROOT => (0..2).for_each(|tile| wg.push_signal(tile, tile)),
                    me => {
                        wg.wait_tile(1 - me, 1 - me)?;
                        wg.wait_tile(ROOT, me)?;
                        wg.push_signal(1 - me, me);
                    }
                }
                Ok(())
            });
        },
    )
}

/// Way in which a user's kernel runs concurrently with a call: correct, or as a mutant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Beside {
    /// Correct: the kernel reads a copy of the call number, and the next call waits for the kernel.
    Right,
    /// Mutant: the kernel reads the op's own call number, which the end of the call changes.
    OwnNumber,
    /// Mutant: the next call does not wait for the kernel.
    NotAwaited,
}

/// Scenario of all-gather straight into C with a user's kernel that runs at the same time: the
/// second workgroup of each rank reads each tile once it has arrived, through the Tiles of
/// `iris/tiles.h`.
pub fn beside(ranks: u32, tiles: u32, calls_: u32, how: Beside) -> Scenario {
    let name = format!("all_gather, a kernel beside, {ranks} ranks, {tiles} tiles, {calls_} calls");
    let scenario = Scenario::new(format!("{name}, {how:?}"), ranks)
        .calls(calls_, 7)
        .tiles(tiles, 0)
        .groups(&vec![2; ranks as usize])
        .program(move |thread| {
            let is_op = thread.id().group == 0;
            let awaited = how != Beside::NotAwaited;
            for position in 0..thread.calls() {
                let call = thread.call(position).number();
                let body = Tiles { thread, call, tiles, pull: false, atomic: false, at_once: true };
                let done = if is_op {
                    in_front(thread, awaited || position == 0);
                    body.gather_beside()
                } else if awaited || position == 0 {
                    thread.boundary();
                    body.take_beside(how)
                } else {
                    return;
                };
                if done.is_err() {
                    return;
                }
                if awaited {
                    thread.boundary();
                }
            }
        });
    directly(scenario, true)
}

/// Device word with a copy of the call number. A user's kernel that runs at the same time as the call
/// reads the copy.
pub(crate) const COPY_OF_CALL: u32 = 1000;

/// Device words of the call number and the sequence, each with the word of its copy. A user's kernel
/// that runs at the same time as the call reads the copies.
fn copies(thread: &Thread<'_>) -> [(u32, u32); 2] {
    let channel = thread.channel();
    [(channel.call, COPY_OF_CALL), (channel.sequence, COPY_OF_CALL + 1)]
}

/// Runs before a call, on the call's stream: copies the call number and lets the concurrent user's
/// kernel start.
fn in_front(thread: &Thread<'_>, launched: bool) {
    if !launched {
        return;
    }
    if thread.id().thread == 0 {
        for (from, to) in copies(thread) {
            let value = thread.dev_load(DevWord { index: from }, Access::CallLoad);
            thread.dev_store(DevWord { index: to }, value, Access::CallStore);
        }
    }
    thread.boundary();
}

impl Tiles<'_, '_> {
    fn gather_beside(mut self) -> Result<(), Aborted> {
        let thread = self.thread;
        let (channel, record) = (thread.channel(), thread.record());
        let launch = Launch { m: thread, channel, record, index: 0, count: 1 };
        let delivery = Delivery { tiles: self.tiles, me: self.me(), broadcast: false };
        flow::deliver(&launch, &delivery, 0, &mut self)
    }

    fn take_beside(self, how: Beside) -> Result<(), Aborted> {
        let thread = self.thread;
        let mut channel = *thread.channel();
        if how != Beside::OwnNumber {
            let [(_, call), (_, sequence)] = copies(thread);
            (channel.call, channel.sequence) = (call, sequence);
        }
        let mut wg = Workgroup::begin(thread, &channel, (0, 1), thread.record());
        for source in channel.peers() {
            for tile in 0..self.tiles {
                assert!(wg.direct(source)?, "all ranks allow it");
                wg.wait_tile(source, tile)?;
                let element = self.crossed();
                let place = self.at(self.me(), OUT, source, tile, element);
                thread.expect(place, value(source, self.call, tile, element));
            }
        }
        Ok(())
    }
}

/// Simulates the kernel that writes a rank's shard before a call; workgroup 0 runs it.
fn fill_shard(thread: &Thread<'_>, body: &Tiles<'_, '_>) {
    if thread.id().group == 0 {
        for part in 0..body.tiles {
            let place = body.at(body.me(), SHARD, 0, part, body.mine());
            thread.write(place, value(body.me(), body.call, part, body.mine()));
        }
    }
    thread.boundary();
}

/// Scenario of all-gather-matmul by pull. Before every call, each rank writes new values to its
/// shard, at the same place.
pub fn pull(ranks: u32, tiles: u32, calls_: u32) -> Scenario {
    scenario("pull", ranks, tiles, calls_).headers(Headers::new(programs::PULL, tiles)).program(
        move |thread| {
            calls(thread, tiles, |launch, body| {
                fill_shard(thread, &body);
                flow::pull(launch, tiles, &mut Tiles { pull: true, ..body })
            });
        },
    )
}

/// Index of the first word in which ranks accumulate by atomic additions.
pub(crate) const ACCUMULATORS: u32 = 1 << 20;

/// Index of the first word that holds data of [`pull_of_leavers`] or [`copied_of_leavers`]. Data
/// words lie after all other words.
pub(crate) const SHARD_WORD: u32 = 1 << 21;

/// Tile operations for a pull of one tile, with shards in words. `wrong` records a value of another
/// call that was read: place, value, and expected value.
struct ShardWords<'a, 'b> {
    thread: &'a Thread<'b>,
    call: i32,
    wrong: Option<(Place, i32, i32)>,
}

impl flow::GatherTiles for ShardWords<'_, '_> {
    fn push_part(&mut self, _peer: u32, _part: u32, _parity: u32) {}

    fn multiply(&mut self, _tile: u32, source: u32, _parity: u32) {
        let seen =
            self.thread.load(SymWord { rank: source, index: SHARD_WORD }, Access::AbortStore);
        let wanted = value(source, self.call, 0, 0);
        if seen != wanted {
            let place = Place::Sym { rank: source, index: SHARD_WORD };
            self.wrong = Some((place, seen, wanted));
        }
    }

    fn store(&mut self, _tile: u32) {}
}

/// Scenario of [`pull`] in which rank 0 leaves the call early: at its deadline or, if `by_host`,
/// because its host stops it. After the call, each rank's next kernel overwrites the shard. If a
/// call succeeds, it must have read the shards of all peers before they were overwritten.
///
/// Shards are words with relaxed accesses. If they were cells, an overwrite during a peer's read
/// would be reported as a race, even if the peer's call fails and drops the value.
pub fn pull_of_leavers(ranks: u32, by_host: bool) -> Scenario {
    let who = if by_host { "the host of rank 0 stops it" } else { "rank 0 gives up" };
    let scenario = Scenario::new(format!("pull, {ranks} ranks, overwritten shards, {who}"), ranks)
        .tiles(1, 0)
        .headers(Headers::new(programs::PULL, 1).option(1))
        .program(move |thread| {
            let shard = SymWord { rank: thread.rank(), index: SHARD_WORD };
            let call = thread.call(0).number();
            thread.store(shard, value(thread.rank(), call, 0, 0), Access::AbortStore);
            thread.boundary();
            let mut body = ShardWords { thread, call, wrong: None };
            let done = flow::pull(&thread.launch(), 1, &mut body);
            if let (Ok(()), Some((place, seen, wanted))) = (done, body.wrong) {
                thread.check(place, seen, wanted);
            }
            thread.boundary();
            thread.store(shard, 0, Access::AbortStore);
        });
    leaving(scenario, by_host)
}

/// Units of a staged gather: tile t needs unit t of each rank.
struct Staging {
    ranks: u32,
    tiles: u32,
}

impl flow::Staging for Staging {
    fn units(&self) -> u32 {
        self.ranks * self.tiles
    }

    fn unit_at(&self, position: u32) -> u32 {
        position
    }

    fn source(&self, unit: u32) -> u32 {
        unit / self.tiles
    }

    fn tiles(&self) -> u32 {
        self.tiles
    }

    fn needs(&self, tile: u32) -> impl Iterator<Item = u32> {
        let tiles = self.tiles;
        (0..self.ranks).map(move |rank| rank * tiles + tile)
    }
}

/// Scenario of all-gather-matmul through a staging buffer. Rank r has `groups[r]` workgroups, of
/// which the first fetches units from peers.
pub fn staged(groups: &[u32], tiles: u32, calls_: u32) -> Scenario {
    let ranks = groups.len() as u32;
    scenario("staged", ranks, tiles, calls_)
        .tiles(tiles, ranks * tiles)
        .groups(groups)
        .headers(Headers::new(programs::STAGED, tiles))
        .program(move |thread| {
            calls(thread, tiles, |launch, body| {
                fill_shard(thread, &body);
                flow::staged(launch, 1, &Staging { ranks, tiles }, &mut { body })
            });
        })
}

/// Scenario of all-gather by push, a device barrier, then the GEMM. If `barrier` is false, the
/// scenario is a mutant without the barrier.
pub fn gather(ranks: u32, tiles: u32, calls_: u32, barrier: bool) -> Scenario {
    scenario("gather", ranks, tiles, calls_)
        .headers(Headers::new(programs::GATHER, tiles).option((!barrier).into()))
        .program(move |thread| {
            calls(thread, tiles, |launch, mut body| {
                gather_once(launch, thread, tiles, barrier, &mut body)
            });
        })
}

fn gather_once<'b>(
    launch: &Launch<'_, Thread<'b>>,
    thread: &Thread<'b>,
    tiles: u32,
    barrier: bool,
    body: &mut Tiles<'_, 'b>,
) -> Result<(), Aborted> {
    // Results of launches are ignored, because a stream runs later launches even after one that
    // failed.
    let _ = flow::gather(launch, tiles, body);
    thread.boundary();
    if barrier {
        let _ = flow::barrier(launch, 0, Members::all(thread.ranks()), End::Keep);
        thread.boundary();
    }
    flow::local(launch, tiles, body)
}

impl flow::CopiedTiles for Tiles<'_, '_> {
    fn copy(&mut self, peer: u32, part: u32) {
        flow::DeliverTiles::push(self, peer, part, 0, true);
    }
}

/// Scenario of all-gather by a copy engine. The last workgroup of each rank plays the engine, the
/// first one multiplies the parts that have arrived; a single workgroup does both in turn. If
/// `waits` is false, the scenario is a mutant: the engine begins before the peers have entered the
/// call.
///
/// The engine copies after the launch that opens the call and before the launch that closes it. It
/// polls no word.
pub fn copied(ranks: u32, tiles: u32, calls_: u32, waits: bool) -> Scenario {
    copied_in(("copied", if waits { 0 } else { EARLY }), ranks, tiles, calls_)
}

/// Mutant of [`copied`] with one part and one call: the launch that opens the call also ends it,
/// before the copies are made.
pub fn copied_ended_at_once(ranks: u32) -> Scenario {
    let mut scenario = copied_in(("copied, ended at once", ENDS), ranks, 1, 1);
    scenario.headers = None;
    scenario
}

/// Scenario of [`copied`] as an all-reduce: in the same call, the copy engine also sends the sums.
/// The signals of the sums have the indices that follow those of the parts.
pub fn copied_on(ranks: u32, tiles: u32, calls_: u32) -> Scenario {
    copied_in(("copied on", ON), ranks, tiles, calls_)
}

/// Scenario of [`copied`] in which one GEMM launch runs at the same time as the copy engine. All
/// workgroups except the engine's belong to the launch. In each, thread 0 waits for the parts that
/// the workgroup reads.
pub fn copied_beside(ranks: u32, tiles: u32, calls_: u32) -> Scenario {
    copied_in(("copied beside", BESIDE), ranks, tiles, calls_)
}

/// Scenario of a GEMM that stores tiles to their owners and waits for the tiles that peers store
/// here. One launch does all of this, after the launch that opens the call and before the one that
/// closes it. Its threads store, signal and wait independently. The launch may start before the
/// opening launch is over, but waits for the opening launch before its first store. `instead`
/// selects a mutant.
pub fn stored(ranks: u32, tiles: u32, calls_: u32, instead: Stored) -> Scenario {
    scenario("stored", ranks, tiles, calls_)
        .tiles(tiles, 1)
        .headers(Headers::new(programs::STORED, tiles).option(instead as u32))
        .program(move |thread| {
            let is_stream = thread.id().group == 0;
            calls(thread, tiles, |launch, body| {
                let alone = Launch { index: 0, count: 1, ..*launch };
                // Results of launches are ignored, because a stream runs later launches even after
                // one that failed.
                if is_stream {
                    let _ = flow::open(&alone);
                }
                let arrivals = flow::Arrivals::begin(launch);
                if instead != Stored::OutOfTurn {
                    thread.boundary();
                }
                body.store_to_owners(launch, arrivals, instead != Stored::Unmuted);
                if instead == Stored::OutOfTurn {
                    thread.boundary();
                }
                thread.boundary();
                if is_stream { flow::close(&alone) } else { Ok(()) }
            });
        })
}

/// Variant of [`stored`]: the correct protocol, or a mutant that leaves out one step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stored {
    /// Correct protocol: no step is left out.
    Right,
    /// Mutant without the check that keeps a rank from storing after it has given up.
    Unmuted,
    /// Mutant that does not wait for the launch that opens the call before its first store.
    OutOfTurn,
}

/// Option bit of the program of [`copied`]: the copy engine begins before the peers have entered.
const EARLY: u32 = 1;
/// Option bit of the program of [`copied`]: the copy engine also sends the sums.
const ON: u32 = 2;
/// Option bit of the program of [`copied`]: one launch, which runs at the same time as the copy
/// engine, multiplies the data.
const BESIDE: u32 = 4;
/// Option bit of the program of [`copied`]: the scenario is [`copied_of_leavers`].
const OF_LEAVERS: u32 = 8;
/// Option bit of the program of [`copied`]: the launch that opens the call also ends it.
const ENDS: u32 = 16;

fn copied_in((name, options): (&str, u32), ranks: u32, tiles: u32, calls_: u32) -> Scenario {
    let [early, on, beside, ends] = [EARLY, ON, BESIDE, ENDS].map(|option| options & option != 0);
    let rounds = 1 + u32::from(on);
    scenario(name, ranks, tiles, calls_)
        .tiles(rounds * tiles, 1)
        .headers(Headers::new(programs::COPIED, tiles).option(options))
        .program(move |thread| {
            let (group, groups) = (thread.id().group, thread.groups());
            let (is_stream, is_engine) = (group == 0, group + 1 == groups);
            calls(thread, tiles, |launch, mut body| {
                let alone = Launch { index: 0, count: 1, ..*launch };
                // Results of launches are ignored, because a stream runs later launches even after
                // one that failed.
                if is_stream && !early && !ends {
                    let _ = flow::open(&alone);
                } else if is_stream {
                    let _ = alone.run(if ends { End::Advance } else { End::Keep }, |wg| {
                        wg.enter()?;
                        if ends {
                            wg.wait_entries(Members::all(ranks))?;
                        }
                        wg.raise_flag(0);
                        Ok(())
                    });
                }
                thread.boundary();
                if is_engine {
                    let plan = Delivery { tiles, me: thread.id().rank, broadcast: false };
                    let _ = flow::copies(&alone, 0, &plan, &mut body);
                }
                if beside && (is_stream || !is_engine) {
                    let count = (groups - 1).max(1);
                    body.take_arriving(&Launch { index: group, count, ..*launch });
                } else if !beside && is_stream {
                    body.take_copied(&alone);
                }
                thread.boundary();
                if on {
                    if is_engine {
                        let plan = Delivery { tiles, me: thread.id().rank, broadcast: false };
                        let _ = flow::copies(&alone, tiles, &plan, &mut Sums(body));
                    }
                    if is_stream {
                        body.take_gated(&alone, tiles, RESULT);
                    }
                    thread.boundary();
                }
                if is_stream { flow::close(&alone) } else { Ok(()) }
            });
        })
}

/// Parts that engines copy to each peer, into words that lie after all words of the protocol.
struct CopiedWords<'a, 'b> {
    thread: &'a Thread<'b>,
    call: i32,
}

impl CopiedWords<'_, '_> {
    fn word(rank: u32, source: u32) -> SymWord {
        SymWord { rank, index: SHARD_WORD + source }
    }
}

impl flow::CopiedTiles for CopiedWords<'_, '_> {
    fn copy(&mut self, peer: u32, _part: u32) {
        let source = self.thread.rank();
        let sent = value(source, self.call, 0, 0);
        self.thread.store(Self::word(peer, source), sent, Access::AbortStore);
    }
}

/// Scenario of [`copied`] in which rank 0 leaves the call early: at its deadline or, if `by_host`,
/// because its host stops it. Copies that rank 0 has enqueued still run. They may write into memory
/// that a peer still reads for the previous call. If a call succeeds, it must have found the parts
/// of all peers. Parts are words, for the reason given at [`pull_of_leavers`].
pub fn copied_of_leavers(ranks: u32, by_host: bool) -> Scenario {
    let who = if by_host { "the host of rank 0 stops it" } else { "rank 0 gives up" };
    let scenario = Scenario::new(format!("copied, {ranks} ranks, overwritten parts, {who}"), ranks)
        .calls(2, 7)
        .tiles(1, 1)
        .headers(Headers::new(programs::COPIED, 1).option(OF_LEAVERS))
        .program(move |thread| {
            for position in 0..thread.calls() {
                let call = thread.call(position).number();
                let launch = thread.launch();
                // Results of launches are ignored, because a stream runs later launches even after
                // one that failed.
                let _ = flow::open(&launch);
                thread.boundary();
                let plan = Delivery { tiles: 1, me: thread.rank(), broadcast: false };
                let _ = flow::copies(&launch, 0, &plan, &mut CopiedWords { thread, call });
                thread.boundary();
                let mut wrong = None;
                for source in thread.channel().peers() {
                    if flow::gate(&launch, source, (0, 1)).is_err() {
                        break;
                    }
                    let word = CopiedWords::word(thread.rank(), source);
                    let seen = thread.load(word, Access::AbortStore);
                    let wanted = value(source, call, 0, 0);
                    if seen != wanted {
                        wrong =
                            Some((Place::Sym { rank: word.rank, index: word.index }, seen, wanted));
                    }
                }
                thread.boundary();
                if let (Ok(()), Some((place, seen, wanted))) = (flow::close(&launch), wrong) {
                    thread.check(place, seen, wanted);
                }
                thread.boundary();
            }
        });
    leaving(scenario, by_host)
}

/// Sums of the received tiles, which the copy engine sends on to the peers.
struct Sums<'a, 'b>(Tiles<'a, 'b>);

impl flow::CopiedTiles for Sums<'_, '_> {
    fn copy(&mut self, peer: u32, part: u32) {
        let Sums(tiles) = self;
        let sum = value(tiles.me(), tiles.call, part, tiles.mine());
        tiles.thread.expect(tiles.at(tiles.me(), WORK, 0, part, tiles.mine()), sum);
        tiles.thread.write(tiles.at(peer, RESULT, tiles.me(), part, tiles.mine()), sum);
    }
}

impl<'b> Tiles<'_, 'b> {
    /// Waits for each part of each peer and checks it in `array`; `first` is the index of the first
    /// part's signal. Returns whether all parts arrived.
    fn take_gated(&self, launch: &Launch<'_, Thread<'b>>, first: u32, array: u32) -> bool {
        let parts =
            launch.channel.peers().flat_map(|peer| (0..self.tiles).map(move |it| (peer, it)));
        parts.into_iter().all(|(source, tile)| {
            let arrived = flow::gate(launch, source, (first + tile, 1)).is_ok();
            if arrived {
                self.expect_from(array, source, tile, self.crossed());
            }
            arrived
        })
    }

    /// Checks an element of a tile of rank `source` in `array`.
    fn expect_from(&self, array: u32, source: u32, tile: u32, element: u32) {
        let place = self.at(self.me(), array, source, tile, element);
        self.thread.expect(place, value(source, self.call, tile, element));
    }

    /// Waits for the copied parts, then writes this rank's sums.
    fn take_copied(self, launch: &Launch<'_, Thread<'b>>) {
        if !self.take_gated(launch, 0, OUT) {
            return;
        }
        for tile in 0..self.tiles {
            let sum = value(self.me(), self.call, tile, self.mine());
            self.thread.write(self.at(self.me(), WORK, 0, tile, self.mine()), sum);
        }
    }

    /// This workgroup's share of the tiles of each peer.
    fn share(&self, launch: &Launch<'_, Thread<'b>>) -> impl Iterator<Item = (u32, u32)> + use<> {
        let (tiles, index, count) = (self.tiles, launch.index, launch.count as usize);
        let of = move |peer| (index..tiles).step_by(count).map(move |tile| (peer, tile));
        launch.channel.peers().flat_map(of)
    }

    /// Multiplies this workgroup's share of the received parts, in one launch whose thread 0 waits
    /// for each part.
    fn take_arriving(self, launch: &Launch<'_, Thread<'b>>) {
        if self.thread.id().thread != 0 {
            return;
        }
        let mut arrivals = flow::Arrivals::begin(launch);
        for (source, tile) in self.share(launch) {
            if arrivals.wait_part(source, tile).is_ok() {
                self.expect_from(OUT, source, tile, self.crossed());
            }
        }
    }

    /// Stores this workgroup's tiles to their owners. Then waits for the tiles that peers stored to
    /// this rank, and checks them.
    fn store_to_owners(
        self,
        launch: &Launch<'_, Thread<'b>>,
        mut arrivals: flow::Arrivals<'_, Thread<'b>>,
        mutes: bool,
    ) {
        if self.thread.id().thread != 0 {
            return;
        }
        let departures = flow::Departures::begin(launch);
        for (peer, tile) in self.share(launch) {
            if departures.may_store() || !mutes {
                let place = self.at(peer, OUT, self.me(), tile, 0);
                self.thread.write(place, value(self.me(), self.call, tile, 0));
                departures.signal_part(peer, tile);
            }
        }
        for (source, tile) in self.share(launch) {
            if arrivals.wait_part(source, tile).is_ok() {
                self.expect_from(OUT, source, tile, 0);
            }
        }
    }
}

/// Variant of [`accumulate`]: how partial results are added, and which barriers a mutant leaves
/// out.
#[derive(Clone, Copy, Debug)]
pub struct Accumulate {
    /// Whether partial results are accumulated by atomic additions; if not, under a lock.
    pub atomic: bool,
    /// Whether there is a barrier between clearing the workspace and adding to it.
    pub first_barrier: bool,
    /// Whether there is a barrier between adding to the workspace and reading it.
    pub second_barrier: bool,
}

impl Accumulate {
    /// Option bits of the program over the device headers.
    fn bits(self) -> u32 {
        let Self { atomic, first_barrier, second_barrier } = self;
        u32::from(atomic) | u32::from(!first_barrier) << 1 | u32::from(!second_barrier) << 2
    }
}

/// Scenario of all-reduce with one workspace per tile: clear, barrier, add, barrier, convert.
pub fn accumulate(ranks: u32, tiles: u32, calls_: u32, how: Accumulate) -> Scenario {
    let Accumulate { atomic, first_barrier, second_barrier } = how;
    let name = if atomic { "atomic" } else { "spinlock" };
    scenario(name, ranks, tiles, calls_)
        .headers(Headers::new(programs::ACCUMULATE, tiles).option(how.bits()))
        .program(move |thread| {
            let owner = |tile| tile % ranks;
            calls(thread, tiles, |launch, body| {
                let mut body = Tiles { atomic, ..body };
                // Results of launches are ignored, because a stream runs later launches even after
                // one that failed.
                let _ = flow::zero(launch, tiles, owner, &mut body);
                thread.boundary();
                if first_barrier {
                    let _ = flow::barrier(launch, 0, Members::all(ranks), End::Keep);
                    thread.boundary();
                }
                let _ = flow::add(launch, tiles, owner, !atomic, &mut body);
                thread.boundary();
                if second_barrier {
                    let _ = flow::barrier(launch, 1, Members::all(ranks), End::Keep);
                    thread.boundary();
                }
                flow::convert(launch, tiles, owner, &mut body)
            });
        })
}

/// Changes a scenario so that rank 0 times out at its first failed poll. The stream of rank 0 still
/// runs later launches and calls. Rank 1 must not mistake signal words of those later calls for
/// signal words of the call in which rank 0 timed out.
pub fn given_up(mut scenario: Scenario) -> Scenario {
    scenario.name.push_str(", rank 0 gives up");
    leaving(scenario, false)
}

/// Scenario in which rank 1 calls with another M; ranks that consume its tiles must report the
/// mismatch.
pub fn different_m() -> Scenario {
    of_different_m(one_shot(2, 1, 1), "one_shot, ranks with different M")
}

/// Changes a scenario so that rank 1 calls with another M than rank 0.
pub(super) fn of_different_m(mut scenario: Scenario, name: &str) -> Scenario {
    for (record, m) in scenario.records.iter_mut().zip([128, 107]) {
        record.fields[Field::M as usize] = m;
    }
    scenario.name = name.into();
    scenario
}
