//! Terms of first-order logic, in which rules and invariants are written once: [`super::smt`]
//! prints them for the solver, [`super::concrete`] evaluates them.

pub mod text;

use std::fmt;
use std::ops::{Add, BitAnd, BitOr, Not, Sub};
use std::sync::Arc;

/// Name of a function, a variable or a clause.
pub type Name = &'static str;

/// Sort of a term: the kind of value that it has.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Sort {
    /// Truth value: true or false.
    Bool,
    /// Integer without bounds, which stands for the number of a call.
    Int,
    /// Rank of the world.
    Rank,
    /// Thread of a rank, or a copy engine that works for the rank.
    Agent,
    /// Word that one rank writes at another rank.
    Word,
    /// Place for data that one rank writes at another rank.
    Tile,
}

/// Function of a system, with the sorts of its arguments and of its value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Function {
    /// Name of the function.
    pub name: Name,
    /// Sorts of the function's arguments.
    pub arguments: &'static [Sort],
    /// Sort of the function's value.
    pub value: Sort,
}

/// Variable with its sort: a parameter of an action, or a variable bound by a quantifier.
pub type Variable = (Name, Sort);

/// Term of first-order logic; clones are cheap.
#[derive(Clone, PartialEq, Eq)]
pub struct Term(Arc<Node>);

/// Outermost operation of a term, with its operands.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Node {
    /// Constant truth value.
    Bool(bool),
    /// Constant number.
    Int(i64),
    /// Variable with this name and sort.
    Variable(Name, Sort),
    /// Application of the function with this name to arguments.
    Apply(Name, Vec<Term>),
    /// Negation of a term.
    Not(Term),
    /// Conjunction: all of these terms hold.
    And(Vec<Term>),
    /// Disjunction: at least one of these terms holds.
    Or(Vec<Term>),
    /// Implication: if the first term holds, so does the second.
    Implies(Term, Term),
    /// Equality of two terms.
    Equal(Term, Term),
    /// Comparison `<=` of two integers.
    AtMost(Term, Term),
    /// Sum of two integers.
    Add(Term, Term),
    /// Difference of two integers.
    Sub(Term, Term),
    /// Remainder of an integer, never negative, by a positive number.
    Mod(Term, i64),
    /// Conditional: the second term if the first holds, else the third.
    If(Term, Term, Term),
    /// Universal quantifier: the term holds for all values of these variables.
    All(Vec<Variable>, Term),
}

impl Term {
    /// Outermost operation of the term.
    pub fn node(&self) -> &Node {
        &self.0
    }

    fn new(node: Node) -> Self {
        Self(Arc::new(node))
    }

    /// Makes the application of the function `name` to these arguments.
    pub fn applied(name: Name, arguments: Vec<Term>) -> Self {
        Term::new(Node::Apply(name, arguments))
    }

    /// Makes the conjunction of these terms: all of them hold.
    pub fn conjunction(terms: Vec<Term>) -> Self {
        Term::new(Node::And(terms))
    }

    /// Makes the term `self == other`.
    pub fn is(&self, other: impl Into<Term>) -> Term {
        Term::new(Node::Equal(self.clone(), other.into()))
    }

    /// Makes the term `self != other`.
    pub fn is_not(&self, other: impl Into<Term>) -> Term {
        !self.is(other)
    }

    /// Makes the term `self <= other`.
    pub fn at_most(&self, other: impl Into<Term>) -> Term {
        Term::new(Node::AtMost(self.clone(), other.into()))
    }

    /// Makes the term `self >= other`.
    pub fn at_least(&self, other: impl Into<Term>) -> Term {
        other.into().at_most(self)
    }

    /// Makes the term `self < other`.
    pub fn below(&self, other: impl Into<Term>) -> Term {
        !self.at_least(other)
    }

    /// Makes the term `self > other`.
    pub fn above(&self, other: impl Into<Term>) -> Term {
        !self.at_most(other)
    }

    /// Makes the implication: if `self` holds, so does `other`.
    pub fn implies(&self, other: impl Into<Term>) -> Term {
        Term::new(Node::Implies(self.clone(), other.into()))
    }

    /// Makes the term for the remainder of `self` by `modulus`, which is never negative.
    pub fn modulo(&self, modulus: i64) -> Term {
        Term::new(Node::Mod(self.clone(), modulus))
    }

    /// Makes the conditional: `yes` if `self` holds, else `no`.
    pub fn choose(&self, yes: impl Into<Term>, no: impl Into<Term>) -> Term {
        Term::new(Node::If(self.clone(), yes.into(), no.into()))
    }

    /// Makes the term for the larger of `self` and `other`.
    pub fn max(&self, other: impl Into<Term>) -> Term {
        let other = other.into();
        self.at_least(&other).choose(self, &other)
    }

    /// Operands of the term's outermost operation, in order.
    pub fn operands(&self) -> Vec<&Term> {
        match self.node() {
            Node::Bool(_) | Node::Int(_) | Node::Variable(..) => Vec::new(),
            Node::Apply(_, all) | Node::And(all) | Node::Or(all) => all.iter().collect(),
            Node::Not(a) | Node::Mod(a, _) | Node::All(_, a) => vec![a],
            Node::Implies(a, b)
            | Node::Equal(a, b)
            | Node::AtMost(a, b)
            | Node::Add(a, b)
            | Node::Sub(a, b) => vec![a, b],
            Node::If(a, b, c) => vec![a, b, c],
        }
    }

    /// Copy of this term with `replace` applied to every application and variable in it, innermost
    /// first.
    pub fn rebuild(&self, replace: &dyn Fn(&Node) -> Option<Term>) -> Term {
        let again = |term: &Term| term.rebuild(replace);
        let many = |terms: &[Term]| terms.iter().map(again).collect::<Vec<_>>();
        let node = match self.node() {
            Node::Bool(_) | Node::Int(_) => return self.clone(),
            Node::Variable(name, sort) => Node::Variable(name, *sort),
            Node::Apply(name, arguments) => Node::Apply(name, many(arguments)),
            Node::Not(a) => Node::Not(again(a)),
            Node::And(all) => Node::And(many(all)),
            Node::Or(all) => Node::Or(many(all)),
            Node::Implies(a, b) => Node::Implies(again(a), again(b)),
            Node::Equal(a, b) => Node::Equal(again(a), again(b)),
            Node::AtMost(a, b) => Node::AtMost(again(a), again(b)),
            Node::Add(a, b) => Node::Add(again(a), again(b)),
            Node::Sub(a, b) => Node::Sub(again(a), again(b)),
            Node::Mod(a, modulus) => Node::Mod(again(a), *modulus),
            Node::If(a, b, c) => Node::If(again(a), again(b), again(c)),
            Node::All(variables, body) => Node::All(variables.clone(), again(body)),
        };
        replace(&node).unwrap_or_else(|| Term::new(node))
    }

    /// Copy of this term in which `values` replace `variables`. Variables that quantifiers bind
    /// have names of their own, so they do not clash.
    pub fn with(&self, variables: &[Variable], values: &[Term]) -> Term {
        self.rebuild(&|node| match node {
            Node::Variable(name, _) => {
                let at = variables.iter().position(|(known, _)| known == name)?;
                values.get(at).cloned()
            }
            _ => None,
        })
    }

    /// Whether `test` holds for some operation in the term.
    pub fn any(&self, test: &dyn Fn(&Node) -> bool) -> bool {
        test(self.node()) || self.operands().into_iter().any(|term| term.any(test))
    }
}

/// Makes a term from a variable.
pub fn variable((name, sort): Variable) -> Term {
    Term::new(Node::Variable(name, sort))
}

/// Makes the application of the function `name` to these arguments.
pub fn apply<const N: usize>(name: Name, arguments: [&Term; N]) -> Term {
    Term::new(Node::Apply(name, arguments.map(Term::clone).into()))
}

/// Makes the conjunction of these terms: all of them hold.
pub fn all_of<const N: usize>(terms: [Term; N]) -> Term {
    Term::new(Node::And(terms.into()))
}

/// Makes the disjunction of these terms: at least one of them holds.
pub fn any_of<const N: usize>(terms: [Term; N]) -> Term {
    Term::new(Node::Or(terms.into()))
}

/// Name and sort of a term that is a variable.
pub fn declared(term: &Term) -> Variable {
    match term.node() {
        Node::Variable(name, sort) => (*name, *sort),
        _ => unreachable!("{term:?} is no variable"),
    }
}

/// Makes the quantified term: `body` holds for all values of these variables.
pub fn for_all<const N: usize>(variables: [&Term; N], body: Term) -> Term {
    Term::new(Node::All(variables.map(declared).into(), body))
}

impl From<&Term> for Term {
    fn from(term: &Term) -> Self {
        term.clone()
    }
}

impl From<i64> for Term {
    fn from(value: i64) -> Self {
        Term::new(Node::Int(value))
    }
}

impl From<bool> for Term {
    fn from(value: bool) -> Self {
        Term::new(Node::Bool(value))
    }
}

impl Not for Term {
    type Output = Term;
    fn not(self) -> Term {
        Term::new(Node::Not(self))
    }
}

impl Not for &Term {
    type Output = Term;
    fn not(self) -> Term {
        !self.clone()
    }
}

impl<T: Into<Term>> BitAnd<T> for Term {
    type Output = Term;
    fn bitand(self, other: T) -> Term {
        Term::new(Node::And(vec![self, other.into()]))
    }
}

impl<T: Into<Term>> BitOr<T> for Term {
    type Output = Term;
    fn bitor(self, other: T) -> Term {
        Term::new(Node::Or(vec![self, other.into()]))
    }
}

impl<T: Into<Term>> Add<T> for &Term {
    type Output = Term;
    fn add(self, other: T) -> Term {
        Term::new(Node::Add(self.clone(), other.into()))
    }
}

impl<T: Into<Term>> Sub<T> for &Term {
    type Output = Term;
    fn sub(self, other: T) -> Term {
        Term::new(Node::Sub(self.clone(), other.into()))
    }
}

impl<T: Into<Term>> Add<T> for Term {
    type Output = Term;
    fn add(self, other: T) -> Term {
        &self + other
    }
}

impl<T: Into<Term>> Sub<T> for Term {
    type Output = Term;
    fn sub(self, other: T) -> Term {
        &self - other
    }
}

impl fmt::Debug for Term {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&text::text(self))
    }
}
