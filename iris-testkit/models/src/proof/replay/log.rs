//! Log of one execution of the unbroken code, from which the rules learn what they need to know
//! about a scenario.

use iris_sync::Channel;
use rustc_hash::FxHashMap as HashMap;

use crate::search::{self, Observer};
use crate::{Failure, Forbidden, Operation, Place, Rules, Scenario, ThreadId};

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

/// Operation of the execution from which plans are learned.
pub(super) struct Event {
    pub(super) by: ThreadId,
    pub(super) op: Operation,
    pub(super) place: Place,
    /// Call that the rank is in, counted from 0; `None` if it has read no number of a call.
    pub(super) call: Option<i64>,
    /// Number of launches of the rank that are over.
    pub(super) launch: u32,
    /// Number of barriers that the workgroup has passed.
    pub(super) votes: u32,
}

/// Operations of an execution of [`reference`].
pub(super) struct Log {
    pub(super) channel: Channel,
    /// Number of the first call.
    pub(super) first: i64,
    pub(super) events: Vec<Event>,
    calls: HashMap<u32, i64>,
    launches: HashMap<u32, u32>,
    votes: HashMap<(u32, u32), u32>,
}

impl Log {
    /// Runs [`reference`] once. Returns the log, and the failure of the execution. Returns `None` if
    /// the scenario begins in a state that other calls have left.
    pub(super) fn learn(scenario: &Scenario) -> Option<(Self, Option<Failure>)> {
        let (reference, first) = reference(scenario, scenario.calls.max(2))?;
        let mut log = Self {
            channel: scenario.channel(0),
            first: first.into(),
            events: Vec::new(),
            calls: HashMap::default(),
            launches: HashMap::default(),
            votes: HashMap::default(),
        };
        let report = search::observe(&reference, &Rules::default(), (1, 1), &mut log);
        Some((log, report.failure))
    }
}

impl Observer for Log {
    fn performed(&mut self, by: ThreadId, op: &Operation, result: i64) -> Result<(), Forbidden> {
        let Some(place) = op.place() else { return Ok(()) };
        self.events.push(Event {
            by,
            op: *op,
            place,
            call: self.calls.get(&by.rank).copied(),
            launch: self.launches.get(&by.rank).copied().unwrap_or_default(),
            votes: self.votes.get(&(by.rank, by.group)).copied().unwrap_or_default(),
        });
        if loads(op, self.channel.call) {
            self.calls.insert(by.rank, result - self.first);
        }
        Ok(())
    }

    fn met(&mut self, threads: &[ThreadId], op: &Operation) -> Result<(), Forbidden> {
        if let Some(by) = threads.first() {
            *match op {
                Operation::Boundary => self.launches.entry(by.rank).or_default(),
                _ => self.votes.entry((by.rank, by.group)).or_default(),
            } += 1;
        }
        Ok(())
    }
}

/// Whether the operation reads the device word `index`, atomically or not.
pub(super) fn loads(op: &Operation, index: u32) -> bool {
    matches!(op, Operation::Read { .. } | Operation::Load { .. })
        && matches!(op.place(), Some(Place::Dev { index: of, .. }) if of == index)
}

/// Whether the operation writes the device word `index`, atomically or not.
pub(super) fn stores(op: &Operation, index: u32) -> bool {
    matches!(op, Operation::Write { .. } | Operation::Store { .. })
        && matches!(op.place(), Some(Place::Dev { index: of, .. }) if of == index)
}
