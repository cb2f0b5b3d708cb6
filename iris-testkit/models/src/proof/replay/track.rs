//! Progress of an execution through the states of a rule, with counts of the replayed steps.

use std::collections::BTreeMap;

use iris_sync::Access;
use rustc_hash::FxHashSet as HashSet;

use crate::proof::concrete::{Machine, Refusal, State, Universe};
use crate::proof::rule::Numbers;
use crate::proof::system::System;
use crate::proof::term::Name;
use crate::{Forbidden, Operation};

/// Numbers of replayed steps and accesses, by name.
#[derive(Clone, Default, Debug)]
pub struct Counts {
    /// Number of steps, by rule and action.
    pub steps: BTreeMap<(Name, Name), u64>,
    /// Number of atomic accesses, by row of the access table.
    pub accesses: BTreeMap<Name, u64>,
}

impl Counts {
    /// Adds the numbers of `other` to this count.
    pub fn add(&mut self, other: &Counts) {
        for (&name, &times) in &other.steps {
            *self.steps.entry(name).or_default() += times;
        }
        for (&name, &times) in &other.accesses {
            *self.accesses.entry(name).or_default() += times;
        }
    }

    /// Number of all steps.
    pub fn total(&self) -> u64 {
        self.steps.values().sum()
    }
}

/// Number of steps `turn` of a replay that the compiled rule performs; see [`Track::turn`].
const COMPARED: u64 = 200;

/// Rule over concrete values, and the state that an execution has reached.
pub(super) struct Track {
    pub(super) system: Name,
    machine: Machine,
    state: State,
    /// Values that the steps of this execution have overwritten, each with its index.
    log: Vec<(usize, i64)>,
    /// States in which the invariant was already checked.
    ends: HashSet<State>,
    /// Rows of values of each thread; see [`Machine::rows_of_threads`].
    rows: Vec<(usize, usize)>,
    /// Index of the last step's action, if that step changed nothing.
    idle: Option<usize>,
    idle_parameters: Vec<i64>,
    /// Index of the action `turn`; 0 if the rule has no such action.
    turn: usize,
    /// Number of steps `turn` that the compiled rule has performed.
    turns: u64,
    steps: Vec<u64>,
    accesses: Vec<u64>,
}

impl Track {
    /// Rule that `make` builds over concrete values, before the first step; see [`Machine::new`].
    pub(super) fn new(
        make: fn(Numbers, Option<&str>) -> System,
        universe: Universe,
        fixed: impl Fn(Name, &[i64]) -> i64,
    ) -> Self {
        let system = &make(Numbers::REAL, None);
        let machine = Machine::new(system, universe, fixed);
        Self {
            system: system.name,
            state: machine.initial(),
            log: Vec::new(),
            ends: HashSet::default(),
            rows: machine.rows_of_threads(system),
            turn: (0..machine.actions()).find(|&it| machine.name(it) == "turn").unwrap_or_default(),
            turns: 0,
            idle: None,
            idle_parameters: Vec::new(),
            steps: vec![0; machine.actions()],
            accesses: vec![0; Access::ALL.len()],
            machine,
        }
    }

    /// Number of changes so far, for a later [`Track::undo_to`].
    pub(super) fn changes(&self) -> usize {
        self.log.len()
    }

    /// Undoes all changes except the first `changes`.
    pub(super) fn undo_to(&mut self, changes: usize) {
        self.idle = None;
        for (at, old) in self.log.drain(changes..).rev() {
            self.state.0[at] = old;
        }
    }

    /// Numbers of steps and accesses so far, of all executions.
    pub(super) fn counts(&self) -> Counts {
        let steps = self.steps.iter().enumerate().filter(|(_, times)| **times > 0);
        let accesses = Access::ALL.iter().zip(&self.accesses).filter(|(_, times)| **times > 0);
        Counts {
            steps: steps
                .map(|(action, &times)| ((self.system, self.machine.name(action)), times))
                .collect(),
            accesses: accesses.map(|(access, &times)| (access.name(), times)).collect(),
        }
    }

    /// Number of steps of the action `name` so far, of all executions.
    pub(super) fn taken(&self, name: &str) -> u64 {
        self.steps[self.machine.named(name)]
    }

    pub(super) fn get(&self, name: &str, arguments: &[i64]) -> i64 {
        self.machine.get(&self.state, name, arguments)
    }

    /// Takes a step, if the rule allows it.
    pub(super) fn step(&mut self, name: Name, parameters: &[i64]) -> Result<(), Forbidden> {
        let action = self.machine.named(name);
        // If the same step was taken last and changed nothing, it is allowed again without a check.
        let is_idle =
            self.idle.is_some_and(|it| it == action) && self.idle_parameters == parameters;
        if is_idle {
            self.steps[action] += 1;
            return Ok(());
        }
        let before = self.log.len();
        if let Err(refusal) = self.machine.permits(&self.state, action, parameters) {
            let shown = self.machine.show(action, parameters);
            return Err(match refusal {
                Refusal::Given => Forbidden::new(name, format!("{shown} is no step of the rule")),
                Refusal::Guard(it) => Forbidden::new(it, format!("{shown} is forbidden")),
                Refusal::Property(it) => Forbidden::new(it, format!("{shown} violates it")),
            });
        }
        self.machine.perform_logged(&mut self.state, action, parameters, &mut self.log);
        self.steps[action] += 1;
        self.idle = (self.log.len() == before).then_some(action);
        self.idle_parameters.clear();
        self.idle_parameters.extend(parameters);
        Ok(())
    }

    /// Lets a thread learn what another thread of its rank knows. This is the step `turn`: each
    /// value of the first thread becomes at least the other thread's value.
    ///
    /// Half of all steps are such turns, and the compiled rule needs microseconds for one. So the
    /// compiled rule performs only the first [`COMPARED`] turns, whose results are compared; this
    /// function alone performs the later ones.
    pub(super) fn turn(&mut self, to: i64, from: i64) -> Result<(), Forbidden> {
        let mut learned = Vec::new();
        for &(offset, length) in &self.rows {
            let (own, theirs) = (offset + to as usize * length, offset + from as usize * length);
            for at in 0..length {
                if self.state.0[own + at] < self.state.0[theirs + at] {
                    learned.push((own + at, self.state.0[theirs + at]));
                }
            }
        }
        if self.turns >= COMPARED {
            if !learned.is_empty() {
                self.steps[self.turn] += 1;
            }
            for (at, value) in learned {
                self.idle = None;
                self.log.push((at, std::mem::replace(&mut self.state.0[at], value)));
            }
            return Ok(());
        }
        self.turns += 1;
        let mut expected = self.state.clone();
        learned.into_iter().for_each(|(at, value)| expected.0[at] = value);
        self.step("turn", &[to, from])?;
        if self.state == expected {
            Ok(())
        } else {
            Err(Forbidden::new("turn", "a turn does not take the greater value of each row"))
        }
    }

    /// Checks the order and scope of an operation against its row of the access table, and counts
    /// the operation. Non-atomic operations pass, because the models treat some words of one device
    /// as plain memory.
    pub(super) fn row(&mut self, access: Access, op: &Operation) -> Result<(), Forbidden> {
        let has = (op.order().unwrap_or(access.order()), op.scope().unwrap_or(access.scope()));
        let wanted = (access.order(), access.scope());
        if has != wanted {
            let what = format!("{op:?}, but the table has {wanted:?}");
            return Err(Forbidden::new(access.name(), what));
        }
        self.accesses[access as usize] += 1;
        Ok(())
    }

    /// Checks the invariant in the present state, once for each state.
    pub(super) fn holds(&mut self) -> Result<(), Forbidden> {
        if self.ends.contains(&self.state) {
            return Ok(());
        }
        self.ends.insert(self.state.clone());
        match self.machine.broken(&self.state) {
            Some((clause, values)) => Err(Forbidden::new(
                clause,
                format!("the end, where it does not hold of {values:?}"),
            )),
            None => Ok(()),
        }
    }

    /// Number without bounds that the machine word `value` stands for: the number nearest to the
    /// rank's call among all numbers that equal `value` modulo 2^32.
    pub(super) fn ghost(&self, rank: i64, value: i64) -> i64 {
        let call = self.get("call", &[rank]);
        call + i64::from((value as i32).wrapping_sub(call as i32))
    }
}
