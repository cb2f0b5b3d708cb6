//! Progress of an execution through a system, with a count of what was replayed.

use std::collections::BTreeMap;

use iris_sync::Access;
use rustc_hash::FxHashSet as HashSet;

use crate::proof::concrete::{Machine, Refusal, State};
use crate::proof::system::System;
use crate::proof::term::Name;
use crate::{Forbidden, Op};

/// Numbers of replayed steps and accesses, by name.
#[derive(Clone, Default, Debug)]
pub struct Counts {
    /// Number of steps, by system and action.
    pub steps: BTreeMap<(Name, Name), u64>,
    /// Number of atomic accesses, by row of the table of accesses.
    pub accesses: BTreeMap<Name, u64>,
}

impl Counts {
    /// Adds the numbers of another count.
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

/// Number of turns of a replay that the machine does; see [`Track::turn`].
const COMPARED: u64 = 200;

/// A system over concrete values, and the state that an execution has reached.
pub(super) struct Track {
    system: Name,
    machine: Machine,
    state: State,
    /// Values that the steps of this execution overwrote, each with its index.
    log: Vec<(usize, i64)>,
    /// States whose invariant was checked.
    ends: HashSet<State>,
    /// Rows of threads; see [`Machine::rows_of_threads`].
    rows: Vec<(usize, usize)>,
    /// Action of the last step, if the step changed nothing.
    idle: Option<usize>,
    idle_parameters: Vec<i64>,
    /// Number of the action `turn`; 0 if the system has none.
    turn: usize,
    /// Number of turns that the machine has done.
    turns: u64,
    steps: Vec<u64>,
    accesses: Vec<u64>,
}

impl Track {
    pub(super) fn new(system: &System, machine: Machine) -> Self {
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

    /// Returns to the state before the first step.
    pub(super) fn begin(&mut self) {
        self.undo_to(0);
    }

    /// Number of changes so far, for [`Track::undo_to`].
    pub(super) fn changes(&self) -> usize {
        self.log.len()
    }

    /// Takes back all changes but the first `changes`.
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

    pub(super) fn is(&self, name: &str, arguments: &[i64]) -> bool {
        self.get(name, arguments) != 0
    }

    /// Takes a step, if the system allows it.
    pub(super) fn step(&mut self, name: Name, parameters: &[i64]) -> Result<(), Forbidden> {
        let action = self.machine.named(name);
        // A step that has just been taken and changed nothing is allowed again.
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

    /// Lets a thread learn what another one of its rank knows: the step `turn`, which takes the
    /// greater of both values in each row of the two threads.
    ///
    /// Half of all steps are turns, and the machine needs microseconds for one. So only the first
    /// [`COMPARED`] turns are left to it, and must have this effect; later ones are done here.
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

    /// Checks the order and scope of an operation against its row of the table, and counts it. Plain
    /// operations pass: the models take some words of one device as plain memory.
    pub(super) fn row(&mut self, access: Access, op: &Op) -> Result<(), Forbidden> {
        let has = (op.order().unwrap_or(access.order()), op.scope().unwrap_or(access.scope()));
        let wanted = (access.order(), access.scope());
        if has != wanted {
            let what = format!("{op:?}, but the table has {wanted:?}");
            return Err(Forbidden::new(access.name(), what));
        }
        self.accesses[access as usize] += 1;
        Ok(())
    }

    /// Checks the invariant, once for each state.
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

    /// Number of the call that a word holds: of all that are equal modulo 2^32, the nearest to the
    /// rank's call.
    pub(super) fn ghost(&self, rank: i64, value: i64) -> i64 {
        let call = self.get("call", &[rank]);
        call + i64::from((value as i32).wrapping_sub(call as i32))
    }
}
