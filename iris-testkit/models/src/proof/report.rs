//! Report of the proof: a table of what was proved, and the failures.

use std::collections::HashSet;
use std::fmt;

use comfy_table::{Table, presets};
use rayon::prelude::*;

use super::conditions::{self, LIMIT, Outcome, SEEDS};
use super::mutants::{self, Weakened};
use super::rule::{Numbers, slot_rule};
use super::system::System;
use super::term::Name;
use super::wrap::LEMMAS;
use super::{barrier, beside, bounded, engine, program, smt, staging};

/// Result of the proof.
#[derive(Clone, Debug, Default)]
pub struct Proof {
    /// Version that z3 prints; `None` if there is no z3.
    pub solver: Option<String>,
    /// Number of lemmas about machine words for which the solver gave the expected answer.
    pub lemmas: usize,
    /// Systems that were proved, each with the outcome of its conditions.
    pub systems: Vec<(Name, Outcome)>,
    /// Proofs in which one clause of the rules was switched off, one for each clause.
    pub weakened: Vec<Weakened>,
    /// Number of states of small worlds in which no property was violated.
    pub states: usize,
    /// Number of actions that happened in the small worlds, and number of all actions of the rules.
    pub actions: (usize, usize),
    /// Failures, each with the name of the system and goal.
    pub failures: Vec<String>,
}

/// Extent of a run: which checks it includes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Extent {
    /// Only the conditions of all systems.
    Conditions,
    /// Also proofs with each clause switched off, in each of which a condition must fail.
    Clauses,
    /// Also searches of small worlds. In them, every action must happen and no property may be
    /// violated. For each clause, a run without the clause must lead to a violation.
    Worlds,
}

/// Function that makes a system from constants; leaves out the named clause, if one is given.
type Make = fn(Numbers, Option<&str>) -> System;

/// The systems that are proved.
pub const SYSTEMS: [Make; 6] = [
    barrier::barrier,
    slot_rule,
    staging::staging,
    engine::engines,
    beside::beside,
    program::programs,
];

/// Runs the proof to this extent. If z3 is not installed, the result has no solver and is otherwise
/// empty.
pub fn run(extent: Extent) -> Proof {
    let mut proof = Proof { solver: smt::version(), ..Proof::default() };
    if proof.solver.is_none() {
        return proof;
    }
    for lemma in LEMMAS {
        let answer = lemma.settle(LIMIT);
        if lemma.is_as_expected(&answer) {
            proof.lemmas += 1;
        } else {
            proof.failures.push(format!("lemma \"{}\": {answer:?}", lemma.name));
        }
    }
    let slots = slot_rule(Numbers::REAL, None);
    for make in SYSTEMS {
        let system = make(Numbers::REAL, None);
        proof.failures.extend(system.faults());
        proof.failures.extend(system.not_given_by(&slots).into_iter().map(|name| {
            format!("{}: takes \"{name}\", which the slot rule does not give", system.name)
        }));
        let outcome = conditions::prove(&system, &SEEDS, LIMIT);
        for (goal, answer) in &outcome.open {
            proof.failures.push(format!("{}: {goal}: {answer:?}", system.name));
        }
        proof.systems.push((system.name, outcome));
    }
    if extent != Extent::Conditions {
        proof.weaken(extent == Extent::Worlds);
    }
    if extent == Extent::Worlds {
        proof.explore();
    }
    proof
}

impl Proof {
    /// Number of conditions of all systems.
    pub fn conditions(&self) -> usize {
        self.systems.iter().map(|(_, outcome)| outcome.conditions).sum()
    }

    /// Number of conditions that are not proved.
    pub fn open(&self) -> usize {
        self.systems.iter().map(|(_, outcome)| outcome.open.len()).sum()
    }

    /// Number of clauses without which the proof fails, as it must.
    pub fn caught(&self) -> usize {
        self.weakened.iter().filter(|it| it.open.is_some()).count()
    }

    fn weaken(&mut self, worlds: bool) {
        for make in SYSTEMS {
            let whole = make(Numbers::REAL, None);
            let weak = mutants::clauses(&whole)
                .into_par_iter()
                .map(|clause| mutants::weaken(make, &whole, clause, worlds))
                .collect::<Vec<_>>();
            for it in &weak {
                if it.open.is_none() {
                    self.failures.push(format!("all is proved without \"{}\"", it.clause));
                }
                if worlds && it.violated.is_none() {
                    let name = whole.name;
                    self.failures.push(format!("{name}: no bad run without \"{}\"", it.clause));
                }
            }
            self.weakened.extend(weak);
        }
    }

    /// Searches small worlds of all systems: no property may be violated, and every action must
    /// happen.
    fn explore(&mut self) {
        for make in SYSTEMS {
            self.explore_worlds(&make(bounded::SMALL, None));
        }
    }

    /// Searches the worlds of a system with the constants [`bounded::SMALL`]. Failures are a
    /// violated property, a broken invariant, an action that never happens, and a guard that always
    /// holds.
    pub fn explore_worlds(&mut self, system: &System) {
        let worlds = bounded::worlds(system.name);
        let found: Vec<_> = worlds
            .par_iter()
            .map(|world| (world.name, bounded::search(system, world, bounded::SEARCHED / 4, true)))
            .collect();
        let (mut happened, mut refused) = (HashSet::new(), HashSet::new());
        for (name, found) in found {
            self.states += found.states;
            happened.extend(found.happened);
            refused.extend(found.refused);
            for what in found.violated.into_iter().chain(found.broken) {
                self.failures.push(format!("{name}: {what}: {:?}", found.trace));
            }
        }
        for action in &system.actions {
            if !happened.contains(action.name) {
                self.failures.push(format!("{}: {} never happens", system.name, action.name));
            }
            for (guard, _) in &action.guards {
                if !refused.contains(&(action.name, *guard)) {
                    let (system, action) = (system.name, action.name);
                    self.failures.push(format!("{system}: {action}: \"{guard}\" always holds"));
                }
            }
        }
        self.actions.0 += happened.len();
        self.actions.1 += system.actions.len();
    }
}

/// Table without lines and with this header.
pub(crate) fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(header);
    table
}

impl fmt::Display for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.weakened.is_empty() {
            let header =
                ["clause switched off", "not proved any more", "violated", "world", "steps"];
            let mut rows = table(&header);
            for it in &self.weakened {
                let open = it.open.as_ref().map_or("NOTHING".into(), ToString::to_string);
                let (property, world, steps) = it.violated.unwrap_or(("no run found", "", 0));
                rows.add_row([it.clause, &open, property, world, &steps.to_string()]);
            }
            writeln!(f, "{rows}\n")?;
        }
        let mut rows = table(&["proof", "conditions", "asked", "again", "open", "seconds"]);
        for (name, outcome) in &self.systems {
            let Outcome { conditions, asked, again, open, seconds } = outcome;
            rows.add_row([
                (*name).to_string(),
                conditions.to_string(),
                asked.to_string(),
                again.to_string(),
                open.len().to_string(),
                format!("{seconds:.1}"),
            ]);
        }
        writeln!(f, "{rows}\n")?;
        match &self.solver {
            Some(version) => writeln!(f, "solver: {version}; lemmas about words: {}", self.lemmas)?,
            None => writeln!(f, "solver: no z3")?,
        }
        if !self.weakened.is_empty() {
            let (all, caught) = (self.weakened.len(), self.caught());
            writeln!(f, "clauses switched off: {all}, without which the proof fails: {caught}")?;
            let runs = self.weakened.iter().filter(|it| it.violated.is_some()).count();
            if self.states > 0 {
                writeln!(f, "clauses without which a small world has a bad run: {runs}")?;
            }
        }
        if self.states > 0 {
            let (happened, all) = self.actions;
            writeln!(f, "small worlds: {} states, {happened} of {all} actions", self.states)?;
        }
        Ok(())
    }
}
