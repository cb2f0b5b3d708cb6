//! Access to values of a machine's state, and steps that can be undone.

use super::{Machine, State, System};
use crate::proof::term::{Function, Name, Sort};

impl Machine {
    /// Performs the action with these parameters, and appends each value that it overwrites to
    /// `log`, with the value's index.
    pub(in crate::proof) fn perform_logged(
        &self,
        state: &mut State,
        action: usize,
        parameters: &[i64],
        log: &mut Vec<(usize, i64)>,
    ) {
        for (at, value) in self.writes(state, &self.actions[action].effects, parameters) {
            let old = std::mem::replace(&mut state.0[at], value);
            if old != value {
                log.push((at, old));
            }
        }
    }

    /// Offset and length of one thread's row of values, for each function of the state whose first
    /// argument is a thread. The row of thread g begins g lengths after the offset.
    pub(in crate::proof) fn rows_of_threads(&self, system: &System) -> Vec<(usize, usize)> {
        let state = &self.tables[system.fixed.len()..];
        let of_threads = state.iter().filter(|(it, _)| it.arguments.first() == Some(&Sort::Agent));
        let length = |function: &Function| {
            let others = function.arguments[1..].iter();
            others.map(|&sort| self.universe.domain(sort).1 as usize).product()
        };
        of_threads.map(|(function, offset)| (*offset, length(function))).collect()
    }

    /// Index of the action called `name`.
    pub fn named(&self, name: &str) -> usize {
        match self.actions.iter().position(|action| action.name == name) {
            Some(at) => at,
            None => unreachable!("no action {name}"),
        }
    }

    /// Name of the action with the index `action`.
    pub fn name(&self, action: usize) -> Name {
        self.actions[action].name
    }

    /// Text of an action with its parameters, for people.
    pub fn show(&self, action: usize, parameters: &[i64]) -> String {
        let action = &self.actions[action];
        let pairs = action.over.iter().zip(parameters);
        let pairs: Vec<_> = pairs.map(|((name, _), it)| format!("{name}={it}")).collect();
        format!("{}({})", action.name, pairs.join(" "))
    }

    /// Value of the function `name` for these arguments in `state`.
    pub fn get(&self, state: &State, name: &str, arguments: &[i64]) -> i64 {
        let Some(&position) = self.positions.get(name) else { unreachable!("no function {name}") };
        let (function, offset) = &self.tables[position];
        let mut index = 0;
        for (&argument, &sort) in arguments.iter().zip(function.arguments) {
            let (from, count) = self.universe.domain(sort);
            index = index * count + argument - from;
        }
        state.0[offset + index as usize]
    }
}
