//! Flags of the staging buffer: some workgroups of a device copy units of peers' shards into the
//! buffer, and other workgroups multiply these units.
//!
//! **Problem.** A unit always has the same place in the buffer, and its flag is never reset. A
//! workgroup must not mistake the flag of an earlier call for the flag of its own call, and must
//! not read a unit that is still being copied.
//!
//! **Solution.** A transition system of the flags of any number of devices. In it, an `Agent`
//! stands for a workgroup, and a `Word` for a unit with its flag. The replay checks the barriers
//! inside a workgroup.
//!
//! **Assumptions about the slot rule.** A workgroup at work has the number of its rank's call ("the
//! number is that of the call"). A rank ends its call only when all of its workgroups have been
//! counted out (`finish: all are counted out`), and the next launch comes after that.
//!
//! **A rank that gives up** goes on to the end of its call. The results of that call are void, but
//! its steps keep to the rule. The rank refreshes no flags, so the rule allows it no further call.

use super::rule::{Clauses, NUMBER, Numbers, Parameters, functions, pattern, starts_as};
use super::system::{Action, Clause, Effect, System};
use super::term::{Function, Sort, Term, all_of, apply, for_all, variable};

functions! {
    /// Functions that never change during a run.
    FIXED:
    /// Number that the first call has.
    first(): Int;
    /// Rank to whose device a workgroup belongs.
    rank(Agent): Rank;
    /// Workgroup that copies a unit in a given call of a rank.
    fetcher(Int, Rank, Word): Agent;
}

functions! {
    /// Functions whose values make up the state.
    STATE:
    /// Number of the call that the rank is in.
    call(Rank): Int;
    /// Whether a workgroup of the rank has given up, or was told that a peer has given up.
    quit(Rank): Bool;
    /// Whether the rank has given up and ended the call in which it did.
    dead(Rank): Bool;
    /// Last call out of which the workgroup was counted.
    over(Agent): Int;
    /// Last call whose data was copied to the unit.
    copied(Rank, Word): Int;
    /// Last call in which the unit's flag was raised.
    raised(Rank, Word): Int;
    /// Whether this number was stored in the unit's flag.
    stored(Rank, Word, Int): Bool;
    /// Last call whose copy to the unit is visible to a workgroup that acquires this number from
    /// the unit's flag.
    view(Rank, Word, Int): Int;
    /// Last call whose copy to the unit is visible to the workgroup.
    knows(Agent, Word): Int;
    /// Last call for which the workgroup saw that the unit's flag had reached the call's number.
    seen(Agent, Word): Int;
    /// Last call in which the workgroup read the unit.
    used(Agent, Word): Int;
}

/// Builds the rule of staging flags. Leaves out the clause named `off`, if one is given.
pub fn staging(numbers: Numbers, off: Option<&str>) -> System {
    let clauses = Clauses::without(off);
    let actions = actions(&clauses, &numbers);
    System {
        name: "staging flags",
        fixed: FIXED,
        state: STATE,
        axioms: Vec::new(),
        initial: STATE.iter().map(start).collect(),
        actions,
        invariant: invariant(&numbers),
        clauses: clauses.names(),
        takes: &[NUMBER, "finish: all are counted out"],
    }
}

fn start(function: &Function) -> Effect {
    let (_, at) = pattern(function);
    match (function.name, at.last()) {
        ("call", _) => starts_as(function, first([])),
        ("quit" | "dead", _) => starts_as(function, false),
        ("seen" | "used", _) => starts_as(function, first([]) - 2),
        ("stored", Some(number)) => starts_as(function, number.is(first([]) - 1)),
        _ => starts_as(function, first([]) - 1),
    }
}

fn actions(clauses: &Clauses, numbers: &Numbers) -> Vec<Action> {
    let Parameters { g, h, p, w, v, .. } = Parameters::new();
    let mine = rank([&h]);
    let c = call([&mine]);
    let at_work = over([&h]).below(&c);
    let fetches = at_work.clone() & fetcher([&c, &mine, &w]).is(&h);
    let unread = for_all([&g], rank([&g]).is(&mine).implies(used([&g, &w]).below(&c)));
    let fetch = Action::new("fetch", [&h, &w])
        .given(fetches.clone())
        .rule(clauses, "fetch: before the unit's flag", raised([&mine, &w]).below(&c))
        .property("no workgroup has read the unit in this call", unread)
        .set(&copied([&mine, &w]), &c);
    let raise = Action::new("raise", [&h, &w])
        .given(fetches)
        .rule(clauses, "raise: after the unit's copy", copied([&mine, &w]).is(&c))
        .set(&raised([&mine, &w]), &c)
        .set(&stored([&mine, &w, &c]), true)
        .set(&view([&mine, &w, &c]), clauses.carries("raise: FlagStore releases", &c));
    let known = numbers.refresh_before(&(&c - 1));
    let wait = Action::new("await", [&h, &w, &v])
        .given(all_of([
            at_work.clone(),
            stored([&mine, &w, &v]),
            stored([&mine, &w, &known]).implies(v.at_least(&known)),
        ]))
        .rule(
            clauses,
            "await: the flag reached this call",
            clauses.reached("await: flags compared by the difference", numbers, &c, &v),
        )
        .set(&seen([&h, &w]), &c)
        .acquires(
            clauses,
            "await: FlagLoad acquires",
            &[(&knows([&h, &w]), &view([&mine, &w, &v]))],
        )
        .property("the flag is within the window", numbers.in_window(&c, &v))
        .property("a flag that was left alone does not look new", v.at_least(&c));
    let read = Action::new("multiply", [&h, &w])
        .given(at_work.clone())
        .rule(clauses, "multiply: after the unit's flag", seen([&h, &w]).is(&c))
        .property("the unit is of this call", copied([&mine, &w]).is(&c))
        .property("the unit's copy is over, and known to be", knows([&h, &w]).at_least(&c))
        .set(&used([&h, &w]), &c);
    let count = Action::new("count", [&h]).given(at_work).set(&over([&h]), &c);
    let now = call([&p]);
    let all_over = for_all([&g], rank([&g]).is(&p).implies(over([&g]).at_least(&now)));
    let stamp = Action::new("stamp", [&p, &w])
        .given(!dead([&p]))
        .rule(clauses, "stamp: all workgroups are counted out", all_over.clone())
        .set(&stored([&p, &w, &now]), true)
        // The store is relaxed here: it makes no copy of this call visible to a workgroup that
        // loads it.
        .set(&view([&p, &w, &now]), &now - 1);
    let x = variable(("x", Sort::Word));
    let due = now.modulo(numbers.period).is(0);
    let quits = Action::new("quit", [&p]).given(!dead([&p])).set(&quit([&p]), true);
    let die = Action::new("die", [&p]).given(all_of([quit([&p]), !dead([&p]), all_over.clone()]));
    let die = if clauses.has("die: no call after one that was given up") {
        die.set(&dead([&p]), true)
    } else {
        die.set(&call([&p]), &now + 1).set(&quit([&p]), false)
    };
    let finish = Action::new("finish", [&p])
        .given(all_of([all_over, !quit([&p])]))
        .rule(
            clauses,
            "finish: all flags were refreshed",
            for_all([&x], due.implies(stored([&p, &x, &now]))),
        )
        .set(&call([&p]), &now + 1);
    vec![fetch, raise, wait, read, count, stamp, finish, quits, die]
}

fn invariant(numbers: &Numbers) -> Vec<Clause> {
    let Parameters { h, p, w, v, .. } = Parameters::new();
    let mine = rank([&h]);
    let c = call([&mine]);
    vec![
        Clause::new(
            "call: numbers and states",
            [&p],
            all_of([call([&p]).at_least(first([])), dead([&p]).implies(quit([&p]))]),
        ),
        Clause::new(
            "over: this call or the last",
            [&h],
            all_of([over([&h]).at_most(&c), over([&h]).at_least(&c - 1)]),
        ),
        Clause::new(
            "flag: no later than the call",
            [&p, &w, &v],
            stored([&p, &w, &v])
                .implies(all_of([v.at_least(first([]) - 1), v.at_most(call([&p]))])),
        ),
        Clause::new(
            "flag: of this call, if a workgroup is at work",
            [&h, &w],
            all_of([over([&h]).below(&c), stored([&mine, &w, &c])])
                .implies(all_of([raised([&mine, &w]).is(&c), view([&mine, &w, &c]).is(&c)])),
        ),
        Clause::new(
            "raised: after the copy",
            [&p, &w],
            all_of([
                raised([&p, &w]).at_most(call([&p])),
                copied([&p, &w]).at_most(call([&p])),
                raised([&p, &w]).is(call([&p])).implies(copied([&p, &w]).is(call([&p]))),
            ]),
        ),
        Clause::new(
            "seen: is known",
            [&h, &w],
            all_of([
                seen([&h, &w]).at_most(&c),
                seen([&h, &w])
                    .is(&c)
                    .implies(all_of([raised([&mine, &w]).is(&c), knows([&h, &w]).at_least(&c)])),
            ]),
        ),
        Clause::new("used: after the flag", [&h, &w], used([&h, &w]).at_most(raised([&mine, &w]))),
        Clause::new(
            "flag: refreshed",
            [&p, &w, &v],
            all_of([v.at_least(first([])), v.below(call([&p])), v.modulo(numbers.period).is(0)])
                .implies(stored([&p, &w, &v])),
        ),
    ]
}
