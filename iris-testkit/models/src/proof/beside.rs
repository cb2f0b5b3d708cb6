//! User's kernel beside a call: the kernel reads tiles as they arrive, and may still run when the
//! call has ended.
//!
//! **Problem.** The kernel belongs to no launch of the call, so the end of the call does not wait
//! for it. The end of the call advances the call number that the kernel would read, and the next
//! call lets peers overwrite the tiles that the kernel reads.
//!
//! **Solution.** A step before the call copies the call number for the kernel, and waits until the
//! kernel of the previous call is over. So neither the copied number nor a tile changes while a
//! kernel runs.
//!
//! **Assumptions about the slot rule.** A peer writes a tile of a call only after this rank has
//! entered the call. A peer signals after it has written its tile. Numbers that are compared are
//! less than half the range apart, because the kernel's call is the call that its rank is in. The
//! rule covers one tile from each rank to each other rank, stored directly into the receiver's own
//! memory.

use super::rule::{Clauses, ENTERED, NUMBER, Numbers, Parameters, functions, pattern, starts_as};
use super::system::{Action, Clause, Effect, System};
use super::term::{Function, Sort, Term, all_of, apply};

functions! {
    /// Functions that never change during a run.
    FIXED:
    /// Number that the first call has.
    first(): Int;
}

functions! {
    /// Functions whose values make up the state.
    STATE:
    /// Number of the call that the rank is in, or of its next call.
    call(Rank): Int;
    /// Value of the device word with the call number.
    number(Rank): Int;
    /// Last call for which the step before the call copied the number, so that its kernel may
    /// start.
    front(Rank): Int;
    /// Call number that was copied last.
    noted(Rank): Int;
    /// Last call that a launch of the rank began, so that peers see the rank's entry.
    begun(Rank): Int;
    /// Last call whose kernel has started.
    started(Rank): Int;
    /// Call number that the last started kernel uses.
    kernel(Rank): Int;
    /// Last call whose kernel is over.
    over(Rank): Int;
    /// Last call in which the first rank wrote its tile at the second rank.
    filled(Rank, Rank): Int;
    /// Whether the first rank has stored this number in its signal word at the second rank.
    stored(Rank, Rank, Int): Bool;
    /// Last call whose stores to the tile are visible to a kernel that acquires the store of this
    /// number.
    view(Rank, Rank, Int): Int;
    /// Last call in which a kernel of the first rank saw the signal of the second rank.
    seen(Rank, Rank): Int;
    /// Last call whose stores to the second rank's tile are visible to kernels of the first rank.
    holds(Rank, Rank): Int;
}

/// Builds the rule of kernels beside a call. Leaves out the clause named `off`, if one is given.
pub fn beside(numbers: Numbers, off: Option<&str>) -> System {
    let clauses = Clauses::without(off);
    let actions = actions(&clauses, &numbers);
    System {
        name: "kernel beside a call",
        fixed: FIXED,
        state: STATE,
        axioms: Vec::new(),
        initial: STATE.iter().map(start).collect(),
        actions,
        invariant: invariant(),
        clauses: clauses.names(),
        takes: &[ENTERED, "its tiles were written in this call", NUMBER],
    }
}

fn start(function: &Function) -> Effect {
    let (_, at) = pattern(function);
    match (function.name, at.last()) {
        ("call" | "number", _) => starts_as(function, first([])),
        ("seen", _) => starts_as(function, first([]) - 2),
        ("stored", Some(number)) => starts_as(function, number.is(first([]) - 1)),
        _ => starts_as(function, first([]) - 1),
    }
}

fn actions(clauses: &Clauses, numbers: &Numbers) -> Vec<Action> {
    let Parameters { p, q, v, .. } = Parameters::new();
    let (c, k) = (call([&p]), kernel([&p]));
    let other = p.is_not(&q);
    let note = Action::new("note", [&p])
        .given(all_of([front([&p]).below(&c), begun([&p]).below(&c)]))
        .rule(clauses, "note: the kernel before is over", over([&p]).at_least(&c - 1))
        .set(&noted([&p]), number([&p]))
        .set(&front([&p]), &c);
    let begin = Action::new("begin", [&p])
        .given(begun([&p]).below(&c))
        .rule(clauses, "begin: behind the copy of the number", front([&p]).is(&c))
        .set(&begun([&p]), &c);
    // Rank p writes its tile at rank q.
    let write = Action::new("write", [&p, &q])
        .given(all_of([other.clone(), begun([&p]).is(&c), begun([&q]).at_least(&c)]))
        .set(&filled([&p, &q]), &c)
        .property("no kernel reads the tile of an earlier call", over([&q]).at_least(&c - 1));
    let raise = Action::new("raise", [&p, &q])
        .given(all_of([other.clone(), filled([&p, &q]).is(&c)]))
        .set(&stored([&p, &q, &c]), true)
        .set(&view([&p, &q, &c]), &c);
    let finish = Action::new("finish", [&p])
        .given(begun([&p]).is(&c))
        .set(&number([&p]), number([&p]) + 1)
        .set(&call([&p]), &c + 1);
    let from = if clauses.has("start: with the copied number") { noted } else { number };
    let starts = Action::new("start", [&p])
        .given(started([&p]).below(front([&p])))
        .set(&kernel([&p]), from([&p]))
        .set(&started([&p]), front([&p]))
        .property("the kernel's number is that of its call", from([&p]).is(front([&p])));
    let runs = all_of([started([&p]).is(front([&p])), over([&p]).below(started([&p]))]);
    // The kernel of rank p loads the signal word of rank q.
    let see = Action::new("look", [&p, &q, &v])
        .given(all_of([
            other.clone(),
            runs.clone(),
            stored([&q, &p, &v]),
            numbers.in_window(&k, &v),
        ]))
        .rule(clauses, "look: the word reached the kernel's call", numbers.reached(&k, &v))
        .set(&seen([&p, &q]), &k)
        .acquires(
            clauses,
            "look: the kernel's SignalLoad acquires",
            &[(&holds([&p, &q]), &view([&q, &p, &v]))],
        );
    let read = Action::new("use", [&p, &q])
        .given(all_of([other, runs.clone()]))
        .rule(clauses, "use: after the tile's signal", seen([&p, &q]).is(&k))
        .property("the tile is of the kernel's call", filled([&q, &p]).is(&k))
        .property("the tile's stores are known", holds([&p, &q]).at_least(&k));
    let end = Action::new("end", [&p]).given(runs).set(&over([&p]), started([&p]));
    vec![note, begin, write, raise, finish, starts, see, read, end]
}

fn invariant() -> Vec<Clause> {
    let Parameters { p, q, v, .. } = Parameters::new();
    let c = call([&p]);
    let other = p.is_not(&q);
    vec![
        Clause::new(
            "call: numbers and steps",
            [&p],
            all_of([
                c.at_least(first([])),
                number([&p]).is(&c),
                begun([&p]).at_least(&c - 1),
                begun([&p]).at_most(front([&p])),
                front([&p]).at_most(&c),
                noted([&p]).is(front([&p])),
            ]),
        ),
        Clause::new(
            "kernel: of the last call, or the one before",
            [&p],
            all_of([
                kernel([&p]).is(started([&p])),
                started([&p]).at_most(front([&p])),
                over([&p]).at_most(started([&p])),
                over([&p]).at_least(front([&p]) - 1),
            ]),
        ),
        Clause::new(
            "filled: no later than both are",
            [&p, &q],
            other.implies(all_of([
                filled([&p, &q]).at_most(begun([&p])),
                filled([&p, &q]).at_most(begun([&q])),
            ])),
        ),
        Clause::new(
            "word: stands for its tile",
            [&p, &q, &v],
            all_of([other.clone(), stored([&p, &q, &v])])
                .implies(all_of([v.at_most(filled([&p, &q])), view([&p, &q, &v]).is(&v)])),
        ),
        Clause::new(
            "seen: is held",
            [&p, &q],
            other.implies(all_of([
                seen([&p, &q]).at_most(kernel([&p])),
                seen([&p, &q]).is(kernel([&p])).implies(all_of([
                    holds([&p, &q]).at_least(kernel([&p])),
                    filled([&q, &p]).at_least(kernel([&p])),
                ])),
            ])),
        ),
    ]
}
