//! Invariant of the slot rule: clauses that hold in every state that ranks can reach. Every clause
//! is about a pair of ranks; a third rank is never needed.

use super::*;
use crate::proof::system::{Clause, Effect};
use crate::proof::term::{Function, Sort, Term, all_of, any_of, variable};

/// Assumptions about the plans of calls, which tests of iris-ops check.
pub(super) fn plans() -> Vec<Clause> {
    let (p, q) = (variable(("p", Sort::Rank)), variable(("q", Sort::Rank)));
    let (k, v) = (variable(("k", Sort::Tile)), variable(("v", Sort::Int)));
    let planned = all_of([plan([&v, &p, &q, &k]), !numbered([&k])]);
    vec![
        Clause::new(
            "a tile that carries its number has two slots",
            [&k],
            numbered([&k]).implies(!direct([&k])),
        ),
        Clause::new(
            "a tile that carries its number has one writer",
            [&v, &p, &q, &k],
            all_of([plan([&v, &p, &q, &k]), numbered([&k])]).implies(theirs([&p, &q, &k])),
        ),
        Clause::new("a rank has a thread", [&p], rank([&one([&p])]).is(&p)),
        Clause::new(
            "a tile has a word that is awaited",
            [&v, &p, &q, &k],
            planned.implies(awaited([&v, &p, &q, &word([&v, &p, &q, &k])])),
        ),
    ]
}

/// Initial value of a function, before the first call.
pub(super) fn start(function: &Function) -> Effect {
    let before = || first([]) - 1;
    let (_, at) = pattern(function);
    match function.name {
        "call" | "number" => starts_as(function, first([])),
        "idle" => starts_as(function, true),
        // At first nothing has been written, read or seen: these functions have the value that
        // stands for no call.
        "recorded" | "record_read" | "wrote" | "seen" | "filled" | "taken" | "pulls"
        | "done_seen" => starts_as(function, first([]) - 2),
        // At first words hold the number of the call before the first one, and that call is over.
        "entered" | "entry_view" | "knows" | "holds" | "view" | "used" | "done_view"
        | "done_known" => starts_as(function, before()),
        "stored" | "labelled" | "done" => {
            let number = at.last().expect("a number");
            starts_as(function, number.is(before()))
        }
        _ => starts_as(function, false),
    }
}

/// Clauses of the invariant of the slot rule.
pub(super) fn slot_rule(numbers: &Numbers) -> Vec<Clause> {
    [
        ranks(),
        knowledge(),
        tiles(numbers),
        words(numbers),
        takes(),
        labels(numbers),
        shards(numbers),
    ]
    .concat()
}

/// Term for whether the rank's threads have been counted as finished in this call.
fn out(p: &Term, v: &Term) -> Term {
    v.below(call([p])) | all_of([v.is(call([p])), counted([p])])
}

fn ranks() -> Vec<Clause> {
    let Parameters { p, q, v, .. } = Parameters::new();
    let other = p.is_not(&q);
    let c = call([&p]);
    let well = all_of([counted([&p]), !quit([&p])]);
    let w = recorded([&p, &q, &is_odd(&v)]);
    let r = record_read([&q, &p, &is_odd(&v)]);
    vec![
        Clause::new(
            "call: numbers and states",
            [&p],
            all_of([
                c.at_least(first([])),
                idle([&p]).implies(all_of([
                    !counted([&p]),
                    !advanced([&p]),
                    !quit([&p]),
                    !dead([&p]),
                ])),
                number([&p]).is(&c + advanced([&p]).choose(1, 0)),
                dead([&p]).implies(quit([&p])),
                used([&p]).at_most(&c),
            ]),
        ),
        Clause::new(
            "entry: of this call or the one before",
            [&p, &q],
            other.implies(all_of([
                entered([&p, &q]).at_least(&c - 1),
                entered([&p, &q]).at_most(newest(&p)),
            ])),
        ),
        Clause::new(
            "entry: one call ahead",
            [&p, &q],
            other.implies(all_of([
                entered([&p, &q]).at_most(call([&q]) + 1),
                c.at_most(call([&q]) + 2),
            ])),
        ),
        Clause::new(
            "entry: all peers, when counted out",
            [&p, &q],
            all_of([other.clone(), well]).implies(entered([&p, &q]).is(&c)),
        ),
        Clause::new(
            "entry: what its store carries",
            [&p, &q, &v],
            all_of([other.clone(), v.at_least(first([]) - 1), v.at_most(entered([&p, &q]))])
                .implies(entry_view([&p, &q, &v]).is(&v)),
        ),
        Clause::new(
            "records: of calls entered",
            [&p, &q, &v],
            other.implies(all_of([
                w.at_most(entered([&p, &q])),
                w.below(first([])) | is_odd(&w).is(is_odd(&v)),
                r.at_most(entered([&p, &q])),
                r.at_most(newest(&q)),
                r.below(first([])) | is_odd(&r).is(is_odd(&v)),
                all_of([v.at_least(first([])), v.at_most(entered([&p, &q])), !light([&v])])
                    .implies(w.at_least(&v)),
            ])),
        ),
    ]
}

fn knowledge() -> Vec<Clause> {
    let Parameters { g, q, .. } = Parameters::new();
    let me = rank([&g]);
    let c = call([&me]);
    let other = me.is_not(&q);
    let known = knows([&g, &q]);
    let peer = |term: Term| other.implies(term);
    vec![
        Clause::new(
            "knows: no more than there is",
            [&g, &q],
            peer(all_of([known.at_least(first([]) - 1), known.at_most(newest(&q))])),
        ),
        Clause::new("knows: no less than two calls ago", [&g, &q], peer(known.at_least(&c - 2))),
        Clause::new(
            "knows: with credit, the call before",
            [&g, &q],
            peer(credit([&g, &q]).implies(all_of([known.at_least(&c - 1), !idle([&me])]))),
        ),
        Clause::new(
            "knows: with the entry, this call",
            [&g, &q],
            peer(came([&g, &q]).implies(all_of([
                known.at_least(&c),
                entered([&q, &me]).at_least(&c),
                !idle([&me]),
            ]))),
        ),
        Clause::new(
            "knows: with the record, the entry",
            [&g, &q],
            peer(agreed([&g, &q]).implies(came([&g, &q]))),
        ),
        Clause::new(
            "knows: when counted out, the call before",
            [&g, &q],
            all_of([other.clone(), counted([&me]), !quit([&me])]).implies(known.at_least(&c - 1)),
        ),
    ]
}

fn tiles(_: &Numbers) -> Vec<Clause> {
    let Parameters { g, p, q, k, v, .. } = Parameters::new();
    let other = p.is_not(&q);
    let last = filled([&p, &q, &k]);
    let read = taken([&q, &p, &k]);
    let slot = |number: &Term| {
        number.below(first([]))
            | all_of([
                direct([&k]) | odd([&k]).is(is_odd(number)),
                any_of([direct([&k]), numbered([&k])]).implies(plan([number, &p, &q, &k])),
            ])
    };
    let c = call([&p]);
    let comes = |number: &Term| all_of([plan([number, &p, &q, &k]), !numbered([&k])]);
    vec![
        Clause::new(
            "filled: no later than both are",
            [&p, &q, &k],
            other.implies(all_of([
                last.at_most(newest(&p)),
                last.at_most(call([&q]) + 1),
                slot(&last),
                any_of([last.below(first([])), !direct([&k]), last.at_most(newest(&q))]),
            ])),
        ),
        Clause::new(
            "filled: by whom",
            [&g, &q, &k],
            rank([&g]).is_not(&q).implies(wrote([&g, &q, &k]).at_most(filled([
                &rank([&g]),
                &q,
                &k,
            ]))),
        ),
        Clause::new(
            "taken: what was filled",
            [&p, &q, &k],
            other.implies(all_of([read.at_most(&last), read.at_most(newest(&q)), slot(&read)])),
        ),
        Clause::new(
            "filled: all, when counted out",
            [&p, &q, &k],
            all_of([other.clone(), counted([&p]), !quit([&p]), plan([&c, &p, &q, &k])])
                .implies(last.at_least(&c)),
        ),
        Clause::new(
            "filled: all that comes, when counted out",
            [&p, &q, &k],
            all_of([other.clone(), counted([&q]), !quit([&q]), comes(&call([&q]))]).implies(
                all_of([
                    last.at_least(call([&q])),
                    holds([&one([&q]), &p, &word([&call([&q]), &p, &q, &k])]).at_least(call([&q])),
                ]),
            ),
        ),
        Clause::new(
            "filled: all that came in calls that are over",
            [&p, &q, &k, &v],
            all_of([other.clone(), v.at_least(first([])), v.below(call([&q])), comes(&v)])
                .implies(last.at_least(&v)),
        ),
        Clause::new(
            "filled: all of calls that are over",
            [&p, &q, &k, &v],
            all_of([other.clone(), v.at_least(first([])), v.below(&c), plan([&v, &p, &q, &k])])
                .implies(last.at_least(&v)),
        ),
    ]
}

fn words(numbers: &Numbers) -> Vec<Clause> {
    let Parameters { p, q, k, w, v, .. } = Parameters::new();
    let other = p.is_not(&q);
    let there = all_of([other.clone(), stored([&p, &q, &w, &v])]);
    let stands = all_of([
        v.at_least(first([])),
        plan([&v, &p, &q, &k]),
        !numbered([&k]),
        word([&v, &p, &q, &k]).is(&w),
    ]);
    vec![
        Clause::new(
            "word: within the window",
            [&p, &q, &w, &v],
            there.implies(all_of([
                v.at_least(first([]) - 1),
                v.at_most(newest(&p)),
                v.at_most(call([&q]) + 2),
                view([&p, &q, &w, &v]).is(&v),
            ])),
        ),
        Clause::new(
            "word: stands for its tiles",
            [&p, &q, &w, &v, &k],
            all_of([there.clone(), stands]).implies(filled([&p, &q, &k]).at_least(&v)),
        ),
        Clause::new(
            "word: refreshed",
            [&p, &q, &w, &v],
            all_of([
                other.clone(),
                v.modulo(numbers.period).is(0),
                v.at_least(first([])),
                v.below(call([&p])),
            ])
            .implies(stored([&p, &q, &w, &v])),
        ),
    ]
}

fn takes() -> Vec<Clause> {
    let Parameters { h, p, k, w, v, .. } = Parameters::new();
    let me = rank([&h]);
    let c = call([&me]);
    let other = me.is_not(&p);
    let known = holds([&h, &p, &w]);
    vec![
        Clause::new(
            "holds: no more than there is",
            [&h, &p, &w],
            other.implies(known.at_most(newest(&p))),
        ),
        Clause::new(
            "holds: tiles that were filled",
            [&h, &p, &w, &v, &k],
            all_of([
                other.clone(),
                v.at_least(first([])),
                v.at_most(&known),
                awaited([&v, &p, &me, &w]),
                plan([&v, &p, &me, &k]),
                !numbered([&k]),
                word([&v, &p, &me, &k]).is(&w),
            ])
            .implies(filled([&p, &me, &k]).at_least(&v)),
        ),
        Clause::new(
            "seen: is held",
            [&h, &p, &w],
            other.implies(all_of([
                seen([&h, &p, &w]).at_most(newest(&me)),
                all_of([seen([&h, &p, &w]).is(&c), c.at_least(first([]))])
                    .implies(known.at_least(&c)),
            ])),
        ),
        Clause::new(
            "holds: all words, when counted out",
            [&h, &p, &w],
            all_of([other.clone(), counted([&me]), !quit([&me]), awaited([&c, &p, &me, &w])])
                .implies(known.at_least(&c)),
        ),
        Clause::new(
            "holds: all words of calls that are over",
            [&h, &p, &w, &v],
            all_of([other.clone(), v.at_least(first([])), v.below(&c), awaited([&v, &p, &me, &w])])
                .implies(known.at_least(&v)),
        ),
    ]
}

fn labels(numbers: &Numbers) -> Vec<Clause> {
    let Parameters { p, q, k, v, .. } = Parameters::new();
    let other = p.is_not(&q);
    vec![
        Clause::new(
            "label: within the window",
            [&p, &q, &k, &v],
            all_of([other.clone(), labelled([&p, &q, &k, &v])]).implies(all_of([
                v.at_least(first([]) - 2),
                v.at_most(newest(&p)),
                v.at_most(call([&q]) + 1),
                all_of([v.at_least(first([])), plan([&v, &p, &q, &k]), numbered([&k])])
                    .implies(filled([&p, &q, &k]).at_least(&v)),
            ])),
        ),
        Clause::new(
            "label: refreshed",
            [&p, &q, &k, &v],
            all_of([
                other,
                numbered([&k]),
                theirs([&p, &q, &k]),
                newest_refresh(numbers, &k, &v).is(&v),
                v.at_least(first([])),
                v.below(call([&p])),
            ])
            .implies(labelled([&p, &q, &k, &v]) | labelled([&p, &q, &k, &(&v - 2)])),
        ),
    ]
}

fn shards(numbers: &Numbers) -> Vec<Clause> {
    let Parameters { p, q, v, .. } = Parameters::new();
    let other = p.is_not(&q);
    let c = call([&p]);
    let last = pulls([&q, &p]);
    vec![
        Clause::new(
            "done: of calls that are counted out",
            [&q, &p, &v],
            all_of([other.clone(), done([&q, &p, &v])]).implies(all_of([
                v.at_least(first([]) - 1),
                v.at_most(call([&p]) + 2),
                done_view([&q, &p, &v]).is(&v),
                v.below(first([])) | out(&q, &v),
            ])),
        ),
        Clause::new(
            "done: refreshed",
            [&q, &p, &v],
            all_of([
                other.clone(),
                v.modulo(numbers.period).is(0),
                v.at_least(first([])),
                v.below(call([&q])),
            ])
            .implies(done([&q, &p, &v])),
        ),
        Clause::new(
            "pull: of a call that both are in",
            [&q, &p],
            other.implies(all_of([
                last.at_most(newest(&q)),
                last.below(first([])) | all_of([pulled([&last]), last.at_most(newest(&p))]),
            ])),
        ),
        Clause::new(
            "pull: over, when done was seen",
            [&p, &q],
            other.implies(all_of([
                done_seen([&p, &q]).at_most(newest(&p)),
                all_of([done_seen([&p, &q]).is(&c), c.at_least(first([]))]).implies(all_of([
                    done_known([&p, &q]).at_least(&c),
                    out(&q, &c),
                    counted([&p]),
                ])),
            ])),
        ),
        Clause::new(
            "told: by a rank that left a call that pulls",
            [&p, &q],
            all_of([other.clone(), dead([&p]), pulled([&c])])
                .implies(told([&p, &q]) | done_seen([&p, &q]).is(&c)),
        ),
        Clause::new(
            "pull: over in calls that are over",
            [&p, &q, &v],
            all_of([other, pulled([&v]), v.at_least(first([])), v.below(&c)])
                .implies(all_of([done_known([&p, &q]).at_least(&v), out(&q, &v)])),
        ),
    ]
}
