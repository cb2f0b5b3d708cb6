//! A user's kernel beside a call: it reads tiles as they arrive, and may run on when the call has ended.
//!
//! **Problem.** The kernel is counted out of no launch. The end of the call advances the number that the
//! kernel would read, and the next call lets peers write the tiles that it reads.
//!
//! **Solution.** A step in front of the call copies the number for the kernel, and waits until the
//! kernel of the call before is over. So neither the copy nor a tile changes under a kernel.
//!
//! **What it assumes of the slot rule.** A peer writes a tile of a call when this rank has entered that
//! call, signals behind its tile, and words are less than half the range away, since the kernel's call is
//! that of its rank.
//! It speaks of one tile from each rank to each other one, in the receiver's own memory.

use super::rule::{Clauses, ENTERED, NUMBER, Numbers, Parameters, functions, pattern, starts_as};
use super::system::{Action, Clause, Effect, System};
use super::term::{Function, Sort, Term, all_of, apply};

functions! {
    /// Functions that never change.
    FIXED:
    /// Number that the first call has.
    first(): Int;
}

functions! {
    /// Functions of the state.
    STATE:
    /// The call that the rank is in, or the next one.
    call(Rank): Int;
    /// The device word with the number of the call.
    number(Rank): Int;
    /// The last call in front of which the number was copied, so that its kernel may start.
    front(Rank): Int;
    /// The copied number.
    noted(Rank): Int;
    /// The last call that a launch of the rank began, so that peers see its entry.
    begun(Rank): Int;
    /// The last call whose kernel has started.
    started(Rank): Int;
    /// The number with which that kernel works.
    kernel(Rank): Int;
    /// The last call whose kernel is over.
    over(Rank): Int;
    /// The last call in which the first rank wrote its tile at the second.
    filled(Rank, Rank): Int;
    /// Numbers stored in the signal of the first rank at the second.
    stored(Rank, Rank, Int): Bool;
    /// Call up to which a kernel that acquires this store knows the tile's stores.
    view(Rank, Rank, Int): Int;
    /// The last call in which a kernel of the first rank saw the signal of the second.
    seen(Rank, Rank): Int;
    /// Call up to which kernels of the first rank know the stores of the second's tile.
    holds(Rank, Rank): Int;
}

/// The rule of kernels beside a call. Without the clause `off`, if it is one.
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
    // Rank p writes at rank q.
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
    // The kernel of rank p looks at what rank q sends.
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
