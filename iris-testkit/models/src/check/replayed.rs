//! Replays of executions against the proved rules: each step of an execution must be a step that
//! the rules allow. The executions are those that models explore, random schedules, and executions
//! of mutants, which must break the rules.

use std::collections::{BTreeSet, HashSet};

use comfy_table::Table;
use iris_sync::Access;
use rayon::prelude::*;

use super::catalogue::{self, Implementation, Model, catalogue};
use super::protocol::Pointers;
use crate::mutants::{Engine, Mutant};
use crate::proof::replay::{self, Counts, Extent, is_replayed, replay};
use crate::proof::report::{self, Proof};
use crate::{Change, Check, Failure, Report, Rules, Scenario, headers};

/// Result of comparing the executions of one scenario with the proved rules.
#[derive(Clone, Debug)]
pub struct Replayed {
    /// Implementation that was run and replayed.
    pub implementation: Implementation,
    /// Number of executions, and the first one that the rules do not allow.
    pub report: Report,
    /// Number of replayed steps and accesses.
    pub counts: Counts,
}

/// Number of replayed steps below which [`missing`] reports that there are too few.
pub const STEPS: u64 = 1_000_000;

/// Explores a model, and replays every execution of loom and every transition of the search. Other
/// models are only explored: models of other engines, and models to which no rule applies.
/// [`random`] replays random schedules of them.
pub fn explore(model: &Model) -> (Report, Option<Replayed>) {
    let &Model { implementation, ref scenario, engine, .. } = model;
    let extent = match engine {
        Engine::Loom(preemptions) => Some(Extent::Loom(preemptions)),
        Engine::Search => Some(Extent::Search),
        Engine::Random(_) | Engine::WholeRange(_) | Engine::SlotsWholeRange(_) => None,
    };
    let replayed = extent.and_then(|extent| replay(scenario, &Rules::default(), extent));
    match replayed {
        Some((report, counts)) => {
            (report.clone(), Some(Replayed { implementation, report, counts }))
        }
        None => (model.run(), None),
    }
}

/// Replays random schedules of each scenario of the catalogue, and of calls that refresh words.
pub fn random(full: bool) -> Vec<Replayed> {
    let runs = if full { 400 } else { 10 };
    let mut seen = HashSet::new();
    let models = catalogue(full).into_iter();
    let mut all: Vec<_> = models.map(|it| (it.implementation, it.scenario)).collect();
    all.retain(|(source, scenario)| seen.insert((scenario.name().to_string(), *source)));
    all.extend(catalogue::refreshing());
    let all = all.into_iter().map(|(source, scenario)| (source, scenario, Rules::default()));
    let all: Vec<_> = all.chain(aged()).collect();
    let replayed = all.into_par_iter().filter_map(|(implementation, scenario, rules)| {
        let (report, counts) = replay(&scenario, &rules, Extent::Random(runs))?;
        Some(Replayed { implementation, report, counts })
    });
    replayed.collect()
}

/// Scenarios in which a rank gives up and goes on for so many calls that its call number is far
/// from those of its peers. The rank must take no step that a peer could mistake for a step of a
/// call.
fn aged() -> impl Iterator<Item = (Implementation, Scenario, Rules)> {
    catalogue::of_leavers().into_iter().flat_map(|(source, scenario)| {
        AGES.map(|ages| (source, scenario.clone(), Rules::from(Change::Ages(ages))))
    })
}

/// Numbers of calls that a rank counts between the call in which it gave up and its next call.
pub const AGES: [i32; 2] = [1 << 30, i32::MAX];

/// Replays random schedules of the scenarios of `aged` with these changes added. Returns the names
/// of the rules that forbid a step.
pub fn aged_under(changes: &[Change]) -> Vec<&'static str> {
    let replayed = aged().filter_map(|(_, scenario, mut rules)| {
        rules.changes.extend(changes);
        let (report, _) = replay(&scenario, &rules, Extent::Random(30))?;
        match report.failure {
            Some(Failure::Rule(forbidden)) => Some(forbidden.by),
            _ => None,
        }
    });
    replayed.collect()
}

/// Sums of the steps and accesses of one implementation.
pub fn counts(replayed: &[Replayed], source: Implementation) -> Counts {
    let mut counts = Counts::default();
    let of_source = replayed.iter().filter(|it| it.implementation == source);
    of_source.for_each(|it| counts.add(&it.counts));
    counts
}

/// Names of the actions of the rules and of the rows of the access table that one of the
/// implementations never replayed. Also reports the number of steps if it is less than [`STEPS`].
pub fn missing(replayed: &[Replayed]) -> Vec<String> {
    let sources: &[_] = if headers::AVAILABLE {
        &[Implementation::Rust, Implementation::Headers]
    } else {
        &[Implementation::Rust]
    };
    let of_source = |&source: &Implementation| {
        let mut missing = replay::never_replayed(&counts(replayed, source));
        // Kernels beside a call have no program over the device headers.
        missing.retain(|it| source == Implementation::Rust || !it.ends_with("beside a call"));
        let missing = missing.into_iter();
        missing.map(move |what| format!("never replayed ({}): {what}", source.name()))
    };
    let mut missing: Vec<String> = sources.iter().flat_map(of_source).collect();
    let steps: u64 = replayed.iter().map(|it| it.counts.total()).sum();
    if steps < STEPS {
        missing.push(format!("replayed {steps} steps, expected at least {STEPS}"));
    }
    missing
}

/// Result of replaying executions of a mutant.
#[derive(Clone, Debug)]
pub struct ReplayedMutant {
    /// Implementation that was run.
    pub implementation: Implementation,
    /// Mutant whose executions were replayed.
    pub mutant: Mutant,
    /// Number of executions, and the step at which the first execution left the rules.
    pub report: Report,
}

/// Number of random schedules of a mutant that are replayed, at most.
const RUNS: u64 = 60;

/// Mutants of accesses that no rule covers, with the reason.
const OUTSIDE: &[(&str, &str)] =
    &[("no-vote-after-lock", LOCKS), ("no-vote-before-unlock", LOCKS), ("site-lock-give", LOCKS)];
const LOCKS: &str = "locks are explored only";

/// Replays random schedules of each mutant, up to the first that leaves the rules. Leaves out
/// mutants whose scenario itself is at fault if no sound scenario is known, and mutants whose
/// scenario no rule applies to.
///
/// Two kinds of mutants are replayed in calls that refresh words instead of in their own scenario:
/// mutants whose scenario goes through the whole range of call numbers; and mutants whose scenario
/// no rule applies to, if they change a row of the access table that is replayed.
pub fn mutants(all: Vec<(Implementation, Mutant)>) -> Vec<ReplayedMutant> {
    let replayed = all
        .into_par_iter()
        .filter(|(_, mutant)| !mutant.in_scenario || mutant.scenario.sound.is_some());
    let replayed = replayed.filter_map(|(implementation, mutant)| {
        let refreshing = || {
            let of_source = |(source, scenario)| (source == implementation).then_some(scenario);
            catalogue::refreshing().into_iter().filter_map(of_source).collect()
        };
        let replay_in = |scenarios: Vec<Scenario>| {
            let mut last = None;
            for scenario in scenarios {
                let report = replay(&scenario, &mutant.rules, Extent::Random(RUNS)).map(|it| it.0);
                let is_by_rule = report.as_ref().is_some_and(|it| by_rule(&it.failure));
                last = report.or(last);
                if is_by_rule {
                    break;
                }
            }
            last
        };
        let report = match mutant.engine {
            Engine::WholeRange(_) | Engine::SlotsWholeRange(_) => replay_in(refreshing()),
            _ => replay_in(vec![mutant.scenario.clone()]),
        };
        let is_row = mutant.access.is_some_and(is_replayed);
        let report = report.or_else(|| if is_row { replay_in(refreshing()) } else { None })?;
        Some(ReplayedMutant { implementation, mutant, report })
    });
    replayed.collect()
}

fn by_rule(failure: &Option<Failure>) -> bool {
    matches!(failure, Some(Failure::Rule(_) | Failure::Scope(..)))
}

impl ReplayedMutant {
    /// Name of the clause, property or row of the table of accesses that forbids the step at which
    /// the mutant breaks the rules; `None` if it breaks none.
    pub fn by(&self) -> Option<&'static str> {
        match &self.report.failure {
            Some(Failure::Rule(forbidden)) => Some(forbidden.by),
            Some(Failure::Scope(..)) => Some(self.mutant.access.map_or(SCOPE, Access::name)),
            // Scenarios check the value of each item that they receive; `VALUE` names this check.
            Some(Failure::Wrong { .. }) => Some(VALUE),
            _ => None,
        }
    }

    /// Fault of the replay: the mutant breaks the rules although no rule covers it, or keeps to the
    /// rules although it must break them. A mutant that loses a signal may keep to the rules,
    /// because liveness is not proved.
    pub fn fault(&self) -> Option<String> {
        let outside = OUTSIDE.iter().find(|(name, _)| *name == self.mutant.name);
        let is_lost = self.mutant.expected == Check::Lost
            && matches!(self.report.failure, Some(Failure::Lost(_)));
        let wrong = match (self.by(), outside) {
            (None, None) if !is_lost => format!("keeps to the rules: {:?}", self.report.failure),
            (Some(by), Some((_, why))) => format!("stops at \"{by}\", although {why}"),
            _ => return None,
        };
        let (name, source) = (self.mutant.name, self.implementation.name());
        Some(format!("replayed mutant {name} ({source}) {wrong}"))
    }
}

/// Name of the rule that a rank reads the values that were written for the call.
const VALUE: &str = "what is read is of this call";
/// Name of the rule that words of peers are accessed at system scope.
const SCOPE: &str = "words of peers are accessed at system scope";

/// Whether `by` shows that `clause` is broken: it is that clause, or a row of the access table that
/// the clause names.
fn shows(by: &str, clause: &str) -> bool {
    let access = Access::ALL.iter().any(|it| it.name() == by);
    by == clause || access && clause.split(' ').any(|word| word == by)
}

/// Table of the clauses of the rules: the section that states the clause, the condition that is not
/// proved without the clause, the property that a small world then violates, and the mutants of the
/// code that stop at the clause. The last rows have the mutants that no clause stops: those stopped
/// by a property or by a row of the table of accesses, and those that keep to the rules.
pub(super) fn table(proof: &Proof, pointers: &Pointers, mutants: &[ReplayedMutant]) -> Table {
    let mut rows = report::table(&[
        "clause, or property",
        "section of PROTOCOL.md",
        "not proved without it",
        "violated in a small world",
        "mutants that stop there",
    ]);
    let names = |of: &dyn Fn(&ReplayedMutant) -> bool| {
        let names: BTreeSet<_> =
            mutants.iter().filter(|it| of(it)).map(|it| it.mutant.name).collect();
        names.into_iter().collect::<Vec<_>>().join(" ")
    };
    for it in &proof.weakened {
        let open = it.open.as_ref().map_or("NOTHING".into(), ToString::to_string);
        let violated = it.violated.map_or("-".into(), |(property, world, steps)| {
            format!("{property} ({world}, {steps} steps)")
        });
        let here = names(&|mutant| mutant.by().is_some_and(|by| shows(by, it.clause)));
        let section = pointers.sections.get(it.clause).cloned().unwrap_or_default();
        rows.add_row([it.clause.to_string(), section, open, violated, here]);
    }
    let is_clause = |by: &str| proof.weakened.iter().any(|it| shows(by, it.clause));
    let others: BTreeSet<_> =
        mutants.iter().filter_map(ReplayedMutant::by).filter(|by| !is_clause(by)).collect();
    for by in others {
        rows.add_row([by, "-", "-", "-", &names(&|it| it.by() == Some(by))]);
    }
    let lost = names(&|it| it.by().is_none() && it.mutant.expected == Check::Lost);
    rows.add_row(["no step: a signal is lost (liveness is explored only)", "-", "-", "-", &lost]);
    let outside = names(&|it| it.by().is_none() && it.mutant.expected != Check::Lost);
    rows.add_row(["no step: the rules do not speak of it", "-", "-", "-", &outside]);
    rows
}
