//! Mutants of the LL protocol, one for each of its rules. Some run the whole range of call numbers,
//! because LL words are compared by `==`.

use iris_sync::{Access, FaultKind, REFRESH_PERIOD, Scope};

use super::mutant::{Engine, Mutant, RUNS, mutant};
use super::round::LAST;
use crate::ll::{self, Pattern};
use crate::{Change, Check, Compare, ops};

/// Mutants that the device headers and iris-sync have in common.
pub(super) fn all() -> Vec<Mutant> {
    use Access::{AbortCheck, CreditLoad, EntryStore, LlLoad, LlStamp, LlStore};
    let one = |calls| ll::exchange(Pattern::All, 2, calls).without_heads();
    let rows = |calls| ll::exchange_rows(2, calls, true, true).threads(3).without_heads();
    let tiles = ll::exchange_tiles(2, 1, 2).threads(4).without_heads();
    let root = |calls| ll::exchange(Pattern::Root, 2, calls).without_heads();
    let many = |threads| ll::exchange(Pattern::Root, 3, 3).threads(threads).without_heads();
    let relay = ll::exchange(Pattern::Relay, 3, 1).without_heads();
    let sums = ll::exchange(Pattern::TwoShot, 2, 1).without_heads();
    let packs = ll::exchange(Pattern::Packs, 2, 2).without_heads();
    let summed_packs = ll::exchange(Pattern::TwoShotPacks, 2, 1).without_heads();
    let device = |name, access, scenario| {
        let change = Change::Scope(access, Scope::Device);
        mutant(name, scenario, change, Check::Scope).of(access)
    };
    let round = |name, change: Change, expected| {
        let scenario = ll::partial(Pattern::All, 2, REFRESH_PERIOD - 1, LAST).without_heads();
        mutant(name, scenario, change, expected).by(Engine::SlotsWholeRange(Pattern::All))
    };
    let refreshing = |used| ll::partial(Pattern::All, 2, REFRESH_PERIOD - 1, used).without_heads();
    vec![
        device("ll-store-device", LlStore, one(1)),
        device("ll-load-device", LlLoad, one(1)),
        device("ll-stamp-device", LlStamp, refreshing(&[1, 1])),
        mutant("ll-torn", one(1), Change::Torn, Check::Wrong),
        mutant("ll-any", one(1), Change::Compare(LlLoad, Compare::Any), Check::Wrong),
        // A rank passes on an item that has not arrived yet.
        mutant("ll-relay-any", relay, Change::Compare(LlLoad, Compare::Any), Check::Wrong),
        mutant("ll-two-hops-any", sums, Change::Compare(LlLoad, Compare::Any), Check::Wrong),
        // A pack has four words, each with its own flag.
        mutant("ll-packs-torn", packs.clone(), Change::Torn, Check::Wrong),
        mutant("ll-packs-any", packs, Change::Compare(LlLoad, Compare::Any), Check::Wrong),
        mutant(
            "ll-packs-two-hops-any",
            summed_packs,
            Change::Compare(LlLoad, Compare::Any),
            Check::Wrong,
        ),
        // Mutants that check only one of several items that are polled together.
        mutant("ll-rows-torn", rows(1), Change::Torn, Check::Wrong).by(RUNS),
        mutant("ll-rows-any", rows(1), Change::Compare(LlLoad, Compare::Any), Check::Wrong)
            .by(RUNS),
        // Without the barrier, a thread of a workgroup reads items that the other thread has not
        // received yet.
        mutant(
            "ll-no-vote-before-row",
            rows(1),
            Change::DropVote { rank: 0, group: 0, position: 1 },
            Check::Wrong,
        )
        .by(RUNS),
        mutant("ll-tiles-any", tiles.clone(), Change::Compare(LlLoad, Compare::Any), Check::Wrong)
            .by(RUNS),
        // Without the barrier, a thread of a workgroup pushes items that the other thread has not
        // multiplied yet.
        mutant(
            "ll-no-vote-behind-product",
            tiles,
            Change::DropVote { rank: 0, group: 0, position: 1 },
            Check::Wrong,
        )
        .by(RUNS),
        mutant(
            "ll-less",
            one(2).calls(2, i32::MAX),
            Change::Compare(LlLoad, Compare::Less),
            Check::Wrong,
        )
        .by(Engine::Search),
        mutant("ll-no-credit", root(3), Change::Skip(CreditLoad), Check::Lost).by(Engine::Search),
        mutant("ll-no-credit-ahead", root(3).threads(2), Change::Skip(CreditLoad), Check::Lost)
            .by(RUNS),
        mutant("ll-no-credit-of-many", many(1), Change::Skip(CreditLoad), Check::Lost).by(RUNS),
        mutant("ll-no-credit-of-many-ahead", many(4), Change::Skip(CreditLoad), Check::Lost)
            .by(RUNS),
        // Without the barrier, a thread counts the workgroup out before the other one has read the number.
        mutant(
            "ll-no-vote-behind-pushes",
            ll::exchange_two(Pattern::All, 2, 1).threads(2).without_heads(),
            Change::DropVote { rank: 0, group: 0, position: 0 },
            Check::Race,
        )
        .by(RUNS),
        mutant("ll-one-slot", root(2), Change::OnePairSlot, Check::Lost).by(Engine::Search),
        mutant("ll-no-entry", one(3), Change::Skip(EntryStore), Check::Lost).by(Engine::Search),
        mutant("ll-waits-first", ll::waiting_first(), [], Check::Lost)
            .by(Engine::Search)
            .in_scenario(),
        mutant("ll-different-m", ll::different_m(), [], Check::Fault(FaultKind::Mismatch))
            .by(Engine::Search)
            .in_scenario(),
        mutant("ll-counts-first", ll::counting_first(), [], Check::Race).by(RUNS).in_scenario(),
        // Launches that overlap: both write the cells of items that the first launch has received.
        mutant("ll-launched-early", ll::early(), [], Check::Race).by(RUNS).in_scenario(),
        mutant("ll-two-kinds", ll::two_kinds(), [], Check::Fault(FaultKind::Mismatch))
            .by(Engine::Search)
            .in_scenario(),
        mutant("ll-no-head-comparison", ll::different_m(), Change::BlindRecords, Check::Wrong)
            .by(Engine::Search)
            .in_scenario(),
        // With shared pushes, one workgroup overwrites an input item that another workgroup still
        // has to push.
        mutant("ll-spread-in-place", ll::in_place(true), [], Check::Race).by(RUNS).in_scenario(),
        mutant("ll-recycled", one(1).recycled(0), [], Check::Wrong)
            .by(Engine::Search)
            .in_scenario(),
        mutant("ll-recycled-other-slot", one(2).recycled(1), [], Check::Wrong)
            .by(Engine::Search)
            .in_scenario(),
        mutant(
            "ll-stamps-used",
            ll::partial(Pattern::All, 2, REFRESH_PERIOD, &[1]).without_heads(),
            Change::StampUsedPairs,
            Check::Lost,
        )
        .by(Engine::Search),
        round("ll-no-stamps", Change::Skip(LlStamp), Check::Wrong),
        mutant(
            "ll-packs-no-stamps",
            ll::partial(Pattern::Packs, 2, REFRESH_PERIOD - 1, LAST).without_heads(),
            Change::Skip(LlStamp),
            Check::Wrong,
        )
        .by(Engine::SlotsWholeRange(Pattern::Packs)),
        round("ll-no-stamp-even", Change::SkipPairStamps(0), Check::Wrong),
        round("ll-no-stamp-odd", Change::SkipPairStamps(1), Check::Wrong),
        // Without the check, rank 1 still polls words of the first call when the root, which is two
        // calls ahead and has given up, refreshes them.
        mutant(
            "ll-no-check-refresh",
            ops::given_up(
                ll::partial(Pattern::Root, 2, REFRESH_PERIOD - 1, &[2, 1, 1]).without_heads(),
            ),
            Change::Skip(AbortCheck),
            Check::Wrong,
        )
        .by(Engine::Search),
        // Without the barrier, one thread has received all of its items while the other thread
        // gives up. The next kernel then reads items that the other thread did not receive.
        mutant(
            "ll-no-vote-to-leave",
            ops::given_up(ll::exchange_two(Pattern::All, 2, 1).threads(2).without_heads()),
            Change::DropVote { rank: 0, group: 0, position: 1 },
            Check::Wrong,
        )
        .by(RUNS),
        // The mutant runs in calls that refresh words, because these count their workgroups at the
        // end of the call. In other calls, the fault would first show at the count.
        mutant(
            "ll-no-vote-after-credit",
            ll::exchange_two(Pattern::Root, 3, 3)
                .threads(3)
                .calls(3, REFRESH_PERIOD - 1)
                .without_heads(),
            Change::DropVote { rank: 0, group: 0, position: 6 },
            Check::Lost,
        )
        .by(RUNS),
    ]
}
