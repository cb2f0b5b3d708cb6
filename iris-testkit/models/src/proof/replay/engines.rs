//! Replay of the rule of copy engines. In this rule, a `Word` stands for one part and its signal.

use std::collections::{BTreeMap, BTreeSet};

use iris_sync::{ABORT_WORD, Access, Channel};
use rustc_hash::FxHashMap as HashMap;

use super::track::Track;
use super::{
    Event, Follows, Log, NUMBER, RANKS, Replay, Word, is_spoken_of, loads, meaning, owner,
    refreshes, stores, universe, word,
};
use crate::proof::concrete::Universe;
use crate::proof::engine::engines;
use crate::proof::term::Name;
use crate::{Forbidden, Operation, Place, Scenario, ThreadId};

/// Clause about the number that an engine stores as a signal.
const COPIED: Name = "signal: the number in flag 0";

/// Peer and index of the word, if the operation stores to a signal, result or barrier word of a
/// peer; `None` for other operations.
fn signal(channel: &Channel, by: ThreadId, op: &Operation) -> Option<(i64, u32)> {
    match (*op, op.place()) {
        (Operation::Store { .. }, Some(place @ Place::Sym { rank, index })) if rank != by.rank => {
            let is_signal = matches!(word(channel, index), Word::Signal { .. });
            is_signal.then_some((owner(place), index))
        }
        _ => None,
    }
}

/// Whether the operation writes data at a peer.
fn is_data(channel: &Channel, by: ThreadId, op: &Operation, place: Place) -> bool {
    owner(place) != i64::from(by.rank)
        && match (*op, place) {
            (Operation::Write { .. }, Place::Cell { index, .. }) => is_spoken_of(index),
            (Operation::Store { .. }, Place::Sym { index, .. }) => {
                word(channel, index) == Word::Shard
            }
            _ => false,
        }
}

/// Parts that copy engines of a scenario send. A part is identified by the key of its signal; see
/// [`meaning`].
pub(super) struct Engines {
    /// Part to which each place belongs that a rank writes.
    parts: HashMap<(i64, Place), i64>,
    words: BTreeMap<(u32, u32), i64>,
    plan: BTreeSet<(i64, i64, i64, (u32, u32))>,
}

/// Progress of an execution that is not part of the rule's state.
#[derive(Clone, Copy, Default)]
pub(super) struct Seen {
    /// Workgroups of each rank that have read flag 0 since they began or since their last signal,
    /// as bits.
    numbered: [u8; RANKS],
    /// Peers to whose abort word each rank has stored, as bits.
    told: [u8; RANKS],
    /// Ranks that have advanced the number of a call whose last launch has not ended yet, as bits.
    advanced: u8,
}

impl Seen {
    /// Records whether the workgroup has read flag 0 since its last signal, and returns the
    /// previous record.
    fn number(&mut self, by: ThreadId, is: bool) -> bool {
        let bits = &mut self.numbered[by.rank as usize];
        let (before, bit) = (*bits, 1 << by.group);
        *bits = if is { before | bit } else { before & !bit };
        before & bit != 0
    }
}

impl Replay<Engines, Seen> {
    /// Makes the replay of a scenario. Returns `None` if no copy engine works in the scenario. An
    /// engine is a workgroup that reads the number for its signals from flag 0.
    pub(super) fn new(scenario: &Scenario, log: &Log) -> Option<Self> {
        let channel = log.channel;
        // Workgroups, by rank and index, that have read flag 0 since they began or since their last
        // signal, and data that workgroups have written since their last signal.
        let mut numbered = BTreeSet::new();
        let mut unsent: BTreeMap<(u32, u32), Vec<Place>> = BTreeMap::new();
        let (mut parts, mut plan) = (BTreeMap::new(), BTreeSet::new());
        for &Event { by, op, place, call, .. } in &log.events {
            let (group, me) = ((by.rank, by.group), i64::from(by.rank));
            if loads(&op, channel.call) {
                numbered.remove(&group);
            } else if loads(&op, channel.flags) {
                numbered.insert(group);
            } else if is_data(&channel, by, &op, place) {
                unsent.entry(group).or_default().push(place);
            } else if let Some((peer, index)) = signal(&channel, by, &op) {
                let data = unsent.remove(&group).unwrap_or_default();
                if numbered.remove(&group) {
                    let part = meaning(&channel, index);
                    plan.insert((call.unwrap_or_default(), me, peer, part));
                    parts.extend(data.into_iter().map(|place| ((me, place), part)));
                }
            }
        }
        if plan.is_empty() {
            return None;
        }
        assert!(scenario.groups.iter().all(|&groups| groups <= 8), "{}", scenario.name());
        let all: BTreeSet<_> = plan.iter().map(|&(_, _, _, part)| part).collect();
        let by_index: Vec<_> = all.iter().copied().collect();
        let words: BTreeMap<_, _> = all.into_iter().zip(0..).collect();
        let universe = Universe { words: words.len() as i64, ..universe(scenario) };
        let first = universe.first;
        let fixed = |name: Name, values: &[i64]| match name {
            "plan" => {
                let part = by_index[values[3] as usize];
                plan.contains(&(values[0] - first, values[1], values[2], part)).into()
            }
            _ => 0,
        };
        let track = Track::new(engines, universe, fixed);
        let parts = parts.into_iter().map(|(place, part)| (place, words[&part])).collect();
        let rule = Engines { parts, words, plan };
        Some(Self { channel, first, track, rule, progress: Seen::default() })
    }

    fn call(&self, rank: i64) -> i64 {
        self.get("call", &[rank])
    }

    /// Ends the rank's call if its number was advanced: after the last launch or, if the rank has one
    /// thread, when the next launch reads the number.
    fn close(&mut self, me: i64) -> Result<(), Forbidden> {
        let advanced = self.progress.advanced & 1 << me != 0;
        self.progress.advanced &= !(1 << me);
        if advanced { self.step("next", &[me]) } else { Ok(()) }
    }

    fn quits(&mut self, me: i64) -> Result<(), Forbidden> {
        if self.is("quit", &[me]) { Ok(()) } else { self.step("quit", &[me]) }
    }

    fn tells(&mut self, me: i64, peer: i64) -> Result<(), Forbidden> {
        self.quits(me)?;
        let told = &mut self.progress.told[me as usize];
        *told |= 1 << peer | 1 << me;
        let all = told.count_ones() == self.channel.size;
        if all && !self.is("told", &[me]) { self.step("tell", &[me]) } else { Ok(()) }
    }

    /// Replays a store to flag 0, which is made by the launch that opens the call or by the
    /// refresh. In a rank with one thread, stores have no order: there the second store in a call
    /// is the refresh.
    fn flag(&mut self, me: i64, op: &Operation, value: i64) -> Result<(), Forbidden> {
        let call = self.call(me);
        if self.ghost(me, value) != call {
            return Err(Forbidden::new(NUMBER, format!("{op:?} in call {call}")));
        }
        let refreshes = match op.order() {
            Some(order) => order == Access::FlagStamp.order(),
            None => self.get("begun", &[me]) == call,
        };
        self.track.row(if refreshes { Access::FlagStamp } else { Access::FlagStore }, op)?;
        self.step(if refreshes { "stamp" } else { "open" }, &[me])
    }

    fn copy(&mut self, me: i64, place: Place) -> Result<(), Forbidden> {
        let Some(&part) = self.rule.parts.get(&(me, place)) else { return Ok(()) };
        // The copies of a call begin after the launch that opens the call, even if that launch
        // failed.
        if self.is("quit", &[me]) && self.get("begun", &[me]) < self.call(me) {
            self.step("fail", &[me])?;
        }
        self.step("copy", &[me, owner(place), part])
    }

    fn signal(
        &mut self,
        by: ThreadId,
        op: &Operation,
        (peer, index): (i64, u32),
        value: i64,
    ) -> Result<(), Forbidden> {
        let (me, part) = (i64::from(by.rank), meaning(&self.channel, index));
        let call = self.call(me);
        let is_number = self.progress.number(by, false);
        if !self.rule.plan.contains(&(call - self.first, me, peer, part)) {
            return Ok(());
        }
        let v = self.ghost(me, value);
        if !is_number {
            // A refresh of words comes after all copies of the call.
            let refreshes =
                refreshes(call) && self.is("sent", &[me, peer, self.rule.words[&part], call]);
            let what = || Forbidden::new(COPIED, format!("{op:?}, not from flag 0"));
            return if refreshes { Ok(()) } else { Err(what()) };
        }
        let flag = self.get("flag", &[me]);
        if v != flag {
            return Err(Forbidden::new(COPIED, format!("{op:?}, but flag 0 holds {flag}")));
        }
        self.step("signal", &[me, peer, self.rule.words[&part]])
    }
}

impl Follows for Replay<Engines, Seen> {
    fn performed(
        &mut self,
        thread: ThreadId,
        op: &Operation,
        place: Place,
        result: i64,
    ) -> Result<(), Forbidden> {
        let me = i64::from(thread.rank);
        match (*op, place) {
            (Operation::Load { .. }, Place::Sym { rank, index: ABORT_WORD })
                if result != 0 && rank == thread.rank =>
            {
                self.quits(me)
            }
            (Operation::Store { .. }, Place::Sym { rank, index: ABORT_WORD }) => {
                self.tells(me, rank.into())
            }
            (Operation::Load { .. }, Place::Sym { rank, index }) if rank == thread.rank => {
                let Word::Entry { source, odd } = word(&self.channel, index) else {
                    return Ok(());
                };
                let call = self.call(me);
                let of_call = odd == (call.rem_euclid(2) == 1);
                let waits = source != me && of_call && !self.is("quit", &[me]);
                let news = self.get("came", &[me, source]) < call;
                if waits && news && self.ghost(me, result) >= call {
                    return self.step("arrive", &[me, source]);
                }
                Ok(())
            }
            _ if loads(op, self.channel.call) => {
                self.progress.number(thread, false);
                self.close(me)
            }
            _ if loads(op, self.channel.flags) => {
                self.progress.number(thread, true);
                self.track.row(Access::FlagLoad, op)
            }
            (Operation::Store { value, .. }, Place::Dev { index, .. })
                if index == self.channel.flags =>
            {
                self.flag(me, op, value)
            }
            (Operation::Write { value, .. }, Place::Dev { index, .. })
                if index == self.channel.flags =>
            {
                self.flag(me, op, value.into())
            }
            _ if stores(op, self.channel.call) => {
                self.progress.advanced |= 1 << me;
                Ok(())
            }
            _ if is_data(&self.channel, thread, op, place) => self.copy(me, place),
            (Operation::Store { value, .. }, _) => match signal(&self.channel, thread, op) {
                Some(at) => self.signal(thread, op, at, value),
                None => Ok(()),
            },
            _ => Ok(()),
        }
    }

    fn met(&mut self, threads: &[ThreadId], op: &Operation) -> Result<(), Forbidden> {
        match (op, threads.first()) {
            (Operation::Boundary, Some(by)) => self.close(by.rank.into()),
            _ => Ok(()),
        }
    }
}
