//! Replay of executions against the rule of staging flags. In this rule, an `Agent` stands for a
//! workgroup. Barriers between the threads of a workgroup are checked here too: by the steps that
//! each thread has taken since the last barrier.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use iris_sync::{ABORT_WORD, Access, Channel};

use super::track::Track;
use super::{PLAN, array, array_of};
use crate::proof::concrete::{Machine, Universe};
use crate::proof::rule::Numbers;
use crate::proof::staging::staging;
use crate::proof::term::Name;
use crate::search::{Explorer, Observer};
use crate::{Forbidden, Op, Place, Scenario, ThreadId};

/// Clause that orders the copy of a unit before its flag, also among the threads of a workgroup.
const COPIED: Name = "raise: after the unit's copy";

/// Clause that orders the flag before reads of the unit, also among the threads of a workgroup.
const AWAITED: Name = "multiply: after the unit's flag";

/// Index of the unit (one copy into the staging buffer) whose flag is device word `index`; `None`
/// if that word is no flag.
fn unit(channel: &Channel, index: u32) -> Option<i64> {
    let flags: Range<u32> = channel.flags..channel.flags + channel.flag_count;
    flags.contains(&index).then(|| i64::from(index - channel.flags))
}

/// Whether the cell with this index belongs to the staging buffer.
fn is_staged(index: u32) -> bool {
    array_of(index) == array::STAGE
}

/// Observer that learns from one execution which workgroup copies which unit to which cells.
pub(super) struct Learner {
    channel: Channel,
    /// Cells that a workgroup, given by rank and index, has written since it last raised a flag.
    unraised: BTreeMap<(u32, u32), Vec<Place>>,
    units: BTreeMap<Place, i64>,
    fetchers: BTreeMap<(u32, i64), u32>,
}

impl Learner {
    pub(super) fn new(channel: Channel) -> Self {
        let (unraised, units, fetchers) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Self { channel, unraised, units, fetchers }
    }
}

impl Observer for Learner {
    fn performed(&mut self, thread: ThreadId, op: &Op, _: i64) -> Result<(), Forbidden> {
        let group = (thread.rank, thread.group);
        match (*op, op.place()) {
            (Op::Write { .. }, Some(place @ Place::Cell { index, .. })) if is_staged(index) => {
                self.unraised.entry(group).or_default().push(place);
            }
            (Op::Write { .. } | Op::Store { .. }, Some(Place::Dev { index, .. })) => {
                let cells = self.unraised.remove(&group).unwrap_or_default();
                if let Some(unit) = unit(&self.channel, index)
                    && !cells.is_empty()
                {
                    self.fetchers.insert((thread.rank, unit), thread.group);
                    self.units.extend(cells.into_iter().map(|cell| (cell, unit)));
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// Comparison of an execution with the transition system of [`staging`](crate::proof::staging),
/// one operation after the other.
pub(super) struct Stages {
    channel: Channel,
    pub(super) track: Track,
    /// Workgroups by rank and index; the rule identifies a workgroup by its position in this list.
    groups: Vec<(u32, u32)>,
    units: BTreeMap<Place, i64>,
    threads: Threads,
}

/// Steps of single threads that other threads of their workgroup may not know of yet.
#[derive(Clone, Default)]
pub(super) struct Threads {
    /// Threads that copied to a unit and have passed no barrier since, as (rank, group, thread) and
    /// unit.
    copying: BTreeSet<(u32, u32, u32, i64)>,
    /// Calls in which a thread saw a unit's flag, or met a thread that had seen it, as (rank,
    /// group, thread), unit and call.
    awaited: BTreeSet<(u32, u32, u32, i64, i64)>,
    /// Ranks that have advanced the number of a call whose last launch has not ended yet.
    advanced: BTreeSet<u32>,
}

impl Stages {
    /// Makes the replay of a scenario. Returns `None` if no unit is staged in the scenario.
    pub(super) fn new(scenario: &Scenario, learned: Learner) -> Option<Self> {
        let channel = scenario.channel(0);
        let Learner { units, fetchers, .. } = learned;
        if units.is_empty() {
            return None;
        }
        let all = scenario.thread_ids().into_iter().map(|it| (it.rank, it.group));
        let groups: Vec<_> = all.collect::<BTreeSet<_>>().into_iter().collect();
        let first = i64::from(scenario.first.number());
        let universe = Universe {
            ranks: scenario.ranks.into(),
            agents: groups.len() as i64,
            words: channel.flag_count.into(),
            tiles: 1,
            first,
            calls: i64::from(scenario.calls) + 1,
        };
        let agent = |group| groups.iter().position(|&it| it == group).unwrap_or_default() as i64;
        let fixed = |name: &'static str, values: &[i64]| match name {
            "first" => first,
            "rank" => groups[values[0] as usize].0.into(),
            "fetcher" => {
                let rank = values[1] as u32;
                agent((rank, fetchers.get(&(rank, values[2])).copied().unwrap_or_default()))
            }
            _ => 0,
        };
        let system = staging(Numbers::REAL, None);
        let track = Track::new(&system, Machine::new(&system, universe, fixed));
        Some(Self { channel, track, groups, units, threads: Threads::default() })
    }

    fn agent(&self, by: ThreadId) -> i64 {
        let is_it = |&it: &(u32, u32)| it == (by.rank, by.group);
        self.groups.iter().position(is_it).unwrap_or_default() as i64
    }

    fn call(&self, by: ThreadId) -> i64 {
        self.track.get("call", &[by.rank.into()])
    }

    /// Whether all workgroups of the rank have finished the call. If a rank has one workgroup, no
    /// word counts it: the workgroup has finished when it makes the stores at the end of the call.
    fn is_over(&self, rank: u32, call: i64) -> bool {
        let of_rank = self.groups.iter().zip(0..).filter(|((of, _), _)| *of == rank);
        of_rank.into_iter().all(|(_, agent)| self.track.get("over", &[agent]) >= call)
    }

    fn is_alone(&self, rank: u32) -> bool {
        self.groups.iter().filter(|(of, _)| *of == rank).count() == 1
    }

    /// Ends the rank's call if its number was advanced: after the last launch or, if the rank has one
    /// thread, when the next launch reads the number.
    fn close(&mut self, rank: u32) -> Result<(), Forbidden> {
        if !self.threads.advanced.remove(&rank) {
            return Ok(());
        }
        let how = if self.track.is("quit", &[rank.into()]) { "die" } else { "finish" };
        self.track.step(how, &[rank.into()])
    }

    fn count(&mut self, by: ThreadId) -> Result<(), Forbidden> {
        let agent = self.agent(by);
        if self.track.get("over", &[agent]) < self.call(by) {
            self.track.step("count", &[agent])
        } else {
            Ok(())
        }
    }

    fn flag(&mut self, by: ThreadId, op: &Op, unit: i64) -> Result<(), Forbidden> {
        let call = self.call(by);
        let is_relaxed = op.order().is_some_and(|order| order == Access::FlagStamp.order());
        if self.is_alone(by.rank) && is_relaxed {
            self.count(by)?;
        }
        if self.is_over(by.rank, call) {
            self.track.row(Access::FlagStamp, op)?;
            return self.track.step("stamp", &[by.rank.into(), unit]);
        }
        self.track.row(Access::FlagStore, op)?;
        let open = |&&(rank, group, thread, of): &&(u32, u32, u32, i64)| {
            (rank, group, of) == (by.rank, by.group, unit) && thread != by.thread
        };
        if let Some(other) = self.threads.copying.iter().find(open) {
            let what = format!("{op:?}, while thread {} has met at no barrier", other.2);
            return Err(Forbidden::new(COPIED, what));
        }
        self.track.step("raise", &[self.agent(by), unit])
    }

    fn cell(&mut self, by: ThreadId, op: &Op, place: Place) -> Result<(), Forbidden> {
        let Some(&unit) = self.units.get(&place) else {
            return Err(Forbidden::new(PLAN, format!("{op:?}")));
        };
        let (agent, call) = (self.agent(by), self.call(by));
        if matches!(op, Op::Write { .. }) {
            self.threads.copying.insert((by.rank, by.group, by.thread, unit));
            return self.track.step("fetch", &[agent, unit]);
        }
        if !self.threads.awaited.contains(&(by.rank, by.group, by.thread, unit, call)) {
            return Err(Forbidden::new(AWAITED, format!("{op:?} by thread {}", by.thread)));
        }
        self.track.step("multiply", &[agent, unit])
    }
}

impl Observer for Stages {
    fn begin(&mut self) {
        self.track.begin();
        self.threads = Threads::default();
    }

    fn performed(&mut self, thread: ThreadId, op: &Op, result: i64) -> Result<(), Forbidden> {
        let Some(place) = op.place() else { return Ok(()) };
        let rank = thread.rank;
        // After the call in which the rank gave up, its operations are void.
        if self.track.is("dead", &[rank.into()]) {
            return Ok(());
        }
        match (*op, place) {
            (Op::Load { .. }, Place::Sym { index: ABORT_WORD, .. }) if result != 0 => {
                self.track.step("quit", &[rank.into()])
            }
            (Op::Store { .. }, Place::Sym { index: ABORT_WORD, .. }) => {
                self.track.step("quit", &[rank.into()])
            }
            (Op::Write { .. } | Op::Store { .. }, Place::Dev { index, .. }) => {
                if index == self.channel.call {
                    if self.is_alone(rank) {
                        self.count(thread)?;
                    }
                    self.threads.advanced.insert(rank);
                    return Ok(());
                }
                unit(&self.channel, index).map_or(Ok(()), |unit| self.flag(thread, op, unit))
            }
            (Op::Add { .. }, Place::Dev { index, .. }) if index == self.channel.finished => {
                self.count(thread)
            }
            (Op::Read { .. } | Op::Load { .. }, Place::Dev { index, .. }) => {
                if index == self.channel.call {
                    return self.close(rank);
                }
                let Some(unit) = unit(&self.channel, index) else { return Ok(()) };
                self.track.row(Access::FlagLoad, op)?;
                let (v, call) = (self.track.ghost(rank.into(), result), self.call(thread));
                if v < call {
                    return Ok(());
                }
                self.threads.awaited.insert((rank, thread.group, thread.thread, unit, call));
                self.track.step("await", &[self.agent(thread), unit, v])
            }
            (Op::Read { .. } | Op::Write { .. }, Place::Cell { index, .. }) if is_staged(index) => {
                self.cell(thread, op, place)
            }
            _ => Ok(()),
        }
    }

    fn met(&mut self, threads: &[ThreadId], op: &Op) -> Result<(), Forbidden> {
        let met: BTreeSet<_> = threads.iter().map(|it| (it.rank, it.group, it.thread)).collect();
        self.threads
            .copying
            .retain(|&(rank, group, thread, _)| !met.contains(&(rank, group, thread)));
        let known: Vec<_> = self.threads.awaited.iter().copied().collect();
        for (rank, group, thread, unit, call) in known {
            if met.contains(&(rank, group, thread)) {
                let others = met.iter().filter(|it| (it.0, it.1) == (rank, group));
                let others = others.map(|&(rank, group, thread)| (rank, group, thread, unit, call));
                self.threads.awaited.extend(others);
            }
        }
        match (op, threads.first()) {
            (Op::Boundary, Some(by)) => self.close(by.rank),
            _ => Ok(()),
        }
    }

    fn end(&mut self) -> Result<(), Forbidden> {
        self.track.holds()
    }
}

impl Explorer for Stages {
    /// Data to which a search returns: number of changes, and the steps of threads.
    type Saved = (usize, Threads);

    fn save(&self) -> Self::Saved {
        (self.track.changes(), self.threads.clone())
    }

    fn restore(&mut self, (changes, threads): &Self::Saved) {
        self.track.undo_to(*changes);
        self.threads.clone_from(threads);
    }
}
