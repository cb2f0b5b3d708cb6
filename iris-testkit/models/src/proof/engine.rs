//! Copy engines: copies on a side stream, each followed by a signal whose number the engine reads
//! from flag 0.
//!
//! **Problem.** A copy engine does not wait, polls no word and cannot be stopped. If the launch
//! that opens a call fails, the copies of the call run all the same. Peers must not mistake the
//! signals of these copies for signals of a call that was opened, however many calls the rank
//! counts after the call in which it gave up.
//!
//! **Solution.** The launch that opens a call stores the call's number into flag 0 once all peers
//! have entered; if it fails, it stores nothing. After each copy, the engine sends the number in
//! flag 0 as the signal. So a new number stands for data of a call that was opened, and an old
//! number for data that was sent earlier.
//!
//! **Assumptions about the slot rule.** A peer whose entry was seen is in this call or a later one.
//! The slot rule covers what a peer does with a signal: it treats a copy as `push_direct`, and a
//! signal of this call as `raise`.
//!
//! **Limits.** It is an axiom that peers see an engine's second copy only after its first one; see
//! PROTOCOL.md.

use super::rule::{Clauses, IN_CALL, Numbers, Parameters, functions, starts_as};
use super::system::{Action, Clause, Effect, System};
use super::term::{Function, Sort, Term, all_of, any_of, apply, for_all, variable};

functions! {
    /// Functions that never change during a run.
    FIXED:
    /// Number that the first call has.
    first(): Int;
    /// Whether the first rank's engines send this part to the second rank in this call.
    plan(Int, Rank, Rank, Word): Bool;
}

functions! {
    /// Functions whose values make up the state.
    STATE:
    /// Number of the call that the rank is in.
    call(Rank): Int;
    /// Whether the rank has given up. Its later calls fail, but the copies of those calls run.
    quit(Rank): Bool;
    /// Whether the rank has stored to the abort words of all peers.
    told(Rank): Bool;
    /// Last call for which the first rank has seen the entry of the second rank.
    came(Rank, Rank): Int;
    /// Number in flag 0.
    flag(Rank): Int;
    /// Last call that a launch of the rank opened.
    opened(Rank): Int;
    /// Last call whose opening launch has ended, with success or not, so that engines may copy.
    begun(Rank): Int;
    /// Last call in which the part was copied from the first rank to the second.
    moved(Rank, Rank, Word): Int;
    /// Whether engines of the first rank have sent this number to the second rank, as the part's
    /// signal.
    sent(Rank, Rank, Word, Int): Bool;
}

/// Builds the rule of copy engines. Leaves out the clause named `off`, if one is given. The
/// constants of call numbers have no effect, because an engine compares no numbers.
pub fn engines(_: Numbers, off: Option<&str>) -> System {
    let clauses = Clauses::without(off);
    let actions = actions(&clauses);
    System {
        name: "copy engines",
        fixed: FIXED,
        state: STATE,
        axioms: Vec::new(),
        initial: STATE.iter().map(start).collect(),
        actions,
        invariant: invariant(),
        clauses: clauses.names(),
        takes: &[IN_CALL],
    }
}

fn start(function: &Function) -> Effect {
    match function.name {
        "call" => starts_as(function, first([])),
        "quit" | "told" | "sent" => starts_as(function, false),
        _ => starts_as(function, first([]) - 1),
    }
}

fn actions(clauses: &Clauses) -> Vec<Action> {
    let Parameters { p, q, w, .. } = Parameters::new();
    let (r, x) = (variable(("r", Sort::Rank)), variable(("x", Sort::Word)));
    let c = call([&p]);
    let other = p.is_not(&q);
    let arrive = Action::new("arrive", [&p, &q])
        .given(all_of([other.clone(), !quit([&p]), call([&q]).at_least(&c)]))
        .set(&came([&p, &q]), &c);
    let quits = Action::new("quit", [&p]).set(&quit([&p]), true);
    let tell = Action::new("tell", [&p]).given(quit([&p])).set(&told([&p]), true);
    let all_came = for_all([&r], p.is_not(&r).implies(came([&p, &r]).is(&c)));
    let open = Action::new("open", [&p])
        .given(all_of([!quit([&p]), begun([&p]).below(&c)]))
        .rule(clauses, "open: after the entries of all peers", all_came)
        .set(&flag([&p]), &c)
        .set(&opened([&p]), &c)
        .set(&begun([&p]), &c);
    let fail = Action::new("fail", [&p])
        .given(all_of([quit([&p]), begun([&p]).below(&c)]))
        .rule(clauses, "fail: the peers were told", told([&p]))
        .set(&begun([&p]), &c);
    let fail =
        if clauses.has("fail: flag 0 keeps its number") { fail } else { fail.set(&flag([&p]), &c) };
    let planned = all_of([other, plan([&c, &p, &q, &w])]);
    let copy = Action::new("copy", [&p, &q, &w])
        .given(planned.clone())
        .rule(clauses, "copy: after the launch that opens", begun([&p]).is(&c))
        .set(&moved([&p, &q, &w]), &c)
        .property(
            "the peer is in this call, or was told that this rank gave up",
            any_of([call([&q]).at_least(&c), told([&p])]),
        );
    let number = if clauses.has("signal: the number in flag 0") { flag([&p]) } else { c.clone() };
    let was_sent = any_of([
        number.below(first([])),
        !plan([&number, &p, &q, &w]),
        sent([&p, &q, &w, &number]),
    ]);
    let signal = Action::new("signal", [&p, &q, &w])
        .given(planned)
        .rule(clauses, "signal: after its data", moved([&p, &q, &w]).is(&c))
        .set(&sent([&p, &q, &w, &number]), true)
        .property(
            "a signal of this call stands for data of this call, which was opened",
            number.is(&c).implies(all_of([opened([&p]).is(&c), moved([&p, &q, &w]).is(&c)])),
        )
        .property("an earlier number says nothing new", number.is(&c) | was_sent);
    let all_sent = for_all(
        [&r, &x],
        all_of([p.is_not(&r), plan([&c, &p, &r, &x])]).implies(sent([&p, &r, &x, &c])),
    );
    let stamp = Action::new("stamp", [&p])
        .given(!quit([&p]))
        .rule(clauses, "stamp: the copies are over", all_sent.clone())
        .set(&flag([&p]), &c);
    // The call number advances without end, even on a rank that has given up.
    let next = Action::new("next", [&p])
        .rule(clauses, "next: the copies are over", flag([&p]).is(&c).implies(all_sent))
        .set(&call([&p]), &c + 1);
    vec![arrive, quits, tell, open, fail, copy, signal, stamp, next]
}

fn invariant() -> Vec<Clause> {
    let Parameters { p, q, w, v, .. } = Parameters::new();
    let c = call([&p]);
    let other = p.is_not(&q);
    let planned = all_of([other.clone(), plan([&v, &p, &q, &w])]);
    vec![
        Clause::new(
            "call: numbers and states",
            [&p],
            all_of([
                c.at_least(first([])),
                flag([&p]).at_most(&c),
                opened([&p]).at_most(&c),
                begun([&p]).at_most(&c),
                told([&p]).implies(quit([&p])),
            ]),
        ),
        Clause::new(
            "came: both are in the call",
            [&p, &q],
            other.implies(all_of([
                came([&p, &q]).at_most(&c),
                came([&p, &q]).at_most(call([&q])),
                opened([&p]).is(&c).implies(came([&p, &q]).is(&c)),
            ])),
        ),
        Clause::new(
            "begun: opened, or the peers were told",
            [&p],
            begun([&p]).is(&c).implies(opened([&p]).is(&c) | told([&p])),
        ),
        Clause::new(
            "flag: of an opened call",
            [&p, &q, &w, &v],
            all_of([planned.clone(), v.is(&c), flag([&p]).is(&c)]).implies(opened([&p]).is(&c)),
        ),
        Clause::new(
            "flag: of a call whose copies are over",
            [&p, &q, &w, &v],
            all_of([planned.clone(), v.is(flag([&p])), v.at_least(first([])), v.below(&c)])
                .implies(sent([&p, &q, &w, &v])),
        ),
        Clause::new("moved: no later than the call", [&p, &q, &w], moved([&p, &q, &w]).at_most(&c)),
        Clause::new(
            "sent: of an opened call",
            [&p, &q, &w, &v],
            all_of([other, sent([&p, &q, &w, &v])]).implies(all_of([
                v.at_most(&c),
                all_of([plan([&v, &p, &q, &w]), v.is(&c)]).implies(opened([&p]).is(&c)),
            ])),
        ),
    ]
}
