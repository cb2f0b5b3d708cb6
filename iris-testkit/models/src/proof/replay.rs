//! Replay of executions against the rules: each operation must be a step that the rules allow.
//!
//! This file is long because one table of cases maps each operation to a step of the slot rule, and
//! both the learner of plans and the replay read the table.
//!
//! The rule is about tiles and words, the code about cells and addresses. A `Plan` links the two:
//! it says which rank writes which cell at which peer in which call, and which word signals the
//! cell. The plan is learned from one execution of the unbroken code. All other executions, of Rust
//! and of the device headers, must keep to the plan.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use iris_sync::{ABORT_WORD, Access, Channel, LINE_WORDS, LlWord};
use rustc_hash::{FxHashMap as HashMap, FxHashSet as HashSet};

use super::barrier::barrier;
use super::beside::beside;
use super::concrete::{Machine, Universe};
use super::engine::engines;
use super::rule::{Numbers, slot_rule};
use super::staging::staging;
use super::term::Name;
use crate::mutants::STATES;
use crate::ops::{SHARD_WORD, array};
use crate::search::{self, Explorer, Observer};
use crate::{Failure, Forbidden, Op, Place, Report, Rules, Scenario, ThreadId, loom_memory};
use engines::Engines;
use kernels::Kernels;
use members::Members;
use stages::Stages;
use track::Track;

mod engines;
mod kernels;
mod members;
mod stages;
mod track;

pub use track::Counts;

/// Kind of a word that peers access, by its position in a channel.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Word {
    /// Entry word of a source rank, for calls of one parity.
    Entry { source: i64, odd: bool },
    /// Any field of the entry record of a source rank.
    Record { source: i64 },
    /// Signal word, result word or barrier word that a source rank sets.
    Signal { source: i64 },
    /// Done word of a reader rank.
    Done { reader: i64 },
    /// Abort word of the rank in whose memory it lies.
    Abort,
    /// Shard that the scenario keeps in words.
    Shard,
    /// Lock word, or memory that only the scenario uses.
    Other,
}

fn word(channel: &Channel, index: u32) -> Word {
    let c = channel;
    if index == ABORT_WORD {
        return Word::Abort;
    }
    if index >= SHARD_WORD {
        return Word::Shard;
    }
    let pairs = c.barriers + 2 * c.size * LINE_WORDS;
    match index {
        at if at < c.entries || at >= pairs => Word::Other,
        at if at < c.signals => {
            let (record, field) = ((at - c.entries) / LINE_WORDS, (at - c.entries) % LINE_WORDS);
            let source = i64::from(record / 2);
            if field == LINE_WORDS - 1 {
                Word::Entry { source, odd: record % 2 == 1 }
            } else {
                Word::Record { source }
            }
        }
        at if at < c.results => Word::Signal { source: ((at - c.signals) / c.tiles).into() },
        at if at < c.done => Word::Signal { source: ((at - c.results) / c.tiles).into() },
        at if at < c.barriers => Word::Done { reader: ((at - c.done) / LINE_WORDS).into() },
        at => Word::Signal { source: ((at - c.barriers) / LINE_WORDS % c.size).into() },
    }
}

/// Key of a signal, result or barrier word, without its source rank: the kind of word, and the tile
/// or phase.
fn meaning(channel: &Channel, index: u32) -> (u32, u32) {
    let c = channel;
    match index {
        at if at < c.results => (0, (at - c.signals) % c.tiles),
        at if at < c.done => (1, (at - c.results) % c.tiles),
        at => (2, (at - c.barriers) / LINE_WORDS / c.size),
    }
}

/// Rank that writes a given word of the LL protocol.
fn writer(channel: &Channel, index: u32) -> i64 {
    let first = channel.pair(0, 0, 0, 0).index;
    let source = channel.pair(0, 1, 0, 0).index - first;
    i64::from((index - first) / source % channel.size)
}

/// Index of the array that contains a cell.
fn array_of(index: u32) -> u32 {
    index / 256
}

/// Whether the slot rule covers an array. Only the models explore arrays to which ranks add under
/// locks, and arrays that only one device accesses.
fn is_spoken_of(index: u32) -> bool {
    !matches!(array_of(index), array::WORK | array::STAGE)
}

/// Clause that forbids any step of a rank after the call in which it gave up.
const GAVE_UP: Name = "die: no call after one that was given up";

/// Clause that demands a store to the abort word of each peer before a rank leaves a call that
/// pulls.
const TOLD: Name = "die: peers of a call that pulls are told";

/// Rule that a rank tells all peers before it leaves a call of any kind because it gives up.
const LEAVES: Name = "whoever leaves a call tells its peers";

/// Rule that every word holds the number of a call of its writer.
const NUMBER: Name = "words hold the number of the call";

/// Rule that calls use the tiles and words that ranks agreed on.
const PLAN: Name = "tiles and words are those of the plan";

/// Rule about a barrier inside a call that ranks enter: the barrier's word is also a word of the
/// slot rule. Arriving at the barrier is the step `raise`, and a load of the word is the step
/// `see`.
const JOINED: Name = "a barrier inside a call is a word of the slot rule";

/// Tiles and words of each call of a scenario, on which all ranks agree. Calls are numbered from 0.
#[derive(Clone, Debug, Default)]
struct Plan {
    /// Tiles that are written: call, writer and place.
    tiles: BTreeSet<(i64, i64, Place)>,
    /// Word by which each tile is signalled.
    words: HashMap<(i64, i64, Place), u32>,
    /// Words that are set as signals: call, writer, receiver and word.
    raised: BTreeSet<(i64, i64, i64, u32)>,
    pulled: BTreeSet<i64>,
    /// Calls in which ranks write entry records.
    recorded: BTreeSet<i64>,
    enters: bool,
}

fn owner(place: Place) -> i64 {
    match place {
        Place::Sym { rank, .. }
        | Place::Wide { rank, .. }
        | Place::Dev { rank, .. }
        | Place::Data { rank, .. }
        | Place::Cell { rank, .. }
        | Place::Unchecked { rank, .. } => rank.into(),
    }
}

/// Observers of one execution of a scenario, one for each rule: each learns what its rule needs to
/// know about the scenario.
struct Learners {
    slots: Learner,
    members: members::Learner,
    stages: stages::Learner,
    engines: engines::Learner,
    kernels: kernels::Learner,
}

impl Learners {
    /// Learns from an execution of [`reference`], and also returns the failure of that execution.
    /// Returns `None` if the scenario begins in a state that other calls have left.
    fn learn(scenario: &Scenario) -> Option<(Self, Option<Failure>)> {
        let (reference, first) = reference(scenario, scenario.calls.max(2))?;
        let (channel, first) = (scenario.channel(0), i64::from(first));
        let mut learners = Self {
            slots: Learner::new(channel, first),
            members: members::Learner::new(channel, first),
            stages: stages::Learner::new(channel),
            engines: engines::Learner::new(channel, first),
            kernels: kernels::Learner::new(),
        };
        let report = search::observe(&reference, &Rules::default(), (1, 1), &mut learners);
        Some((learners, report.failure))
    }
}

impl Observer for Learners {
    fn performed(&mut self, thread: ThreadId, op: &Op, result: i64) -> Result<(), Forbidden> {
        self.slots.performed(thread, op, result)?;
        self.members.performed(thread, op, result)?;
        self.stages.performed(thread, op, result)?;
        self.engines.performed(thread, op, result)?;
        self.kernels.performed(thread, op, result)
    }

    fn met(&mut self, threads: &[ThreadId], op: &Op) -> Result<(), Forbidden> {
        self.slots.met(threads, op)
    }
}

/// Observer that learns a plan from an execution.
struct Learner {
    channel: Channel,
    first: i64,
    plan: Plan,
    /// Call that each rank is in at present.
    calls: HashMap<u32, i64>,
    launches: HashMap<u32, u32>,
    /// Number of barriers that each workgroup has passed so far.
    votes: HashMap<(u32, u32), u32>,
    /// Tiles whose signal has not been set yet: call, writer, place, thread that wrote it, launch,
    /// and number of barriers that the thread's workgroup had passed.
    open: Vec<(i64, i64, Place, ThreadId, u32, u32)>,
}

impl Learner {
    fn new(channel: Channel, first: i64) -> Self {
        Self {
            channel,
            first,
            plan: Plan::default(),
            calls: HashMap::default(),
            launches: HashMap::default(),
            votes: HashMap::default(),
            open: Vec::new(),
        }
    }
}

impl Observer for Learner {
    fn performed(&mut self, thread: ThreadId, op: &Op, result: i64) -> Result<(), Forbidden> {
        let Some(place) = op.place() else { return Ok(()) };
        let me = i64::from(thread.rank);
        let call = self.calls.get(&thread.rank).copied().unwrap_or_default();
        let launch = *self.launches.entry(thread.rank).or_default();
        let peer = owner(place);
        let votes = self.votes.get(&(thread.rank, thread.group)).copied().unwrap_or_default();
        match (*op, place) {
            (Op::Read { .. } | Op::Load { .. }, Place::Dev { index, .. })
                if index == self.channel.call =>
            {
                self.calls.insert(thread.rank, result - self.first);
            }
            (Op::Write { .. }, Place::Cell { index, .. }) if peer != me && is_spoken_of(index) => {
                self.plan.tiles.insert((call, me, place));
                self.open.push((call, me, place, thread, launch, votes));
            }
            (Op::Store { .. }, Place::Wide { .. }) => {
                self.plan.tiles.insert((call, me, place));
            }
            (Op::Read { .. }, Place::Cell { index, .. }) if peer != me && is_spoken_of(index) => {
                self.plan.pulled.insert(call);
            }
            (Op::Load { .. }, Place::Sym { index, .. })
                if peer != me && word(&self.channel, index) == Word::Shard =>
            {
                self.plan.pulled.insert(call);
            }
            (Op::Write { .. }, Place::Data { .. } | Place::Unchecked { .. }) => {
                self.plan.recorded.insert(call);
            }
            (Op::Store { .. }, Place::Sym { index, .. }) => match word(&self.channel, index) {
                Word::Entry { .. } => self.plan.enters = true,
                // Sums that peers read are not spoken of, but the rank waits for their readers too.
                Word::Done { .. } if (call + self.first).rem_euclid(Numbers::REAL.period) != 0 => {
                    self.plan.pulled.insert(call);
                }
                Word::Signal { .. } => {
                    self.plan.raised.insert((call, me, peer, index));
                    let words = &mut self.plan.words;
                    self.open.retain(|&(of, writer, tile, by, at, voted)| {
                        let stands = writer == me
                            && owner(tile) == peer
                            && (by == thread
                                || by.group == thread.group && voted < votes
                                || at < launch);
                        if stands {
                            words.insert((of, writer, tile), index);
                        }
                        !stands
                    });
                }
                _ => {}
            },
            _ => {}
        }
        Ok(())
    }

    fn met(&mut self, threads: &[ThreadId], op: &Op) -> Result<(), Forbidden> {
        if let Some(thread) = threads.first() {
            *match op {
                Op::Boundary => self.launches.entry(thread.rank).or_default(),
                _ => self.votes.entry((thread.rank, thread.group)).or_default(),
            } += 1;
        }
        Ok(())
    }
}

/// Maximum number of ranks in a scenario that is replayed.
const RANKS: usize = 8;

/// Slot rule of a scenario over concrete values, and the state that an execution has reached.
pub struct Replay {
    channel: Channel,
    first: i64,
    track: Track,
    /// Threads of the scenario; the rule identifies a thread by its index in this list.
    threads: Vec<ThreadId>,
    /// Threads and copy engines of each rank, by their indices in the rule.
    agents: Vec<Vec<i64>>,
    tiles: HashMap<Place, i64>,
    words: HashMap<(u32, u32), i64>,
    plan: Plan,
    direct: HashSet<Place>,
    /// For each rank, the thread that was counted as finished last. This thread knows all that the
    /// threads counted before it knew.
    counted_out: [Option<u8>; RANKS],
    aborts: Aborts,
}

/// Abort words of an execution: the stores made and the values found so far.
#[derive(Clone, Default)]
pub struct Aborts {
    /// Peers to whose abort word each rank has stored, as a bit set per rank. Abort words are never
    /// reset.
    told: [u8; RANKS],
    /// Done words that were found to have reached a rank's call: rank, its thread, the peer and the
    /// number. Each becomes a step `see_done` once a later load of the rank's abort word finds no
    /// abort.
    done_words: Vec<[i64; 4]>,
    /// Ranks that skip the refresh of words, as bits: such a rank had done everything else in a
    /// call that refreshes words when it learned that it must leave.
    skipped: u8,
}

/// Scenario from which the plan of `scenario` is learned, and the number of its first call. The
/// scenario makes `calls` calls with the same slots, in which no rank gives up and no word is
/// refreshed. If `scenario` is a mutant, the plan is that of its sound scenario. Returns `None` if
/// the scenario begins in a state that other calls have left.
fn reference(scenario: &Scenario, calls: u32) -> Option<(Scenario, i32)> {
    let scenario = scenario.sound.as_deref().unwrap_or(scenario);
    if scenario.words.is_some() || !scenario.initial.is_empty() {
        return None;
    }
    let first = 8 - (scenario.first.number() & 1);
    let mut reference = scenario.clone().calls(calls, first);
    (reference.expires, reference.host_stops) = (None, None);
    Some((reference, first))
}

impl Replay {
    fn over(scenario: &Scenario, channel: Channel, plan: Plan, kernels: &kernels::Groups) -> Self {
        let places: BTreeSet<Place> = plan.tiles.iter().map(|&(_, _, place)| place).collect();
        let indices: BTreeSet<(u32, u32)> =
            plan.raised.iter().map(|&(_, _, _, index)| meaning(&channel, index)).collect();
        let raised: BTreeSet<(i64, i64, i64, (u32, u32))> = plan
            .raised
            .iter()
            .map(|&(call, from, to, index)| (call, from, to, meaning(&channel, index)))
            .collect();
        let tiles: HashMap<Place, i64> = places.iter().copied().zip(0..).collect();
        let words: HashMap<(u32, u32), i64> = indices.iter().copied().zip(0..).collect();
        let by_index: Vec<Place> = places.iter().copied().collect();
        let word_index: Vec<(u32, u32)> = indices.iter().copied().collect();
        let first = i64::from(scenario.first.number());
        // `odd`: parity of the first call that uses each place. `direct`: places of C, and places
        // that calls of both parities use.
        let mut odd = HashMap::default();
        let mut direct = HashSet::default();
        for &(call, _, place) in &plan.tiles {
            let parity = (call + first).rem_euclid(2) == 1;
            let is_c = matches!(place, Place::Cell { index, .. } if array_of(index) == array::OUT);
            if is_c || *odd.entry(place).or_insert(parity) != parity {
                direct.insert(place);
            }
        }
        let mut threads = scenario.thread_ids();
        threads.retain(|it| !kernels.contains(&(it.rank, it.group)));
        assert!(scenario.ranks as usize <= RANKS && threads.len() <= 256, "{}", scenario.name());
        let mut agents = vec![Vec::new(); scenario.ranks as usize];
        for (agent, thread) in (0..).zip(&threads) {
            agents[thread.rank as usize].push(agent);
        }
        let universe = Universe {
            ranks: scenario.ranks.into(),
            agents: threads.len() as i64,
            words: words.len() as i64,
            tiles: tiles.len() as i64,
            first,
            calls: i64::from(scenario.calls) + 1,
        };
        let fixed = |name: Name, values: &[i64]| -> i64 {
            let call = |value: i64| value - first;
            let tile = |at: i64| by_index[at as usize];
            i64::from(match name {
                "rank" => return threads[values[0] as usize].rank.into(),
                "one" => return agents[values[0] as usize][0],
                "plan" => {
                    let place = tile(values[3]);
                    owner(place) == values[2]
                        && plan.tiles.contains(&(call(values[0]), values[1], place))
                }
                "direct" => direct.contains(&tile(values[0])),
                "numbered" => matches!(tile(values[0]), Place::Wide { .. }),
                "word" => {
                    let key = (call(values[0]), values[1], tile(values[3]));
                    let index = plan.words.get(&key);
                    let index = index.and_then(|&it| words.get(&meaning(&channel, it)));
                    return index.copied().unwrap_or_default();
                }
                "awaited" => {
                    let index = word_index[values[3] as usize];
                    raised.contains(&(call(values[0]), values[1], values[2], index))
                }
                "odd" => odd.get(&tile(values[0])).copied().unwrap_or_default(),
                "theirs" => match tile(values[2]) {
                    place @ Place::Wide { index, .. } => {
                        owner(place) == values[1] && writer(&channel, index) == values[0]
                    }
                    _ => false,
                },
                "pulled" => plan.pulled.contains(&call(values[0])),
                "light" => !plan.recorded.contains(&call(values[0])),
                _ => false,
            })
        };
        let system = slot_rule(Numbers::REAL, None);
        let track = Track::new(&system, Machine::new(&system, universe, fixed));
        Self {
            channel,
            first,
            track,
            threads,
            agents,
            tiles,
            words,
            plan,
            direct,
            counted_out: [None; RANKS],
            aborts: Aborts::default(),
        }
    }

    fn get(&self, name: &str, arguments: &[i64]) -> i64 {
        self.track.get(name, arguments)
    }

    fn is(&self, name: &str, arguments: &[i64]) -> bool {
        self.track.is(name, arguments)
    }

    fn step(&mut self, name: Name, parameters: &[i64]) -> Result<(), Forbidden> {
        self.track.step(name, parameters)
    }

    /// Makes all of these threads know what any of them knows: first one thread learns from all
    /// others, then all others learn from that thread.
    fn join(&mut self, agents: &[i64]) -> Result<(), Forbidden> {
        let Some((&first, others)) = agents.split_first() else { return Ok(()) };
        others.iter().try_for_each(|&other| self.track.turn(first, other))?;
        others.iter().try_for_each(|&other| self.track.turn(other, first))
    }

    fn agent(&self, thread: ThreadId) -> i64 {
        (0..).zip(&self.threads).find(|(_, it)| **it == thread).map_or(-1, |(agent, _)| agent)
    }

    fn ghost(&self, rank: i64, value: i64) -> i64 {
        self.track.ghost(rank, value)
    }

    /// Takes the step `count`: all threads of the call have been counted as finished, and each
    /// knows what the others know.
    fn count(&mut self, rank: i64) -> Result<(), Forbidden> {
        if self.is("counted", &[rank]) {
            return Ok(());
        }
        let agents = self.agents[rank as usize].clone();
        self.join(&agents)?;
        self.step("count", &[rank])
    }

    /// Ends the rank's call after its last launch, by the step `finish`, or by `die` if the rank
    /// gave up.
    fn close(&mut self, rank: i64) -> Result<(), Forbidden> {
        if !self.is("advanced", &[rank]) || self.is("dead", &[rank]) {
            return Ok(());
        }
        self.count(rank)?;
        if !self.is("quit", &[rank]) {
            return self.step("finish", &[rank]);
        }
        let call = self.get("call", &[rank]);
        let pulls = self.plan.pulled.contains(&(call - self.first));
        let told = self.aborts.told[rank as usize];
        // Whether a peer need not be told. In a call that pulls: this rank has seen the peer's done
        // word, so the peer pulls no more. In other calls: this rank has only skipped a refresh.
        let need_not_be = |peer: i64| match pulls {
            true => self.get("done_seen", &[rank, peer]) == call,
            false => self.aborts.skipped & 1 << rank != 0,
        };
        let peers = (0..i64::from(self.channel.size)).filter(|&peer| peer != rank);
        let untold: Vec<i64> =
            peers.filter(|&peer| told & 1 << peer == 0 && !need_not_be(peer)).collect();
        if !untold.is_empty() {
            let what = format!("rank {rank} leaves call {call} and has not told {untold:?}");
            return Err(Forbidden::new(if pulls { TOLD } else { LEAVES }, what));
        }
        self.step("die", &[rank])
    }

    /// Takes the step `see_done` for each done word that the rank has found set. Callers call this
    /// when a load of the rank's abort word found no abort, or when the rank advances its call
    /// number without such a load.
    fn settle(&mut self, rank: i64) -> Result<(), Forbidden> {
        let all = std::mem::take(&mut self.aborts.done_words);
        for [of, agent, peer, v] in all {
            if of == rank {
                self.step("see_done", &[agent, peer, v])?;
            } else {
                self.aborts.done_words.push([of, agent, peer, v]);
            }
        }
        Ok(())
    }

    fn quits(&mut self, rank: i64) -> Result<(), Forbidden> {
        self.aborts.done_words.retain(|it| it[0] != rank);
        if self.is("quit", &[rank]) || self.is("idle", &[rank]) {
            return Ok(());
        }
        let refreshes = self.get("call", &[rank]).rem_euclid(Numbers::REAL.period) <= 1;
        if refreshes && self.has_done_all(rank) {
            self.aborts.skipped |= 1 << rank;
        }
        self.step("quit", &[rank])
    }

    /// Whether the rule allows the step `count` for the rank now. The state is not changed.
    fn has_done_all(&mut self, rank: i64) -> bool {
        let before = self.track.changes();
        let counted = self.count(rank).is_ok();
        self.track.undo_to(before);
        counted
    }

    fn load(
        &mut self,
        me: i64,
        agent: i64,
        op: &Op,
        (owner, index): (i64, u32),
        seen: i64,
    ) -> Result<(), Forbidden> {
        let call = self.get("call", &[me]);
        let v = self.ghost(me, seen);
        match word(&self.channel, index) {
            Word::Abort if seen != 0 => self.quits(me),
            Word::Abort => self.settle(me),
            Word::Shard if owner != me => self.step("pull", &[agent, owner]),
            Word::Entry { source, odd } if source != me => {
                let of_call = odd == (call.rem_euclid(2) == 1);
                self.track.row(if of_call { Access::EntryLoad } else { Access::CreditLoad }, op)?;
                // Once all workgroups of a rank have finished, the rank waits for its peers to be
                // done. It then reads their entries only to find out which peer to blame. That read
                // is no step of the rule.
                if self.is("counted", &[me]) {
                    return Ok(());
                }
                match of_call {
                    true if v >= call => self.step("entry", &[agent, source, v]),
                    false if v >= call - 1 => self.step("credit", &[agent, source, v]),
                    _ => Ok(()),
                }
            }
            Word::Signal { source } if source != me => {
                let is_barrier = index >= self.channel.barriers;
                let row = if is_barrier { Access::BarrierLoad } else { Access::SignalLoad };
                self.track.row(row, op)?;
                let Some(&w) = self.words.get(&meaning(&self.channel, index)) else {
                    return Ok(());
                };
                if v >= call && self.plan.raised.contains(&(call - self.first, source, me, index)) {
                    self.step("see", &[agent, source, w, v])?;
                }
                Ok(())
            }
            Word::Done { reader } if reader != me => {
                self.track.row(Access::DoneLoad, op)?;
                if v >= call {
                    self.count(me)?;
                    self.aborts.done_words.push([me, agent, reader, v]);
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Whether a rank that gave up stores the number of an earlier call to a word that has already
    /// held this number. Copy engines do so: their copies still run after a launch that failed, and
    /// carry the number of the last call that was opened.
    fn says_nothing_new(&self, (me, peer): (i64, i64), index: u32, v: i64) -> bool {
        let signal = matches!(word(&self.channel, index), Word::Signal { .. });
        let earlier = self.first - 1..=self.get("call", &[me]);
        signal
            && earlier.contains(&v)
            && self.is("quit", &[me])
            && self
                .words
                .get(&meaning(&self.channel, index))
                .is_some_and(|&w| self.is("stored", &[me, peer, w, v]))
    }

    fn store(
        &mut self,
        (me, agent): (i64, i64),
        op: &Op,
        (peer, index): (i64, u32),
        value: i64,
    ) -> Result<(), Forbidden> {
        let call = self.get("call", &[me]);
        let kind = word(&self.channel, index);
        if kind == Word::Abort {
            self.aborts.told[me as usize] |= 1 << peer;
            return self.quits(me);
        }
        if kind == Word::Shard && peer == me {
            // A kernel before or after the call makes this access. In a rank with one thread, no
            // barrier between launches shows that the call is over, so this access shows it.
            self.close(me)?;
            return if self.is("idle", &[me]) { self.step("use", &[me]) } else { Ok(()) };
        }
        if matches!(kind, Word::Shard | Word::Other | Word::Record { .. }) || peer == me {
            return Ok(());
        }
        if self.says_nothing_new((me, peer), index, self.ghost(me, value)) {
            return Ok(());
        }
        if self.is("dead", &[me]) {
            return Err(Forbidden::new(GAVE_UP, format!("{op:?}")));
        }
        if self.ghost(me, value) != call {
            return Err(Forbidden::new(NUMBER, format!("{op:?} in call {call}")));
        }
        let due = call.rem_euclid(Numbers::REAL.period) == 0;
        match kind {
            Word::Entry { odd, .. } if odd == (call.rem_euclid(2) == 1) => {
                self.track.row(Access::EntryStore, op)?;
                self.step("enter", &[agent, peer])
            }
            Word::Entry { .. } => Err(Forbidden::new("records: two, by parity", format!("{op:?}"))),
            Word::Done { .. } => {
                // In a call without pulls, a store to a done word can only be a refresh, so it must
                // have the order of a refresh.
                let pulls = self.plan.pulled.contains(&(call - self.first));
                self.track.row(if pulls { Access::DoneStore } else { Access::StampStore }, op)?;
                self.count(me)?;
                self.step("say_done", &[agent, peer])
            }
            _ => {
                let Some(&w) = self.words.get(&meaning(&self.channel, index)) else {
                    return if due {
                        self.track.row(Access::StampStore, op)
                    } else {
                        Err(Forbidden::new(PLAN, format!("{op:?}")))
                    };
                };
                let planned = self.plan.raised.contains(&(call - self.first, me, peer, index));
                if due && (!planned || self.is("stored", &[me, peer, w, call])) {
                    self.track.row(Access::StampStore, op)?;
                    self.count(me)?;
                    return self.step("stamp", &[agent, peer, w]);
                }
                let is_barrier = index >= self.channel.barriers;
                let row = if is_barrier { Access::BarrierStore } else { Access::SignalStore };
                self.track.row(row, op)?;
                self.step("raise", &[agent, peer, w])
            }
        }
    }

    fn wide(
        &mut self,
        (me, agent): (i64, i64),
        op: &Op,
        place: Place,
        bits: i64,
    ) -> Result<(), Forbidden> {
        let call = self.get("call", &[me]);
        let v = self.ghost(me, LlWord::from_bits(bits as u64).call.into());
        let Some(&k) = self.tiles.get(&place) else { return Ok(()) };
        if matches!(op, Op::Load { .. }) {
            self.track.row(Access::LlLoad, op)?;
            let writers = (0..i64::from(self.channel.size)).filter(|&peer| peer != me);
            let source = writers
                .into_iter()
                .find(|&peer| self.plan.tiles.contains(&(call - self.first, peer, place)));
            return match source {
                Some(source) if v == call => self.step("take", &[agent, source, k, v]),
                _ => Ok(()),
            };
        }
        if self.is("dead", &[me]) {
            return Err(Forbidden::new(GAVE_UP, format!("{op:?}")));
        }
        match call - v {
            0 => {
                self.track.row(Access::LlStore, op)?;
                self.step("push_numbered", &[agent, owner(place), k])
            }
            2 => {
                self.track.row(Access::LlStamp, op)?;
                self.count(me)?;
                self.step("stamp_numbered", &[agent, owner(place), k])
            }
            _ => Err(Forbidden::new(NUMBER, format!("{op:?} in call {call}"))),
        }
    }

    /// Replays a non-atomic access to a cell.
    fn cell(
        &mut self,
        (me, agent): (i64, i64),
        op: &Op,
        place: Place,
        index: u32,
    ) -> Result<(), Forbidden> {
        if !is_spoken_of(index) {
            return Ok(());
        }
        let call = self.get("call", &[me]) - self.first;
        let (peer, idle) = (owner(place), self.is("idle", &[me]));
        let tile = self.tiles.get(&place).copied();
        match (op, peer == me, tile) {
            (Op::Write { .. }, false, Some(k)) => {
                if self.is("dead", &[me]) {
                    return Err(Forbidden::new(GAVE_UP, format!("{op:?}")));
                }
                let how = if self.direct.contains(&place) { "push_direct" } else { "push" };
                self.step(how, &[agent, peer, k])
            }
            (Op::Write { .. }, false, None) => Err(Forbidden::new(PLAN, format!("{op:?}"))),
            _ if self.is("dead", &[me]) => Ok(()),
            (Op::Read { .. }, false, _) => self.step("pull", &[agent, peer]),
            (Op::Read { .. }, true, Some(k)) if !idle => {
                let ranks = 0..i64::from(self.channel.size);
                let source = ranks
                    .into_iter()
                    .find(|&source| self.plan.tiles.contains(&(call, source, place)));
                source.map_or(Ok(()), |source| self.step("read", &[agent, source, k]))
            }
            (_, true, _) if idle && matches!(array_of(index), array::OUT | array::SHARD) => {
                self.step("use", &[me])
            }
            _ => Ok(()),
        }
    }
}

impl Observer for Replay {
    fn begin(&mut self) {
        self.track.begin();
        self.counted_out.fill(None);
        self.aborts = Aborts::default();
    }

    fn performed(&mut self, thread: ThreadId, op: &Op, result: i64) -> Result<(), Forbidden> {
        let Some(place) = op.place() else { return Ok(()) };
        let me = i64::from(thread.rank);
        let agent = self.agent(thread);
        if agent < 0 {
            return Ok(());
        }
        match (*op, place) {
            (Op::Read { .. } | Op::Load { .. }, Place::Dev { index, .. })
                if index == self.channel.call =>
            {
                self.track.row(Access::CallLoad, op)?;
                if self.agents[me as usize].len() == 1 {
                    self.close(me)?;
                }
                if self.is("dead", &[me]) {
                    return Ok(());
                }
                let v = self.ghost(me, result);
                self.step("load", &[agent, v])
            }
            (Op::Write { .. } | Op::Store { .. }, Place::Dev { index, .. })
                if index == self.channel.call =>
            {
                self.track.row(Access::CallStore, op)?;
                if self.is("dead", &[me]) {
                    return Ok(());
                }
                self.settle(me)?;
                self.step("advance", &[me])
            }
            (Op::Add { .. }, Place::Dev { index, .. }) if index == self.channel.finished => {
                self.track.row(Access::FinishAdd, op)?;
                let last = self.counted_out[me as usize].replace(agent as u8);
                last.map_or(Ok(()), |last| self.track.turn(agent, last.into()))
            }
            (Op::Write { .. } | Op::Store { .. }, Place::Dev { index, .. })
                if index == self.channel.finished =>
            {
                self.counted_out[me as usize] = None;
                self.track.row(Access::FinishStore, op)
            }
            (Op::Load { .. }, Place::Sym { rank, index }) if !self.is("dead", &[me]) => {
                self.load(me, agent, op, (rank.into(), index), result)
            }
            (Op::Store { value, .. }, Place::Sym { rank, index }) => {
                self.store((me, agent), op, (rank.into(), index), value)
            }
            (Op::Load { .. }, Place::Wide { .. }) if !self.is("dead", &[me]) => {
                self.wide((me, agent), op, place, result)
            }
            (Op::Store { value, .. }, Place::Wide { .. }) => {
                self.wide((me, agent), op, place, value)
            }
            (Op::Read { .. }, Place::Data { rank, index } | Place::Unchecked { rank, index })
                if i64::from(rank) == me && !self.is("dead", &[me]) =>
            {
                match word(&self.channel, index) {
                    Word::Record { source }
                        if source != me && !self.is("agreed", &[agent, source]) =>
                    {
                        self.step("compare", &[agent, source])
                    }
                    _ => Ok(()),
                }
            }
            (Op::Read { .. } | Op::Write { .. }, Place::Cell { index, .. }) => {
                self.cell((me, agent), op, place, index)
            }
            _ => Ok(()),
        }
    }

    fn met(&mut self, threads: &[ThreadId], op: &Op) -> Result<(), Forbidden> {
        let agents = threads.iter().map(|&thread| self.agent(thread));
        let agents: Vec<i64> = agents.filter(|&agent| agent >= 0).collect();
        let Some(rank) = threads.first().map(|thread| i64::from(thread.rank)) else {
            return Ok(());
        };
        if !self.is("dead", &[rank]) {
            self.join(&agents)?;
        }
        if matches!(op, Op::Boundary) { self.close(rank) } else { Ok(()) }
    }

    fn end(&mut self) -> Result<(), Forbidden> {
        self.track.holds()
    }
}

impl Explorer for Replay {
    /// Data to which a search returns: number of changes, the threads counted as finished, and the
    /// abort words.
    type Saved = (usize, [Option<u8>; RANKS], Aborts);

    fn save(&self) -> Self::Saved {
        (self.track.changes(), self.counted_out, self.aborts.clone())
    }

    fn restore(&mut self, (changes, counted_out, aborts): &Self::Saved) {
        self.track.undo_to(*changes);
        self.counted_out = *counted_out;
        self.aborts.clone_from(aborts);
    }
}

/// Replay of an execution against all rules that apply to its scenario.
struct Both {
    engines: Option<Engines>,
    slots: Option<Replay>,
    members: Option<Members>,
    stages: Option<Stages>,
    kernels: Option<Kernels>,
}

impl Both {
    /// Learns the plan of a scenario. Returns `None` if no rule applies, because no rank enters a
    /// call and not every call has a barrier. Also returns `None` if the scenario begins in a state
    /// that other calls have left.
    ///
    /// # Errors
    /// The failure of the execution from which the plan should be learned.
    fn new(scenario: &Scenario) -> Result<Option<Self>, String> {
        let Some((learners, failure)) = Learners::learn(scenario) else { return Ok(None) };
        let plan = learners.slots.plan;
        let enters = match failure {
            None => plan.enters,
            // The scenario is about waits that time out; its calls never end in the reference
            // execution, which has no deadlines.
            Some(_) if scenario.expires.is_some() => false,
            Some(failure) => return Err(format!("{}: {failure:?}", scenario.name())),
        };
        let kernels = Kernels::new(scenario, learners.kernels);
        let groups = kernels.as_ref().map(|it| it.groups.clone()).unwrap_or_default();
        let channel = scenario.channel(0);
        let slots = enters.then(|| Replay::over(scenario, channel, plan, &groups));
        let members = Members::new(scenario, learners.members);
        if slots.is_none() && members.is_none() {
            return Ok(None);
        }
        // Units are staged, and engines copy, only in calls that ranks enter.
        let stages = slots.as_ref().and_then(|_| Stages::new(scenario, learners.stages));
        let engines = slots.as_ref().and_then(|_| Engines::new(scenario, learners.engines));
        Ok(Some(Self { engines, slots, members, stages, kernels }))
    }

    fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        self.engines.iter().for_each(|it| counts.add(&it.track.counts()));
        self.kernels.iter().for_each(|it| counts.add(&it.track.counts()));
        self.slots.iter().for_each(|it| counts.add(&it.track.counts()));
        self.members.iter().for_each(|it| counts.add(&it.track.counts()));
        self.stages.iter().for_each(|it| counts.add(&it.track.counts()));
        counts
    }

    fn each(
        &mut self,
        mut tell: impl FnMut(&mut dyn Observer) -> Result<(), Forbidden>,
    ) -> Result<(), Forbidden> {
        self.engines.as_mut().map_or(Ok(()), |it| tell(it))?;
        self.slots.as_mut().map_or(Ok(()), |it| tell(it))?;
        self.members.as_mut().map_or(Ok(()), |it| tell(it))?;
        self.stages.as_mut().map_or(Ok(()), |it| tell(it))?;
        self.kernels.as_mut().map_or(Ok(()), |it| tell(it))
    }

    /// Numbers of steps taken so far for accesses to barrier words: `raise` of the slot rule and
    /// `arrive` of the barrier, then `see` and `look`. Returns `None` if `op` does not access a
    /// barrier word, or if one of the two rules does not apply to the scenario.
    fn joined(&self, op: &Op) -> Option<[(u64, u64); 2]> {
        let (slots, members) = (self.slots.as_ref()?, self.members.as_ref()?);
        let Some(Place::Sym { index, .. }) = op.place() else { return None };
        members::phase(&slots.channel, index)?;
        let pair =
            |of_slots, of_members| (slots.track.taken(of_slots), members.track.taken(of_members));
        Some([pair("raise", "arrive"), pair("see", "look")])
    }
}

impl Observer for Both {
    fn begin(&mut self) {
        let begun = self.each(|it| {
            it.begin();
            Ok(())
        });
        debug_assert_eq!(begun, Ok(()));
    }

    fn performed(&mut self, thread: ThreadId, op: &Op, result: i64) -> Result<(), Forbidden> {
        let before = self.joined(op);
        self.each(|it| it.performed(thread, op, result))?;
        let (Some(before), Some(after)) = (before, self.joined(op)) else { return Ok(()) };
        let differ = before.iter().zip(&after).any(|(was, is)| is.0 - was.0 != is.1 - was.1);
        if differ { Err(Forbidden::new(JOINED, format!("{op:?}"))) } else { Ok(()) }
    }

    fn met(&mut self, threads: &[ThreadId], op: &Op) -> Result<(), Forbidden> {
        self.each(|it| it.met(threads, op))
    }

    fn end(&mut self) -> Result<(), Forbidden> {
        self.each(|it| it.end())
    }
}

impl Explorer for Both {
    type Saved = (
        Option<<Engines as Explorer>::Saved>,
        Option<<Replay as Explorer>::Saved>,
        Option<<Members as Explorer>::Saved>,
        Option<<Stages as Explorer>::Saved>,
        Option<<Kernels as Explorer>::Saved>,
    );

    fn save(&self) -> Self::Saved {
        (
            self.engines.as_ref().map(Explorer::save),
            self.slots.as_ref().map(Explorer::save),
            self.members.as_ref().map(Explorer::save),
            self.stages.as_ref().map(Explorer::save),
            self.kernels.as_ref().map(Explorer::save),
        )
    }

    fn restore(&mut self, (engines, slots, members, stages, kernels): &Self::Saved) {
        if let (Some(replay), Some(saved)) = (&mut self.engines, engines) {
            replay.restore(saved);
        }
        if let (Some(replay), Some(saved)) = (&mut self.kernels, kernels) {
            replay.restore(saved);
        }
        if let (Some(replay), Some(saved)) = (&mut self.stages, stages) {
            replay.restore(saved);
        }
        if let (Some(replay), Some(saved)) = (&mut self.slots, slots) {
            replay.restore(saved);
        }
        if let (Some(replay), Some(saved)) = (&mut self.members, members) {
            replay.restore(saved);
        }
    }
}

/// Executions by one engine that are replayed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Extent {
    /// Executions by this number of random schedules.
    Random(u64),
    /// Every transition of the exhaustive search of schedules.
    Search,
    /// Every execution of loom with this number of preemptions; all executions if `None`.
    Loom(Option<usize>),
}

/// Replays executions of a scenario against the rules. Returns `None` if no rule applies to the
/// scenario.
pub fn replay(scenario: &Scenario, rules: &Rules, extent: Extent) -> Option<(Report, Counts)> {
    let mut both = match Both::new(scenario) {
        Ok(both) => both?,
        Err(why) => {
            let failure = Some(Failure::Other(why));
            let report = search::random(scenario, rules, 1, 0);
            return Some((Report { failure, ..report }, Counts::default()));
        }
    };
    Some(match extent {
        Extent::Random(runs) => {
            let report = search::observe(scenario, rules, (1, runs), &mut both);
            (report, both.counts())
        }
        Extent::Search => {
            let report = search::exhaust_observed(scenario, rules, STATES, &mut both);
            (report, both.counts())
        }
        Extent::Loom(preemptions) => {
            let both = Arc::new(Mutex::new(both));
            let report = loom_memory::check_observed(scenario, rules, preemptions, both.clone());
            let counts = both.lock().map_or_else(|_| Counts::default(), |both| both.counts());
            (report, counts)
        }
    })
}

/// Whether a row of the access table belongs to a rule that is replayed. Other rows are explored by
/// the models only.
pub fn is_replayed(access: Access) -> bool {
    use Access::*;
    match access {
        EntryStore | CreditLoad | EntryLoad | SignalStore | SignalLoad | DoneStore | DoneLoad
        | BarrierStore | BarrierLoad | StampStore | CallLoad | CallStore | FinishAdd
        | FinishStore | LlStore | LlLoad | LlStamp | FlagStore | FlagLoad | FlagStamp => true,
        VersionStore | VersionLoad | LockTake | LockGive | AbortStore | AbortLoad | AbortCheck => {
            false
        }
    }
}

/// Names of those actions of the replayed rules, and of those rows of the access table, that do not
/// occur in `counts`.
pub fn never_replayed(counts: &Counts) -> Vec<String> {
    let systems = [slot_rule, barrier, staging, engines, beside];
    let systems = systems.map(|make| make(Numbers::REAL, None));
    let actions = systems.iter().flat_map(|it| it.actions.iter().map(|of| (it.name, of.name)));
    let missing = actions
        .filter(|name| !counts.steps.contains_key(name))
        .map(|(system, action)| format!("action {action} of the {system}"));
    let rows = Access::ALL.iter().filter(|&&access| is_replayed(access));
    let rows = rows.filter(|access| !counts.accesses.contains_key(access.name()));
    missing.chain(rows.map(|access| format!("access {}", access.name()))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops;

    /// Tests that a barrier word which is missing in the plan of the slot rule is refused.
    #[test]
    fn a_barrier_that_is_no_word_of_the_slot_rule_is_refused() {
        let scenario = ops::gather(2, 1, 2, true);
        let by = |forgets: bool| {
            let mut both = Both::new(&scenario).expect("a plan").expect("rules");
            let slots = both.slots.as_mut().expect("the slot rule");
            let barriers = slots.channel.barriers;
            slots.plan.raised.retain(|it| !forgets || it.3 < barriers);
            let report = search::observe(&scenario, &Rules::default(), (1, 20), &mut both);
            match report.failure {
                Some(Failure::Rule(forbidden)) => Some(forbidden.by),
                _ => None,
            }
        };
        assert_eq!((by(false), by(true)), (None, Some(JOINED)));
    }
}
