//! Replay of the rule of kernels beside a call.

use std::collections::{BTreeMap, BTreeSet};

use iris_sync::{Access, Channel};

use super::track::Track;
use super::{NUMBER, Word, is_spoken_of, owner, word};
use crate::ops::COPY_OF_CALL;
use crate::proof::beside::beside;
use crate::proof::concrete::{Machine, Universe};
use crate::proof::rule::Numbers;
use crate::proof::term::Name;
use crate::search::{Explorer, Observer};
use crate::{Forbidden, Op, Place, Scenario, ThreadId};

/// Clause about the number with which the kernel works.
const NOTED: Name = "start: with the copied number";

/// Workgroups of a scenario that read the copy of the call number, by rank and index.
pub(super) type Groups = BTreeSet<(u32, u32)>;

/// Observer that learns which workgroups are kernels beside a call, and which rank writes each
/// tile.
pub(super) struct Learner {
    kernels: Groups,
    writers: BTreeMap<Place, i64>,
}

impl Learner {
    pub(super) fn new() -> Self {
        Self { kernels: Groups::new(), writers: BTreeMap::new() }
    }
}

impl Observer for Learner {
    fn performed(&mut self, thread: ThreadId, op: &Op, _: i64) -> Result<(), Forbidden> {
        match (*op, op.place()) {
            (Op::Read { .. } | Op::Load { .. }, Some(Place::Dev { index: COPY_OF_CALL, .. })) => {
                self.kernels.insert((thread.rank, thread.group));
            }
            (Op::Write { .. }, Some(place @ Place::Cell { index, .. }))
                if owner(place) != i64::from(thread.rank) && is_spoken_of(index) =>
            {
                self.writers.insert(place, thread.rank.into());
            }
            _ => {}
        }
        Ok(())
    }
}

/// Comparison of an execution with the transition system of [`beside`](crate::proof::beside), one
/// operation after the other.
pub(super) struct Kernels {
    channel: Channel,
    pub(super) track: Track,
    pub(super) groups: Groups,
    writers: BTreeMap<Place, i64>,
}

impl Kernels {
    /// Makes the replay of a scenario. Returns `None` if the scenario has no kernel beside a call.
    pub(super) fn new(scenario: &Scenario, learned: Learner) -> Option<Self> {
        let channel = scenario.channel(0);
        let Learner { kernels, writers } = learned;
        if kernels.is_empty() {
            return None;
        }
        let first = i64::from(scenario.first.number());
        let universe = Universe {
            ranks: scenario.ranks.into(),
            agents: 1,
            words: 1,
            tiles: 1,
            first,
            calls: i64::from(scenario.calls) + 1,
        };
        let system = beside(Numbers::REAL, None);
        let machine = Machine::new(&system, universe, |_, _| 0);
        Some(Self { channel, track: Track::new(&system, machine), groups: kernels, writers })
    }

    fn get(&self, name: &str, rank: i64) -> i64 {
        self.track.get(name, &[rank])
    }

    fn runs(&self, me: i64) -> bool {
        let started = self.get("started", me);
        started == self.get("front", me) && self.get("over", me) < started
    }

    /// Replays an operation of the kernel.
    fn of_kernel(&mut self, me: i64, op: &Op, place: Place, result: i64) -> Result<(), Forbidden> {
        let kernel = self.get("kernel", me);
        match (*op, place) {
            (Op::Read { .. } | Op::Load { .. }, Place::Dev { index, .. })
                if index == COPY_OF_CALL || index == self.channel.call =>
            {
                if index != COPY_OF_CALL {
                    return Err(Forbidden::new(NOTED, format!("{op:?}")));
                }
                if self.track.ghost(me, result) != self.get("noted", me) {
                    return Err(Forbidden::new(NUMBER, format!("{op:?} finds {result}")));
                }
                self.track.step("start", &[me])
            }
            (Op::Load { .. }, Place::Sym { index, .. }) => {
                let Word::Signal { source } = word(&self.channel, index) else { return Ok(()) };
                self.track.row(Access::SignalLoad, op)?;
                let v = self.track.ghost(me, result);
                if v >= kernel { self.track.step("look", &[me, source, v]) } else { Ok(()) }
            }
            (Op::Read { .. }, Place::Cell { .. }) => match self.writers.get(&place) {
                Some(&source) => self.track.step("use", &[me, source]),
                None => Ok(()),
            },
            _ => Ok(()),
        }
    }

    /// Replays an operation of the call.
    fn of_call(&mut self, by: ThreadId, op: &Op, place: Place) -> Result<(), Forbidden> {
        let (me, peer) = (i64::from(by.rank), owner(place));
        match (*op, place) {
            (Op::Write { .. } | Op::Store { .. }, Place::Dev { index: COPY_OF_CALL, .. }) => {
                self.track.step("note", &[me])
            }
            (Op::Write { .. } | Op::Store { .. }, Place::Dev { index, .. })
                if index == self.channel.call =>
            {
                self.track.step("finish", &[me])
            }
            (Op::Write { .. }, Place::Cell { .. }) if self.writers.get(&place) == Some(&me) => {
                self.track.step("write", &[me, peer])
            }
            (Op::Store { .. }, Place::Sym { index, .. }) if peer != me => {
                match word(&self.channel, index) {
                    Word::Entry { .. } if self.get("begun", me) < self.get("call", me) => {
                        self.track.step("begin", &[me])
                    }
                    Word::Signal { .. } => self.track.step("raise", &[me, peer]),
                    _ => Ok(()),
                }
            }
            _ => Ok(()),
        }
    }
}

impl Observer for Kernels {
    fn begin(&mut self) {
        self.track.begin();
    }

    fn performed(&mut self, thread: ThreadId, op: &Op, result: i64) -> Result<(), Forbidden> {
        let Some(place) = op.place() else { return Ok(()) };
        if self.groups.contains(&(thread.rank, thread.group)) {
            self.of_kernel(thread.rank.into(), op, place, result)
        } else {
            self.of_call(thread, op, place)
        }
    }

    /// Replays a boundary between launches: the kernel beside the call is over.
    fn met(&mut self, threads: &[ThreadId], op: &Op) -> Result<(), Forbidden> {
        match threads.first().map(|it| i64::from(it.rank)) {
            Some(me) if matches!(op, Op::Boundary) && self.runs(me) => {
                self.track.step("end", &[me])
            }
            _ => Ok(()),
        }
    }

    fn end(&mut self) -> Result<(), Forbidden> {
        self.track.holds()
    }
}

impl Explorer for Kernels {
    /// Number of changes.
    type Saved = usize;

    fn save(&self) -> usize {
        self.track.changes()
    }

    fn restore(&mut self, changes: &usize) {
        self.track.undo_to(*changes);
    }
}
