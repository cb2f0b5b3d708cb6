//! Replay of executions against the rule of staging flags. In this rule, an `Agent` stands for a
//! workgroup. Barriers between the threads of a workgroup are checked here too: by the steps that
//! each thread has taken since the last barrier.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use iris_sync::{ABORT_WORD, Access, Channel};

use super::track::Track;
use super::{Event, Follows, Log, PLAN, Replay, array, array_of, universe};
use crate::proof::concrete::Universe;
use crate::proof::staging::staging;
use crate::proof::term::Name;
use crate::{Forbidden, Operation, Place, Scenario, ThreadId};

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

/// Units that workgroups of a scenario stage.
pub(super) struct Stages {
    /// Workgroups by rank and index; the rule identifies a workgroup by its position in this list.
    groups: Vec<(u32, u32)>,
    units: BTreeMap<Place, i64>,
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

impl Replay<Stages, Threads> {
    /// Makes the replay of a scenario. Returns `None` if no unit is staged in the scenario.
    pub(super) fn new(scenario: &Scenario, log: &Log) -> Option<Self> {
        let channel = log.channel;
        // Cells that a workgroup, given by rank and index, has written since it last raised a flag;
        // unit of each cell; and workgroup that copies each unit of a rank.
        let mut unraised: BTreeMap<(u32, u32), Vec<Place>> = BTreeMap::new();
        let (mut units, mut fetchers) = (BTreeMap::new(), BTreeMap::new());
        for &Event { by, op, place, .. } in &log.events {
            let group = (by.rank, by.group);
            match (op, place) {
                (Operation::Write { .. }, Place::Cell { index, .. }) if is_staged(index) => {
                    unraised.entry(group).or_default().push(place);
                }
                (Operation::Write { .. } | Operation::Store { .. }, Place::Dev { index, .. }) => {
                    let cells = unraised.remove(&group).unwrap_or_default();
                    if let Some(unit) = unit(&channel, index)
                        && !cells.is_empty()
                    {
                        fetchers.insert((by.rank, unit), group);
                        units.extend(cells.into_iter().map(|cell| (cell, unit)));
                    }
                }
                _ => {}
            }
        }
        if units.is_empty() {
            return None;
        }
        let all = scenario.thread_ids().into_iter().map(|it| (it.rank, it.group));
        let groups: Vec<_> = all.collect::<BTreeSet<_>>().into_iter().collect();
        let universe = Universe {
            agents: groups.len() as i64,
            words: channel.flag_count.into(),
            ..universe(scenario)
        };
        let first = universe.first;
        let fixed = |name: Name, values: &[i64]| match name {
            "rank" => groups[values[0] as usize].0.into(),
            "fetcher" => {
                let rank = values[1] as u32;
                let group = fetchers.get(&(rank, values[2])).copied().unwrap_or((rank, 0));
                groups.iter().position(|&it| it == group).unwrap_or_default() as i64
            }
            _ => 0,
        };
        let track = Track::new(staging, universe, fixed);
        let rule = Stages { groups, units };
        Some(Self { channel, first, track, rule, progress: Threads::default() })
    }

    fn agent(&self, by: ThreadId) -> i64 {
        let is_it = |&it: &(u32, u32)| it == (by.rank, by.group);
        self.rule.groups.iter().position(is_it).unwrap_or_default() as i64
    }

    fn call(&self, by: ThreadId) -> i64 {
        self.get("call", &[by.rank.into()])
    }

    /// Whether all workgroups of the rank have finished the call. If a rank has one workgroup, no
    /// word counts it: the workgroup has finished when it makes the stores at the end of the call.
    fn is_over(&self, rank: u32, call: i64) -> bool {
        let of_rank = self.rule.groups.iter().zip(0..).filter(|((of, _), _)| *of == rank);
        of_rank.into_iter().all(|(_, agent)| self.get("over", &[agent]) >= call)
    }

    fn is_alone(&self, rank: u32) -> bool {
        self.rule.groups.iter().filter(|(of, _)| *of == rank).count() == 1
    }

    /// Ends the rank's call if its number was advanced: after the last launch or, if the rank has one
    /// thread, when the next launch reads the number.
    fn close(&mut self, rank: u32) -> Result<(), Forbidden> {
        if !self.progress.advanced.remove(&rank) {
            return Ok(());
        }
        let how = if self.is("quit", &[rank.into()]) { "die" } else { "finish" };
        self.step(how, &[rank.into()])
    }

    fn count(&mut self, by: ThreadId) -> Result<(), Forbidden> {
        let agent = self.agent(by);
        if self.get("over", &[agent]) < self.call(by) {
            self.step("count", &[agent])
        } else {
            Ok(())
        }
    }

    fn flag(&mut self, by: ThreadId, op: &Operation, unit: i64) -> Result<(), Forbidden> {
        let call = self.call(by);
        let is_relaxed = op.order().is_some_and(|order| order == Access::FlagStamp.order());
        if self.is_alone(by.rank) && is_relaxed {
            self.count(by)?;
        }
        if self.is_over(by.rank, call) {
            self.track.row(Access::FlagStamp, op)?;
            return self.step("stamp", &[by.rank.into(), unit]);
        }
        self.track.row(Access::FlagStore, op)?;
        let open = |&&(rank, group, thread, of): &&(u32, u32, u32, i64)| {
            (rank, group, of) == (by.rank, by.group, unit) && thread != by.thread
        };
        if let Some(other) = self.progress.copying.iter().find(open) {
            let what = format!("{op:?}, while thread {} has met at no barrier", other.2);
            return Err(Forbidden::new(COPIED, what));
        }
        self.step("raise", &[self.agent(by), unit])
    }

    fn cell(&mut self, by: ThreadId, op: &Operation, place: Place) -> Result<(), Forbidden> {
        let Some(&unit) = self.rule.units.get(&place) else {
            return Err(Forbidden::new(PLAN, format!("{op:?}")));
        };
        let (agent, call) = (self.agent(by), self.call(by));
        if matches!(op, Operation::Write { .. }) {
            self.progress.copying.insert((by.rank, by.group, by.thread, unit));
            return self.step("fetch", &[agent, unit]);
        }
        if !self.progress.awaited.contains(&(by.rank, by.group, by.thread, unit, call)) {
            return Err(Forbidden::new(AWAITED, format!("{op:?} by thread {}", by.thread)));
        }
        self.step("multiply", &[agent, unit])
    }
}

impl Follows for Replay<Stages, Threads> {
    fn performed(
        &mut self,
        thread: ThreadId,
        op: &Operation,
        place: Place,
        result: i64,
    ) -> Result<(), Forbidden> {
        let rank = thread.rank;
        // After the call in which the rank gave up, its operations are void.
        if self.is("dead", &[rank.into()]) {
            return Ok(());
        }
        match (*op, place) {
            (Operation::Load { .. }, Place::Sym { index: ABORT_WORD, .. }) if result != 0 => {
                self.step("quit", &[rank.into()])
            }
            (Operation::Store { .. }, Place::Sym { index: ABORT_WORD, .. }) => {
                self.step("quit", &[rank.into()])
            }
            (Operation::Write { .. } | Operation::Store { .. }, Place::Dev { index, .. }) => {
                if index == self.channel.call {
                    if self.is_alone(rank) {
                        self.count(thread)?;
                    }
                    self.progress.advanced.insert(rank);
                    return Ok(());
                }
                unit(&self.channel, index).map_or(Ok(()), |unit| self.flag(thread, op, unit))
            }
            (Operation::Add { .. }, Place::Dev { index, .. }) if index == self.channel.finished => {
                self.count(thread)
            }
            (Operation::Read { .. } | Operation::Load { .. }, Place::Dev { index, .. }) => {
                if index == self.channel.call {
                    return self.close(rank);
                }
                let Some(unit) = unit(&self.channel, index) else { return Ok(()) };
                self.track.row(Access::FlagLoad, op)?;
                let (v, call) = (self.ghost(rank.into(), result), self.call(thread));
                if v < call {
                    return Ok(());
                }
                self.progress.awaited.insert((rank, thread.group, thread.thread, unit, call));
                self.step("await", &[self.agent(thread), unit, v])
            }
            (Operation::Read { .. } | Operation::Write { .. }, Place::Cell { index, .. })
                if is_staged(index) =>
            {
                self.cell(thread, op, place)
            }
            _ => Ok(()),
        }
    }

    fn met(&mut self, threads: &[ThreadId], op: &Operation) -> Result<(), Forbidden> {
        let met: BTreeSet<_> = threads.iter().map(|it| (it.rank, it.group, it.thread)).collect();
        self.progress
            .copying
            .retain(|&(rank, group, thread, _)| !met.contains(&(rank, group, thread)));
        let known: Vec<_> = self.progress.awaited.iter().copied().collect();
        for (rank, group, thread, unit, call) in known {
            if met.contains(&(rank, group, thread)) {
                let others = met.iter().filter(|it| (it.0, it.1) == (rank, group));
                let others = others.map(|&(rank, group, thread)| (rank, group, thread, unit, call));
                self.progress.awaited.extend(others);
            }
        }
        match (op, threads.first()) {
            (Operation::Boundary, Some(by)) => self.close(by.rank),
            _ => Ok(()),
        }
    }
}
