//! Proofs of weakened rules: if any one clause of a rule is switched off, a condition of the proof
//! must fail, and a run to a violated property must exist.

use std::collections::HashSet;

use super::bounded::violation;
use super::conditions::{self, Condition, Goal};
use super::rule::Numbers;
use super::smt::Answer;
use super::system::System;
use super::term::Name;

/// Clause that was switched off, and the effects that this had.
#[derive(Clone, Debug)]
pub struct Weakened {
    /// Clause of the rule that is switched off.
    pub clause: Name,
    /// First condition whose proof fails without the clause; `None` if all are still proved.
    pub open: Option<Goal>,
    /// Property that is violated in a small world without the clause, the name of that world, and
    /// the number of actions that lead to the violation. `None` if no violation was found.
    pub violated: Option<(Name, Name, usize)>,
}

/// Names of the clauses of a rule, each once, in the order of the rule's text.
pub fn clauses(system: &System) -> Vec<Name> {
    let mut seen = HashSet::new();
    system.clauses.iter().copied().filter(|name| seen.insert(*name)).collect()
}

/// Limit of the solver's work for a condition that is expected to fail; true conditions are proved
/// with a tenth of it.
const LIMIT: u64 = 3_000_000;

/// Switches a clause off and tries the proof; with `worlds`, also searches small worlds for a
/// violation.
pub fn weaken(
    make: fn(Numbers, Option<&str>) -> System,
    whole: &System,
    clause: Name,
    worlds: bool,
) -> Weakened {
    let weak = make(Numbers::REAL, Some(clause));
    Weakened {
        clause,
        open: first_open(whole, &weak),
        violated: worlds.then(|| violation(make, clause)).flatten(),
    }
}

/// Conditions of a weakened system that differ from all conditions of the whole system.
fn changed(whole: &System, weak: &System) -> Vec<Condition> {
    let known: HashSet<_> = conditions::all(whole).into_iter().map(|it| it.script).collect();
    conditions::all(weak).into_iter().filter(|it| !known.contains(&it.script)).collect()
}

/// First condition of a weakened system that is not proved.
pub fn first_open(whole: &System, weak: &System) -> Option<Goal> {
    // Properties come first, because a violated property is more informative than a clause that an
    // action does not keep.
    let mut changed = changed(whole, weak);
    changed.sort_by_key(|it| !matches!(it.goal, Goal::Property(..)));
    changed.into_iter().find_map(|condition| {
        let verdict = conditions::settle(&condition, &conditions::SEEDS[..1], LIMIT);
        (verdict.answer != Answer::Proved).then_some(verdict.goal)
    })
}
