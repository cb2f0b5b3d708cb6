//! Programs: the order in which a rank enqueues the steps of its calls, as `iris_kernels::program`
//! checks it.
//!
//! **Problem.** The slot rule treats a call as one unit: the call ends once, no step of it is
//! visible to peers outside of it, and the next call begins after all of its steps. In the code, a
//! call is a program of up to fifty launches and copies. So every program must keep to this, for
//! any number of parts and peers.
//!
//! **Solution.** The checks of `Program::check` are the guards of a transition system with one
//! action for each kind of step. A run of the system is any sequence of calls, each of any length.
//! The properties are the assumptions of the slot rule. A test compares the system with
//! `Program::check` on all short programs.
//!
//! **Assumptions of the next call.** If the call before was opened, it has ended. No copy of that
//! call is under way, and no step of it is visible to peers any more.
//!
//! **Limits.** Two promises of the runtime are not proved: a stream runs its work in the order in
//! which it was enqueued, and the step that closes a call waits for the side stream.

use super::rule::{Clauses, Numbers, Parameters, functions, starts_as};
use super::system::{Action, Clause, System};
use super::term::{Function, Sort, Term, all_of, apply, for_all, variable};

functions! {
    /// Functions that never change during a run.
    FIXED:
    /// Number of the first step.
    first(): Int;
}

functions! {
    /// Functions whose values make up the state.
    STATE:
    /// Number of the step that the rank enqueues next.
    at(Rank): Int;
    /// Whether a step has opened the rank's call.
    opened(Rank): Bool;
    /// Whether a step has ended the rank's call.
    ended(Rank): Bool;
    /// Whether the rank's call has enqueued copies on the side stream.
    forked(Rank): Bool;
    /// Whether the last step on the stream of the call is the launch that waits until peers have
    /// entered.
    behind(Rank): Bool;
    /// Whether the copies that the step with this number enqueued may still be under way.
    copying(Rank, Int): Bool;
}

/// Kind of a step, described by its effects.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Kind {
    /// Name of the action.
    pub name: &'static str,
    /// Whether the step opens the call.
    pub opens: bool,
    /// Whether the step accesses memory of peers.
    pub peers: bool,
    /// Whether the step ends the call.
    pub ends: bool,
    /// Whether the step is the launch that waits until peers have entered the call.
    pub is_open: bool,
    /// Whether the step waits for the side stream.
    pub joins: bool,
    /// Whether the step runs on the side stream.
    pub side: bool,
    /// Whether the step may begin while the step before it opens the call.
    pub early: bool,
}

impl Kind {
    /// All kinds of steps that a program may have.
    pub const ALL: &'static [Kind] = &[
        Kind { name: "local", ..Kind::NONE },
        Kind { name: "open", opens: true, is_open: true, ..Kind::NONE },
        Kind { name: "push first", opens: true, peers: true, ..Kind::NONE },
        Kind { name: "push", peers: true, ..Kind::NONE },
        Kind { name: "push last", peers: true, ends: true, ..Kind::NONE },
        Kind { name: "whole", opens: true, peers: true, ends: true, ..Kind::NONE },
        Kind { name: "copy", peers: true, side: true, ..Kind::NONE },
        Kind { name: "multiply early", early: true, ..Kind::NONE },
        Kind { name: "store early", peers: true, early: true, ..Kind::NONE },
        Kind { name: "close", ends: true, joins: true, ..Kind::NONE },
    ];

    const NONE: Kind = Kind {
        name: "",
        opens: false,
        peers: false,
        ends: false,
        is_open: false,
        joins: false,
        side: false,
        early: false,
    };

    /// Whether peers can observe the step.
    pub fn is_visible(&self) -> bool {
        self.opens || self.peers || self.ends
    }
}

/// Builds the rules of programs. Leaves out the clause named `off`, if one is given. The constants
/// of call numbers have no effect, because programs compare no numbers.
pub fn programs(_: Numbers, off: Option<&str>) -> System {
    let clauses = Clauses::without(off);
    let mut actions: Vec<Action> = Kind::ALL.iter().map(|kind| step(kind, &clauses)).collect();
    actions.push(next(&clauses));
    System {
        name: "programs",
        fixed: FIXED,
        state: STATE,
        axioms: Vec::new(),
        initial: STATE.iter().map(start).collect(),
        actions,
        invariant: invariant(),
        clauses: clauses.names(),
        takes: &[],
    }
}

fn start(function: &Function) -> super::system::Effect {
    match function.name {
        "at" => starts_as(function, first([])),
        _ => starts_as(function, false),
    }
}

fn no_copies(p: &Term) -> Term {
    let x = variable(("x", Sort::Int));
    for_all([&x], !copying([p, &x]))
}

fn step(kind: &Kind, clauses: &Clauses) -> Action {
    let Parameters { p, .. } = Parameters::new();
    let (i, x) = (at([&p]), variable(("x", Sort::Int)));
    let mut action = Action::new(kind.name, [&p]);
    if kind.opens {
        action = action
            .rule(clauses, "open: the call is not open yet", !opened([&p]))
            .property("one step opens a call", !opened([&p]));
    }
    if kind.is_visible() {
        action = action.rule(clauses, "visible: the call has not ended", !ended([&p]));
        if !kind.opens {
            action = action.rule(clauses, "visible: the call is open", opened([&p]));
        }
        let is_open = opened([&p]) | kind.opens;
        action = action
            .property("nothing is visible before the call opens", is_open)
            .property("nothing is visible after the call has ended", !ended([&p]));
    }
    if kind.ends {
        if !kind.joins {
            action = action.rule(clauses, "end: no copies are to be joined", !forked([&p]));
        }
        action = action
            .property("one step ends a call", !ended([&p]))
            .property("copies are over when the call ends", no_copies(&p) | kind.joins);
    }
    if kind.early {
        action = action
            .rule(clauses, "early: directly after the step that opens", behind([&p]))
            .property("a launch that begins early does so in an open call", opened([&p]));
    }
    action = action.set(&at([&p]), &i + 1);
    if kind.opens {
        action = action.set(&opened([&p]), true);
    }
    if kind.ends {
        action = action.set(&ended([&p]), true);
    }
    if kind.joins {
        action = action.set_each(&copying([&p, &x]), [&x], true.into(), false);
    }
    if kind.side {
        action.set(&forked([&p]), true).set(&copying([&p, &i]), true)
    } else {
        action.set(&behind([&p]), kind.is_open)
    }
}

/// Action that ends a program: the next step belongs to another call.
fn next(clauses: &Clauses) -> Action {
    let Parameters { p, .. } = Parameters::new();
    Action::new("next", [&p])
        .rule(clauses, "next: an open call has ended", opened([&p]).implies(ended([&p])))
        .property("the next call finds this one ended", opened([&p]).implies(ended([&p])))
        .property("the next call finds no copies under way", no_copies(&p))
        .set(&opened([&p]), false)
        .set(&ended([&p]), false)
        .set(&forked([&p]), false)
        .set(&behind([&p]), false)
}

fn invariant() -> Vec<Clause> {
    let Parameters { p, v, .. } = Parameters::new();
    vec![
        Clause::new("ended: was open", [&p], ended([&p]).implies(opened([&p]))),
        Clause::new("behind: is open", [&p], behind([&p]).implies(opened([&p]))),
        Clause::new(
            "copies: of an open call that has forked",
            [&p, &v],
            copying([&p, &v]).implies(all_of([forked([&p]), opened([&p]), !ended([&p])])),
        ),
    ]
}
