//! Replay of executions against the rule of the device barrier. In this rule, a `Word` stands for a
//! phase, and a `Rank` for a member of the group. Each access of a member to a cell is part of the
//! member's work before the next phase at which it arrives.

use std::collections::BTreeSet;
use std::sync::Arc;

use iris_sync::{ABORT_WORD, Access, Channel};
use rustc_hash::FxHashMap as HashMap;

use super::track::Track;
use super::{
    Event, Follows, Log, Replay, Word, array_of, is_spoken_of, loads, meaning, owner, refreshes,
    universe, word,
};
use crate::ops::{ACCUMULATORS, SHARD_WORD, array};
use crate::proof::barrier::barrier;
use crate::proof::concrete::Universe;
use crate::proof::term::Name;
use crate::{Forbidden, Operation, Place, Scenario, ThreadId};

/// Number of barrier phases that a channel has.
const PHASES: i64 = 2;

/// Phase of a barrier word; `None` for other words.
pub(super) fn phase(channel: &Channel, index: u32) -> Option<i64> {
    let signal = matches!(word(channel, index), Word::Signal { .. });
    (signal && index >= channel.barriers).then(|| meaning(channel, index).1.into())
}

/// Place of data that members access: a cell, or a word that they accumulate in.
fn data(op: &Operation) -> Option<Place> {
    match (*op, op.place()?) {
        (Operation::Read { .. } | Operation::Write { .. }, place @ Place::Cell { index, .. })
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

/// Members of a barrier in a scenario.
pub(super) struct Members {
    /// Whether launches read the number of their call. If they do not, only the next write of a
    /// member shows that the member's previous call is over.
    numbered: bool,
    /// Index that each member has in the rule, by rank.
    members: HashMap<i64, i64>,
    /// Phases that are used, by call.
    used: BTreeSet<(i64, i64)>,
    /// Phase whose barrier a rank reaches after it has written a place, by call, rank and place.
    heralds: HashMap<(i64, u32, Place), i64>,
    /// For each call, rank and place: the last phase at which the rank had arrived before its first
    /// access to the place, its second access, and so on; -1 if it had arrived at none.
    behind: HashMap<(i64, u32, Place), Vec<i64>>,
    /// Index in [`Accesses`] of each place that a rank accesses.
    positions: HashMap<(u32, Place), usize>,
}

/// Number of accesses that a rank has made to each place in its present call.
type Accesses = Arc<Vec<u8>>;

impl Replay<Members, Accesses> {
    /// Makes the replay of a scenario. Returns `None` unless every call has a barrier of phase 0.
    pub(super) fn new(scenario: &Scenario, log: &Log) -> Option<Self> {
        let channel = log.channel;
        let (mut ranks, mut used) = (BTreeSet::new(), BTreeSet::new());
        let (mut heralds, mut behind) = (HashMap::default(), HashMap::default());
        // Writes that each rank made since it last arrived at a barrier, and the last phase at which
        // a rank has arrived, with its call.
        let mut unheralded: HashMap<u32, Vec<Place>> = HashMap::default();
        let mut arrived: HashMap<u32, (i64, i64)> = HashMap::default();
        for &Event { by, ref op, place, call, .. } in &log.events {
            if let (Some(place), Some(call)) = (data(op), call) {
                let (of, phase) = arrived.get(&by.rank).copied().unwrap_or((call, -1));
                let phase = if of == call { phase } else { -1 };
                behind.entry((call, by.rank, place)).or_insert_with(Vec::new).push(phase);
            }
            match (*op, place) {
                (Operation::Store { value, .. }, Place::Sym { index, .. }) => {
                    let Some(phase) = phase(&channel, index) else { continue };
                    let call = call.unwrap_or(value - log.first);
                    ranks.insert(by.rank.into());
                    used.insert((call, phase));
                    arrived.insert(by.rank, (call, phase));
                    for place in unheralded.remove(&by.rank).unwrap_or_default() {
                        heralds.insert((call, by.rank, place), phase);
                    }
                }
                (Operation::Write { .. }, Place::Cell { index, .. }) if is_spoken_of(index) => {
                    unheralded.entry(by.rank).or_default().push(place);
                }
                _ => {}
            }
        }
        if ranks.is_empty() || !(0..scenario.calls.into()).all(|it| used.contains(&(it, 0))) {
            return None;
        }
        let universe = Universe { ranks: ranks.len() as i64, words: PHASES, ..universe(scenario) };
        let first = universe.first;
        // The call after the last one gets a barrier too, so that the rule's assumption (a barrier
        // in every call) holds.
        let is_used = |call: i64, phase: i64| phase == 0 || used.contains(&(call, phase));
        let fixed = |name: Name, values: &[i64]| match name {
            "used" => is_used(values[0] - first, values[1]).into(),
            _ => 0,
        };
        let track = Track::new(barrier, universe, fixed);
        let numbered = log.events.iter().any(|it| loads(&it.op, channel.call));
        let members = ranks.into_iter().zip(0..).collect();
        let places: BTreeSet<_> = behind.keys().map(|&(_, rank, place)| (rank, place)).collect();
        let progress = Arc::new(vec![0; places.len()]);
        let positions = places.into_iter().zip(0..).collect();
        let rule = Members { numbered, members, used, heralds, behind, positions };
        Some(Self { channel, first, track, rule, progress })
    }

    fn peers(&self, me: i64) -> impl Iterator<Item = i64> + use<> {
        (0..self.rule.members.len() as i64).filter(move |&it| it != me)
    }

    fn uses(&self, call: i64, phase: i64) -> bool {
        self.rule.used.contains(&(call - self.first, phase))
    }

    /// Whether the member has arrived, at any other member, in this phase of its call.
    fn has_arrived(&self, me: i64, phase: i64) -> bool {
        let call = self.get("call", &[me]);
        self.peers(me).any(|peer| self.get("arrived", &[me, peer, phase]) == call)
    }

    fn all_seen(&self, me: i64) -> bool {
        let call = self.get("call", &[me]);
        (0..PHASES)
            .filter(|&phase| self.uses(call, phase))
            .all(|phase| self.peers(me).all(|peer| self.get("seen", &[me, peer, phase]) == call))
    }

    /// Ends the call that the member is in.
    fn close(&mut self, me: i64) -> Result<(), Forbidden> {
        if self.is("idle", &[me]) || self.is("dead", &[me]) {
            return Ok(());
        }
        let how = if self.is("quit", &[me]) { "die" } else { "finish" };
        self.step(how, &[me])
    }

    fn open(&mut self, me: i64, rank: u32) -> Result<(), Forbidden> {
        if !self.is("idle", &[me]) {
            return Ok(());
        }
        let accesses = Arc::make_mut(&mut self.progress);
        for (_, &at) in self.rule.positions.iter().filter(|((of, _), _)| *of == rank) {
            accesses[at] = 0;
        }
        self.step("begin", &[me])
    }

    /// Checks that the member has passed the barrier that comes before this access to a place.
    fn passed(&mut self, me: i64, by: ThreadId, place: Place) -> Result<(), Forbidden> {
        let Some(&at) = self.rule.positions.get(&(by.rank, place)) else { return Ok(()) };
        if ["idle", "quit", "dead"].iter().any(|it| self.is(it, &[me])) {
            return Ok(());
        }
        let (call, nth) = (self.get("call", &[me]), usize::from(self.progress[at]));
        let times = &mut Arc::make_mut(&mut self.progress)[at];
        *times = times.saturating_add(1);
        let of_call = self.rule.behind.get(&(call - self.first, by.rank, place));
        let Some(&phase) = of_call.and_then(|all| all.get(nth)) else { return Ok(()) };
        for peer in self.peers(me).filter(|_| phase >= 0) {
            self.step("pass", &[me, peer, phase])?;
        }
        Ok(())
    }

    fn cell(
        &mut self,
        me: i64,
        by: ThreadId,
        op: &Operation,
        place: Place,
    ) -> Result<(), Forbidden> {
        let rank = owner(place);
        // If launches do not read the call number, only the next write shows that a call is over.
        if !self.rule.numbered && matches!(op, Operation::Write { .. }) {
            if !self.is("idle", &[me]) && self.all_seen(me) {
                self.close(me)?;
            }
            self.open(me, by.rank)?;
        }
        if self.is("idle", &[me]) || self.is("dead", &[me]) {
            return Ok(());
        }
        let call = self.get("call", &[me]);
        if let Operation::Write { .. } = op
            && let Some(&phase) = self.rule.heralds.get(&(call - self.first, by.rank, place))
            && self.has_arrived(me, phase)
        {
            return Err(Forbidden::new("arrive: after the work of all threads", format!("{op:?}")));
        }
        let arrived = (0..PHASES).rfind(|&it| self.uses(call, it) && self.has_arrived(me, it));
        if let Some(phase) = arrived
            && let Some(&peer) = self.rule.members.get(&rank)
            && peer != me
        {
            self.step("pass", &[me, peer, phase])?;
        }
        let next = arrived.map_or(0, |phase| phase + 1);
        if next < PHASES { self.step("work", &[me, next]) } else { Ok(()) }
    }

    fn store(&mut self, me: i64, op: &Operation, rank: u32, index: u32) -> Result<(), Forbidden> {
        let Some(phase) = phase(&self.channel, index) else { return Ok(()) };
        let Some(&peer) = self.rule.members.get(&i64::from(rank)) else {
            return Ok(());
        };
        let call = self.get("call", &[me]);
        let due = refreshes(call);
        if due && (!self.uses(call, phase) || self.get("arrived", &[me, peer, phase]) == call) {
            self.track.row(Access::StampStore, op)?;
            return self.step("stamp", &[me, peer, phase]);
        }
        self.track.row(Access::BarrierStore, op)?;
        if self.get("worked", &[me, phase]) < call {
            self.step("work", &[me, phase])?;
        }
        self.step("arrive", &[me, peer, phase])
    }

    fn load(&mut self, me: i64, op: &Operation, index: u32, seen: i64) -> Result<(), Forbidden> {
        if index == ABORT_WORD {
            return if seen == 0 { Ok(()) } else { self.quits(me) };
        }
        let Some(phase) = phase(&self.channel, index) else { return Ok(()) };
        let Word::Signal { source } = word(&self.channel, index) else { return Ok(()) };
        let Some(&peer) = self.rule.members.get(&source) else { return Ok(()) };
        if peer == me || self.is("dead", &[me]) || self.is("idle", &[me]) {
            return Ok(());
        }
        self.track.row(Access::BarrierLoad, op)?;
        let (v, call) = (self.ghost(me, seen), self.get("call", &[me]));
        if v >= call { self.step("look", &[me, peer, phase, v]) } else { Ok(()) }
    }

    fn quits(&mut self, me: i64) -> Result<(), Forbidden> {
        let out = ["idle", "quit", "dead"].iter().any(|it| self.is(it, &[me]));
        if out { Ok(()) } else { self.step("quit", &[me]) }
    }
}

impl Follows for Replay<Members, Accesses> {
    fn performed(
        &mut self,
        thread: ThreadId,
        op: &Operation,
        place: Place,
        result: i64,
    ) -> Result<(), Forbidden> {
        let Some(&me) = self.rule.members.get(&i64::from(thread.rank)) else { return Ok(()) };
        if let Some(place) = data(op) {
            self.passed(me, thread, place)?;
        }
        match (*op, place) {
            _ if loads(op, self.channel.call) => {
                if self.is("dead", &[me]) {
                    return Ok(());
                }
                if self.ghost(me, result) > self.get("call", &[me]) {
                    self.close(me)?;
                }
                self.open(me, thread.rank)
            }
            (Operation::Load { .. }, Place::Sym { index, .. }) => self.load(me, op, index, result),
            (Operation::Store { .. }, Place::Sym { index: ABORT_WORD, .. }) => self.quits(me),
            (Operation::Store { .. }, Place::Sym { rank, index }) => {
                self.store(me, op, rank, index)
            }
            (Operation::Read { .. } | Operation::Write { .. }, Place::Cell { index, .. })
                if is_spoken_of(index) =>
            {
                self.cell(me, thread, op, place)
            }
            _ => Ok(()),
        }
    }

    fn ended(&mut self) -> Result<(), Forbidden> {
        for me in 0..self.rule.members.len() as i64 {
            if self.is("quit", &[me]) || self.all_seen(me) {
                self.close(me)?;
            }
        }
        Ok(())
    }
}
