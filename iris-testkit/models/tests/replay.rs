//! Replays of executions of the protocols, in Rust and in device headers, against the proved rule.

use std::collections::BTreeSet;

use iris_models::check::{Implementation, replays};
use iris_models::proof::replay::replay;
use iris_models::proof::rule::{Numbers, slot_rule};
use iris_models::{Check, headers, mutants};
use iris_sync::Access;
use rayon::prelude::*;

/// Every scenario with entries, in both implementations: the rule must allow each step, and every
/// action of the rule must occur.
#[test]
fn executions_keep_to_the_rule() {
    let all = replays(false);
    let failed: Vec<String> = all
        .iter()
        .filter_map(|it| {
            let failure = it.report.failure.as_ref()?;
            Some(format!("{} ({}): {failure:?}", it.report.scenario, it.implementation.name()))
        })
        .collect();
    assert!(failed.is_empty(), "{} failed:\n{}", failed.len(), failed.join("\n"));
    let steps: u64 = all.iter().flat_map(|it| it.steps.values()).sum();
    println!("{steps} steps");
    let mut sources = vec![Implementation::Rust];
    if headers::AVAILABLE {
        sources.push(Implementation::Headers);
        assert!(steps >= 1_000_000, "{steps} steps");
    }
    for source in sources {
        let happened: BTreeSet<&str> = all
            .iter()
            .filter(|it| it.implementation == source)
            .flat_map(|it| it.steps.keys().copied())
            .collect();
        let missing: Vec<_> = slot_rule(Numbers::REAL, None)
            .actions
            .iter()
            .map(|action| action.name)
            .filter(|name| !happened.contains(name))
            .collect();
        assert_eq!(missing, Vec::<&str>::new(), "never replayed of {}", source.name());
    }
}

/// Accesses on whose order the rule relies.
const ORDERED: [Access; 8] = [
    Access::EntryStore,
    Access::CreditLoad,
    Access::EntryLoad,
    Access::SignalStore,
    Access::SignalLoad,
    Access::DoneStore,
    Access::DoneLoad,
    Access::FinishAdd,
];

/// A mutant of the code must leave the rule if the rule covers the broken property.
#[test]
fn mutants_leave_the_rule() {
    let caught: Vec<_> = mutants::all()
        .par_iter()
        .filter(|mutant| !mutant.in_scenario)
        .filter_map(|mutant| {
            let (report, _) = replay(&mutant.scenario, &mutant.rules, 200)?;
            Some((mutant.name, mutant.access, mutant.expected, report))
        })
        .collect();
    let mut by_rule = 0;
    for (name, access, expected, report) in &caught {
        let is_by_rule = report.caught_by() == Some(Check::Rule);
        by_rule += usize::from(is_by_rule);
        println!("{name:40} {:?}", report.failure);
        let is_order = access.is_some_and(|access| ORDERED.contains(&access));
        if is_order && *expected != Check::Scope {
            assert!(is_by_rule, "{name}: {:?}", report.failure);
        }
    }
    println!("{} replayed, {by_rule} caught by the rule", caught.len());
    assert!(by_rule >= 40, "{by_rule} of {}", caught.len());
}
