//! Transition systems: functions that make up the state, their initial values, actions, and an
//! invariant.

pub use super::term::declared;
use super::term::{Function, Name, Node, Term, Variable};

/// Statement with a name, about all values of some variables.
#[derive(Clone, Debug)]
pub struct Clause {
    /// Name of the clause.
    pub name: Name,
    /// Variables for all of whose values the clause holds.
    pub over: Vec<Variable>,
    /// Statement about the variables.
    pub body: Term,
}

/// Assignment that an action makes: `function` gets `value` at the arguments `at`, for all values
/// of the variables in `over` for which `only` holds.
#[derive(Clone, Debug)]
pub struct Effect {
    /// Function of the state whose value changes.
    pub function: Name,
    /// Arguments of the function: variables of `over`, each once, and terms over the action's
    /// parameters.
    pub at: Vec<Term>,
    /// Variables of the assignment, which is made for all of their values that satisfy `only`.
    pub over: Vec<Variable>,
    /// Condition on the variables: the assignment is made only for values that satisfy it.
    pub only: Term,
    /// New value of the function: a term over the state before the action.
    pub value: Term,
}

impl Effect {
    /// Term for whether the assignment applies to these arguments, and the assigned value.
    fn at(&self, arguments: &[Term]) -> (Term, Term) {
        let mut bound = Vec::new();
        let mut same = Vec::new();
        for (at, argument) in self.at.iter().zip(arguments) {
            match at.node() {
                Node::Variable(name, sort) if self.over.contains(&(name, *sort)) => {
                    bound.push(((*name, *sort), argument.clone()));
                }
                _ => same.push(at.is(argument)),
            }
        }
        let (over, values): (Vec<_>, Vec<_>) = bound.into_iter().unzip();
        same.push(self.only.with(&over, &values));
        (Term::conjunction(same), self.value.with(&over, &values))
    }
}

/// Action of a rank, or of its memory, that may change the state.
#[derive(Clone, Debug)]
pub struct Action {
    /// Name of the action.
    pub name: Name,
    /// Parameters of the action.
    pub over: Vec<Variable>,
    /// Conditions that define the action and the values that memory may return.
    pub given: Vec<Term>,
    /// Guards, with their names: conditions under which the rule allows the action.
    pub guards: Vec<(Name, Term)>,
    /// Assignments to the state that the action makes.
    pub effects: Vec<Effect>,
    /// Properties, with their names, that must hold whenever the action happens.
    pub properties: Vec<(Name, Term)>,
}

/// Transition system with its properties, and the invariant that proves them.
#[derive(Clone, Debug)]
pub struct System {
    /// Name of the system.
    pub name: Name,
    /// Functions that never change during a run.
    pub fixed: &'static [Function],
    /// Functions whose values make up the state.
    pub state: &'static [Function],
    /// Assumptions about the fixed functions.
    pub axioms: Vec<Clause>,
    /// Values of the state's functions before the first action.
    pub initial: Vec<Effect>,
    /// Actions of the system.
    pub actions: Vec<Action>,
    /// Clauses of the invariant that the proof shows.
    pub invariant: Vec<Clause>,
    /// Names of all clauses of the rule that can be switched off.
    pub clauses: Vec<Name>,
    /// Names of clauses and properties of the slot rule on which this rule relies.
    pub takes: &'static [Name],
}

impl Clause {
    /// Makes the statement `body` about all values of the variables `over`.
    pub fn new<const N: usize>(name: Name, over: [&Term; N], body: Term) -> Self {
        Self { name, over: over.map(declared).into(), body }
    }

    /// Statement for these values of the variables.
    pub fn of(&self, values: &[Term]) -> Term {
        self.body.with(&self.over, values)
    }
}

impl Action {
    /// Makes an action that is always possible and changes nothing.
    pub fn new<const N: usize>(name: Name, over: [&Term; N]) -> Self {
        Self {
            name,
            over: over.map(declared).into(),
            given: Vec::new(),
            guards: Vec::new(),
            effects: Vec::new(),
            properties: Vec::new(),
        }
    }

    /// Adds a condition to the definition of the action.
    #[must_use]
    pub fn given(mut self, term: Term) -> Self {
        self.given.push(term);
        self
    }

    /// Adds the guard `term` with this name: the rule allows the action only if it holds.
    #[must_use]
    pub fn guard(mut self, name: Name, term: Term) -> Self {
        self.guards.push((name, term));
        self
    }

    /// Adds a property: `term` must hold whenever the action happens.
    #[must_use]
    pub fn property(mut self, name: Name, term: Term) -> Self {
        self.properties.push((name, term));
        self
    }

    /// Assigns `value` to one value of a function; `place` is the function applied to its
    /// arguments.
    #[must_use]
    pub fn set(self, place: &Term, value: impl Into<Term>) -> Self {
        self.set_each(place, [], true.into(), value)
    }

    /// Assigns `value` to values of a function, for all values of the given variables for which
    /// `only` holds; `place` is the function applied to its arguments.
    #[must_use]
    pub fn set_each<const N: usize>(
        mut self,
        place: &Term,
        over: [&Term; N],
        only: Term,
        value: impl Into<Term>,
    ) -> Self {
        self.effects.push(assign(place, over.map(declared).into(), only, value.into()));
        self
    }

    /// Value that the term `term` has after the action.
    pub fn after(&self, term: &Term) -> Term {
        term.rebuild(&|node| {
            let Node::Apply(name, arguments) = node else { return None };
            let mut value: Option<Term> = None;
            for effect in self.effects.iter().filter(|effect| effect.function == *name) {
                let now = || Term::applied(name, arguments.clone());
                let before = value.clone().unwrap_or_else(now);
                let (only, new) = effect.at(arguments);
                value = Some(only.choose(new, before));
            }
            value
        })
    }
}

/// Makes an assignment of `value` to a function; `place` is the function applied to the arguments
/// at which its value changes.
pub fn assign(place: &Term, over: Vec<Variable>, only: Term, value: Term) -> Effect {
    let Node::Apply(function, at) = place.node() else { unreachable!("{place:?} is no place") };
    Effect { function, at: at.clone(), over, only, value }
}

impl System {
    /// Function of the system with this name.
    pub fn function(&self, name: Name) -> Option<&'static Function> {
        let (fixed, state) = (self.fixed, self.state);
        fixed.iter().chain(state).find(|function| function.name == name)
    }

    /// Action of the system with this name.
    pub fn action(&self, name: Name) -> Option<&Action> {
        self.actions.iter().find(|action| action.name == name)
    }

    /// Names in `takes` of this system that are neither a clause nor a property of `other`.
    pub fn not_given_by(&self, other: &System) -> Vec<Name> {
        let properties = other.actions.iter().flat_map(|action| &action.properties);
        let given: Vec<Name> =
            properties.map(|(name, _)| *name).chain(other.clauses.iter().copied()).collect();
        self.takes.iter().copied().filter(|name| !given.contains(name)).collect()
    }

    /// Faults in the text of the system itself, for tests: functions or variables that nobody has
    /// declared, or functions without an initial value.
    pub fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        let mut look = |place: String, over: &[Variable], term: &Term| {
            if term.any(&|node| match node {
                Node::Apply(name, arguments) => self
                    .function(name)
                    .is_none_or(|function| function.arguments.len() != arguments.len()),
                _ => false,
            }) {
                faults.push(format!("{place}: a function that is not declared"));
            }
            if let Some(name) = free(term, over) {
                faults.push(format!("{place}: {name} is not declared"));
            }
        };
        for clause in self.invariant.iter().chain(&self.axioms) {
            look(clause.name.into(), &clause.over, &clause.body);
        }
        for action in &self.actions {
            let named = action.guards.iter().chain(&action.properties).map(|(_, term)| term);
            for term in action.given.iter().chain(named) {
                look(action.name.into(), &action.over, term);
            }
            for effect in &action.effects {
                let over = [action.over.clone(), effect.over.clone()].concat();
                for term in [&effect.only, &effect.value].into_iter().chain(&effect.at) {
                    look(action.name.into(), &over, term);
                }
            }
        }
        for function in self.state {
            if !self.initial.iter().any(|effect| effect.function == function.name) {
                faults.push(format!("{} has no initial value", function.name));
            }
        }
        faults
    }
}

/// Name of a variable that occurs in the term but is neither in `over` nor bound in the term.
fn free(term: &Term, over: &[Variable]) -> Option<Name> {
    match term.node() {
        Node::Variable(name, _) => (!over.iter().any(|(known, _)| known == name)).then_some(name),
        Node::All(variables, body) => free(body, &[over, variables].concat()),
        _ => term.operands().into_iter().find_map(|term| free(term, over)),
    }
}

impl Action {
    /// Conjunction of the conditions and guards under which the action can happen.
    pub fn enabled(&self) -> Term {
        let guards = self.guards.iter().map(|(_, term)| term.clone());
        Term::conjunction(self.given.iter().cloned().chain(guards).collect())
    }
}
