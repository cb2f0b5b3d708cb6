use std::fmt;

use iris_sync::{Fault, FaultKind};

use super::{Op, Place, ThreadId};

/// Which check found a failure.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Check {
    /// Two plain accesses, one of them a write, that nothing orders.
    Race,
    /// The same, on the fields of an entry record.
    RecordRace,
    /// Threads wait for words that nobody will set.
    Lost,
    /// A thread read another value than the protocol promises.
    Wrong,
    /// The protocol itself gave up, with this kind of fault.
    Fault(FaultKind),
    /// A word that peers can see was accessed at device scope.
    Scope,
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
        }
    }
}

/// What went wrong in an execution.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Failure {
    /// A data race on this place.
    Race(Option<Place>),
    /// Nothing moves any more; says what still tried to.
    Lost(String),
    /// `thread` saw `seen` in `place` instead of `wanted`.
    Wrong {
        /// Who read it.
        thread: ThreadId,
        /// Where.
        place: Place,
        /// What was there.
        seen: i32,
        /// What should have been.
        wanted: i32,
    },
    /// A fault in a scenario that has none.
    Fault(ThreadId, Fault),
    /// An access at device scope of a place that peers see.
    Scope(ThreadId, Place),
    /// A failure of the model or of a check in the program.
    Other(String),
}

impl Failure {
    /// The check that this failure counts for; none for one of the model itself.
    pub fn check(&self) -> Option<Check> {
        Some(match self {
            Failure::Race(Some(Place::Data { .. })) => Check::RecordRace,
            Failure::Race(_) => Check::Race,
            Failure::Lost(_) => Check::Lost,
            Failure::Wrong { .. } => Check::Wrong,
            Failure::Fault(_, fault) => Check::Fault(fault.kind),
            Failure::Scope(..) => Check::Scope,
            Failure::Other(_) => return None,
        })
    }

    /// Leave the program of a thread with this failure, silently.
    pub(super) fn raise(self) -> ! {
        std::panic::resume_unwind(Box::new(self))
    }
}

/// What an engine found.
#[derive(Clone, Debug)]
pub struct Report {
    /// Name of the scenario.
    pub scenario: String,
    /// The engine and its bound, for people.
    pub bound: String,
    /// Executions explored; for the exhaustive search, states.
    pub executions: u64,
    /// Time it took, in seconds.
    pub seconds: f64,
    /// The first failure; none if the whole space within the bound was explored without one.
    pub failure: Option<Failure>,
    /// The operations that led to it, in the order in which the engine ran them.
    pub trace: Vec<(ThreadId, Op)>,
}

impl Report {
    /// The check that found the failure.
    pub fn caught_by(&self) -> Option<Check> {
        self.failure.as_ref().and_then(Failure::check)
    }

    /// The last operations before the failure, a line each: rank.workgroup.thread, then the operation.
    pub fn history(&self) -> String {
        let skipped = self.trace.len().saturating_sub(80);
        let line = |(id, op): &(ThreadId, Op)| {
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
