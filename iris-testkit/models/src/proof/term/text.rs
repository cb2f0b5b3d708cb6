//! Terms as SMT-LIB text.

use std::fmt::Write as _;

use super::{Node, Sort, Term, Variable};

/// Name of a sort in SMT-LIB text.
pub fn sort(sort: Sort) -> &'static str {
    match sort {
        Sort::Bool => "Bool",
        Sort::Int => "Int",
        Sort::Rank => "Rank",
        Sort::Agent => "Agent",
        Sort::Word => "Word",
        Sort::Tile => "Tile",
    }
}

/// Converts a term to SMT-LIB text.
pub fn text(term: &Term) -> String {
    let mut out = String::new();
    put(&mut out, term);
    out
}

/// Appends the SMT-LIB text of `term` to `out`.
pub fn put(out: &mut String, term: &Term) {
    let mut list = |head: &str, terms: &[&Term]| {
        out.push('(');
        out.push_str(head);
        for term in terms {
            out.push(' ');
            put(out, term);
        }
        out.push(')');
    };
    match term.node() {
        Node::And(all) if all.is_empty() => out.push_str("true"),
        Node::Or(all) if all.is_empty() => out.push_str("false"),
        Node::Apply(name, all) if all.is_empty() => out.push_str(name),
        Node::Apply(name, all) => list(name, &all.iter().collect::<Vec<_>>()),
        Node::And(all) => list("and", &all.iter().collect::<Vec<_>>()),
        Node::Or(all) => list("or", &all.iter().collect::<Vec<_>>()),
        Node::Not(a) => list("not", &[a]),
        Node::Implies(a, b) => list("=>", &[a, b]),
        Node::Equal(a, b) => list("=", &[a, b]),
        Node::AtMost(a, b) => list("<=", &[a, b]),
        Node::Add(a, b) => list("+", &[a, b]),
        Node::Sub(a, b) => list("-", &[a, b]),
        Node::If(a, b, c) => list("ite", &[a, b, c]),
        Node::Mod(a, modulus) => list("mod", &[a, &Term::from(*modulus)]),
        Node::Bool(value) => {
            let _ = write!(out, "{value}");
        }
        Node::Int(value) if *value < 0 => {
            let _ = write!(out, "(- {})", value.unsigned_abs());
        }
        Node::Int(value) => {
            let _ = write!(out, "{value}");
        }
        Node::Variable(name, _) => out.push_str(name),
        Node::All(variables, body) => {
            out.push_str("(forall ");
            bind(out, variables);
            out.push(' ');
            put(out, body);
            out.push(')');
        }
    }
}

/// Appends the list of a quantifier's variables, with their sorts.
pub fn bind(out: &mut String, variables: &[Variable]) {
    out.push('(');
    for (name, of) in variables {
        let _ = write!(out, "({name} {})", sort(*of));
    }
    out.push(')');
}
