//! Mutants that exist only in the device headers, where barriers have names and double buffers
//! belong to the control flow. Also mutants that drop single signals or replace single comparisons.

use iris_sync::barrier::Members;
use iris_sync::{Access, REFRESH_PERIOD};

use super::mutant::{Mutant, RUNS, mutant};
use crate::ops::{self, Accumulate};
use crate::{Change, Check, Compare, Scenario, Site, primitives};

/// All mutants of the device headers; none if the headers could not be compiled.
pub fn of_headers() -> Vec<Mutant> {
    let mut all = sites();
    all.extend(buffers());
    all.extend(signals());
    all.extend(comparisons());
    all.iter().filter_map(Mutant::on_headers).collect()
}

/// Mutants that lack one workgroup barrier of the device headers, by the barrier's place.
fn sites() -> Vec<Mutant> {
    let plain = Accumulate { atomic: false, first_barrier: true, second_barrier: true };
    [
        ("site-signal", Site::Signal, ops::one_shot(2, 1, 1), None),
        ("site-copied-signal", Site::Signal, ops::copied(2, 1, 1, true), Some(RUNS)),
        ("site-flag", Site::Flag, ops::staged(&[2, 1], 1, 1), Some(RUNS)),
        ("site-lock-give", Site::LockGive, ops::accumulate(2, 1, 1, plain), Some(RUNS)),
        ("site-arrive", Site::Arrive, primitives::barrier_in_launch(2), None),
        ("site-waited", Site::Waited, ops::one_shot(2, 1, 1), None),
        ("site-finish", Site::Finish, ops::pull(2, 1, 2), None),
        (
            "site-refresh",
            Site::Refresh,
            ops::partial(2, 2, REFRESH_PERIOD, &[2]).groups(&[2, 1]),
            Some(RUNS),
        ),
        ("site-count", Site::Finish, ops::deliver_by_senders(2, 1, 1, false), Some(RUNS)),
    ]
    .map(|(name, site, scenario, engine)| {
        // Without the barrier after a wait, the thread that does not poll goes on at once. It reads
        // before anything is written, which is a wrong value, not a race.
        let expected = if site == Site::Waited { Check::Wrong } else { Check::Race };
        let mutant = mutant(name, scenario.threads(2), Change::DropSite(site), expected);
        match engine {
            Some(engine) => mutant.by(engine),
            None => mutant,
        }
    })
    .into()
}

/// Mutants with one buffer instead of two. two_shot has no such mutant: a rank receives a result
/// only after the owner of the tile has waited for that rank, so partial results of the next call
/// come later. two_shot has two buffers only because it shares the layout of one_shot.
fn buffers() -> Vec<Mutant> {
    let single = |name, scenario: Scenario, expected| {
        let mutated = scenario.clone().one_buffer().mutant_of(scenario);
        mutant(name, mutated, [], expected).by(RUNS).in_scenario()
    };
    vec![
        single("one-buffer-one-shot", ops::one_shot(2, 1, 3), Check::Race),
        single("one-buffer-reduce-scatter", ops::reduce_scatter(2, 1, 3), Check::Race),
        single("one-buffer-broadcast", ops::deliver(2, 1, 3, true, false), Check::Race),
        single("one-buffer-relay", ops::relay(3, 1, 3, false), Check::Race),
        single("one-buffer-all-gather", ops::deliver(2, 1, 3, false, false), Check::Race),
        single("one-buffer-gather", ops::gather(2, 1, 3, true), Check::Race),
        mutant(
            "one-entry-record",
            ops::deliver(2, 1, 3, true, false),
            Change::OneRecord,
            Check::RecordRace,
        ),
    ]
}

/// Mutants in which one rank does not set one kind of signal.
fn signals() -> Vec<Mutant> {
    use Access::*;
    let everybody = Members::all(2);
    [
        ("no-entry-store", EntryStore, primitives::entry(2, 1)),
        ("no-signal-store", SignalStore, ops::one_shot(2, 1, 1)),
        ("no-copied-signal", SignalStore, ops::copied(2, 1, 1, true)),
        ("no-copied-number", FlagStore, ops::copied(2, 1, 1, true)),
        ("no-done-store", DoneStore, ops::pull(2, 1, 1)),
        ("no-barrier-store", BarrierStore, primitives::barrier(2, everybody, 1, true)),
        ("no-version-store", VersionStore, primitives::versioned(1)),
        ("no-lock-give", LockGive, primitives::spinlock(2, 1)),
        ("no-flag-store", FlagStore, primitives::flags(1)),
    ]
    .map(|(name, access, scenario)| mutant(name, scenario, Change::Skip(access), Check::Lost))
    .into()
}

/// Mutants in which one wait compares by plain `<` where the counter wraps, by other searches than
/// those of Rust. (An entry compared by `==` would pass, because the slot rule keeps peers from
/// being two calls ahead.)
fn comparisons() -> Vec<Mutant> {
    use Access::*;
    let less = |name, access, scenario: Scenario, expected| {
        let calls = scenario.calls;
        let change = Change::Compare(access, Compare::Less);
        mutant(name, scenario.calls(calls, i32::MAX), change, expected)
    };
    let barrier = primitives::barrier(2, Members::all(2), 2, false);
    vec![
        less("done-less", DoneLoad, ops::pull(2, 1, 3), Check::Race).by(RUNS),
        less("barrier-less", BarrierLoad, barrier, Check::Wrong),
    ]
}
