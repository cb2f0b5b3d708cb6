//! Observers of executions. An observer is called for each operation; if it rejects the operation,
//! the execution ends.

use std::time::Instant;

use super::Machine;
use crate::{Failure, Forbidden, Operation, Report, Rules, Scenario, ThreadId};

/// Observer that receives every operation of an execution, in order.
pub trait Observer {
    /// Called when an execution begins. Does nothing by default.
    fn begin(&mut self) {}
    /// Called after a thread has performed an operation with this result.
    ///
    /// # Errors
    /// The rule that forbids the operation; the execution ends.
    fn performed(&mut self, thread: ThreadId, op: &Operation, result: i64)
    -> Result<(), Forbidden>;
    /// Called when threads have met at a barrier of their workgroup or between two launches. The
    /// default allows it.
    ///
    /// # Errors
    /// The rule that forbids the barrier; the execution ends.
    fn met(&mut self, threads: &[ThreadId], op: &Operation) -> Result<(), Forbidden> {
        let _ = (threads, op);
        Ok(())
    }
    /// Called when all threads have ended. The default allows it.
    ///
    /// # Errors
    /// The rule that does not hold at the end.
    fn end(&mut self) -> Result<(), Forbidden> {
        Ok(())
    }
}

/// Observer that can return to an earlier state of an execution, as the exhaustive search does.
pub trait Explorer: Observer {
    /// Copy of the observer's state.
    type Saved;
    /// Returns a copy of the observer's state.
    fn save(&self) -> Self::Saved;
    /// Returns to a state that was saved earlier on the path from the start to the present state.
    fn restore(&mut self, saved: &Self::Saved);
}

/// Runs [`random`](super::random) schedules with an observer and without the search for races. A
/// step that the observer rejects is a [`Failure::Rule`] and ends the search. After a failure of
/// another kind the search goes on, because a later run may contain a rejected step. If no run
/// does, the report contains the first failure.
pub fn observe(
    scenario: &Scenario,
    rules: &Rules,
    (seed, runs): (u64, u64),
    observer: &mut dyn Observer,
) -> Report {
    let start = Instant::now();
    let mut machine = Machine::new(scenario, rules);
    let mut report = Report::new(scenario.name(), format!("replayed, seeds {seed}.."));
    for seed in seed..seed + runs {
        report.executions += 1;
        observer.begin();
        let mut failure = machine.schedule(
            seed,
            false,
            Some(&mut |machine, before, after, thread| {
                machine.tell(before, after, thread, observer)
            }),
        );
        if failure.is_none() {
            failure = observer.end().err().map(Failure::Rule);
        }
        let is_by_rule = matches!(failure, Some(Failure::Rule(_) | Failure::Scope(..)));
        if is_by_rule || failure.is_some() && report.failure.is_none() {
            report.failure = failure;
            report.bound = format!("replayed, seed {seed}");
        }
        if is_by_rule {
            break;
        }
    }
    report.seconds = start.elapsed().as_secs_f64();
    report
}

/// Explorer that does nothing, for searches without one.
pub(super) struct NoExplorer;

impl Observer for NoExplorer {
    fn performed(&mut self, _: ThreadId, _: &Operation, _: i64) -> Result<(), Forbidden> {
        Ok(())
    }
}

impl Explorer for NoExplorer {
    type Saved = ();
    fn save(&self) {}
    fn restore(&mut self, (): &()) {}
}
