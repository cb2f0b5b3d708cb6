//! Replay of the slot rule.
//!
//! This file is long because one table of cases maps each operation to a step of the rule.
//!
//! The rule is about tiles and words, the code about cells and addresses. A [`CallContents`] links
//! the two: it says which rank writes which cell at which peer in which call, and which word
//! signals the cell. The plan is learned from one execution of the unbroken code. All other
//! executions, of Rust and of the device headers, must keep to the plan.

use std::collections::BTreeSet;

use iris_sync::{Access, Channel, LlWord};
use rustc_hash::{FxHashMap as HashMap, FxHashSet as HashSet};

use super::track::Track;
use super::{
    Event, Follows, Log, NUMBER, PLAN, RANKS, Replay, Word, array_of, is_spoken_of, kernels, loads,
    meaning, owner, refreshes, stores, universe, word,
};
use crate::ops::array;
use crate::proof::concrete::Universe;
use crate::proof::rule::{Numbers, slot_rule};
use crate::proof::term::Name;
use crate::{Forbidden, Operation, Place, Scenario, ThreadId};

/// Clause that forbids any step of a rank after the call in which it gave up.
const GAVE_UP: Name = "die: no call after one that was given up";

/// Clause that demands a store to the abort word of each peer before a rank leaves a call that
/// pulls.
const TOLD: Name = "die: peers of a call that pulls are told";

/// Rule that a rank tells all peers before it leaves a call of any kind because it gives up.
const LEAVES: Name = "whoever leaves a call tells its peers";

/// Rank that writes a given word of the LL protocol.
fn writer(channel: &Channel, index: u32) -> i64 {
    let first = channel.pair(0, 0, 0, 0).index;
    let source = channel.pair(0, 1, 0, 0).index - first;
    i64::from((index - first) / source % channel.size)
}

/// Tiles and words of each call of a scenario, on which all ranks agree. Calls are numbered from 0.
#[derive(Clone, Debug, Default)]
pub(super) struct CallContents {
    /// Tiles that are written: call, writer and place.
    tiles: BTreeSet<(i64, i64, Place)>,
    /// Word by which each tile is signalled.
    words: HashMap<(i64, i64, Place), u32>,
    /// Words that are set as signals: call, writer, receiver and word.
    pub(super) raised: BTreeSet<(i64, i64, i64, u32)>,
    pulled: BTreeSet<i64>,
    /// Calls in which ranks write entry records.
    recorded: BTreeSet<i64>,
    /// Whether ranks enter calls.
    pub(super) enters: bool,
}

impl CallContents {
    /// Learns the plan from an execution.
    pub(super) fn learn(log: &Log) -> Self {
        let channel = &log.channel;
        let mut plan = Self::default();
        // Tiles whose signal has not been set yet, with the call in which they were written and
        // the event.
        let mut open: Vec<(i64, &Event)> = Vec::new();
        for event in &log.events {
            let &Event { by, op, place, call, .. } = event;
            let (me, peer) = (i64::from(by.rank), owner(place));
            let call = call.unwrap_or_default();
            match (op, place) {
                (Operation::Write { .. }, Place::Cell { index, .. })
                    if peer != me && is_spoken_of(index) =>
                {
                    plan.tiles.insert((call, me, place));
                    open.push((call, event));
                }
                (Operation::Store { .. }, Place::Wide { .. }) => {
                    plan.tiles.insert((call, me, place));
                }
                (Operation::Read { .. }, Place::Cell { index, .. })
                    if peer != me && is_spoken_of(index) =>
                {
                    plan.pulled.insert(call);
                }
                (Operation::Load { .. }, Place::Sym { index, .. })
                    if peer != me && word(channel, index) == Word::Shard =>
                {
                    plan.pulled.insert(call);
                }
                (Operation::Write { .. }, Place::Data { .. } | Place::Unchecked { .. }) => {
                    plan.recorded.insert(call);
                }
                (Operation::Store { .. }, Place::Sym { index, .. }) => match word(channel, index) {
                    Word::Entry { .. } => plan.enters = true,
                    // Sums that peers read are not spoken of, but the rank waits for their readers
                    // too.
                    Word::Done { .. } if !refreshes(call + log.first) => {
                        plan.pulled.insert(call);
                    }
                    Word::Signal { .. } => {
                        plan.raised.insert((call, me, peer, index));
                        open.retain(|&(of, tile)| {
                            let stands = tile.by.rank == by.rank
                                && owner(tile.place) == peer
                                && (tile.by == by
                                    || tile.by.group == by.group && tile.votes < event.votes
                                    || tile.launch < event.launch);
                            if stands {
                                plan.words.insert((of, me, tile.place), index);
                            }
                            !stands
                        });
                    }
                    _ => {}
                },
                _ => {}
            }
        }
        plan
    }
}

/// Scenario in terms of the slot rule.
pub(super) struct Slots {
    /// Threads of the scenario; the rule identifies a thread by its index in this list.
    threads: Vec<ThreadId>,
    /// Threads and copy engines of each rank, by their indices in the rule.
    agents: Vec<Vec<i64>>,
    tiles: HashMap<Place, i64>,
    words: HashMap<(u32, u32), i64>,
    pub(super) plan: CallContents,
    direct: HashSet<Place>,
}

/// Progress of an execution that is not part of the rule's state.
#[derive(Clone, Default)]
pub(super) struct Progress {
    /// For each rank, the thread that was counted as finished last. This thread knows all that the
    /// threads counted before it knew.
    counted_out: [Option<u8>; RANKS],
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

impl Replay<Slots, Progress> {
    /// Makes the replay of a scenario with this plan. The workgroups in `kernels` are kernels beside
    /// a call, which the slot rule does not cover.
    pub(super) fn new(scenario: &Scenario, plan: CallContents, kernels: &kernels::Groups) -> Self {
        let channel = scenario.channel(0);
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
            agents: threads.len() as i64,
            words: words.len() as i64,
            tiles: tiles.len() as i64,
            ..universe(scenario)
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
        let track = Track::new(slot_rule, universe, fixed);
        let rule = Slots { threads, agents, tiles, words, plan, direct };
        Self { channel, first, track, rule, progress: Progress::default() }
    }

    /// Makes all of these threads know what any of them knows: first one thread learns from all
    /// others, then all others learn from that thread.
    fn join(&mut self, agents: &[i64]) -> Result<(), Forbidden> {
        let Some((&first, others)) = agents.split_first() else { return Ok(()) };
        others.iter().try_for_each(|&other| self.track.turn(first, other))?;
        others.iter().try_for_each(|&other| self.track.turn(other, first))
    }

    fn agent(&self, thread: ThreadId) -> i64 {
        (0..).zip(&self.rule.threads).find(|(_, it)| **it == thread).map_or(-1, |(agent, _)| agent)
    }

    /// Takes the step `count`: all threads of the call have been counted as finished, and each
    /// knows what the others know.
    fn count(&mut self, rank: i64) -> Result<(), Forbidden> {
        if self.is("counted", &[rank]) {
            return Ok(());
        }
        let agents = self.rule.agents[rank as usize].clone();
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
        let pulls = self.rule.plan.pulled.contains(&(call - self.first));
        let told = self.progress.told[rank as usize];
        // Whether a peer need not be told. In a call that pulls: this rank has seen the peer's done
        // word, so the peer pulls no more. In other calls: this rank has only skipped a refresh.
        let need_not_be = |peer: i64| match pulls {
            true => self.get("done_seen", &[rank, peer]) == call,
            false => self.progress.skipped & 1 << rank != 0,
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
        let all = std::mem::take(&mut self.progress.done_words);
        for [of, agent, peer, v] in all {
            if of == rank {
                self.step("see_done", &[agent, peer, v])?;
            } else {
                self.progress.done_words.push([of, agent, peer, v]);
            }
        }
        Ok(())
    }

    fn quits(&mut self, rank: i64) -> Result<(), Forbidden> {
        self.progress.done_words.retain(|it| it[0] != rank);
        if self.is("quit", &[rank]) || self.is("idle", &[rank]) {
            return Ok(());
        }
        let refreshes = self.get("call", &[rank]).rem_euclid(Numbers::REAL.period) <= 1;
        if refreshes && self.has_done_all(rank) {
            self.progress.skipped |= 1 << rank;
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
        op: &Operation,
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
                let Some(&w) = self.rule.words.get(&meaning(&self.channel, index)) else {
                    return Ok(());
                };
                if v >= call
                    && self.rule.plan.raised.contains(&(call - self.first, source, me, index))
                {
                    self.step("see", &[agent, source, w, v])?;
                }
                Ok(())
            }
            Word::Done { reader } if reader != me => {
                self.track.row(Access::DoneLoad, op)?;
                if v >= call {
                    self.count(me)?;
                    self.progress.done_words.push([me, agent, reader, v]);
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
                .rule
                .words
                .get(&meaning(&self.channel, index))
                .is_some_and(|&w| self.is("stored", &[me, peer, w, v]))
    }

    fn store(
        &mut self,
        (me, agent): (i64, i64),
        op: &Operation,
        (peer, index): (i64, u32),
        value: i64,
    ) -> Result<(), Forbidden> {
        let call = self.get("call", &[me]);
        let kind = word(&self.channel, index);
        if kind == Word::Abort {
            self.progress.told[me as usize] |= 1 << peer;
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
        let due = refreshes(call);
        match kind {
            Word::Entry { odd, .. } if odd == (call.rem_euclid(2) == 1) => {
                self.track.row(Access::EntryStore, op)?;
                self.step("enter", &[agent, peer])
            }
            Word::Entry { .. } => Err(Forbidden::new("records: two, by parity", format!("{op:?}"))),
            Word::Done { .. } => {
                // In a call without pulls, a store to a done word can only be a refresh, so it must
                // have the order of a refresh.
                let pulls = self.rule.plan.pulled.contains(&(call - self.first));
                self.track.row(if pulls { Access::DoneStore } else { Access::StampStore }, op)?;
                self.count(me)?;
                self.step("say_done", &[agent, peer])
            }
            _ => {
                let Some(&w) = self.rule.words.get(&meaning(&self.channel, index)) else {
                    return if due {
                        self.track.row(Access::StampStore, op)
                    } else {
                        Err(Forbidden::new(PLAN, format!("{op:?}")))
                    };
                };
                let planned = self.rule.plan.raised.contains(&(call - self.first, me, peer, index));
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
        op: &Operation,
        place: Place,
        bits: i64,
    ) -> Result<(), Forbidden> {
        let call = self.get("call", &[me]);
        let v = self.ghost(me, LlWord::from_bits(bits as u64).call.into());
        let Some(&k) = self.rule.tiles.get(&place) else { return Ok(()) };
        if matches!(op, Operation::Load { .. }) {
            self.track.row(Access::LlLoad, op)?;
            let writers = (0..i64::from(self.channel.size)).filter(|&peer| peer != me);
            let source = writers
                .into_iter()
                .find(|&peer| self.rule.plan.tiles.contains(&(call - self.first, peer, place)));
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
        op: &Operation,
        place: Place,
        index: u32,
    ) -> Result<(), Forbidden> {
        if !is_spoken_of(index) {
            return Ok(());
        }
        let call = self.get("call", &[me]) - self.first;
        let (peer, idle) = (owner(place), self.is("idle", &[me]));
        let tile = self.rule.tiles.get(&place).copied();
        match (op, peer == me, tile) {
            (Operation::Write { .. }, false, Some(k)) => {
                if self.is("dead", &[me]) {
                    return Err(Forbidden::new(GAVE_UP, format!("{op:?}")));
                }
                let how = if self.rule.direct.contains(&place) { "push_direct" } else { "push" };
                self.step(how, &[agent, peer, k])
            }
            (Operation::Write { .. }, false, None) => Err(Forbidden::new(PLAN, format!("{op:?}"))),
            _ if self.is("dead", &[me]) => Ok(()),
            (Operation::Read { .. }, false, _) => self.step("pull", &[agent, peer]),
            (Operation::Read { .. }, true, Some(k)) if !idle => {
                let ranks = 0..i64::from(self.channel.size);
                let source = ranks
                    .into_iter()
                    .find(|&source| self.rule.plan.tiles.contains(&(call, source, place)));
                source.map_or(Ok(()), |source| self.step("read", &[agent, source, k]))
            }
            (_, true, _) if idle && matches!(array_of(index), array::OUT | array::SHARD) => {
                self.step("use", &[me])
            }
            _ => Ok(()),
        }
    }
}

impl Follows for Replay<Slots, Progress> {
    fn performed(
        &mut self,
        thread: ThreadId,
        op: &Operation,
        place: Place,
        result: i64,
    ) -> Result<(), Forbidden> {
        let me = i64::from(thread.rank);
        let agent = self.agent(thread);
        if agent < 0 {
            return Ok(());
        }
        match (*op, place) {
            _ if loads(op, self.channel.call) => {
                self.track.row(Access::CallLoad, op)?;
                if self.rule.agents[me as usize].len() == 1 {
                    self.close(me)?;
                }
                if self.is("dead", &[me]) {
                    return Ok(());
                }
                let v = self.ghost(me, result);
                self.step("load", &[agent, v])
            }
            _ if stores(op, self.channel.call) => {
                self.track.row(Access::CallStore, op)?;
                if self.is("dead", &[me]) {
                    return Ok(());
                }
                self.settle(me)?;
                self.step("advance", &[me])
            }
            (Operation::Add { .. }, Place::Dev { index, .. }) if index == self.channel.finished => {
                self.track.row(Access::FinishAdd, op)?;
                let last = self.progress.counted_out[me as usize].replace(agent as u8);
                last.map_or(Ok(()), |last| self.track.turn(agent, last.into()))
            }
            _ if stores(op, self.channel.finished) => {
                self.progress.counted_out[me as usize] = None;
                self.track.row(Access::FinishStore, op)
            }
            (Operation::Load { .. }, Place::Sym { rank, index }) if !self.is("dead", &[me]) => {
                self.load(me, agent, op, (rank.into(), index), result)
            }
            (Operation::Store { value, .. }, Place::Sym { rank, index }) => {
                self.store((me, agent), op, (rank.into(), index), value)
            }
            (Operation::Load { .. }, Place::Wide { .. }) if !self.is("dead", &[me]) => {
                self.wide((me, agent), op, place, result)
            }
            (Operation::Store { value, .. }, Place::Wide { .. }) => {
                self.wide((me, agent), op, place, value)
            }
            (
                Operation::Read { .. },
                Place::Data { rank, index } | Place::Unchecked { rank, index },
            ) if i64::from(rank) == me && !self.is("dead", &[me]) => {
                match word(&self.channel, index) {
                    Word::Record { source }
                        if source != me && !self.is("agreed", &[agent, source]) =>
                    {
                        self.step("compare", &[agent, source])
                    }
                    _ => Ok(()),
                }
            }
            (Operation::Read { .. } | Operation::Write { .. }, Place::Cell { index, .. }) => {
                self.cell((me, agent), op, place, index)
            }
            _ => Ok(()),
        }
    }

    fn met(&mut self, threads: &[ThreadId], op: &Operation) -> Result<(), Forbidden> {
        let agents = threads.iter().map(|&thread| self.agent(thread));
        let agents: Vec<i64> = agents.filter(|&agent| agent >= 0).collect();
        let Some(rank) = threads.first().map(|thread| i64::from(thread.rank)) else {
            return Ok(());
        };
        if !self.is("dead", &[rank]) {
            self.join(&agents)?;
        }
        if matches!(op, Operation::Boundary) { self.close(rank) } else { Ok(()) }
    }
}
