//! Mutants: the protocol with one rule broken, and the check that must notice.
//!
//! Each mutant runs in the smallest scenario that shows the fault. It counts as caught only by the
//! expected check: a weakened order as a race, a comparison that misses a value as a lost signal.
//!
//! This file is long because the rules are best compared side by side.

use iris_sync::barrier::Members;
use iris_sync::{Access, FaultKind, Order, REFRESH_PERIOD, Scope};

use crate::elastic::{self, Decision, Reuse};
use crate::nodes::{self, Handover, Room};
use crate::ops::{self, Accumulate, Beside};
use crate::{Change, Check, Compare, Kind, Place, Scenario, primitives};
use mutant::{RUNS, mutant};

mod headers;
mod ll;
mod mutant;
mod round;

/// Mutants that exist only in the device headers, whose barriers have names.
pub use headers::of_headers;
pub use mutant::{Engine, Mutant, run};
pub use round::{STATES, slots_whole_range, whole_range};

/// All mutants that the Rust protocols and the C++ headers share.
pub fn all() -> Vec<Mutant> {
    let mut all = orders();
    all.extend(scopes());
    all.extend(comparisons());
    all.extend(slot_rule());
    all.extend(life_of_words());
    all.extend(barriers());
    all.extend(given_up());
    all.extend(kernels_beside());
    all.extend(several_nodes());
    all.extend(lost_ranks());
    all.extend(ll::all());
    all
}

const PLAIN: Accumulate = Accumulate { atomic: false, first_barrier: true, second_barrier: true };

/// Mutants in which one order is weakened to relaxed.
fn orders() -> Vec<Mutant> {
    use Access::*;
    let everybody = Members::all(2);
    let two_groups = || ops::pull(1, 2, 1).groups(&[2]);
    let relaxed = |name, access, scenario, expected| {
        mutant(name, scenario, Change::Order(access, Order::Relaxed), expected).of(access)
    };
    // Weakened orders in a scenario whose threads meet at no workgroup barrier.
    let alone = |name, access, scenario| {
        mutant(name, scenario, Change::Order(access, Order::Relaxed), Check::Race)
    };
    let mut credit =
        relaxed("credit-load-relaxed", CreditLoad, ops::deliver(2, 1, 3, true, false), Check::Race);
    credit.rules.changes.push(Change::UncheckedRecords);
    vec![
        relaxed("entry-store-relaxed", EntryStore, primitives::entry(2, 1), Check::RecordRace),
        relaxed("entry-load-relaxed", EntryLoad, primitives::entry(2, 1), Check::RecordRace),
        credit,
        relaxed("signal-store-relaxed", SignalStore, ops::one_shot(2, 1, 1), Check::Race),
        relaxed("signal-load-relaxed", SignalLoad, ops::one_shot(2, 1, 1), Check::Race),
        alone("departure-store-relaxed", SignalStore, ops::stored(2, 1, 1, ops::Stored::Right)),
        alone("arrival-load-relaxed", SignalLoad, ops::copied_beside(2, 1, 1)),
        relaxed("done-store-relaxed", DoneStore, ops::pull(2, 1, 2), Check::Race),
        relaxed("done-load-relaxed", DoneLoad, ops::pull(2, 1, 2), Check::Race),
        relaxed(
            "barrier-store-relaxed",
            BarrierStore,
            primitives::barrier(2, everybody, 1, true),
            Check::Race,
        ),
        relaxed(
            "barrier-load-relaxed",
            BarrierLoad,
            primitives::barrier(2, everybody, 1, true),
            Check::Race,
        ),
        relaxed("version-store-relaxed", VersionStore, primitives::versioned(1), Check::Race),
        relaxed("version-load-relaxed", VersionLoad, primitives::versioned(1), Check::Race),
        relaxed("lock-take-relaxed", LockTake, primitives::spinlock(2, 1), Check::Race),
        relaxed("lock-give-relaxed", LockGive, primitives::spinlock(2, 1), Check::Race),
        relaxed(
            "stamp-store-relaxed",
            StampStore,
            ops::partial(2, 1, REFRESH_PERIOD, &[1]),
            Check::Race,
        ),
        mutant(
            "finish-add-acquire",
            two_groups(),
            Change::Order(FinishAdd, Order::Acquire),
            Check::Race,
        )
        .of(FinishAdd),
        mutant(
            "finish-add-release",
            two_groups(),
            Change::Order(FinishAdd, Order::Release),
            Check::Race,
        )
        .of(FinishAdd),
        relaxed("flag-store-relaxed", FlagStore, primitives::flags(1), Check::Race),
        relaxed("flag-load-relaxed", FlagLoad, primitives::flags(1), Check::Race),
    ]
}

/// Mutants in which a word that peers see is accessed at device scope.
fn scopes() -> Vec<Mutant> {
    use Access::*;
    let lock = || primitives::spinlock(2, 1);
    let barrier = || primitives::barrier(2, Members::all(2), 1, true);
    [
        ("entry-store-device", EntryStore, primitives::entry(2, 1)),
        ("credit-load-device", CreditLoad, primitives::entry(2, 1)),
        ("entry-load-device", EntryLoad, primitives::entry(2, 1)),
        ("signal-store-device", SignalStore, ops::one_shot(2, 1, 1)),
        ("signal-load-device", SignalLoad, ops::one_shot(2, 1, 1)),
        ("done-store-device", DoneStore, ops::pull(2, 1, 1)),
        ("done-load-device", DoneLoad, ops::pull(2, 1, 1)),
        ("barrier-store-device", BarrierStore, barrier()),
        ("barrier-load-device", BarrierLoad, barrier()),
        ("version-store-device", VersionStore, primitives::versioned(1)),
        ("version-load-device", VersionLoad, primitives::versioned(1)),
        ("lock-take-device", LockTake, lock()),
        ("lock-give-device", LockGive, lock()),
        ("stamp-store-device", StampStore, ops::partial(2, 1, REFRESH_PERIOD, &[1])),
        ("abort-store-device", AbortStore, primitives::abort()),
        ("abort-load-device", AbortLoad, primitives::abort()),
    ]
    .map(|(name, access, scenario)| {
        mutant(name, scenario, Change::Scope(access, Scope::Device), Check::Scope).of(access)
    })
    .into()
}

fn comparisons() -> Vec<Mutant> {
    use Access::*;
    let compare = |name, access, compare, scenario, expected| {
        mutant(name, scenario, Change::Compare(access, compare), expected)
    };
    let less = |name, access, scenario: Scenario, expected| {
        let calls = scenario.calls;
        compare(name, access, Compare::Less, scenario.calls(calls, i32::MAX), expected)
    };
    let barrier = |twice| primitives::barrier(2, Members::all(2), 2, twice);
    vec![
        less("signal-less", SignalLoad, ops::one_shot(2, 1, 2), Check::Race),
        less("entry-less", EntryLoad, primitives::entry(2, 2), Check::Fault(FaultKind::Mismatch)),
        less("credit-less", CreditLoad, ops::deliver(2, 1, 3, true, false), Check::RecordRace),
        less("done-less", DoneLoad, ops::pull(2, 1, 3), Check::Race),
        less("barrier-less", BarrierLoad, barrier(true), Check::Wrong),
        less("version-less", VersionLoad, primitives::versioned(2), Check::Wrong),
        less("flag-less", FlagLoad, primitives::flags(2), Check::Race),
        compare("signal-equal", SignalLoad, Compare::Equal, ops::one_shot(2, 1, 2), Check::Lost),
        compare("barrier-equal", BarrierLoad, Compare::Equal, barrier(false), Check::Lost),
        mutant(
            "literal-one",
            ops::one_shot(2, 1, 2),
            [Change::Value(SignalStore, 1), Change::Compare(SignalLoad, Compare::One)],
            Check::Race,
        ),
    ]
}

fn slot_rule() -> Vec<Mutant> {
    use Access::*;
    use Change::{BlindRecords, Skip, UncheckedRecords};
    let ahead = || ops::deliver(2, 1, 3, true, false);
    // Initial values of entry records: the values that this op will publish, as if an earlier op
    // had left them.
    let mut direct = ops::deliver(2, 1, 2, true, true);
    for parity in 0..2 {
        for rank in 0..2 {
            let index = direct.channel(rank).entry(rank, 1 - rank, parity).index;
            for (field, value) in [(8, 1), (9, 4096)] {
                direct = direct.initial(Place::Unchecked { rank, index: index + field }, value);
            }
        }
    }
    let different_m = ops::different_m().mutant_of(ops::one_shot(2, 1, 1));
    vec![
        mutant("no-credit-before-record", ahead(), Skip(CreditLoad), Check::RecordRace),
        mutant(
            "no-credit-before-slot",
            ahead(),
            [Skip(CreditLoad), UncheckedRecords, BlindRecords],
            Check::Race,
        ),
        mutant(
            "no-entry-before-direct-write",
            direct,
            [Skip(EntryLoad), UncheckedRecords, BlindRecords],
            Check::Race,
        ),
        mutant(
            "no-entry-before-pull",
            ops::pull(2, 1, 1),
            [Skip(EntryLoad), UncheckedRecords, BlindRecords],
            Check::Wrong,
        ),
        mutant("no-done-before-end", ops::pull(2, 1, 2), Skip(DoneLoad), Check::Race),
        mutant("no-wait-for-arrivals", ops::copied_beside(2, 1, 1), Skip(SignalLoad), Check::Wrong),
        // Rank 0 does not wait before it passes on a tile; the other ranks do.
        mutant(
            "no-wait-before-relay",
            ops::relay(3, 1, 1, true),
            Change::SkipAt(SignalLoad, 0),
            Check::Wrong,
        )
        .by(Engine::Search),
        mutant("relay-takes-first", ops::relay_takes_first(), [], Check::Lost)
            .by(Engine::Search)
            .in_scenario(),
        mutant("different-m", ops::different_m(), [], Check::Fault(FaultKind::Mismatch))
            .in_scenario(),
        mutant("no-record-comparison", different_m, BlindRecords, Check::Wrong).in_scenario(),
    ]
}

fn life_of_words() -> Vec<Mutant> {
    use Access::*;
    use Change::{BlindRecords, OwnerStamps, Skip, SkipStamps, UncheckedRecords};
    use ops::instead::{GATHER, PULL, STAGED, TWO_SHOT};
    let unrefreshed = |name, change, last| {
        let scenario = ops::partial(2, 8, REFRESH_PERIOD - 1, last);
        mutant(name, scenario, change, Check::Wrong).by(Engine::WholeRange(last))
    };
    let zero = ops::partial(2, 1, -5, &[1]).words(0);
    let unheard = [UncheckedRecords, BlindRecords];
    vec![
        mutant("words-zero", zero, unheard, Check::Wrong).in_scenario(),
        mutant("late-memset", primitives::late_memset(), [], Check::Lost).in_scenario(),
        mutant(
            "owner-stamps",
            ops::partial(2, 1, REFRESH_PERIOD, &[1, 1]),
            OwnerStamps,
            Check::Lost,
        ),
        mutant(
            "no-stamps",
            ops::partial(2, 8, REFRESH_PERIOD - 1, &[3, 3, 3]),
            Skip(StampStore),
            Check::Wrong,
        )
        .by(Engine::WholeRange(&[3, 3, 8])),
        mutant(
            "no-stamps-of-done",
            ops::partial(2, 8, REFRESH_PERIOD - 1, &[3, 0, 0]),
            Skip(StampStore),
            Check::Wrong,
        )
        .by(Engine::WholeRange(&[3, 0, 0])),
        unrefreshed("no-stamp-signal", SkipStamps(Kind::Signal), &[3, 3, 8]),
        unrefreshed("no-stamp-result", SkipStamps(Kind::Result), &[3, TWO_SHOT, TWO_SHOT]),
        unrefreshed("no-stamp-done", SkipStamps(Kind::Done), &[3, PULL, PULL]),
        unrefreshed("no-stamp-barrier", SkipStamps(Kind::Barrier), &[3, GATHER, GATHER]),
        unrefreshed("no-stamp-flag", Skip(FlagStamp), &[1, STAGED, STAGED]),
    ]
}

/// Mutants in which a rank that has given up does not check its abort word. With the check, later
/// launches on that rank write nothing that a peer could mistake for valid data.
fn given_up() -> Vec<Mutant> {
    let unchecked = |name, scenario, expected| {
        mutant(name, ops::given_up(scenario), Change::Skip(Access::AbortCheck), expected)
    };
    let stored = |how| ops::given_up(ops::stored(2, 1, 2, how));
    let unmuted = stored(ops::Stored::Unmuted).mutant_of(stored(ops::Stored::Right));
    let untold = |name, scenario| {
        mutant(name, scenario, Change::LeaveUntold, Check::Wrong).by(Engine::Search)
    };
    vec![
        mutant("stores-of-who-gave-up", unmuted, [], Check::Wrong).by(Engine::Search).in_scenario(),
        // Mutants in which a leaving rank does not tell all peers. Rank 1 is told before rank 2,
        // and leaves while rank 2 still reads the shard of rank 1.
        untold("leaves-untold", ops::pull_of_leavers(3, false)),
        untold("leaves-untold-by-host", ops::pull_of_leavers(2, true)),
        untold("copies-of-leavers-untold", ops::copied_of_leavers(3, false)).by(RUNS),
        untold("copies-of-leavers-untold-by-host", ops::copied_of_leavers(2, true)),
        unchecked("no-check-next-launch", ops::accumulate(2, 1, 1, PLAIN), Check::Wrong),
        // Without the check, half of a call is delivered: one workgroup of the root gives up, and
        // another workgroup finds its credit in the next call.
        unchecked(
            "no-check-next-call",
            ops::deliver(2, 2, 3, true, false).groups(&[2, 1]),
            Check::Wrong,
        )
        .by(Engine::Search),
        unchecked(
            "no-check-refresh",
            ops::two_shot(2, 1, 1, false).calls(1, REFRESH_PERIOD),
            Check::Wrong,
        ),
        mutant(
            "abort-check-device",
            ops::given_up(ops::accumulate(2, 1, 1, PLAIN)),
            Change::Scope(Access::AbortCheck, Scope::Device),
            Check::Scope,
        )
        .of(Access::AbortCheck),
    ]
}

/// Mutants of the launch of a user's kernel that runs at the same time as a call.
fn kernels_beside() -> Vec<Mutant> {
    let beside = |name, how, expected| {
        let scenario = ops::beside(2, 1, 2, how).mutant_of(ops::beside(2, 1, 2, Beside::Right));
        mutant(name, scenario, [], expected).by(Engine::Random(2_000)).in_scenario()
    };
    vec![
        beside("beside-own-number", Beside::OwnNumber, Check::Race),
        beside("beside-not-awaited", Beside::NotAwaited, Check::Race),
    ]
}

/// Mutants of operators over several nodes.
fn several_nodes() -> Vec<Mutant> {
    let handover = |name, how| {
        let scenario = nodes::composition(2, 2, how);
        mutant(name, scenario, [], Check::Race).by(Engine::Random(2_000)).in_scenario()
    };
    vec![
        handover("step-before-block", Handover::Unfinished),
        handover("block-reused-in-step", Handover::Reused),
        mutant("no-room-for-step", nodes::residency(Room::Filled), [], Check::Lost)
            .by(Engine::Search)
            .in_scenario(),
    ]
}

/// Mutants of the code of a revoked epoch, of the decision which ranks go on after a loss, and of
/// memory of the old epoch that the new one uses again.
fn lost_ranks() -> Vec<Mutant> {
    let decide = |name, how, crashing, hasty| {
        let scenario = elastic::decide(how, crashing, hasty);
        mutant(name, scenario, [], Check::Wrong).by(Engine::Search).in_scenario()
    };
    let reuses = |name, reuse| {
        mutant(name, elastic::epochs(reuse), [], Check::Wrong).by(Engine::Search).in_scenario()
    };
    vec![
        reuses("epoch-reuses-signals", Reuse::Signals),
        reuses("epoch-reuses-inbox", Reuse::Inboxes),
        reuses("epoch-keeps-direct-c", Reuse::DirectC),
        // The kernel stores 1 + its own rank, as for another reason of its host.
        mutant(
            "revoke-travels-as-gave-up",
            primitives::revoked(),
            Change::Value(Access::AbortStore, 1),
            Check::Wrong,
        ),
        decide("decide-by-store", Decision::ByStore, &[2], &[]),
        decide("decide-cleared", Decision::Cleared, &[], &[0]),
        decide("propose-before-phase", Decision::BeforePhase, &[], &[]),
        decide("mask-without-self", Decision::WithoutSelf, &[], &[]),
        decide("slot-reused-before-meet", Decision::SlotReused, &[2], &[]),
    ]
}

/// Mutants of barriers between launches and between the threads of a workgroup.
fn barriers() -> Vec<Mutant> {
    let in_scenario = |name, scenario: Scenario, sound, expected| {
        mutant(name, scenario.mutant_of(sound), [], expected).in_scenario()
    };
    let accumulate = |name, how: Accumulate, expected| {
        let sound = ops::accumulate(2, 1, 1, Accumulate { atomic: how.atomic, ..PLAIN });
        in_scenario(name, ops::accumulate(2, 1, 1, how), sound, expected)
    };
    let first = Accumulate { first_barrier: false, ..PLAIN };
    let second = Accumulate { second_barrier: false, ..PLAIN };
    let gather = |barrier| ops::gather(2, 1, 1, barrier);
    let gather = in_scenario("gather-no-barrier", gather(false), gather(true), Check::Race);
    let copied = |waits| ops::copied(2, 1, 2, waits);
    let early = in_scenario("copies-before-entries", copied(false), copied(true), Check::Race)
        .by(Engine::Random(2_000));
    let stored = |how| ops::stored(2, 2, 2, how).groups(&[2, 2]);
    let before = stored(ops::Stored::OutOfTurn);
    let before = in_scenario("stores-before-turn", before, stored(ops::Stored::Right), Check::Race)
        .by(Engine::Random(2_000));
    let ended = ops::copied_ended_at_once(2);
    let ended = in_scenario("open-ends-the-call", ended, ops::copied(2, 1, 1, true), Check::Lost)
        .by(Engine::Search);
    let lockstep = primitives::barrier_in_arms(3).threads(2).lockstep();
    let vote = |name, scenario: Scenario, rank, group, position| {
        let drop = Change::DropVote { rank, group, position };
        mutant(name, scenario.threads(2), drop, Check::Race)
    };
    let mut after_flag =
        vote("no-vote-after-flag", ops::staged(&[2, 1], 1, 1), 0, 1, 0).by(Engine::Random(2_000));
    after_flag.expected = Check::Wrong;
    let one_shot = || ops::one_shot(2, 1, 1);
    // Without the barrier after a wait, the thread that does not poll goes on at once. It reads
    // before anything is written, which is a wrong value, not a race.
    let mut after_wait = vote("no-vote-after-wait", one_shot(), 0, 0, 2);
    after_wait.expected = Check::Wrong;
    let locked = || ops::accumulate(2, 1, 1, PLAIN);
    // Without this barrier, a thread refreshes the signal of a tile that another workgroup has yet
    // to write.
    let refreshing = ops::partial(2, 2, REFRESH_PERIOD, &[2]).groups(&[2, 1]);
    let no_done = |name, atomic, expected| {
        let sums = ops::accumulate(2, 1, 2, Accumulate { atomic, ..PLAIN });
        mutant(name, sums, Change::Skip(Access::DoneLoad), expected).by(RUNS)
    };
    vec![
        no_done("spinlock-no-done", false, Check::Race),
        no_done("atomic-no-done", true, Check::Wrong),
        accumulate("spinlock-no-first-barrier", first, Check::Race),
        accumulate("spinlock-no-second-barrier", second, Check::Wrong),
        accumulate("atomic-no-first-barrier", Accumulate { atomic: true, ..first }, Check::Wrong),
        accumulate("atomic-no-second-barrier", Accumulate { atomic: true, ..second }, Check::Wrong),
        gather,
        early,
        before,
        ended,
        mutant("barrier-in-arms", lockstep, [], Check::Lost).by(Engine::Search).in_scenario(),
        mutant(
            "no-gate",
            ops::copied(2, 1, 1, true),
            Change::Skip(Access::SignalLoad),
            Check::Wrong,
        ),
        mutant(
            "copied-number-ahead",
            ops::copied(2, 1, 2, true),
            Change::Value(Access::SignalStore, 8),
            Check::Wrong,
        )
        .by(Engine::Search),
        vote("no-vote-before-signal-of-sender", ops::deliver_by_senders(2, 1, 1, false), 0, 0, 1)
            .by(Engine::Random(2_000)),
        mutant(
            "no-wait-for-senders",
            ops::reduce_scatter_by_senders(2, 2, 1),
            Change::Skip(Access::SignalLoad),
            Check::Race,
        )
        .by(Engine::Random(2_000)),
        vote("no-vote-before-signal", one_shot(), 0, 0, 1),
        after_wait,
        vote("no-vote-after-credit", ops::deliver(2, 1, 3, true, false), 0, 0, 6)
            .by(Engine::Random(2_000)),
        vote("no-vote-between-peers", ops::deliver(3, 1, 3, true, false), 0, 0, 6)
            .by(Engine::Random(2_000)),
        vote("no-vote-before-finish", ops::pull(2, 1, 2), 0, 0, 2),
        vote("no-vote-before-refresh", refreshing, 0, 0, 4).by(Engine::Random(2_000)),
        vote("no-vote-before-count", ops::deliver(2, 1, 1, true, false).groups(&[1, 2]), 1, 1, 0)
            .by(Engine::Random(2_000)),
        vote("no-vote-before-flag", ops::staged(&[2, 1], 1, 1), 0, 0, 2).by(Engine::Random(2_000)),
        after_flag,
        vote("no-vote-after-lock", locked(), 0, 0, 6).by(Engine::Random(2_000)),
        vote("no-vote-before-unlock", locked(), 0, 0, 7).by(Engine::Random(2_000)),
    ]
}
