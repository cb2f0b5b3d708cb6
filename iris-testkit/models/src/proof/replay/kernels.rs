//! Replay of the rule of kernels beside a call.

use std::collections::{BTreeMap, BTreeSet};

use iris_sync::Access;

use super::track::Track;
use super::{
    Event, Follows, Log, NUMBER, Replay, Word, is_spoken_of, loads, owner, stores, universe, word,
};
use crate::ops::COPY_OF_CALL;
use crate::proof::beside::beside;
use crate::proof::term::Name;
use crate::{Forbidden, Operation, Place, Scenario, ThreadId};

/// Clause about the number with which the kernel works.
const NOTED: Name = "start: with the copied number";

/// Workgroups of a scenario that read the copy of the call number, by rank and index.
pub(super) type Groups = BTreeSet<(u32, u32)>;

/// Kernels beside a call in a scenario.
pub(super) struct Kernels {
    pub(super) groups: Groups,
    /// Rank that writes each tile.
    writers: BTreeMap<Place, i64>,
}

impl Replay<Kernels, ()> {
    /// Makes the replay of a scenario. Returns `None` if the scenario has no kernel beside a call.
    pub(super) fn new(scenario: &Scenario, log: &Log) -> Option<Self> {
        let (mut groups, mut writers) = (Groups::new(), BTreeMap::new());
        for &Event { by, op, place, .. } in &log.events {
            if loads(&op, COPY_OF_CALL) {
                groups.insert((by.rank, by.group));
            }
            if let (Operation::Write { .. }, Place::Cell { index, .. }) = (op, place)
                && owner(place) != i64::from(by.rank)
                && is_spoken_of(index)
            {
                writers.insert(place, by.rank.into());
            }
        }
        if groups.is_empty() {
            return None;
        }
        let universe = universe(scenario);
        let (channel, first) = (log.channel, universe.first);
        let track = Track::new(beside, universe, |_, _| 0);
        Some(Self { channel, first, track, rule: Kernels { groups, writers }, progress: () })
    }

    fn runs(&self, me: i64) -> bool {
        let started = self.get("started", &[me]);
        started == self.get("front", &[me]) && self.get("over", &[me]) < started
    }

    /// Replays an operation of the kernel.
    fn of_kernel(
        &mut self,
        me: i64,
        op: &Operation,
        place: Place,
        result: i64,
    ) -> Result<(), Forbidden> {
        let kernel = self.get("kernel", &[me]);
        match (*op, place) {
            _ if loads(op, self.channel.call) => Err(Forbidden::new(NOTED, format!("{op:?}"))),
            _ if loads(op, COPY_OF_CALL) => {
                if self.ghost(me, result) != self.get("noted", &[me]) {
                    return Err(Forbidden::new(NUMBER, format!("{op:?} finds {result}")));
                }
                self.step("start", &[me])
            }
            (Operation::Load { .. }, Place::Sym { index, .. }) => {
                let Word::Signal { source } = word(&self.channel, index) else { return Ok(()) };
                self.track.row(Access::SignalLoad, op)?;
                let v = self.ghost(me, result);
                if v >= kernel { self.step("look", &[me, source, v]) } else { Ok(()) }
            }
            (Operation::Read { .. }, Place::Cell { .. }) => match self.rule.writers.get(&place) {
                Some(&source) => self.step("use", &[me, source]),
                None => Ok(()),
            },
            _ => Ok(()),
        }
    }

    /// Replays an operation of the call.
    fn of_call(&mut self, by: ThreadId, op: &Operation, place: Place) -> Result<(), Forbidden> {
        let (me, peer) = (i64::from(by.rank), owner(place));
        match (*op, place) {
            _ if stores(op, COPY_OF_CALL) => self.step("note", &[me]),
            _ if stores(op, self.channel.call) => self.step("finish", &[me]),
            (Operation::Write { .. }, Place::Cell { .. })
                if self.rule.writers.get(&place) == Some(&me) =>
            {
                self.step("write", &[me, peer])
            }
            (Operation::Store { .. }, Place::Sym { index, .. }) if peer != me => {
                match word(&self.channel, index) {
                    Word::Entry { .. } if self.get("begun", &[me]) < self.get("call", &[me]) => {
                        self.step("begin", &[me])
                    }
                    Word::Signal { .. } => self.step("raise", &[me, peer]),
                    _ => Ok(()),
                }
            }
            _ => Ok(()),
        }
    }
}

impl Follows for Replay<Kernels, ()> {
    fn performed(
        &mut self,
        thread: ThreadId,
        op: &Operation,
        place: Place,
        result: i64,
    ) -> Result<(), Forbidden> {
        if self.rule.groups.contains(&(thread.rank, thread.group)) {
            self.of_kernel(thread.rank.into(), op, place, result)
        } else {
            self.of_call(thread, op, place)
        }
    }

    /// Replays a boundary between launches: the kernel beside the call is over.
    fn met(&mut self, threads: &[ThreadId], op: &Operation) -> Result<(), Forbidden> {
        match threads.first().map(|it| i64::from(it.rank)) {
            Some(me) if matches!(op, Operation::Boundary) && self.runs(me) => {
                self.step("end", &[me])
            }
            _ => Ok(()),
        }
    }
}
