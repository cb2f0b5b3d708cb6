use std::fmt;

use iris_sync::{Fault, FaultKind};

use super::{Operation, Place, ThreadId};

/// Check of an engine that found a failure.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Check {
    /// Data race: two unordered non-atomic accesses, one of them a write.
    Race,
    /// Data race on the fields of an entry record.
    RecordRace,
    /// Lost signal: threads wait for words that no other thread will set.
    Lost,
    /// Wrong value: a thread read a value other than the one that the protocol promises.
    Wrong,
    /// Fault of this kind that the protocol itself reported.
    Fault(FaultKind),
    /// Access at device scope to a word that peers can see.
    Scope,
    /// Step that the proved rules do not allow.
    Rule,
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Check::Race => f.write_str("race"),
            Check::RecordRace => f.write_str("race on a record"),
            Check::Lost => f.write_str("lost signal"),
            Check::Wrong => f.write_str("wrong value"),
            Check::Fault(kind) => write!(f, "fault {kind:?}"),
            Check::Scope => f.write_str("scope"),
            Check::Rule => f.write_str("rule"),
        }
    }
}

/// Failure of one execution of a scenario.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Failure {
    /// Data race on this location, if it is known.
    Race(Option<Place>),
    /// Deadlock; the text names the threads that still wait.
    Lost(String),
    /// Wrong value: `thread` read `seen` from `place` instead of `wanted`.
    Wrong {
        /// Thread that read the value.
        thread: ThreadId,
        /// Location that was read.
        place: Place,
        /// Value that the thread read.
        seen: i32,
        /// Value that the scenario expects there.
        wanted: i32,
    },
    /// Fault that the protocol reported on this thread, in a scenario that expects none.
    Fault(ThreadId, Fault),
    /// Access at device scope to a location that peers see.
    Scope(ThreadId, Place),
    /// Step that the proved rules do not allow, or that violates one of their properties.
    Rule(Forbidden),
    /// Failure of the model itself or of a check in the program.
    Other(String),
}

/// Reason why an observer rejects a step and so ends the execution.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Forbidden {
    /// Name of the rule that forbids the step: a clause, a property, or a row of the table of
    /// accesses.
    pub by: &'static str,
    /// Description of the forbidden step.
    pub what: String,
}

impl Forbidden {
    /// Makes a reason from the name of a rule and the description of a step.
    pub fn new(by: &'static str, what: impl Into<String>) -> Self {
        Self { by, what: what.into() }
    }
}

impl Failure {
    /// Check that found this failure; `None` for a failure of the model itself.
    pub fn check(&self) -> Option<Check> {
        Some(match self {
            Failure::Race(Some(Place::Data { .. })) => Check::RecordRace,
            Failure::Race(_) => Check::Race,
            Failure::Lost(_) => Check::Lost,
            Failure::Wrong { .. } => Check::Wrong,
            Failure::Fault(_, fault) => Check::Fault(fault.kind),
            Failure::Scope(..) => Check::Scope,
            Failure::Rule(_) => Check::Rule,
            Failure::Other(_) => return None,
        })
    }

    /// Unwinds out of a thread's program with this failure, without a panic message.
    pub(super) fn raise(self) -> ! {
        std::panic::resume_unwind(Box::new(self))
    }
}

/// Result of an engine's search of one scenario.
#[derive(Clone, Debug)]
pub struct Report {
    /// Name of the scenario.
    pub scenario: String,
    /// Name of the engine and its bound, for people.
    pub bound: String,
    /// Number of executions explored or, for the exhaustive search, of states.
    pub executions: u64,
    /// Run time in seconds.
    pub seconds: f64,
    /// First failure; `None` if everything within the bound was explored without one.
    pub failure: Option<Failure>,
    /// Operations that led to the failure, in the order in which the engine ran them.
    pub trace: Vec<(ThreadId, Operation)>,
}

impl Report {
    /// Report of a search that has not begun.
    pub(super) fn new(scenario: &str, bound: String) -> Self {
        let scenario = scenario.into();
        Self { scenario, bound, executions: 0, seconds: 0.0, failure: None, trace: Vec::new() }
    }

    /// Check that found the failure, if any.
    pub fn caught_by(&self) -> Option<Check> {
        self.failure.as_ref().and_then(Failure::check)
    }

    /// Last 80 operations before the failure, one per line: rank.workgroup.thread, then the
    /// operation.
    pub fn history(&self) -> String {
        let skipped = self.trace.len().saturating_sub(80);
        let line = |(id, op): &(ThreadId, Operation)| {
            let ThreadId { rank, group, thread } = id;
            format!("{rank}.{group}.{thread} {op:?}\n")
        };
        self.trace[skipped..].iter().map(line).collect()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { scenario, bound, executions, seconds, failure, .. } = self;
        write!(f, "{scenario:<44} {bound:<28} {executions:>9} {seconds:>7.2} s  ")?;
        match failure {
            None => f.write_str("ok"),
            Some(failure) => write!(f, "{failure:?}"),
        }
    }
}
