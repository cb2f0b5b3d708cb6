//! Replay of the rule of copy engines. In this rule, a `Word` stands for one part and its signal.

use std::collections::{BTreeMap, BTreeSet};

use iris_sync::{ABORT_WORD, Access, Channel};
use rustc_hash::FxHashMap as HashMap;

use super::track::Track;
use super::{NUMBER, RANKS, Word, is_spoken_of, meaning, owner, word};
use crate::proof::concrete::{Machine, Universe};
use crate::proof::engine::engines;
use crate::proof::rule::Numbers;
use crate::proof::term::Name;
use crate::search::{Explorer, Observer};
use crate::{Forbidden, Op, Place, Scenario, ThreadId};

/// Clause about the number that an engine stores as a signal.
const COPIED: Name = "signal: the number in flag 0";

/// Peer and index of the word, if the operation stores to a signal, result or barrier word of a
/// peer; `None` for other operations.
fn signal(channel: &Channel, by: ThreadId, op: &Op) -> Option<(i64, u32)> {
    match (*op, op.place()) {
        (Op::Store { .. }, Some(place @ Place::Sym { rank, index })) if rank != by.rank => {
            let is_signal = matches!(word(channel, index), Word::Signal { .. });
            is_signal.then_some((owner(place), index))
        }
        _ => None,
    }
}

/// Whether the operation writes data at a peer.
fn is_data(channel: &Channel, by: ThreadId, op: &Op, place: Place) -> bool {
    owner(place) != i64::from(by.rank)
        && match (*op, place) {
            (Op::Write { .. }, Place::Cell { index, .. }) => is_spoken_of(index),
            (Op::Store { .. }, Place::Sym { index, .. }) => word(channel, index) == Word::Shard,
            _ => false,
        }
}

/// Observer that learns from one execution which parts engines copy. An engine is a workgroup that
/// reads the number for its signals from flag 0.
pub(super) struct Learner {
    channel: Channel,
    first: i64,
    calls: BTreeMap<u32, i64>,
    /// Workgroups, by rank and index, that have read flag 0 since they began or since their last
    /// signal.
    numbered: BTreeSet<(u32, u32)>,
    /// Data that a workgroup has written since its last signal.
    unsent: BTreeMap<(u32, u32), Vec<Place>>,
    /// Part to which each place belongs. A part is identified by the key of its signal; see
    /// [`meaning`].
    parts: BTreeMap<(i64, Place), (u32, u32)>,
    plan: BTreeSet<(i64, i64, i64, (u32, u32))>,
}

impl Learner {
    pub(super) fn new(channel: Channel, first: i64) -> Self {
        Self {
            channel,
            first,
            calls: BTreeMap::new(),
            numbered: BTreeSet::new(),
            unsent: BTreeMap::new(),
            parts: BTreeMap::new(),
            plan: BTreeSet::new(),
        }
    }
}

impl Observer for Learner {
    fn performed(&mut self, thread: ThreadId, op: &Op, result: i64) -> Result<(), Forbidden> {
        let (Some(place), channel) = (op.place(), self.channel) else { return Ok(()) };
        let group = (thread.rank, thread.group);
        match (*op, place) {
            (Op::Read { .. } | Op::Load { .. }, Place::Dev { index, .. }) => {
                if index == channel.call {
                    self.calls.insert(thread.rank, result - self.first);
                    self.numbered.remove(&group);
                } else if index == channel.flags {
                    self.numbered.insert(group);
                }
            }
            _ if is_data(&channel, thread, op, place) => {
                self.unsent.entry(group).or_default().push(place);
            }
            _ => {}
        }
        if let Some((peer, index)) = signal(&channel, thread, op) {
            let data = self.unsent.remove(&group).unwrap_or_default();
            if self.numbered.remove(&group) {
                let call = self.calls.get(&thread.rank).copied().unwrap_or_default();
                let part = meaning(&channel, index);
                self.plan.insert((call, thread.rank.into(), peer, part));
                let me = i64::from(thread.rank);
                self.parts.extend(data.into_iter().map(|place| ((me, place), part)));
            }
        }
        Ok(())
    }
}

/// Comparison of an execution with the transition system of [`engine`](crate::proof::engine), one
/// operation after the other.
pub(super) struct Engines {
    channel: Channel,
    first: i64,
    pub(super) track: Track,
    parts: HashMap<(i64, Place), i64>,
    words: BTreeMap<(u32, u32), i64>,
    plan: BTreeSet<(i64, i64, i64, (u32, u32))>,
    seen: Seen,
}

/// Progress that is not part of the rule's state. It is small, because a search saves a copy of it
/// for each state.
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

impl Engines {
    /// Makes the replay of a scenario. Returns `None` if no copy engine works in the scenario.
    pub(super) fn new(scenario: &Scenario, learned: Learner) -> Option<Self> {
        let channel = scenario.channel(0);
        let Learner { parts, plan, .. } = learned;
        if plan.is_empty() {
            return None;
        }
        assert!(scenario.groups.iter().all(|&groups| groups <= 8), "{}", scenario.name());
        let all: BTreeSet<_> = plan.iter().map(|&(_, _, _, part)| part).collect();
        let by_index: Vec<_> = all.iter().copied().collect();
        let words: BTreeMap<_, _> = all.into_iter().zip(0..).collect();
        let first = i64::from(scenario.first.number());
        let universe = Universe {
            ranks: scenario.ranks.into(),
            agents: 1,
            words: words.len() as i64,
            tiles: 1,
            first,
            calls: i64::from(scenario.calls) + 1,
        };
        let fixed = |name: Name, values: &[i64]| match name {
            "first" => first,
            "plan" => {
                let part = by_index[values[3] as usize];
                plan.contains(&(values[0] - first, values[1], values[2], part)).into()
            }
            _ => 0,
        };
        let system = engines(Numbers::REAL, None);
        let track = Track::new(&system, Machine::new(&system, universe, fixed));
        let parts = parts.into_iter().map(|(place, part)| (place, words[&part])).collect();
        Some(Self { channel, first, track, parts, words, plan, seen: Seen::default() })
    }

    fn call(&self, rank: i64) -> i64 {
        self.track.get("call", &[rank])
    }

    /// Ends the rank's call if its number was advanced: after the last launch or, if the rank has one
    /// thread, when the next launch reads the number.
    fn close(&mut self, me: i64) -> Result<(), Forbidden> {
        let advanced = self.seen.advanced & 1 << me != 0;
        self.seen.advanced &= !(1 << me);
        if advanced { self.track.step("next", &[me]) } else { Ok(()) }
    }

    fn quits(&mut self, me: i64) -> Result<(), Forbidden> {
        if self.track.is("quit", &[me]) { Ok(()) } else { self.track.step("quit", &[me]) }
    }

    fn tells(&mut self, me: i64, peer: i64) -> Result<(), Forbidden> {
        self.quits(me)?;
        let told = &mut self.seen.told[me as usize];
        *told |= 1 << peer | 1 << me;
        let all = told.count_ones() == self.channel.size;
        if all && !self.track.is("told", &[me]) { self.track.step("tell", &[me]) } else { Ok(()) }
    }

    /// Replays a store to flag 0, which is made by the launch that opens the call or by the
    /// refresh. In a rank with one thread, stores have no order: there the second store in a call
    /// is the refresh.
    fn flag(&mut self, me: i64, op: &Op, value: i64) -> Result<(), Forbidden> {
        let call = self.call(me);
        if self.track.ghost(me, value) != call {
            return Err(Forbidden::new(NUMBER, format!("{op:?} in call {call}")));
        }
        let refreshes = match op.order() {
            Some(order) => order == Access::FlagStamp.order(),
            None => self.track.get("begun", &[me]) == call,
        };
        self.track.row(if refreshes { Access::FlagStamp } else { Access::FlagStore }, op)?;
        self.track.step(if refreshes { "stamp" } else { "open" }, &[me])
    }

    fn copy(&mut self, me: i64, place: Place) -> Result<(), Forbidden> {
        let Some(&part) = self.parts.get(&(me, place)) else { return Ok(()) };
        // The copies of a call begin after the launch that opens the call, even if that launch
        // failed.
        if self.track.is("quit", &[me]) && self.track.get("begun", &[me]) < self.call(me) {
            self.track.step("fail", &[me])?;
        }
        self.track.step("copy", &[me, owner(place), part])
    }

    fn signal(
        &mut self,
        by: ThreadId,
        op: &Op,
        (peer, index): (i64, u32),
        value: i64,
    ) -> Result<(), Forbidden> {
        let (me, part) = (i64::from(by.rank), meaning(&self.channel, index));
        let call = self.call(me);
        let is_number = self.seen.number(by, false);
        if !self.plan.contains(&(call - self.first, me, peer, part)) {
            return Ok(());
        }
        let v = self.track.ghost(me, value);
        if !is_number {
            // A refresh of words comes after all copies of the call.
            let due = call.rem_euclid(Numbers::REAL.period) == 0;
            let refreshes = due && self.track.is("sent", &[me, peer, self.words[&part], call]);
            let what = || Forbidden::new(COPIED, format!("{op:?}, not from flag 0"));
            return if refreshes { Ok(()) } else { Err(what()) };
        }
        let flag = self.track.get("flag", &[me]);
        if v != flag {
            return Err(Forbidden::new(COPIED, format!("{op:?}, but flag 0 holds {flag}")));
        }
        self.track.step("signal", &[me, peer, self.words[&part]])
    }
}

impl Observer for Engines {
    fn begin(&mut self) {
        self.track.begin();
        self.seen = Seen::default();
    }

    fn performed(&mut self, thread: ThreadId, op: &Op, result: i64) -> Result<(), Forbidden> {
        let Some(place) = op.place() else { return Ok(()) };
        let me = i64::from(thread.rank);
        match (*op, place) {
            (Op::Load { .. }, Place::Sym { rank, index: ABORT_WORD })
                if result != 0 && rank == thread.rank =>
            {
                self.quits(me)
            }
            (Op::Store { .. }, Place::Sym { rank, index: ABORT_WORD }) => {
                self.tells(me, rank.into())
            }
            (Op::Load { .. }, Place::Sym { rank, index }) if rank == thread.rank => {
                let Word::Entry { source, odd } = word(&self.channel, index) else {
                    return Ok(());
                };
                let call = self.call(me);
                let of_call = odd == (call.rem_euclid(2) == 1);
                let waits = source != me && of_call && !self.track.is("quit", &[me]);
                let news = self.track.get("came", &[me, source]) < call;
                if waits && news && self.track.ghost(me, result) >= call {
                    return self.track.step("arrive", &[me, source]);
                }
                Ok(())
            }
            (Op::Read { .. } | Op::Load { .. }, Place::Dev { index, .. }) => {
                if index == self.channel.call {
                    self.seen.number(thread, false);
                    return self.close(me);
                } else if index == self.channel.flags {
                    self.track.row(Access::FlagLoad, op)?;
                    self.seen.number(thread, true);
                }
                Ok(())
            }
            (Op::Store { value, .. }, Place::Dev { index, .. }) if index == self.channel.flags => {
                self.flag(me, op, value)
            }
            (Op::Write { value, .. }, Place::Dev { index, .. }) if index == self.channel.flags => {
                self.flag(me, op, value.into())
            }
            (Op::Write { .. } | Op::Store { .. }, Place::Dev { index, .. })
                if index == self.channel.call =>
            {
                self.seen.advanced |= 1 << me;
                Ok(())
            }
            _ if is_data(&self.channel, thread, op, place) => self.copy(me, place),
            (Op::Store { value, .. }, _) => match signal(&self.channel, thread, op) {
                Some(at) => self.signal(thread, op, at, value),
                None => Ok(()),
            },
            _ => Ok(()),
        }
    }

    fn met(&mut self, threads: &[ThreadId], op: &Op) -> Result<(), Forbidden> {
        match (op, threads.first()) {
            (Op::Boundary, Some(by)) => self.close(by.rank.into()),
            _ => Ok(()),
        }
    }

    fn end(&mut self) -> Result<(), Forbidden> {
        self.track.holds()
    }
}

impl Explorer for Engines {
    /// Number of changes, and the progress that is not part of the rule's state.
    type Saved = (usize, Seen);

    fn save(&self) -> Self::Saved {
        (self.track.changes(), self.seen)
    }

    fn restore(&mut self, (changes, seen): &Self::Saved) {
        self.track.undo_to(*changes);
        self.seen = *seen;
    }
}
