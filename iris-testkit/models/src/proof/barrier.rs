//! Rule of the device barrier, as a transition system. It is separate from the slot rule, because
//! calls of a barrier write no entry records and use other words. "Rank" means a member of the
//! group of ranks that meets. Every call has the barrier of one fixed phase, and may have barriers
//! of other phases.

use super::rule::{Clauses, Numbers, Parameters, functions, pattern, starts_as};
use super::system::{Action, Clause, Effect, System};
use super::term::{Function, Sort, Term, all_of, apply, for_all, variable};

functions! {
    /// Functions that never change during a run.
    FIXED:
    /// Number that the first call has.
    first(): Int;
    /// Phase of the barrier that every call has.
    always(): Word;
    /// Whether a call has the barrier of this phase.
    used(Int, Word): Bool;
}

functions! {
    /// Functions whose values make up the state.
    STATE:
    /// Number of the call that the rank is in or, if it is idle, of its next call.
    call(Rank): Int;
    /// Whether the rank is idle: no launch of its next call has begun.
    idle(Rank): Bool;
    /// Whether a thread of the rank has given up, or was told that a peer has given up.
    quit(Rank): Bool;
    /// Whether the rank has given up and ended its call.
    dead(Rank): Bool;
    /// Last call in which the rank did the work that comes before the barrier of this phase.
    worked(Rank, Word): Int;
    /// Last call in which the first rank arrived at the second, in this phase.
    arrived(Rank, Rank, Word): Int;
    /// Whether the first rank has stored this number in its barrier word at the second rank.
    stored(Rank, Rank, Word, Int): Bool;
    /// Last call whose work by the first rank is visible to a member that acquires the store of
    /// this number, which the first rank made into its barrier word at the second rank.
    view(Rank, Rank, Word, Int): Int;
    /// Last call for which the second rank's work before the barrier of this phase is visible to
    /// the first rank.
    knows(Rank, Rank, Word): Int;
    /// Last call that the rank ended before it had done its work, because the rank gave up or a
    /// clause is switched off.
    missed(Rank): Int;
    /// Last call for which the first rank saw that the second rank's barrier word had reached the
    /// call's number.
    seen(Rank, Rank, Word): Int;
}

/// Builds the rule of the device barrier. Leaves out the clause named `off`, if one is given.
pub fn barrier(numbers: Numbers, off: Option<&str>) -> System {
    let clauses = Clauses::without(off);
    let actions = actions(&clauses, &numbers);
    let v = variable(("v", Sort::Int));
    System {
        name: "device barrier",
        fixed: FIXED,
        state: STATE,
        axioms: vec![Clause::new("one phase is always used", [&v], used([&v, &always([])]))],
        initial: STATE.iter().map(start).collect(),
        actions,
        invariant: invariant(&numbers),
        clauses: clauses.names(),
        takes: &[],
    }
}

fn start(function: &Function) -> Effect {
    let (_, at) = pattern(function);
    match (function.name, at.last()) {
        ("call", _) => starts_as(function, first([])),
        ("idle", _) => starts_as(function, true),
        ("arrived" | "seen" | "missed", _) => starts_as(function, first([]) - 2),
        ("worked" | "view" | "knows", _) => starts_as(function, first([]) - 1),
        ("stored", Some(number)) => starts_as(function, number.is(first([]) - 1)),
        _ => starts_as(function, false),
    }
}

fn newest(p: &Term) -> Term {
    call([p]) - idle([p]).choose(1, 0)
}

fn actions(clauses: &Clauses, numbers: &Numbers) -> Vec<Action> {
    let Parameters { p, q, w, v, .. } = Parameters::new();
    let (r, x) = (variable(("r", Sort::Rank)), variable(("x", Sort::Word)));
    let c = call([&p]);
    let in_call = all_of([!idle([&p]), !dead([&p])]);
    let begin =
        Action::new("begin", [&p]).given(all_of([idle([&p]), !dead([&p])])).set(&idle([&p]), false);
    let work = Action::new("work", [&p, &w]).given(in_call.clone()).set(&worked([&p, &w]), &c);
    let arrive = Action::new("arrive", [&p, &q, &w])
        .given(all_of([p.is_not(&q), in_call.clone()]))
        .rule(clauses, "arrive: after the work of all threads", worked([&p, &w]).is(&c))
        .set(&arrived([&p, &q, &w]), &c)
        .set(&stored([&p, &q, &w, &c]), true)
        .set(&view([&p, &q, &w, &c]), clauses.carries("arrive: BarrierStore releases", &c));
    let known = numbers.refresh_before(&(knows([&p, &q, &always([])]) - 1));
    let look = Action::new("look", [&p, &q, &w, &v])
        .given(all_of([
            p.is_not(&q),
            in_call.clone(),
            used([&c, &w]),
            stored([&q, &p, &w, &v]),
            stored([&q, &p, &w, &known]).implies(v.at_least(&known)),
        ]))
        .rule(
            clauses,
            "look: the word reached this call",
            clauses.reached("look: compared by the difference", numbers, &c, &v),
        )
        .set(&seen([&p, &q, &w]), &c)
        .acquires(
            clauses,
            "look: BarrierLoad acquires",
            &[(&knows([&p, &q, &w]), &view([&q, &p, &w, &v]))],
        )
        .property("the word is within the window", numbers.in_window(&c, &v))
        .property("a word that was left alone does not look new", v.at_least(&c));
    let pass = Action::new("pass", [&p, &q, &w])
        .given(all_of([p.is_not(&q), in_call.clone(), used([&c, &w])]))
        .rule(clauses, "pass: the member's word was seen", seen([&p, &q, &w]).is(&c))
        .property(
            "what the member did before is over, and known to be",
            all_of([
                worked([&q, &w]).at_least(&c),
                knows([&p, &q, &w]).at_least(&c),
                missed([&q]).is_not(&c),
            ]),
        );
    let quits = Action::new("quit", [&p]).given(in_call.clone()).set(&quit([&p]), true);
    let all_seen = for_all(
        [&r, &x],
        all_of([r.is_not(&p), used([&c, &x])]).implies(seen([&p, &r, &x]).is(&c)),
    );
    let all_worked = for_all([&x], used([&c, &x]).implies(worked([&p, &x]).is(&c)));
    let stamp = Action::new("stamp", [&p, &q, &w])
        .given(all_of([p.is_not(&q), in_call.clone()]))
        .rule(clauses, "stamp: after the work of the call", all_worked.clone())
        .set(&stored([&p, &q, &w, &c]), true)
        .set(&view([&p, &q, &w, &c]), clauses.carries("stamp: StampStore releases", &c));
    let finish = Action::new("finish", [&p])
        .given(all_of([in_call.clone(), !quit([&p])]))
        .set(&missed([&p]), all_worked.choose(missed([&p]), &c))
        .rule(clauses, "finish: all members were seen", all_seen)
        .rule(clauses, "finish: after the work of the call", all_worked)
        .rule(
            clauses,
            "finish: all words were refreshed",
            for_all(
                [&r, &x],
                all_of([r.is_not(&p), c.modulo(numbers.period).is(0)])
                    .implies(stored([&p, &r, &x, &c])),
            ),
        )
        .set(&call([&p]), &c + 1)
        .set(&idle([&p]), true);
    let die = Action::new("die", [&p]).given(all_of([in_call, quit([&p])]));
    let die = if clauses.has("die: no call after one that was given up") {
        die.set(&dead([&p]), true)
    } else {
        die.set(&missed([&p]), &c)
            .set(&call([&p]), &c + 1)
            .set(&idle([&p]), true)
            .set(&quit([&p]), false)
    };
    vec![begin, work, arrive, look, pass, quits, stamp, finish, die]
}

fn invariant(numbers: &Numbers) -> Vec<Clause> {
    let Parameters { p, q, w, v, .. } = Parameters::new();
    let other = p.is_not(&q);
    let c = call([&p]);
    let last = arrived([&p, &q, &w]);
    let there = all_of([other.clone(), stored([&p, &q, &w, &v])]);
    let past = all_of([other.clone(), v.at_least(first([])), v.below(&c)]);
    vec![
        Clause::new(
            "call: numbers and states",
            [&p],
            all_of([
                c.at_least(first([])),
                idle([&p]).implies(all_of([!quit([&p]), !dead([&p])])),
                dead([&p]).implies(quit([&p])),
                missed([&p]).below(first([])),
            ]),
        ),
        Clause::new("worked: no later than it is", [&p, &w], worked([&p, &w]).at_most(newest(&p))),
        Clause::new(
            "arrived: no later than it is",
            [&p, &q, &w],
            other.implies(all_of([
                last.at_most(newest(&p)),
                last.below(first([])) | stored([&p, &q, &w, &last]),
            ])),
        ),
        Clause::new(
            "word: within the window, after the work",
            [&p, &q, &w, &v],
            there.implies(all_of([
                v.at_least(first([]) - 1),
                v.at_most(newest(&p)),
                view([&p, &q, &w, &v]).is(&v),
                all_of([v.at_least(first([])), used([&v, &w])])
                    .implies(worked([&p, &w]).at_least(&v)),
            ])),
        ),
        Clause::new(
            "word: refreshed",
            [&p, &q, &w, &v],
            all_of([past.clone(), v.modulo(numbers.period).is(0)])
                .implies(stored([&p, &q, &w, &v])),
        ),
        Clause::new(
            "passed: all calls that are over",
            [&p, &q, &w, &v],
            all_of([past, used([&v, &w])]).implies(all_of([
                knows([&p, &q, &w]).at_least(&v),
                worked([&q, &w]).at_least(&v),
                worked([&p, &w]).at_least(&v),
                v.at_most(call([&q])),
            ])),
        ),
        Clause::new(
            "seen: is known",
            [&p, &q, &w],
            other.implies(all_of([
                seen([&p, &q, &w]).at_most(newest(&p)),
                all_of([seen([&p, &q, &w]).is(&c), c.at_least(first([]))]).implies(all_of([
                    knows([&p, &q, &w]).at_least(&c),
                    worked([&q, &w]).at_least(&c),
                    c.at_most(call([&q])),
                ])),
            ])),
        ),
        Clause::new(
            "passed: one call ahead",
            [&p, &q],
            other.implies(all_of([
                c.at_most(call([&q]) + 1),
                knows([&p, &q, &always([])]).at_least(&c - 1),
            ])),
        ),
        Clause::new(
            "knows: no more than there is",
            [&p, &q, &w],
            other.implies(all_of([
                knows([&p, &q, &w]).at_least(first([]) - 1),
                knows([&p, &q, &w]).at_most(newest(&q)),
            ])),
        ),
    ]
}
