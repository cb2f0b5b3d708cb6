//! Each clause of a rule, switched off: a condition of the proof must fail, and something bad must be able to happen.

use std::collections::HashSet;

use super::bounded::violation;
use super::conditions::{self, Condition, Goal};
use super::rule::Numbers;
use super::smt::Answer;
use super::system::System;
use super::term::Name;

/// A clause that was switched off, and what it leads to.
#[derive(Clone, Debug)]
pub struct Weakened {
    /// Clause of the rule that is switched off.
    pub clause: Name,
    /// Condition whose proof then fails; `None` if all are still proved.
    pub open: Option<Goal>,
    /// The property that is violated in a small world, the world, and the number of actions that lead there.
    pub violated: Option<(Name, Name, usize)>,
}

/// The clauses of a rule, each once, in the order of its text.
pub fn clauses(system: &System) -> Vec<Name> {
    let mut seen = HashSet::new();
    system.clauses.iter().copied().filter(|name| seen.insert(*name)).collect()
}

/// The solver's work for a condition that is expected to fail: what is true is proved with a tenth of it.
const LIMIT: u64 = 3_000_000;

/// Switch a clause off; with `worlds`, also look for what happens then.
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

/// Conditions of a weakened system that the whole one does not have.
fn changed(whole: &System, weak: &System) -> Vec<Condition> {
    let known: HashSet<_> = conditions::all(whole).into_iter().map(|it| it.script).collect();
    conditions::all(weak).into_iter().filter(|it| !known.contains(&it.script)).collect()
}

/// The first condition that is not proved of a weakened system.
pub fn first_open(whole: &System, weak: &System) -> Option<Goal> {
    // A property says more than an invariant that cannot be kept.
    let mut changed = changed(whole, weak);
    changed.sort_by_key(|it| !matches!(it.goal, Goal::Property(..)));
    changed.into_iter().find_map(|condition| {
        let verdict = conditions::settle(&condition, &conditions::SEEDS[..1], LIMIT);
        (verdict.answer != Answer::Proved).then_some(verdict.goal)
    })
}
