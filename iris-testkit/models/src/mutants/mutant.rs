//! A mutant, and how it is looked for.

use iris_sync::Access;

use super::round::{STATES, once_round, slots_whole_range};
use crate::{Change, Check, Report, Rules, Scenario, loom_memory, search};

/// How a mutant is looked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Engine {
    /// loom, with so many preemptions; all executions if none is given.
    Loom(Option<usize>),
    /// All interleavings.
    Search,
    /// So many random schedules.
    Random(u64),
    /// [`whole_range`](super::whole_range), ending with these calls.
    WholeRange(&'static [u32]),
    /// [`slots_whole_range`](super::slots_whole_range).
    SlotsWholeRange,
}

/// A protocol with one rule broken.
#[derive(Clone, Debug)]
pub struct Mutant {
    /// Its name, which PROTOCOL.md mentions where it argues the rule.
    pub name: &'static str,
    /// The row of the table of accesses that it breaks, if it is about one.
    pub access: Option<Access>,
    /// Where it shows.
    pub scenario: Scenario,
    /// What is changed.
    pub rules: Rules,
    /// Whether the scenario itself is the broken rule: then it fails without a change.
    pub in_scenario: bool,
    /// The check that must find it.
    pub expected: Check,
    /// How it is looked for.
    pub engine: Engine,
}

impl Mutant {
    /// Look for it.
    pub fn run(&self) -> Report {
        run(&self.scenario, &self.rules, self.engine)
    }

    /// A search of the same scenario with nothing broken, which must find nothing. Over loom with
    /// one preemption: the longer searches of whole protocols are tests of their own.
    pub fn control(&self) -> Option<Report> {
        let keep = |change: &&Change| matches!(change, Change::UncheckedRecords);
        let rules = Rules { changes: self.rules.changes.iter().filter(keep).copied().collect() };
        let engine = match self.engine {
            Engine::Loom(_) => Engine::Loom(Some(1)),
            engine => engine,
        };
        (!self.in_scenario).then(|| run(&self.scenario, &rules, engine))
    }

    /// The same in the device headers, unless the scenario has no program over them.
    pub fn on_headers(&self) -> Option<Self> {
        Some(Self { scenario: self.scenario.on_headers()?, ..self.clone() })
    }
}

/// Search `scenario` under `rules`.
pub fn run(scenario: &Scenario, rules: &Rules, engine: Engine) -> Report {
    match engine {
        Engine::Loom(preemptions) => loom_memory::check(scenario, rules, preemptions),
        Engine::Search => search::exhaust(scenario, rules, STATES),
        Engine::Random(runs) => search::random(scenario, rules, 1, runs),
        Engine::SlotsWholeRange => slots_whole_range(scenario.is_on_headers(), rules),
        Engine::WholeRange(last) => once_round(scenario.is_on_headers(), rules, last),
    }
}

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

    pub(super) fn by(self, engine: Engine) -> Self {
        Self { engine, ..self }
    }
}
