//! Replay of executions against the rule of the device barrier. In this rule, a `Word` stands for a
//! phase, and a `Rank` for a member of the group. Each access of a member to a cell is part of the
//! member's work before the next phase at which it arrives.

use std::collections::BTreeSet;
use std::sync::Arc;

use iris_sync::{ABORT_WORD, Access, Channel};
use rustc_hash::FxHashMap as HashMap;

use super::track::Track;
use super::{Word, array_of, is_spoken_of, meaning, owner, word};
use crate::ops::{ACCUMULATORS, SHARD_WORD, array};
use crate::proof::barrier::barrier;
use crate::proof::concrete::{Machine, Universe};
use crate::proof::rule::Numbers;
use crate::search::{Explorer, Observer};
use crate::{Forbidden, Op, Place, Scenario, ThreadId};

/// Number of barrier phases that a channel has.
const PHASES: i64 = 2;

/// Phase of a barrier word; `None` for other words.
pub(super) fn phase(channel: &Channel, index: u32) -> Option<i64> {
    let signal = matches!(word(channel, index), Word::Signal { .. });
    (signal && index >= channel.barriers).then(|| meaning(channel, index).1.into())
}

/// Place of data that members access: a cell, or a word that they accumulate in.
fn data(op: &Op) -> Option<Place> {
    match (*op, op.place()?) {
        (Op::Read { .. } | Op::Write { .. }, place @ Place::Cell { index, .. })
            if array_of(index) != array::STAGE =>
        {
            Some(place)
        }
        (_, place @ Place::Sym { index, .. }) if (ACCUMULATORS..SHARD_WORD).contains(&index) => {
            Some(place)
        }
        _ => None,
    }
}

/// Observer that learns from one execution which ranks meet, and in which phases of which calls.
#[derive(Clone, Default)]
pub(super) struct Learner {
    channel: Option<Channel>,
    first: i64,
    calls: HashMap<u32, i64>,
    /// Whether launches read the number of their call. If they do not, only the next write of a
    /// member shows that the member's previous call is over.
    numbered: bool,
    members: BTreeSet<i64>,
    used: BTreeSet<(i64, i64)>,
    /// Writes that each rank made since it last arrived at a barrier.
    unheralded: HashMap<u32, Vec<Place>>,
    /// Phase whose barrier a rank reaches after it has written a place, by call, rank and place.
    heralds: HashMap<(i64, u32, Place), i64>,
    /// Last phase at which a rank has arrived, with its call.
    arrived: HashMap<u32, (i64, i64)>,
    /// For each call, rank and place: the last phase at which the rank had arrived before its first
    /// access to the place, its second access, and so on; -1 if it had arrived at none.
    behind: HashMap<(i64, u32, Place), Vec<i64>>,
}

impl Learner {
    pub(super) fn new(channel: Channel, first: i64) -> Self {
        Self { channel: Some(channel), first, ..Self::default() }
    }
}

impl Observer for Learner {
    fn performed(&mut self, thread: ThreadId, op: &Op, result: i64) -> Result<(), Forbidden> {
        let Some(channel) = self.channel else { return Ok(()) };
        if let (Some(place), Some(&call)) = (data(op), self.calls.get(&thread.rank)) {
            let (of, phase) = self.arrived.get(&thread.rank).copied().unwrap_or((call, -1));
            let phase = if of == call { phase } else { -1 };
            self.behind.entry((call, thread.rank, place)).or_default().push(phase);
        }
        match (*op, op.place()) {
            (Op::Read { .. } | Op::Load { .. }, Some(Place::Dev { index, .. }))
                if index == channel.call =>
            {
                self.numbered = true;
                self.calls.insert(thread.rank, result - self.first);
            }
            (Op::Store { value, .. }, Some(Place::Sym { index, .. })) => {
                if let Some(phase) = phase(&channel, index) {
                    let call = self.calls.get(&thread.rank).copied();
                    self.members.insert(thread.rank.into());
                    let call = call.unwrap_or(value - self.first);
                    self.used.insert((call, phase));
                    self.arrived.insert(thread.rank, (call, phase));
                    for place in self.unheralded.remove(&thread.rank).unwrap_or_default() {
                        self.heralds.insert((call, thread.rank, place), phase);
                    }
                }
            }
            (Op::Write { .. }, Some(place @ Place::Cell { index, .. })) if is_spoken_of(index) => {
                self.unheralded.entry(thread.rank).or_default().push(place);
            }
            _ => {}
        }
        Ok(())
    }
}

/// Replay of one execution against the rule of the barrier.
pub(super) struct Members {
    channel: Channel,
    pub(super) track: Track,
    numbered: bool,
    /// Index that each member has in the rule, by rank.
    members: HashMap<i64, i64>,
    used: BTreeSet<(i64, i64)>,
    heralds: HashMap<(i64, u32, Place), i64>,
    behind: HashMap<(i64, u32, Place), Vec<i64>>,
    /// Index in `accesses` of each place that a rank accesses.
    positions: HashMap<(u32, Place), usize>,
    /// Number of accesses that a rank has made to each place in its present call.
    accesses: Arc<Vec<u8>>,
    first: i64,
}

impl Members {
    /// Makes the replay of a scenario. Returns `None` unless every call has a barrier of phase 0.
    pub(super) fn new(scenario: &Scenario, learner: Learner) -> Option<Self> {
        let channel = scenario.channel(0);
        let calls = i64::from(scenario.calls);
        if learner.members.is_empty() || !(0..calls).all(|it| learner.used.contains(&(it, 0))) {
            return None;
        }
        let first = i64::from(scenario.first.number());
        let universe = Universe {
            ranks: learner.members.len() as i64,
            agents: 1,
            words: PHASES,
            tiles: 1,
            first,
            calls: calls + 1,
        };
        // The call after the last one gets a barrier too, so that the rule's assumption (a barrier
        // in every call) holds.
        let is_used = |call: i64, phase: i64| phase == 0 || learner.used.contains(&(call, phase));
        let fixed = |name: &'static str, values: &[i64]| match name {
            "first" => first,
            "used" => is_used(values[0] - first, values[1]).into(),
            _ => 0,
        };
        let system = barrier(Numbers::REAL, None);
        let track = Track::new(&system, Machine::new(&system, universe, fixed));
        let members = learner.members.iter().copied().zip(0..).collect();
        let Learner { numbered, used, heralds, behind, .. } = learner;
        let places: BTreeSet<_> = behind.keys().map(|&(_, rank, place)| (rank, place)).collect();
        let accesses = Arc::new(vec![0; places.len()]);
        let positions = places.into_iter().zip(0..).collect();
        Some(Self {
            channel,
            track,
            numbered,
            members,
            used,
            heralds,
            behind,
            positions,
            accesses,
            first,
        })
    }

    fn peers(&self, me: i64) -> impl Iterator<Item = i64> + use<> {
        (0..self.members.len() as i64).filter(move |&it| it != me)
    }

    fn uses(&self, call: i64, phase: i64) -> bool {
        self.used.contains(&(call - self.first, phase))
    }

    /// Whether the member has arrived, at any other member, in this phase of its call.
    fn has_arrived(&self, me: i64, phase: i64) -> bool {
        let call = self.track.get("call", &[me]);
        self.peers(me).any(|peer| self.track.get("arrived", &[me, peer, phase]) == call)
    }

    fn all_seen(&self, me: i64) -> bool {
        let call = self.track.get("call", &[me]);
        (0..PHASES).filter(|&phase| self.uses(call, phase)).all(|phase| {
            self.peers(me).all(|peer| self.track.get("seen", &[me, peer, phase]) == call)
        })
    }

    /// Ends the call that the member is in.
    fn close(&mut self, me: i64) -> Result<(), Forbidden> {
        if self.track.is("idle", &[me]) || self.track.is("dead", &[me]) {
            return Ok(());
        }
        let how = if self.track.is("quit", &[me]) { "die" } else { "finish" };
        self.track.step(how, &[me])
    }

    fn open(&mut self, me: i64, rank: u32) -> Result<(), Forbidden> {
        if !self.track.is("idle", &[me]) {
            return Ok(());
        }
        let accesses = Arc::make_mut(&mut self.accesses);
        for (_, &at) in self.positions.iter().filter(|((of, _), _)| *of == rank) {
            accesses[at] = 0;
        }
        self.track.step("begin", &[me])
    }

    /// Checks that the member has passed the barrier that comes before this access to a place.
    fn passed(&mut self, me: i64, by: ThreadId, place: Place) -> Result<(), Forbidden> {
        let Some(&at) = self.positions.get(&(by.rank, place)) else { return Ok(()) };
        if ["idle", "quit", "dead"].iter().any(|it| self.track.is(it, &[me])) {
            return Ok(());
        }
        let (call, nth) = (self.track.get("call", &[me]), usize::from(self.accesses[at]));
        let times = &mut Arc::make_mut(&mut self.accesses)[at];
        *times = times.saturating_add(1);
        let of_call = self.behind.get(&(call - self.first, by.rank, place));
        let Some(&phase) = of_call.and_then(|all| all.get(nth)) else { return Ok(()) };
        for peer in self.peers(me).filter(|_| phase >= 0) {
            self.track.step("pass", &[me, peer, phase])?;
        }
        Ok(())
    }

    fn cell(&mut self, me: i64, by: ThreadId, op: &Op, place: Place) -> Result<(), Forbidden> {
        let rank = owner(place);
        // If launches do not read the call number, only the next write shows that a call is over.
        if !self.numbered && matches!(op, Op::Write { .. }) {
            if !self.track.is("idle", &[me]) && self.all_seen(me) {
                self.close(me)?;
            }
            self.open(me, by.rank)?;
        }
        if self.track.is("idle", &[me]) || self.track.is("dead", &[me]) {
            return Ok(());
        }
        let call = self.track.get("call", &[me]);
        if let Op::Write { .. } = op
            && let Some(&phase) = self.heralds.get(&(call - self.first, by.rank, place))
            && self.has_arrived(me, phase)
        {
            return Err(Forbidden::new("arrive: after the work of all threads", format!("{op:?}")));
        }
        let arrived = (0..PHASES).rfind(|&it| self.uses(call, it) && self.has_arrived(me, it));
        if let Some(phase) = arrived
            && let Some(&peer) = self.members.get(&rank)
            && peer != me
        {
            self.track.step("pass", &[me, peer, phase])?;
        }
        let next = arrived.map_or(0, |phase| phase + 1);
        if next < PHASES { self.track.step("work", &[me, next]) } else { Ok(()) }
    }

    fn store(&mut self, me: i64, op: &Op, rank: u32, index: u32) -> Result<(), Forbidden> {
        let Some(phase) = phase(&self.channel, index) else { return Ok(()) };
        let Some(&peer) = self.members.get(&i64::from(rank)) else {
            return Ok(());
        };
        let call = self.track.get("call", &[me]);
        let due = call.rem_euclid(Numbers::REAL.period) == 0;
        if due && (!self.uses(call, phase) || self.track.get("arrived", &[me, peer, phase]) == call)
        {
            self.track.row(Access::StampStore, op)?;
            return self.track.step("stamp", &[me, peer, phase]);
        }
        self.track.row(Access::BarrierStore, op)?;
        if self.track.get("worked", &[me, phase]) < call {
            self.track.step("work", &[me, phase])?;
        }
        self.track.step("arrive", &[me, peer, phase])
    }

    fn load(&mut self, me: i64, op: &Op, index: u32, seen: i64) -> Result<(), Forbidden> {
        if index == ABORT_WORD {
            return if seen == 0 { Ok(()) } else { self.quits(me) };
        }
        let Some(phase) = phase(&self.channel, index) else { return Ok(()) };
        let Word::Signal { source } = word(&self.channel, index) else { return Ok(()) };
        let Some(&peer) = self.members.get(&source) else { return Ok(()) };
        if peer == me || self.track.is("dead", &[me]) || self.track.is("idle", &[me]) {
            return Ok(());
        }
        self.track.row(Access::BarrierLoad, op)?;
        let (v, call) = (self.track.ghost(me, seen), self.track.get("call", &[me]));
        if v >= call { self.track.step("look", &[me, peer, phase, v]) } else { Ok(()) }
    }

    fn quits(&mut self, me: i64) -> Result<(), Forbidden> {
        let out = ["idle", "quit", "dead"].iter().any(|it| self.track.is(it, &[me]));
        if out { Ok(()) } else { self.track.step("quit", &[me]) }
    }
}

impl Observer for Members {
    fn begin(&mut self) {
        self.track.begin();
        Arc::make_mut(&mut self.accesses).fill(0);
    }

    fn performed(&mut self, thread: ThreadId, op: &Op, result: i64) -> Result<(), Forbidden> {
        let Some(place) = op.place() else { return Ok(()) };
        let Some(&me) = self.members.get(&i64::from(thread.rank)) else { return Ok(()) };
        if let Some(place) = data(op) {
            self.passed(me, thread, place)?;
        }
        match (*op, place) {
            (Op::Read { .. } | Op::Load { .. }, Place::Dev { index, .. })
                if index == self.channel.call =>
            {
                if self.track.is("dead", &[me]) {
                    return Ok(());
                }
                if self.track.ghost(me, result) > self.track.get("call", &[me]) {
                    self.close(me)?;
                }
                self.open(me, thread.rank)
            }
            (Op::Load { .. }, Place::Sym { index, .. }) => self.load(me, op, index, result),
            (Op::Store { .. }, Place::Sym { index: ABORT_WORD, .. }) => self.quits(me),
            (Op::Store { .. }, Place::Sym { rank, index }) => self.store(me, op, rank, index),
            (Op::Read { .. } | Op::Write { .. }, Place::Cell { index, .. })
                if is_spoken_of(index) =>
            {
                self.cell(me, thread, op, place)
            }
            _ => Ok(()),
        }
    }

    fn end(&mut self) -> Result<(), Forbidden> {
        for me in 0..self.members.len() as i64 {
            if self.track.is("quit", &[me]) || self.all_seen(me) {
                self.close(me)?;
            }
        }
        self.track.holds()
    }
}

impl Explorer for Members {
    /// Number of the changes so far, and of accesses to each place.
    type Saved = (usize, Arc<Vec<u8>>);

    fn save(&self) -> Self::Saved {
        (self.track.changes(), self.accesses.clone())
    }

    fn restore(&mut self, (changes, accesses): &Self::Saved) {
        self.track.undo_to(*changes);
        self.accesses.clone_from(accesses);
    }
}
