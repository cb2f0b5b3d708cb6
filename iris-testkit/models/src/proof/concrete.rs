//! Transition system over concrete values: ranks, threads, words and tiles are numbers from 0, and
//! calls lie in a window. The terms of a rule are compiled to tables and look-ups.

mod steps;

use rustc_hash::FxHashMap;

use super::system::{Action, Clause, System};
use super::term::{Function, Name, Node, Sort, Term, Variable};

/// Number of ranks, threads, words, tiles and calls that a concrete system has.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Universe {
    /// Number of ranks.
    pub ranks: i64,
    /// Number of threads of all ranks together.
    pub agents: i64,
    /// Number of words from one rank to another.
    pub words: i64,
    /// Number of tiles from one rank to another.
    pub tiles: i64,
    /// Number of the first call.
    pub first: i64,
    /// Number of calls.
    pub calls: i64,
}

/// Largest distance between the number of the first call and a lower number that a word holds.
const BELOW: i64 = 3;

impl Universe {
    /// First value of a sort, and number of the sort's values.
    fn domain(&self, sort: Sort) -> (i64, i64) {
        match sort {
            Sort::Bool => (0, 2),
            Sort::Int => (self.first - BELOW, self.calls + BELOW + 2),
            Sort::Rank => (0, self.ranks),
            Sort::Agent => (0, self.agents),
            Sort::Word => (0, self.words),
            Sort::Tile => (0, self.tiles),
        }
    }
}

/// State of a system: the values of all its functions.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct State(pub(super) Vec<i64>);

/// Reason for which an action is refused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Refusal {
    /// The condition that defines the action does not hold for these parameters.
    Given,
    /// The guard of this name does not hold.
    Guard(Name),
    /// The rule allows the action, but the action violates this property.
    Property(Name),
}

enum Code {
    Value(i64),
    Slot(usize),
    Fixed(Place),
    State(Place),
    Not(Box<Code>),
    And(Box<[Code]>),
    Or(Box<[Code]>),
    Equal(Box<[Code; 2]>),
    AtMost(Box<[Code; 2]>),
    Add(Box<[Code; 2]>),
    Sub(Box<[Code; 2]>),
    Mod(Box<Code>, i64),
    If(Box<[Code; 3]>),
    All { slot: usize, from: i64, count: i64, body: Box<Code> },
}

/// Index of a function's value in `Frame::fixed` or `Frame::state`: an offset, plus the index of each
/// argument times its stride.
struct Place {
    offset: usize,
    /// Arguments of the function: for each, its value, the first value of its sort, the number of
    /// values of its sort, and its stride.
    arguments: Box<[(Code, i64, i64, i64)]>,
    /// Value of the function for arguments outside of the universe, such as calls outside of the
    /// window.
    outside: i64,
}

struct CompiledEffect {
    place: Place,
    loops: Vec<(usize, i64, i64)>,
    only: Code,
    value: Code,
}

/// Action of a system, compiled so that it runs on states.
struct CompiledAction {
    name: Name,
    over: Vec<Variable>,
    given: Code,
    guards: Vec<(Name, Code)>,
    properties: Vec<(Name, Code)>,
    effects: Vec<CompiledEffect>,
}

struct CompiledClause {
    name: Name,
    over: Vec<Variable>,
    body: Code,
}

/// System of a proof, compiled so that it runs on states.
pub struct Machine {
    universe: Universe,
    tables: Vec<(Function, usize)>,
    /// Position in `tables` of each function.
    positions: FxHashMap<Name, usize>,
    size: usize,
    fixed: Vec<i64>,
    actions: Vec<CompiledAction>,
    invariant: Vec<CompiledClause>,
    initial: Vec<CompiledEffect>,
}

/// Values of the variables while terms are evaluated, and the state that is read.
struct Frame<'a> {
    slots: [i64; SLOTS],
    fixed: &'a [i64],
    state: &'a [i64],
}

impl Place {
    #[inline]
    fn index(&self, frame: &mut Frame<'_>) -> Option<usize> {
        let mut index = self.offset;
        for (argument, from, count, stride) in &self.arguments {
            let value = match argument {
                Code::Slot(slot) => frame.slots[*slot],
                argument => argument.value(frame),
            };
            let at = value - from;
            if !(0..*count).contains(&at) {
                return None;
            }
            index += (at * stride) as usize;
        }
        Some(index)
    }
}

impl Code {
    fn value(&self, frame: &mut Frame<'_>) -> i64 {
        match self {
            Code::Value(value) => *value,
            Code::Slot(slot) => frame.slots[*slot],
            Code::Fixed(place) => {
                let at = place.index(frame);
                at.map_or(place.outside, |at| frame.fixed[at])
            }
            Code::State(place) => {
                let at = place.index(frame);
                at.map_or(place.outside, |at| frame.state[at])
            }
            Code::Not(a) => i64::from(a.value(frame) == 0),
            Code::And(all) => i64::from(all.iter().all(|it| it.value(frame) != 0)),
            Code::Or(all) => i64::from(all.iter().any(|it| it.value(frame) != 0)),
            Code::Equal(both) => i64::from(both[0].value(frame) == both[1].value(frame)),
            Code::AtMost(both) => i64::from(both[0].value(frame) <= both[1].value(frame)),
            Code::Add(both) => both[0].value(frame) + both[1].value(frame),
            Code::Sub(both) => both[0].value(frame) - both[1].value(frame),
            Code::Mod(a, modulus) => a.value(frame).rem_euclid(*modulus),
            Code::If(three) => {
                let chosen = if three[0].value(frame) != 0 { &three[1] } else { &three[2] };
                chosen.value(frame)
            }
            Code::All { slot, from, count, body } => {
                for value in *from..from + count {
                    frame.slots[*slot] = value;
                    if body.value(frame) == 0 {
                        return 0;
                    }
                }
                1
            }
        }
    }
}

impl Machine {
    /// Compiles a system. `fixed` returns the values of functions that never change, except
    /// `first`, whose value is the number of the universe's first call.
    pub fn new(system: &System, universe: Universe, fixed: impl Fn(Name, &[i64]) -> i64) -> Self {
        let mut tables = Vec::new();
        let (mut fixed_size, mut size) = (0, 0);
        let cells = |function: &Function| -> usize {
            function.arguments.iter().map(|&sort| universe.domain(sort).1 as usize).product()
        };
        for function in system.fixed {
            tables.push((*function, fixed_size));
            fixed_size += cells(function);
        }
        for function in system.state {
            tables.push((*function, size));
            size += cells(function);
        }
        let positions = tables.iter().map(|(it, _)| it.name).zip(0..).collect();
        let mut machine = Self {
            universe,
            tables,
            positions,
            size,
            fixed: Vec::with_capacity(fixed_size),
            actions: Vec::new(),
            invariant: Vec::new(),
            initial: Vec::new(),
        };
        for function in system.fixed {
            let over: Vec<Variable> = function.arguments.iter().map(|&sort| ("", sort)).collect();
            machine
                .each(&over, |values| {
                    let value = match values {
                        [] if function.name == "first" => machine.universe.first,
                        values => fixed(function.name, values),
                    };
                    Some(value)
                })
                .into_iter()
                .for_each(|value| machine.fixed.push(value));
        }
        machine.actions =
            system.actions.iter().map(|action| machine.action(system, action)).collect();
        machine.invariant =
            system.invariant.iter().map(|clause| machine.clause(system, clause)).collect();
        let initial = system.initial.iter();
        machine.initial = initial.map(|it| machine.effect(system, &[], it)).collect();
        machine
    }

    /// Results of the function `of` for all values of the variables `over`.
    fn each<R>(&self, over: &[Variable], mut of: impl FnMut(&[i64]) -> Option<R>) -> Vec<R> {
        let domains: Vec<(i64, i64)> =
            over.iter().map(|&(_, sort)| self.universe.domain(sort)).collect();
        let mut values: Vec<i64> = domains.iter().map(|&(from, _)| from).collect();
        let mut all = Vec::new();
        if domains.iter().any(|&(_, count)| count == 0) {
            return all;
        }
        loop {
            all.extend(of(&values));
            let Some(at) =
                (0..values.len()).rev().find(|&at| values[at] + 1 < domains[at].0 + domains[at].1)
            else {
                return all;
            };
            values[at] += 1;
            for later in at + 1..values.len() {
                values[later] = domains[later].0;
            }
        }
    }

    fn place(
        &self,
        system: &System,
        name: Name,
        arguments: &[Term],
        scope: &[Name],
    ) -> (Place, bool) {
        let Some((function, offset)) = self.tables.iter().find(|(it, _)| it.name == name) else {
            unreachable!("{name} is declared")
        };
        let mut stride = 1;
        let mut placed = Vec::new();
        for (argument, &sort) in arguments.iter().zip(function.arguments).rev() {
            let (from, count) = self.universe.domain(sort);
            placed.push((self.compile(system, argument, scope), from, count, stride));
            stride *= count;
        }
        let outside = match function.value {
            Sort::Int => self.universe.first - 1,
            _ => 0,
        };
        let is_state = system.state.iter().any(|it| it.name == name);
        (Place { offset: *offset, arguments: placed.into(), outside }, is_state)
    }

    fn compile(&self, system: &System, term: &Term, scope: &[Name]) -> Code {
        let code = |term: &Term| self.compile(system, term, scope);
        let many = |terms: &[Term]| terms.iter().map(code).collect::<Vec<_>>().into_boxed_slice();
        match term.node() {
            Node::Bool(value) => Code::Value((*value).into()),
            Node::Int(value) => Code::Value(*value),
            Node::Variable(name, _) => match scope.iter().rposition(|known| known == name) {
                Some(slot) => Code::Slot(slot),
                None => unreachable!("{name} is declared"),
            },
            Node::Apply(name, arguments) => match self.place(system, name, arguments, scope) {
                (place, true) => Code::State(place),
                (place, false) => Code::Fixed(place),
            },
            Node::Not(a) => Code::Not(code(a).into()),
            Node::And(all) => Code::And(many(all)),
            Node::Or(all) => Code::Or(many(all)),
            Node::Implies(a, b) => Code::Or([Code::Not(code(a).into()), code(b)].into()),
            Node::Equal(a, b) => Code::Equal([code(a), code(b)].into()),
            Node::AtMost(a, b) => Code::AtMost([code(a), code(b)].into()),
            Node::Add(a, b) => Code::Add([code(a), code(b)].into()),
            Node::Sub(a, b) => Code::Sub([code(a), code(b)].into()),
            Node::Mod(a, modulus) => Code::Mod(code(a).into(), *modulus),
            Node::If(a, b, c) => Code::If([code(a), code(b), code(c)].into()),
            Node::All(variables, body) => {
                let mut inner = scope.to_vec();
                inner.extend(variables.iter().map(|(name, _)| *name));
                let mut code = self.compile(system, body, &inner);
                for (at, &(_, sort)) in variables.iter().enumerate().rev() {
                    let (from, count) = self.universe.domain(sort);
                    code = Code::All { slot: scope.len() + at, from, count, body: code.into() };
                }
                code
            }
        }
    }

    fn action(&self, system: &System, action: &Action) -> CompiledAction {
        let scope: Vec<Name> = action.over.iter().map(|(name, _)| *name).collect();
        let named = |terms: &[(Name, Term)]| {
            terms.iter().map(|(name, it)| (*name, self.compile(system, it, &scope))).collect()
        };
        CompiledAction {
            name: action.name,
            over: action.over.clone(),
            given: self.compile(system, &Term::conjunction(action.given.clone()), &scope),
            guards: named(&action.guards),
            properties: named(&action.properties),
            effects: action.effects.iter().map(|it| self.effect(system, &scope, it)).collect(),
        }
    }

    fn effect(
        &self,
        system: &System,
        scope: &[Name],
        effect: &super::system::Effect,
    ) -> CompiledEffect {
        let mut inner = scope.to_vec();
        let mut loops = Vec::new();
        for &(name, sort) in &effect.over {
            let (from, count) = self.universe.domain(sort);
            loops.push((inner.len(), from, count));
            inner.push(name);
        }
        CompiledEffect {
            place: self.place(system, effect.function, &effect.at, &inner).0,
            loops,
            only: self.compile(system, &effect.only, &inner),
            value: self.compile(system, &effect.value, &inner),
        }
    }

    fn clause(&self, system: &System, clause: &Clause) -> CompiledClause {
        let scope: Vec<Name> = clause.over.iter().map(|(name, _)| *name).collect();
        CompiledClause {
            name: clause.name,
            over: clause.over.clone(),
            body: self.compile(system, &clause.body, &scope),
        }
    }

    fn frame<'a>(&'a self, state: &'a State, parameters: &[i64]) -> Frame<'a> {
        let mut slots = [0; SLOTS];
        slots[..parameters.len()].copy_from_slice(parameters);
        Frame { slots, fixed: &self.fixed, state: &state.0 }
    }

    /// State of the machine before the first call.
    pub fn initial(&self) -> State {
        let mut state = State(vec![0; self.size]);
        for effect in &self.initial {
            self.write(&mut state, std::slice::from_ref(effect), &[]);
        }
        state
    }

    /// Assignments that these effects make: index in the state, and new value.
    fn writes(
        &self,
        state: &State,
        effects: &[CompiledEffect],
        parameters: &[i64],
    ) -> Vec<(usize, i64)> {
        let mut writes = Vec::new();
        let mut frame = self.frame(state, parameters);
        for effect in effects {
            for &(slot, from, _) in &effect.loops {
                frame.slots[slot] = from;
            }
            if effect.loops.iter().any(|&(_, _, count)| count == 0) {
                continue;
            }
            loop {
                if effect.only.value(&mut frame) != 0
                    && let Some(at) = effect.place.index(&mut frame)
                {
                    writes.push((at, effect.value.value(&mut frame)));
                }
                let next = effect
                    .loops
                    .iter()
                    .rposition(|&(slot, from, count)| frame.slots[slot] + 1 < from + count);
                let Some(at) = next else { break };
                frame.slots[effect.loops[at].0] += 1;
                for &(slot, from, _) in &effect.loops[at + 1..] {
                    frame.slots[slot] = from;
                }
            }
        }
        writes
    }

    fn write(&self, state: &mut State, effects: &[CompiledEffect], parameters: &[i64]) {
        for (at, value) in self.writes(state, effects, parameters) {
            state.0[at] = value;
        }
    }

    /// Number of actions of the system.
    pub fn actions(&self) -> usize {
        self.actions.len()
    }

    /// All values of the action's parameters for which the conditions that define the action hold.
    pub fn choices(&self, state: &State, action: usize) -> Vec<Vec<i64>> {
        let action = &self.actions[action];
        let mut frame = self.frame(state, &[]);
        self.each(&action.over, |values| {
            frame.slots[..values.len()].copy_from_slice(values);
            (action.given.value(&mut frame) != 0).then(|| values.to_vec())
        })
    }

    /// Names of the action's guards that do not hold with these parameters.
    pub fn unmet(&self, state: &State, action: usize, parameters: &[i64]) -> Vec<Name> {
        let mut frame = self.frame(state, parameters);
        let unmet = |(name, guard): &(Name, Code)| (guard.value(&mut frame) == 0).then_some(*name);
        self.actions[action].guards.iter().filter_map(unmet).collect()
    }

    /// Checks whether the action may happen with these parameters.
    ///
    /// # Errors
    /// First reason against the action: a guard that forbids it, or a property that it violates.
    pub fn permits(&self, state: &State, action: usize, parameters: &[i64]) -> Result<(), Refusal> {
        let action = &self.actions[action];
        let mut frame = self.frame(state, parameters);
        if action.given.value(&mut frame) == 0 {
            return Err(Refusal::Given);
        }
        for (name, guard) in &action.guards {
            if guard.value(&mut frame) == 0 {
                return Err(Refusal::Guard(name));
            }
        }
        for (name, property) in &action.properties {
            if property.value(&mut frame) == 0 {
                return Err(Refusal::Property(name));
            }
        }
        Ok(())
    }

    /// Performs the action with these parameters, which changes `state`.
    pub fn perform(&self, state: &mut State, action: usize, parameters: &[i64]) {
        self.write(state, &self.actions[action].effects, parameters);
    }

    /// First clause of the invariant that does not hold in `state`, with the values for which it
    /// fails; `None` if all clauses hold.
    pub fn broken(&self, state: &State) -> Option<(Name, Vec<i64>)> {
        self.invariant.iter().find_map(|clause| {
            let mut frame = self.frame(state, &[]);
            self.each(&clause.over, |values| {
                frame.slots[..values.len()].copy_from_slice(values);
                (clause.body.value(&mut frame) == 0).then(|| (clause.name, values.to_vec()))
            })
            .into_iter()
            .next()
        })
    }
}

/// Maximum number of variables of an action, including those of the quantifiers in it.
const SLOTS: usize = 12;
