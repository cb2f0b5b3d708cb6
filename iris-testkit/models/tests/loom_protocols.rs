//! Tests that search protocols of iris-sync over loom: every execution of the C11 memory model
//! within the bound, with two ranks. The tests print the number of executions, and fail if it is
//! less than the number recorded here, so that a search that has become small is noticed.

use iris_models::ll::{self, Pattern};
use iris_models::ops::Accumulate;
use iris_models::{Rules, Scenario, loom_memory, ops, primitives};
use iris_sync::REFRESH_PERIOD;
use iris_sync::barrier::Members;
use iris_testkit::Level;
use rayon::prelude::*;

/// Scenario, preemption bound, and minimum number of executions.
type Case = (Scenario, Option<usize>, u64);

fn check(cases: impl IntoIterator<Item = Case>) {
    let cases: Vec<Case> = cases.into_iter().collect();
    let reports = cases.par_iter().map(|(scenario, preemptions, _)| {
        loom_memory::check(scenario, &Rules::default(), *preemptions)
    });
    for (report, (.., at_least)) in reports.collect::<Vec<_>>().iter().zip(&cases) {
        println!("{report}");
        assert!(report.failure.is_none(), "{report}\n{}", report.history());
        assert!(report.executions >= *at_least, "{report}: expected at least {at_least}");
    }
}

/// Cases for the test level of this run, and for all lower levels.
fn up_to_level<const Q: usize, const D: usize, const F: usize>(
    quick: [Case; Q],
    default: [Case; D],
    full: [Case; F],
) -> Vec<Case> {
    let level = Level::from_env();
    let mut cases: Vec<Case> = quick.into();
    if level >= Level::Normal {
        cases.extend(default);
    }
    if level >= Level::Full {
        cases.extend(full);
    }
    cases
}

#[test]
fn primitives_exhaustively() {
    let (two, outer) = (Members::all(2), Members::from_bits(0b101));
    check(up_to_level(
        [
            (primitives::versioned(2), None, 1_000),
            (primitives::spinlock(2, 2), None, 90),
            (primitives::barrier(2, two, 1, true), None, 100),
            (primitives::flags(2), None, 400),
            (primitives::entry(2, 2), None, 250),
            (primitives::entry(2, 3), None, 4_000),
            (primitives::abort(), None, 30),
        ],
        [
            (primitives::versioned(3), None, 45_000),
            (primitives::spinlock(2, 3), None, 2_000),
            (primitives::spinlock(3, 1), None, 9_000),
            (primitives::barrier(2, two, 2, true), None, 100_000),
            (primitives::barrier(3, Members::all(3), 1, false), None, 28_000),
            (primitives::barrier(3, outer, 1, true), None, 100),
            (primitives::flags(3), None, 7_000),
        ],
        [
            (primitives::barrier(3, outer, 2, true), None, 150_000),
            (primitives::barrier(2, two, 3, false), None, 300_000),
            (primitives::spinlock(2, 4), None, 30_000),
        ],
    ));
}

fn accumulate(calls: u32, atomic: bool) -> Scenario {
    let how = Accumulate { atomic, first_barrier: true, second_barrier: true };
    ops::accumulate(2, 1, calls, how)
}

#[test]
fn ops_that_push() {
    check(up_to_level(
        [
            (ops::one_shot(2, 1, 1), None, 350),
            (ops::one_shot(2, 1, 3), Some(2), 16_000),
            (ops::two_shot(2, 1, 3, false), Some(2), 1_500),
            (ops::two_shot(2, 1, 3, true), Some(2), 1_500),
            (ops::reduce_scatter(2, 1, 3), Some(2), 1_800),
            (ops::deliver(2, 1, 3, true, false), Some(3), 8_000),
            (ops::deliver(2, 1, 3, true, true), Some(3), 3_000),
            (ops::deliver(2, 1, 3, false, true), Some(2), 1_300),
        ],
        [
            (ops::one_shot(2, 1, 3), Some(3), 100_000),
            (ops::two_shot(2, 1, 3, true), Some(3), 11_000),
            (ops::two_shot(2, 2, 3, false), Some(3), 100_000),
            (ops::reduce_scatter(2, 1, 3), Some(3), 8_500),
            (ops::deliver(2, 1, 3, false, true), Some(3), 10_000),
        ],
        [
            (ops::one_shot(2, 1, 2), None, 350_000),
            (ops::two_shot(2, 1, 2, true), None, 130_000),
            (ops::deliver(2, 1, 3, false, false), Some(3), 100_000),
        ],
    ));
}

#[test]
fn words_that_carry_their_data() {
    let exchange = |pattern, calls| ll::exchange(pattern, 2, calls).without_heads();
    check(up_to_level(
        [
            (exchange(Pattern::Root, 1), None, 20),
            (exchange(Pattern::All, 1), Some(2), 150),
            (exchange(Pattern::Root, 3), Some(2), 2_400),
            (exchange(Pattern::TwoShot, 1), Some(2), 200),
        ],
        [
            (exchange(Pattern::All, 2), Some(3), 40_000),
            (exchange(Pattern::Root, 3), Some(3), 10_500),
        ],
        [(exchange(Pattern::All, 1), None, 400), (exchange(Pattern::All, 3), Some(2), 20_000)],
    ));
}

#[test]
fn ops_that_gather_and_accumulate() {
    check(up_to_level(
        [
            (ops::pull(2, 1, 3), Some(2), 1_300),
            (ops::staged(&[1, 1], 1, 2), Some(2), 500),
            (ops::gather(2, 1, 3, true), Some(2), 2_000),
            (ops::copied(2, 1, 3, true), Some(2), 1_300),
            (ops::copied_on(2, 1, 2), Some(2), 500),
            (ops::copied_beside(2, 1, 2), Some(2), 500),
            (ops::stored(2, 1, 2, ops::Stored::Right), Some(2), 500),
            (accumulate(1, false), None, 3_500),
            (accumulate(1, true), None, 1_500),
            (accumulate(3, false), Some(2), 2_500),
            (accumulate(3, true), Some(2), 2_200),
        ],
        [
            (ops::pull(2, 1, 3), Some(3), 11_000),
            (ops::staged(&[1, 1], 1, 3), Some(3), 9_000),
            (ops::gather(2, 1, 3, true), Some(3), 10_000),
            (ops::copied(2, 1, 3, true), Some(3), 10_000),
            (accumulate(3, false), Some(3), 28_000),
            (accumulate(3, true), Some(3), 22_000),
        ],
        [(ops::pull(2, 1, 2), None, 10_000)],
    ));
}

#[test]
fn workgroups_of_two_threads() {
    check(up_to_level(
        [
            (ops::one_shot(2, 1, 1).threads(2), None, 800),
            (ops::pull(2, 1, 1).threads(2), None, 2_800),
            (ops::deliver(2, 1, 1, true, false).threads(2), None, 30),
        ],
        [
            (ops::one_shot(2, 1, 1).threads(2), Some(2), 2_500),
            (ops::deliver(2, 1, 1, true, true).threads(2), None, 40),
            (ops::two_shot(2, 1, 1, false).threads(2), None, 200),
            (accumulate(1, false).threads(2), Some(0), 8),
            (accumulate(1, true).threads(2), Some(0), 8),
        ],
        [
            (ops::deliver(2, 1, 2, true, false).threads(2), Some(2), 500),
            (accumulate(1, false).threads(2), Some(1), 3_000_000),
        ],
    ));
}

#[test]
fn two_workgroups_of_a_rank() {
    check(up_to_level(
        [
            (ops::pull(2, 1, 1).groups(&[2, 1]), None, 2_500),
            (ops::pull(1, 2, 2).groups(&[2]), None, 3),
        ],
        [
            (ops::one_shot(2, 2, 1).groups(&[2, 1]), Some(1), 500),
            (ops::one_shot(2, 1, 1).groups(&[2, 2]), None, 4_500),
            (ops::staged(&[2, 1], 1, 1), Some(2), 13_000),
        ],
        [(ops::one_shot(2, 2, 1).groups(&[2, 1]), Some(2), 3_000)],
    ));
}

/// Tests words that a rank's last workgroup refreshes after other workgroups have set them. A
/// reader of the refreshed word must see all writes that the original word published.
#[test]
fn words_refreshed_while_they_are_awaited() {
    check(up_to_level(
        [
            (ops::partial(2, 1, REFRESH_PERIOD, &[1]), None, 5_000),
            (ops::partial(2, 1, REFRESH_PERIOD - 1, &[1, 1, 1]), Some(1), 500),
            (ops::partial(2, 2, REFRESH_PERIOD, &[2]).threads(2), Some(0), 80),
        ],
        [
            (ops::partial(2, 2, REFRESH_PERIOD, &[2]).groups(&[2, 1]), Some(1), 500),
            (ops::partial(2, 1, i32::MAX, &[1, 1, 1]), Some(2), 10_000),
            (ops::partial(2, 1, REFRESH_PERIOD, &[1, 1]), Some(2), 7_000),
        ],
        [(ops::partial(2, 2, REFRESH_PERIOD, &[2]).groups(&[2, 1]), Some(2), 10_000)],
    ));
}
