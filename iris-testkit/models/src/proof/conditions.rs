//! Conditions of a proof: the invariant holds in the initial state, each action keeps it, and each
//! property follows from it.

use std::fmt::{self, Write as _};
use std::time::Instant;

use rayon::prelude::*;

use super::smt::{self, Answer};
use super::system::{Action, Clause, Effect, System};
use super::term::{Name, Node, Term, Variable, variable};

/// Statement to be proved.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Goal {
    /// The clause of the invariant with this name holds in the initial state.
    Initiation(Name),
    /// If the invariant holds, the action named first keeps the clause named second.
    Consecution(Name, Name),
    /// The property named second holds whenever the action named first happens.
    Property(Name, Name),
}

impl fmt::Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Goal::Initiation(clause) => write!(f, "clause \"{clause}\" holds at first"),
            Goal::Consecution(action, clause) => write!(f, "{action} keeps \"{clause}\""),
            Goal::Property(action, property) => write!(f, "{action}: \"{property}\""),
        }
    }
}

/// Goal, together with the solver's input. No input is needed if the action changes no function
/// that the clause mentions.
#[derive(Clone, Debug)]
pub struct Condition {
    /// Statement to be proved.
    pub goal: Goal,
    /// SMT-LIB assertions that contradict each other if the goal is true; `None` if the goal is
    /// true without a question to the solver.
    pub script: Option<String>,
}

/// Result of the proof of one condition.
#[derive(Clone, Debug)]
pub struct Verdict {
    /// Statement that was to be proved.
    pub goal: Goal,
    /// Answer of the solver; [`Answer::Proved`] also if the solver was not needed.
    pub answer: Answer,
    /// Whether the solver was asked about this goal.
    pub asked: bool,
    /// Number of seeds with which the solver was tried.
    pub seeds: usize,
}

/// Seeds of the solver's random numbers, in the order in which they are tried.
pub const SEEDS: [u32; 4] = [0, 1, 2, 3];

/// Limit for one goal and one seed, in z3's units of work.
pub const LIMIT: u64 = 10_000_000;

const SKOLEMS: [Name; 6] = ["s!0", "s!1", "s!2", "s!3", "s!4", "s!5"];

fn skolems(over: &[Variable]) -> (Vec<Variable>, Vec<Term>) {
    let declared: Vec<Variable> =
        SKOLEMS.iter().zip(over).map(|(&name, &(_, sort))| (name, sort)).collect();
    let terms = declared.iter().map(|&it| variable(it)).collect();
    (declared, terms)
}

fn start(effect: &Effect) -> Clause {
    let body = Term::applied(effect.function, effect.at.clone()).is(&effect.value);
    Clause { name: "initial", over: effect.over.clone(), body }
}

/// All conditions that prove a system: initiation, consecution and properties.
pub fn all(system: &System) -> Vec<Condition> {
    let mut all = Vec::new();
    let declarations = smt::declarations(system);
    let text = |clauses: &[Clause]| clauses.iter().map(smt::assert_clause).collect::<String>();
    let axioms = text(&system.axioms);
    let initial: Vec<Clause> = system.initial.iter().map(start).collect();
    let initial = text(&initial);
    for clause in &system.invariant {
        let (declared, values) = skolems(&clause.over);
        let mut script = format!("{declarations}{axioms}{initial}{}", smt::constants(&declared));
        script += &smt::assert(&!clause.of(&values));
        all.push(Condition { goal: Goal::Initiation(clause.name), script: Some(script) });
    }
    let invariant = text(&system.invariant);
    for action in &system.actions {
        let mut base = format!("{declarations}{axioms}{invariant}{}", smt::constants(&action.over));
        base += &smt::assert(&action.enabled());
        for (name, property) in &action.properties {
            let script = format!("{base}{}", smt::assert(&!property));
            let goal = Goal::Property(action.name, name);
            all.push(Condition { goal, script: Some(script) });
            base += &smt::assert(property);
        }
        for clause in &system.invariant {
            all.push(Condition {
                goal: Goal::Consecution(action.name, clause.name),
                script: touches(action, clause).then(|| kept(&base, action, clause)),
            });
        }
    }
    all
}

/// Whether an action changes a function that a clause mentions.
pub fn touches(action: &Action, clause: &Clause) -> bool {
    clause.body.any(&|node| {
        let changed = |name: &Name| action.effects.iter().any(|effect| effect.function == *name);
        matches!(node, Node::Apply(name, _) if changed(name))
    })
}

fn kept(base: &str, action: &Action, clause: &Clause) -> String {
    let (declared, values) = skolems(&clause.over);
    let before = clause.of(&values);
    let mut script = String::from(base);
    let _ = write!(script, "{}", smt::constants(&declared));
    script += &smt::assert(&before);
    script += &smt::assert(&!action.after(&before));
    script
}

/// Tries to prove a condition with each seed in turn, until the solver proves or refutes it.
pub fn settle(condition: &Condition, seeds: &[u32], limit: u64) -> Verdict {
    let mut answer = Answer::Proved;
    let mut tried = 0;
    if let Some(script) = &condition.script {
        for &seed in seeds {
            tried += 1;
            answer = smt::ask(script, seed, limit);
            if answer != Answer::Unknown {
                break;
            }
        }
    }
    Verdict {
        goal: condition.goal.clone(),
        answer,
        asked: condition.script.is_some(),
        seeds: tried,
    }
}

/// Outcome of the proof of a system: the conditions that are not proved, and counts.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Number of conditions of the system.
    pub conditions: usize,
    /// Number of conditions that the solver was asked about.
    pub asked: usize,
    /// Number of conditions for which the first seed did not suffice.
    pub again: usize,
    /// Goals that were not proved, with the solver's answers.
    pub open: Vec<(Goal, Answer)>,
    /// Run time in seconds.
    pub seconds: f64,
}

/// Tries to prove all conditions of a system.
pub fn prove(system: &System, seeds: &[u32], limit: u64) -> Outcome {
    let start = Instant::now();
    let verdicts: Vec<Verdict> =
        all(system).par_iter().map(|condition| settle(condition, seeds, limit)).collect();
    let mut outcome = Outcome::default();
    verdicts.into_iter().for_each(|verdict| outcome.add(verdict));
    outcome.seconds = start.elapsed().as_secs_f64();
    outcome
}

impl Outcome {
    fn add(&mut self, verdict: Verdict) {
        self.conditions += 1;
        self.asked += usize::from(verdict.asked);
        self.again += usize::from(verdict.seeds > 1);
        if verdict.answer != Answer::Proved {
            self.open.push((verdict.goal, verdict.answer));
        }
    }
}
