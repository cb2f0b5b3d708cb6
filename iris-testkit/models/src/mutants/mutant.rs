//! Definition of a mutant and of the engine that must find it.

use iris_sync::Access;

use super::round::{STATES, once_round, slots_whole_range};
use crate::ll::Pattern;
use crate::{Change, Check, Report, Rules, Scenario, loom_memory, search};

/// Engine that searches for a mutant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Engine {
    /// Search by loom with at most this number of preemptions; `None` explores all executions.
    Loom(Option<usize>),
    /// Exhaustive search of all interleavings.
    Search,
    /// Search of this number of random schedules.
    Random(u64),
    /// Search by [`whole_range`](super::whole_range), whose last calls use these numbers of tiles,
    /// or run another op ([`instead`](crate::ops::instead)).
    WholeRange(&'static [u32]),
    /// Search by [`slots_whole_range`](super::slots_whole_range): the whole range of call numbers
    /// of LL words.
    SlotsWholeRange(Pattern),
}

/// Protocol with one of its rules broken, so that a check must fail.
#[derive(Clone, Debug)]
pub struct Mutant {
    /// Name, which PROTOCOL.md cites where it states the rule.
    pub name: &'static str,
    /// Row of the table of accesses ([`Access`]) that the mutant breaks, if any.
    pub access: Option<Access>,
    /// Scenario in which the broken rule shows.
    pub scenario: Scenario,
    /// Changes that break the protocol.
    pub rules: Rules,
    /// Whether the scenario itself breaks the rule, so that it fails without any changes.
    pub in_scenario: bool,
    /// Check that must find the mutant.
    pub expected: Check,
    /// Engine that finds the mutant.
    pub engine: Engine,
}

impl Mutant {
    /// Runs the mutant's engine, which must find the fault, and reports the result.
    pub fn run(&self) -> Report {
        run(&self.scenario, &self.rules, self.engine)
    }

    /// Searches the same scenario without the fault, which must find nothing. Loom runs with one
    /// preemption here, because separate tests search the protocols for longer.
    pub fn control(&self) -> Option<Report> {
        let keep = |change: &&Change| matches!(change, Change::UncheckedRecords);
        let rules = Rules { changes: self.rules.changes.iter().filter(keep).copied().collect() };
        let engine = match self.engine {
            Engine::Loom(_) => Engine::Loom(Some(1)),
            engine => engine,
        };
        (!self.in_scenario).then(|| run(&self.scenario, &rules, engine))
    }

    /// Returns the same mutant in the device headers; `None` if the scenario has no program over
    /// the device headers.
    pub fn on_headers(&self) -> Option<Self> {
        Some(Self { scenario: self.scenario.on_headers()?, ..self.clone() })
    }
}

/// Searches `scenario` under `rules` with `engine`.
pub fn run(scenario: &Scenario, rules: &Rules, engine: Engine) -> Report {
    match engine {
        Engine::Loom(preemptions) => loom_memory::check(scenario, rules, preemptions),
        Engine::Search => search::exhaust(scenario, rules, STATES),
        Engine::Random(runs) => search::random(scenario, rules, 1, runs),
        Engine::SlotsWholeRange(pattern) => {
            slots_whole_range(scenario.is_on_headers(), pattern, rules)
        }
        Engine::WholeRange(last) => once_round(scenario.is_on_headers(), rules, last),
    }
}

/// Random schedules that find faults which few schedules show.
pub(super) const RUNS: Engine = Engine::Random(20_000);

pub(super) fn mutant(
    name: &'static str,
    scenario: Scenario,
    rules: impl Into<Rules>,
    expected: Check,
) -> Mutant {
    let engine = Engine::Loom(Some(2));
    Mutant {
        name,
        access: None,
        scenario,
        rules: rules.into(),
        in_scenario: false,
        expected,
        engine,
    }
}

impl Mutant {
    pub(super) fn of(self, access: Access) -> Self {
        Self { access: Some(access), ..self }
    }

    /// Same mutant, whose scenario breaks the rule even without changes.
    pub(super) fn in_scenario(self) -> Self {
        Self { in_scenario: true, ..self }
    }

    pub(super) fn by(self, engine: Engine) -> Self {
        Self { engine, ..self }
    }
}
