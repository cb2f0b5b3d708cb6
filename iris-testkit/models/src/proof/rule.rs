//! Slot rule as a transition system: the steps that ranks and their threads may take, and the
//! properties that must hold at each step.
//!
//! This file is long because the rule is one text whose guards are compared with each other.
//!
//! The rule is written once, as terms. [`super::smt`] prints them for the proof, where the numbers
//! of ranks, threads, words, tiles and calls have no bounds. [`super::concrete`] evaluates them,
//! for the replay of executions and for searches with small constants.
//!
//! **Calls** are integers without bounds; memory holds them modulo [`Numbers::range`]. Numbers in
//! words are compared by [`Numbers::reached`], which stands for `Call::reached_by` of iris-sync.
//! The lemmas of [`super::wrap`] show that the two agree on machine words.
//!
//! **Memory** behaves as in C++11 for words that one rank writes (release, acquire, relaxed; no
//! load buffering). A word is modelled as the set of numbers that were ever stored in it; each
//! number has a view, the work that its store makes visible. A load may return any of these
//! numbers, except numbers older than one that the loading thread knows to have been stored. Two
//! functions describe what thread g knows of another rank. `knows(g, q)`: all work that q did
//! before it launched the call of this number. `holds(g, p, w)`: all work that is made visible by
//! p's store of this number to word w.
//!
//! **Plans** are functions that all ranks agree on and that never change: they say which tiles and
//! words a call uses.
//!
//! **A rank that has given up** takes no step after the call in which it gave up. So the proof
//! needs no bound on the number of calls that such a rank counts later.

pub mod invariant;

use std::cell::RefCell;

use super::system::{Action, Effect, System, assign, declared};
use super::term::{Function, Name, Sort, Term, all_of, any_of, apply, for_all, variable};

/// Declares the functions of a rule: a table of all of them, and for each a Rust function that
/// applies it to terms.
macro_rules! functions {
    ($(#[$about:meta])* $table:ident: $($(#[$doc:meta])* $name:ident($($argument:ident),*): $value:ident;)*) => {
        $(#[$about])*
        pub const $table: &[Function] = &[$(Function {
            name: stringify!($name),
            arguments: &[$(Sort::$argument),*],
            value: Sort::$value,
        }),*];
        $($(#[$doc])*
        pub(super) fn $name<const N: usize>(arguments: [&Term; N]) -> Term {
            apply(stringify!($name), arguments)
        })*
    };
}
pub(super) use functions;

functions! {
    /// Functions that never change during a run: the plans of calls, and which thread belongs to
    /// which rank.
    FIXED:
    /// Number that the first call has.
    first(): Int;
    /// Rank that a thread belongs to.
    rank(Agent): Rank;
    /// Some thread of the rank.
    one(Rank): Agent;
    /// Whether the first rank writes the tile at the second in this call.
    plan(Int, Rank, Rank, Tile): Bool;
    /// Whether the tile lies in the receiver's own memory, without a second buffer: in C, or in a
    /// workspace that copy engines fill.
    direct(Tile): Bool;
    /// Whether the tile carries the number of its call itself, as LL words do.
    numbered(Tile): Bool;
    /// Whether the tile is one that the first rank writes at the second and refreshes there.
    theirs(Rank, Rank, Tile): Bool;
    /// Word at the second rank by which the first signals this tile in this call.
    word(Int, Rank, Rank, Tile): Word;
    /// Whether the second rank waits for this word, which the first rank sets, in this call.
    awaited(Int, Rank, Rank, Word): Bool;
    /// Whether the tile is in the slot that calls with odd numbers use.
    odd(Tile): Bool;
    /// Whether ranks read each other's memory in this call.
    pulled(Int): Bool;
    /// Whether the call writes no entry records, because its messages carry the values for which
    /// records would be compared.
    light(Int): Bool;
}

functions! {
    /// Functions whose values make up the state.
    STATE:
    /// Number of the call that the rank is in or, if it is idle, of its next call.
    call(Rank): Int;
    /// Whether the rank is idle: no launch of its next call has begun.
    idle(Rank): Bool;
    /// Whether all threads of the rank's call have been counted as finished.
    counted(Rank): Bool;
    /// Value of the rank's device word that holds the number of the call.
    number(Rank): Int;
    /// Whether the device word with the call number has been advanced in this call.
    advanced(Rank): Bool;
    /// Whether a thread of the rank has given up, or was told that a peer has given up.
    quit(Rank): Bool;
    /// Whether the rank has given up and ended its call.
    dead(Rank): Bool;
    /// Last call whose entry the first rank announced to the second.
    entered(Rank, Rank): Int;
    /// Last call of the first rank whose work is visible to a thread that acquires this number from
    /// the first rank's entry word at the second rank.
    entry_view(Rank, Rank, Int): Int;
    /// Last call whose record the first rank wrote at the second, for each parity of calls.
    recorded(Rank, Rank, Bool): Int;
    /// Last call in which the first rank read the record of the second, for each parity of calls.
    record_read(Rank, Rank, Bool): Int;
    /// Last call of the rank for which the thread knows all work that the rank did before it
    /// launched the call.
    knows(Agent, Rank): Int;
    /// Whether the thread has seen that it may write slots at the rank.
    credit(Agent, Rank): Bool;
    /// Whether the thread has seen that the rank has entered this call.
    came(Agent, Rank): Bool;
    /// Whether the thread has compared the record of its own rank with the record of this rank.
    agreed(Agent, Rank): Bool;
    /// Last call for which the thread knows that its own rank has written this tile at this rank.
    wrote(Agent, Rank, Tile): Int;
    /// Largest number for which the thread knows the work that the rank's store of the number to
    /// the word makes visible.
    holds(Agent, Rank, Word): Int;
    /// Last call for which the thread saw that the word of the rank had reached the call's number.
    seen(Agent, Rank, Word): Int;
    /// Last call in which the first rank wrote this tile at the second rank.
    filled(Rank, Rank, Tile): Int;
    /// Last call in which the first rank read this tile, which the second rank writes.
    taken(Rank, Rank, Tile): Int;
    /// Whether the first rank has stored this number in its word at the second rank.
    stored(Rank, Rank, Word, Int): Bool;
    /// Last call of the first rank whose work is visible to a thread that acquires this number from
    /// the first rank's word at the second rank.
    view(Rank, Rank, Word, Int): Int;
    /// Whether the first rank has stored this number with the tile, for tiles that carry their
    /// number.
    labelled(Rank, Rank, Tile, Int): Bool;
    /// Last call before which kernels of the rank's stream used the rank's C or shard.
    used(Rank): Int;
    /// Last call in which the first rank read the shard of the second.
    pulls(Rank, Rank): Int;
    /// Whether the first rank has stored this number in its done word at the second rank.
    done(Rank, Rank, Int): Bool;
    /// Last call of the first rank whose work is visible to a thread that acquires this number from
    /// the first rank's done word at the second rank.
    done_view(Rank, Rank, Int): Int;
    /// Last call of the second rank whose work the first rank knows through the second rank's done
    /// word.
    done_known(Rank, Rank): Int;
    /// Last call for which the first rank saw that the done word of the second had reached the
    /// call's number.
    done_seen(Rank, Rank): Int;
    /// Whether the first rank has stored to the abort word of the second rank, before it left a
    /// call that reads the memory of peers.
    told(Rank, Rank): Bool;
}

/// Constants of the arithmetic of call numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Numbers {
    /// Number of different values that a word can hold: 2^32.
    pub range: i64,
    /// Number of calls after which all words are refreshed: 2^29.
    pub period: i64,
}

impl Numbers {
    /// Constants with the values that iris-sync uses.
    pub const REAL: Numbers = Numbers { range: 1 << 32, period: iris_sync::REFRESH_PERIOD as i64 };

    /// Term of the comparison `Call::reached_by`: whether the number `seen` is that of `want` or of
    /// a later call.
    pub fn reached(&self, want: &Term, seen: &Term) -> Term {
        (seen - want).modulo(self.range).below(self.range / 2)
    }

    /// Term for the value that a number has in a signed machine word.
    fn signed(&self, number: &Term) -> Term {
        let low = number.modulo(self.range);
        low.below(self.range / 2).choose(&low, &low - self.range)
    }

    /// Term for the largest multiple of the refresh period that is at most `number`.
    pub fn refresh_before(&self, number: &Term) -> Term {
        number - number.modulo(self.period)
    }

    /// Term for whether `want` and `seen` differ by less than half the range of numbers.
    pub fn in_window(&self, want: &Term, seen: &Term) -> Term {
        all_of([(seen - want).below(self.range / 2), (seen - want).at_least(-self.range / 2)])
    }
}

/// Clauses of a rule, of which one may be switched off.
pub(super) struct Clauses {
    off: Option<String>,
    known: RefCell<Vec<Name>>,
}

impl Clauses {
    pub(super) fn without(off: Option<&str>) -> Self {
        Self { off: off.map(String::from), known: RefCell::default() }
    }

    /// Whether the clause `name` is in force, that is, not switched off.
    pub(super) fn has(&self, name: Name) -> bool {
        self.known.borrow_mut().push(name);
        self.off.as_deref() != Some(name)
    }

    pub(super) fn names(self) -> Vec<Name> {
        self.known.into_inner()
    }

    /// Term for whether `seen` has reached `want`. Numbers are compared by their wrapping
    /// difference or, if the clause is switched off, as signed integers.
    pub(super) fn reached(&self, name: Name, numbers: &Numbers, want: &Term, seen: &Term) -> Term {
        if self.has(name) {
            numbers.reached(want, seen)
        } else {
            numbers.signed(seen).at_least(numbers.signed(want))
        }
    }

    /// Last call whose work is visible to a thread that acquires a store of `call`. This is `call`
    /// or, if the clause is switched off and the store is therefore relaxed, the call before it.
    pub(super) fn carries(&self, name: Name, call: &Term) -> Term {
        if self.has(name) { call.clone() } else { call - 1 }
    }
}

impl Action {
    /// Adds a guard whose name is a clause of the rule; the guard is left out if the clause is
    /// switched off.
    #[must_use]
    pub(super) fn rule(self, clauses: &Clauses, name: Name, term: Term) -> Self {
        if clauses.has(name) { self.guard(name, term) } else { self }
    }

    /// Lets a thread learn from its acquire load: each `place` becomes at least the `value` that
    /// was loaded with it. If the clause is switched off, the load is relaxed and the thread learns
    /// nothing.
    #[must_use]
    pub(super) fn acquires(self, clauses: &Clauses, name: Name, joins: &[(&Term, &Term)]) -> Self {
        if !clauses.has(name) {
            return self;
        }
        joins.iter().fold(self, |action, (place, value)| action.set(place, place.max(*value)))
    }
}

/// Names of properties of the slot rule on which other rules rely.
pub(super) const NUMBER: Name = "the number is that of the call";
pub(super) const IN_CALL: Name = "the peer is in this call, or a later one";
pub(super) const ENTERED: Name = "the peer has entered this call";

/// Whether the call with this number is odd.
pub(super) fn is_odd(call: &Term) -> Term {
    call.modulo(2).is(1)
}

/// Variables, one for each name that a parameter of an action has.
pub(super) struct Parameters {
    pub(super) g: Term,
    pub(super) h: Term,
    pub(super) p: Term,
    pub(super) q: Term,
    pub(super) k: Term,
    pub(super) w: Term,
    pub(super) v: Term,
}

impl Parameters {
    pub(super) fn new() -> Self {
        Self {
            g: variable(("g", Sort::Agent)),
            h: variable(("h", Sort::Agent)),
            p: variable(("p", Sort::Rank)),
            q: variable(("q", Sort::Rank)),
            k: variable(("k", Sort::Tile)),
            w: variable(("w", Sort::Word)),
            v: variable(("v", Sort::Int)),
        }
    }
}

/// Term for the greatest number that the rank may have stored in a word.
pub(super) fn newest(p: &Term) -> Term {
    call([p]) - idle([p]).choose(1, 0)
}

/// Term for whether a rank is at work: its call has begun, the call's threads have not all been
/// counted as finished, and the rank did not give up in an earlier call.
fn at_work(p: &Term) -> Term {
    all_of([!idle([p]), !counted([p]), !dead([p])])
}

/// Builds the slot rule. Leaves out the clause named `off`, if one is given.
pub fn slot_rule(numbers: Numbers, off: Option<&str>) -> System {
    let clauses = Clauses::without(off);
    let actions = [
        of_calls(&clauses),
        of_entries(&clauses, &numbers),
        of_tiles(&clauses, &numbers),
        of_numbered_tiles(&clauses, &numbers),
        of_pulls(&clauses, &numbers),
        of_ends(&clauses, &numbers),
    ]
    .concat();
    System {
        name: "slot rule",
        fixed: FIXED,
        state: STATE,
        axioms: invariant::plans(),
        initial: STATE.iter().map(invariant::start).collect(),
        actions,
        invariant: invariant::slot_rule(&numbers),
        clauses: clauses.names(),
        takes: &[],
    }
}

/// Actions of launches: what threads learn from each other, and changes of the call number.
fn of_calls(clauses: &Clauses) -> Vec<Action> {
    let Parameters { g, h, p, v, .. } = Parameters::new();
    let me = rank([&g]);
    let load = Action::new("load", [&g, &v])
        .given(v.is(number([&me])))
        .given(!dead([&me]))
        .rule(clauses, "load: the number has not been advanced", !advanced([&me]))
        .set(&idle([&me]), false)
        .property(NUMBER, v.is(call([&me])));
    let (x, y, z) =
        (variable(("a", Sort::Rank)), variable(("b", Sort::Tile)), variable(("c", Sort::Word)));
    let mut turn = Action::new("turn", [&g, &h]).given(rank([&g]).is(rank([&h])));
    let one = |function: fn([&Term; 2]) -> Term| (function([&g, &x]), function([&h, &x]));
    let (own, theirs) = one(knows);
    turn = turn.set_each(&own, [&x], true.into(), own.max(theirs));
    for flag in [credit, came, agreed] as [fn([&Term; 2]) -> Term; 3] {
        let (own, theirs) = one(flag);
        turn = turn.set_each(&own, [&x], true.into(), own.clone() | theirs);
    }
    let (own, theirs) = (wrote([&g, &x, &y]), wrote([&h, &x, &y]));
    turn = turn.set_each(&own, [&x, &y], true.into(), own.max(theirs));
    for number in [holds, seen] as [fn([&Term; 3]) -> Term; 2] {
        let (own, theirs) = (number([&g, &x, &z]), number([&h, &x, &z]));
        turn = turn.set_each(&own, [&x, &z], true.into(), own.max(theirs));
    }
    let quits =
        Action::new("quit", [&p]).given(all_of([!idle([&p]), !dead([&p])])).set(&quit([&p]), true);
    vec![load, turn, quits, of_use(), of_advance()]
}

/// Action of a kernel on the stream between two calls, which reads C and writes the shard.
fn of_use() -> Action {
    let Parameters { p, .. } = Parameters::new();
    let (g, q, k) =
        (variable(("x", Sort::Agent)), variable(("y", Sort::Rank)), variable(("z", Sort::Tile)));
    let last = filled([&q, &p, &k]);
    let other =
        |term: Term| for_all([&g, &q, &k], all_of([rank([&g]).is(&p), q.is_not(&p)]).implies(term));
    Action::new("use", [&p])
        .given(all_of([idle([&p]), !dead([&p])]))
        .set(&used([&p]), call([&p]))
        .property(
            "direct writes into C are over, and known to be",
            other(any_of([
                last.below(first([])),
                !direct([&k]),
                last.below(knows([&g, &q])),
                last.at_most(holds([&g, &q, &word([&last, &q, &p, &k])])),
            ])),
        )
        .property(
            "pulls from the shard are over, and known to be",
            other(any_of([
                pulls([&q, &p]).below(first([])),
                pulls([&q, &p]).below(knows([&g, &q])),
                pulls([&q, &p]).at_most(done_known([&p, &q])),
            ])),
        )
}

fn of_advance() -> Action {
    let Parameters { p, .. } = Parameters::new();
    Action::new("advance", [&p])
        .given(all_of([!idle([&p]), !dead([&p]), !advanced([&p])]))
        .set(&number([&p]), number([&p]) + 1)
        .set(&advanced([&p]), true)
}

/// Condition that thread `h` may load the value `v` from the entry word of rank `p` for calls of
/// the parity of `want`.
fn entry_load(h: &Term, p: &Term, want: &Term, v: &Term) -> Term {
    let q = &rank([h]);
    let parity = is_odd(want);
    let stored = any_of([
        v.is(first([]) - 1),
        all_of([v.at_least(first([])), v.at_most(entered([p, q])), is_odd(v).is(&parity)]),
    ]);
    let not_older = |known: Term| {
        let there = all_of([
            known.at_least(first([])),
            known.at_most(entered([p, q])),
            is_odd(&known).is(&parity),
        ]);
        there.implies(v.at_least(known))
    };
    all_of([stored, not_older(knows([h, p]) - 1), not_older(knows([h, p]) - 2)])
}

/// Actions by which ranks enter calls: entries, records and credits.
fn of_entries(clauses: &Clauses, numbers: &Numbers) -> Vec<Action> {
    let Parameters { g, h, p, q, v, .. } = Parameters::new();
    let me = rank([&g]);
    let c = call([&me]);
    let before = &c - 1;
    let credits = Action::new("credit", [&g, &q, &v])
        .given(all_of([me.is_not(&q), at_work(&me), entry_load(&g, &q, &before, &v)]))
        .rule(
            clauses,
            "credit: the peer entered the call before",
            clauses.reached("credit: compared by the difference", numbers, &before, &v),
        )
        .set(&credit([&g, &q]), true)
        .acquires(
            clauses,
            "credit: CreditLoad acquires",
            &[(&knows([&g, &q]), &entry_view([&q, &me, &v]))],
        )
        .property("the entry word is within the window", numbers.in_window(&before, &v))
        .property("a credit is of the call before, or later", v.at_least(&before));
    let enter = Action::new("enter", [&g, &q])
        .given(all_of([me.is_not(&q), at_work(&me)]))
        .rule(clauses, "enter: once a call", entered([&me, &q]).below(&c))
        .rule(clauses, "enter: with the peer's credit", credit([&g, &q]))
        .set(&entered([&me, &q]), &c)
        .set(&entry_view([&me, &q, &c]), clauses.carries("enter: EntryStore releases", &c))
        .set(
            &recorded([&me, &q, &record_slot(clauses, &c)]),
            light([&c]).choose(recorded([&me, &q, &record_slot(clauses, &c)]), &c),
        )
        .property(
            "the peer is done with the record that is overwritten",
            any_of([
                light([&c]),
                record_read([&q, &me, &record_slot(clauses, &c)]).below(first([])),
                record_read([&q, &me, &record_slot(clauses, &c)]).below(knows([&g, &q])),
            ]),
        );
    let me = rank([&h]);
    let c = call([&me]);
    let entry = Action::new("entry", [&h, &p, &v])
        .given(all_of([me.is_not(&p), at_work(&me), entry_load(&h, &p, &c, &v)]))
        .rule(
            clauses,
            "entry: the peer entered this call",
            clauses.reached("entry: compared by the difference", numbers, &c, &v),
        )
        .set(&came([&h, &p]), true)
        .acquires(
            clauses,
            "entry: EntryLoad acquires",
            &[(&knows([&h, &p]), &entry_view([&p, &me, &v]))],
        )
        .property("the entry word is within the window", numbers.in_window(&c, &v))
        .property("an entry is of this call, or later", v.at_least(&c))
        .property(IN_CALL, newest(&p).at_least(&c));
    let compare = Action::new("compare", [&h, &p])
        .given(all_of([me.is_not(&p), at_work(&me), !light([&c])]))
        .rule(clauses, "compare: the peer's entry was seen", came([&h, &p]))
        .set(&agreed([&h, &p]), true)
        .set(&record_read([&me, &p, &record_slot(clauses, &c)]), &c)
        .property(
            "the record is of this call",
            recorded([&p, &me, &record_slot(clauses, &c)]).is(&c),
        )
        .property("the record's store is known", knows([&h, &p]).at_least(&c));
    vec![credits, enter, entry, compare]
}

/// Term for the record that a call uses: records alternate by the parity of the call.
fn record_slot(clauses: &Clauses, call: &Term) -> Term {
    if clauses.has("records: two, by parity") { is_odd(call) } else { false.into() }
}

/// Actions that write and read tiles, and the words that signal them.
fn of_tiles(clauses: &Clauses, numbers: &Numbers) -> Vec<Action> {
    let Parameters { g, h, p, q, k, w, v } = Parameters::new();
    let me = rank([&g]);
    let c = call([&me]);
    let over = |reader: &Term, writer: &Term| {
        let last = taken([reader, writer, &k]);
        any_of([last.below(first([])), last.below(knows([&g, reader]))])
    };
    let push = |name, once| {
        Action::new(name, [&g, &q, &k])
            .given(all_of([me.is_not(&q), at_work(&me), !numbered([&k])]))
            .rule(clauses, once, filled([&me, &q, &k]).below(&c))
            .set(&filled([&me, &q, &k]), &c)
            .set(&wrote([&g, &q, &k]), &c)
            .property("all reads of the tile are over, and known to be", over(&q, &me))
    };
    let slot = push("push", "push: once a call")
        .given(!direct([&k]))
        .rule(clauses, "push: with the peer's credit", credit([&g, &q]))
        .rule(clauses, "slots: two, by parity", odd([&k]).is(is_odd(&c)))
        .property("the peer is past the call before the last", call([&q]).at_least(&c - 1));
    let own = push("push_direct", "push_direct: once a call")
        .given(direct([&k]))
        .rule(clauses, "push_direct: a tile of the plan", plan([&c, &me, &q, &k]))
        .rule(clauses, "push_direct: the records agree", agreed([&g, &q]))
        .property(
            "kernels that the peer had before are over, and known to be",
            any_of([dead([&q]), used([&q]).at_most(knows([&g, &q]))]),
        )
        .property(ENTERED, newest(&q).at_least(&c));
    let x = variable(("x", Sort::Tile));
    let its = all_of([plan([&c, &me, &q, &x]), !numbered([&x]), word([&c, &me, &q, &x]).is(&w)]);
    let raise = Action::new("raise", [&g, &q, &w])
        .given(all_of([me.is_not(&q), at_work(&me), awaited([&c, &me, &q, &w])]))
        .rule(
            clauses,
            "raise: after all tiles that it stands for",
            for_all([&x], its.clone().implies(wrote([&g, &q, &x]).at_least(&c))),
        )
        .set(&stored([&me, &q, &w, &c]), true)
        .set(&view([&me, &q, &w, &c]), clauses.carries("raise: SignalStore releases", &c))
        .property(
            "its tiles were written in this call",
            for_all([&x], its.implies(filled([&me, &q, &x]).is(&c))),
        );
    let me = rank([&h]);
    let c = call([&me]);
    let known = numbers.refresh_before(&(knows([&h, &p]) - 1));
    let see = Action::new("see", [&h, &p, &w, &v])
        .given(all_of([
            me.is_not(&p),
            at_work(&me),
            awaited([&c, &p, &me, &w]),
            stored([&p, &me, &w, &v]),
            stored([&p, &me, &w, &known]).implies(v.at_least(&known)),
        ]))
        .rule(
            clauses,
            "see: the word reached this call",
            clauses.reached("see: compared by the difference", numbers, &c, &v),
        )
        .set(&seen([&h, &p, &w]), &c)
        .acquires(
            clauses,
            "see: SignalLoad acquires",
            &[
                (&holds([&h, &p, &w]), &view([&p, &me, &w, &v])),
                (&knows([&h, &p]), &view([&p, &me, &w, &v])),
            ],
        )
        .property("the word is within the window", numbers.in_window(&c, &v))
        .property("a word that was left alone does not look new", v.at_least(&c));
    let its = word([&c, &p, &me, &k]);
    let own_parity = direct([&k]) | odd([&k]).is(is_odd(&c));
    let read = Action::new("read", [&h, &p, &k])
        .given(all_of([me.is_not(&p), at_work(&me), !numbered([&k])]))
        .rule(clauses, "read: a tile of the plan", plan([&c, &p, &me, &k]))
        .rule(clauses, "slots: two, by parity", own_parity)
        .rule(clauses, "read: after the word that stands for it", seen([&h, &p, &its]).is(&c))
        // The results of a rank that has given up are not used, so records need not agree.
        .rule(clauses, "read: the records agree", agreed([&h, &p]) | quit([&me]))
        .set(&taken([&me, &p, &k]), &c)
        .property("the tile is of this call", filled([&p, &me, &k]).is(&c))
        .property("the tile's stores are known", holds([&h, &p, &its]).at_least(&c))
        .property("the records were compared", came([&h, &p]) | quit([&me]));
    vec![slot, own, raise, see, read]
}

/// Actions on tiles that carry the number of their call in each word: LL words of 64 bits.
fn of_numbered_tiles(clauses: &Clauses, numbers: &Numbers) -> Vec<Action> {
    let Parameters { g, h, p, q, k, v, .. } = Parameters::new();
    let me = rank([&g]);
    let c = call([&me]);
    let last = taken([&q, &me, &k]);
    let push = Action::new("push_numbered", [&g, &q, &k])
        .given(all_of([me.is_not(&q), at_work(&me), numbered([&k]), !direct([&k])]))
        .rule(clauses, "push_numbered: a tile of the plan", plan([&c, &me, &q, &k]))
        .rule(clauses, "push_numbered: once a call", filled([&me, &q, &k]).below(&c))
        .rule(clauses, "push_numbered: with the peer's credit", credit([&g, &q]))
        .rule(clauses, "numbered slots: two, by parity", odd([&k]).is(is_odd(&c)))
        .set(&filled([&me, &q, &k]), &c)
        .set(&labelled([&me, &q, &k, &c]), true)
        .property(
            "the peer has left the call that took it, and is known to have",
            any_of([last.below(first([])), last.below(knows([&g, &q]))]),
        )
        .property("the peer is past the call before the last", call([&q]).at_least(&c - 1));
    let me = rank([&h]);
    let c = call([&me]);
    let known = newest_refresh(numbers, &k, &(knows([&h, &p]) - 1));
    let not_older = |known: &Term| labelled([&p, &me, &k, known]).implies(v.at_least(known));
    let same = if clauses.has("take: the number is that of this call") {
        (&v - &c).modulo(numbers.range).is(0)
    } else {
        true.into()
    };
    let take = Action::new("take", [&h, &p, &k, &v])
        .given(all_of([
            me.is_not(&p),
            at_work(&me),
            numbered([&k]),
            plan([&c, &p, &me, &k]),
            labelled([&p, &me, &k, &v]),
            not_older(&known),
            not_older(&(&known - 2)),
        ]))
        .rule(clauses, "numbered slots: two, by parity", odd([&k]).is(is_odd(&c)))
        .guard("take: the number is that of this call", same)
        .set(&taken([&me, &p, &k]), &c)
        .property(
            "the number is less than the range away",
            all_of([(&v - &c).below(numbers.range), (&v - &c).above(-numbers.range)]),
        )
        .property("the data is of this call", all_of([v.is(&c), filled([&p, &me, &k]).is(&c)]));
    let me = rank([&g]);
    let c = call([&me]);
    let stamp = Action::new("stamp_numbered", [&g, &q, &k])
        .given(all_of([
            numbered([&k]),
            theirs([&me, &q, &k]),
            me.is_not(&q),
            !dead([&me]),
            !idle([&me]),
            newest_refresh(numbers, &k, &c).is(&c),
            // This follows from the line above, because the refresh period is even; it is written
            // out to help the solver.
            odd([&k]).is(is_odd(&c)),
        ]))
        .rule(clauses, "stamp_numbered: all are counted out", counted([&me]))
        .rule(clauses, "stamp_numbered: the rank has not given up", !quit([&me]))
        .rule(
            clauses,
            "stamp_numbered: not a tile of this call",
            !all_of([plan([&c, &me, &q, &k]), numbered([&k])]),
        )
        .set(&labelled([&me, &q, &k, &(&c - 2)]), true)
        .property("data of this call is not overwritten", filled([&me, &q, &k]).below(&c))
        .property("the peer is past the call before the last", call([&q]).at_least(&c - 1));
    vec![push, take, stamp]
}

/// Term for the last call up to `number` in which the numbered tiles of the slot of `k` are
/// refreshed.
pub(super) fn newest_refresh(numbers: &Numbers, k: &Term, number: &Term) -> Term {
    odd([k]).choose(numbers.refresh_before(&(number - 1)) + 1, numbers.refresh_before(number))
}

/// Actions that read the shards of peers.
fn of_pulls(clauses: &Clauses, numbers: &Numbers) -> Vec<Action> {
    let Parameters { g, h, p, q, v, .. } = Parameters::new();
    let me = rank([&h]);
    let c = call([&me]);
    let pull = Action::new("pull", [&h, &p])
        .given(all_of([me.is_not(&p), at_work(&me)]))
        .rule(clauses, "pull: in calls that pull", pulled([&c]))
        .rule(clauses, "pull: the records agree", agreed([&h, &p]))
        .set(&pulls([&me, &p]), &c)
        .property(
            "the shard was filled before, and is known to be",
            any_of([dead([&p]), used([&p]).at_most(knows([&h, &p]))]),
        )
        .property("the owner is in this call", any_of([dead([&p]), call([&p]).is(&c)]))
        .property("the owner's done word is looked at later", done_seen([&me, &p]).below(&c));
    let me = rank([&g]);
    let c = call([&me]);
    let known = numbers.refresh_before(&(knows([&g, &q]) - 1));
    let due = any_of([pulled([&c]), c.modulo(numbers.period).is(0)]);
    let say = Action::new("say_done", [&g, &q])
        .given(all_of([me.is_not(&q), !dead([&me]), !idle([&me]), due]))
        .rule(clauses, "say_done: all are counted out", counted([&me]))
        .set(&done([&me, &q, &c]), true)
        .set(&done_view([&me, &q, &c]), clauses.carries("say_done: DoneStore releases", &c));
    let see = Action::new("see_done", [&g, &q, &v])
        .given(all_of([
            me.is_not(&q),
            !dead([&me]),
            !idle([&me]),
            done([&q, &me, &v]),
            done([&q, &me, &known]).implies(v.at_least(&known)),
        ]))
        .rule(
            clauses,
            "see_done: the word reached this call",
            clauses.reached("see_done: compared by the difference", numbers, &c, &v),
        )
        .rule(clauses, "see_done: all are counted out", counted([&me]))
        // The code loads its abort word once, after the last done word. Abort words are never
        // reset. So if that load finds no abort, there was no abort either when each done word was
        // loaded.
        .rule(clauses, "see_done: the peer has not told that it gave up", !told([&q, &me]))
        .set(&done_seen([&me, &q]), &c)
        .acquires(
            clauses,
            "see_done: DoneLoad acquires",
            &[(&done_known([&me, &q]), &done_view([&q, &me, &v]))],
        )
        .property("the done word is within the window", numbers.in_window(&c, &v))
        .property("a done word that was left alone does not look new", v.at_least(&c))
        .property(
            "the shard that was pulled has not changed since",
            any_of([
                !pulled([&c]),
                !dead([&q]),
                call([&q]).above(&c),
                done_known([&q, &me]).at_least(&c),
            ]),
        );
    vec![pull, say, see]
}

/// Actions that end a call.
fn of_ends(clauses: &Clauses, numbers: &Numbers) -> Vec<Action> {
    let Parameters { g, p, q, w, .. } = Parameters::new();
    let c = call([&p]);
    let (a, b) = (variable(("x", Sort::Agent)), variable(("y", Sort::Agent)));
    let r = variable(("r", Sort::Rank));
    let (t, u) = (variable(("t", Sort::Tile)), variable(("u", Sort::Word)));
    let well = !quit([&p]);
    let peer = all_of([well.clone(), r.is_not(&p)]);
    let mine = all_of([rank([&a]).is(&p), peer.clone()]);
    let both = all_of([rank([&a]).is(&p), rank([&b]).is(&p), r.is_not(&p)]);
    let count = Action::new("count", [&p])
        .given(at_work(&p))
        .rule(
            clauses,
            "count: every peer was entered",
            for_all([&r], peer.implies(entered([&p, &r]).is(&c))),
        )
        .rule(
            clauses,
            "count: all tiles were sent",
            for_all(
                [&r, &t],
                all_of([peer.clone(), plan([&c, &p, &r, &t])]).implies(filled([&p, &r, &t]).is(&c)),
            ),
        )
        .rule(
            clauses,
            "count: all words were seen",
            for_all(
                [&a, &r, &u],
                all_of([mine, awaited([&c, &r, &p, &u])]).implies(seen([&a, &r, &u]).is(&c)),
            ),
        )
        .rule(
            clauses,
            "count: FinishAdd joins what threads know",
            all_of([
                for_all(
                    [&a, &b, &r],
                    both.implies(all_of([
                        knows([&a, &r]).at_least(knows([&b, &r])),
                        well.clone().implies(credit([&a, &r])),
                    ])),
                ),
                for_all(
                    [&a, &b, &r, &u],
                    both.implies(holds([&a, &r, &u]).at_least(holds([&b, &r, &u]))),
                ),
            ]),
        )
        .set(&counted([&p]), true);
    let me = rank([&g]);
    let now = call([&me]);
    let refreshes = now.modulo(numbers.period).is(0);
    let stamp = Action::new("stamp", [&g, &q, &w])
        .given(all_of([me.is_not(&q), !dead([&me]), !idle([&me]), refreshes]))
        .rule(clauses, "stamp: all are counted out", counted([&me]))
        .rule(clauses, "stamp: the rank has not given up", !quit([&me]));
    let stamp = stamp
        .set(&stored([&me, &q, &w, &now]), true)
        .set(&view([&me, &q, &w, &now]), clauses.carries("stamp: StampStore releases", &now));
    let (other, due) = (r.is_not(&p), c.modulo(numbers.period).is(0));
    let finish = Action::new("finish", [&p])
        .given(all_of([!idle([&p]), !quit([&p]), !dead([&p])]))
        .rule(clauses, "finish: all are counted out", counted([&p]))
        .rule(clauses, "finish: the number was advanced", advanced([&p]))
        .rule(
            clauses,
            "finish: all words were refreshed",
            for_all(
                [&r, &u],
                all_of([other.clone(), due.clone()]).implies(stored([&p, &r, &u, &c])),
            ),
        )
        .rule(
            clauses,
            "finish: done words were refreshed",
            for_all([&r], all_of([other.clone(), due]).implies(done([&p, &r, &c]))),
        )
        .rule(
            clauses,
            "finish: numbered tiles were refreshed",
            for_all(
                [&r, &t],
                all_of([
                    other.clone(),
                    numbered([&t]),
                    theirs([&p, &r, &t]),
                    newest_refresh(numbers, &t, &c).is(&c),
                ])
                .implies(any_of([labelled([&p, &r, &t, &c]), labelled([&p, &r, &t, &(&c - 2)])])),
            ),
        )
        .rule(
            clauses,
            "finish: peers are done with the shard",
            for_all([&r], all_of([other, pulled([&c])]).implies(done_seen([&p, &r]).is(&c))),
        )
        .set(&call([&p]), &c + 1)
        .set(&idle([&p]), true)
        .set(&counted([&p]), false)
        .set(&advanced([&p]), false);
    let (d, e) = (variable(("a", Sort::Agent)), variable(("b", Sort::Rank)));
    let finish = [credit, came, agreed].into_iter().fold(finish, |action, flag| {
        action.set_each(&flag([&d, &e]), [&d, &e], rank([&d]).is(&p), false)
    });
    let die = Action::new("die", [&p]).given(all_of([!idle([&p]), quit([&p]), !dead([&p])]));
    // After this step, the rank's stream may overwrite the shard that peers pull. In the code, the
    // stores to the peers' abort words come before that. Here both are one step, because the state
    // between them allows peers nothing that the states around it do not. A peer whose done word
    // was seen pulls no more, so it need not be told.
    let die = if clauses.has("die: peers of a call that pulls are told") {
        let reads = all_of([pulled([&c]), done_seen([&p, &r]).is_not(&c)]);
        die.set_each(&told([&p, &r]), [&r], reads, true)
    } else {
        die
    };
    // A rank that has given up takes no further step. If the clause is switched off, the rank goes
    // on with the next call.
    let die = if clauses.has("die: no call after one that was given up") {
        die.set(&dead([&p]), true)
    } else {
        let on = die
            .set(&call([&p]), &c + 1)
            .set(&number([&p]), &c + 1)
            .set(&idle([&p]), true)
            .set(&counted([&p]), false)
            .set(&advanced([&p]), false)
            .set(&quit([&p]), false);
        [credit, came, agreed].into_iter().fold(on, |action, flag| {
            action.set_each(&flag([&d, &e]), [&d, &e], rank([&d]).is(&p), false)
        })
    };
    vec![count, stamp, finish, die]
}

/// Application of a function to new variables of the right sorts, and these variables.
pub(super) fn pattern(function: &Function) -> (Term, Vec<Term>) {
    const NAMES: [Name; 4] = ["i0", "i1", "i2", "i3"];
    let variables: Vec<Term> =
        NAMES.iter().zip(function.arguments).map(|(&name, &sort)| variable((name, sort))).collect();
    (Term::applied(function.name, variables.clone()), variables)
}

/// Assignment of an initial value to a function for all arguments.
pub(super) fn starts_as(function: &Function, value: impl Into<Term>) -> Effect {
    let (place, over) = pattern(function);
    assign(&place, over.iter().map(declared).collect(), true.into(), value.into())
}
