//! Tests that search the iris-sync protocols with three and four ranks: every interleaving, each
//! state once, and random schedules with vector clocks from printed seeds. They also go through the
//! whole range of the call counter.

use iris_models::ll::{self, Pattern};
use iris_models::mutants::{STATES, slots_whole_range, whole_range};
use iris_models::ops::instead::{GATHER, PULL, STAGED, TWO_SHOT};
use iris_models::ops::{Accumulate, Beside};
use iris_models::search::Observer;
use iris_models::{
    Forbidden, Operation, Place, Report, Rules, Scenario, ThreadId, ops, primitives, search,
};
use iris_sync::barrier::Members;
use iris_sync::{REFRESH_PERIOD, SymWord};
use iris_testkit::Level;
use rayon::prelude::*;

fn report(report: &Report, at_least: u64) {
    println!("{report}");
    assert!(report.failure.is_none(), "{report}\n{}", report.history());
    assert!(report.executions >= at_least, "{report}: expected at least {at_least}");
}

/// Scenarios of every op, with `ranks` ranks and `calls` calls.
fn all_ops(ranks: u32, calls: u32) -> Vec<Scenario> {
    let accumulate = |atomic| {
        let how = Accumulate { atomic, first_barrier: true, second_barrier: true };
        ops::accumulate(ranks, 1, calls, how)
    };
    vec![
        ops::one_shot(ranks, 1, calls),
        ops::one_shot(ranks, 3, calls),
        ops::two_shot(ranks, 1, calls, false),
        ops::two_shot(ranks, 2, calls, false),
        ops::two_shot(ranks, 2, calls, true),
        ops::reduce_scatter(ranks, 1, calls),
        ops::reduce_scatter(ranks, 3, calls),
        ops::matmul_reduce_scatter(ranks, 3, calls),
        ops::deliver(ranks, 1, calls, true, false),
        ops::deliver(ranks, 1, calls, true, true),
        ops::deliver(ranks, 1, calls, false, false),
        ops::deliver(ranks, 1, calls, false, true),
        ops::relay(ranks, 1, calls, false),
        ops::relay(ranks, 2, calls, true),
        ops::pull(ranks, 1, calls),
        ops::staged(&vec![1; ranks as usize], 1, calls),
        ops::gather(ranks, 1, calls, true),
        ops::copied(ranks, 1, calls, true),
        ops::copied_on(ranks, 1, calls),
        ops::copied_beside(ranks, 1, calls),
        ops::stored(ranks, 1, calls, ops::Stored::Right),
        accumulate(false),
        accumulate(true),
    ]
}

#[test]
fn every_interleaving_of_three_and_four_ranks() {
    let level = Level::from_env();
    let mut scenarios = all_ops(3, 2);
    scenarios.push(ops::staged(&[2, 2, 1], 1, 1));
    scenarios.push(ops::copied(2, 2, 2, true).groups(&[2, 2]));
    scenarios.push(ops::copied_beside(2, 2, 2).groups(&[3, 3]));
    scenarios.push(ops::stored(2, 2, 1, ops::Stored::Right).groups(&[2, 2]));
    if level >= Level::Normal {
        scenarios.extend(all_ops(4, 1));
        scenarios.extend(all_ops(2, 4));
        scenarios.push(ops::staged(&[2, 2, 2], 1, 1));
    }
    if level >= Level::Full {
        scenarios.extend(all_ops(3, 3));
    }
    for scenario in scenarios {
        report(&search::exhaust(&scenario, &Rules::default(), STATES), 100);
    }
    for (ranks, tiles, calls) in [(2, 1, 2), (2, 2, 1), (3, 1, 1)] {
        let scenario = ops::beside(ranks, tiles, calls, Beside::Right);
        report(&search::exhaust(&scenario, &Rules::default(), STATES), 100);
    }
    for ranks in [3, 4] {
        let scenario = primitives::barrier(ranks, Members::all(ranks), 2, true);
        report(&search::exhaust(&scenario, &Rules::default(), STATES), 200);
        report(&search::exhaust(&primitives::spinlock(ranks, 2), &Rules::default(), STATES), 200);
        report(&search::exhaust(&primitives::entry(ranks, 2), &Rules::default(), STATES), 1_000);
    }
    let middle = Members::from_bits(0b1011);
    report(
        &search::exhaust(&primitives::barrier(4, middle, 2, true), &Rules::default(), STATES),
        200,
    );
}

/// Tests waves of two threads in lockstep: one side of a branch runs to its end before the other,
/// and either side may be first. From three ranks on, each thread has a peer of its own. `cargo
/// xtask check-protocols` searches one call of each op exhaustively.
#[test]
fn waves_in_lockstep() {
    let runs = Level::from_env().pick(50, 200, 5_000);
    let barrier = primitives::barrier_in_launch(3);
    let both = |scenario: Scenario| [Some(scenario.clone()), scenario.on_headers()];
    for scenario in all_ops(3, 3).into_iter().flat_map(both).flatten() {
        let scenario = scenario.threads(2).lockstep();
        report(&search::random(&scenario, &Rules::default(), 1, runs), runs);
    }
    for scenario in both(barrier).into_iter().flatten() {
        let scenario = scenario.threads(2).lockstep();
        report(&search::exhaust(&scenario, &Rules::default(), STATES), 1_000);
    }
}

/// Tests that every result that a rank accepts is correct, whenever rank 0 gives up. Ops that pull
/// and ops with copy engines are left out. In them, memory is rewritten while a peer may read it;
/// the models would report a race, although the peer notices before its call ends.
#[test]
fn a_rank_that_gives_up_misleads_nobody() {
    let level = Level::from_env();
    let pulls =
        |s: &Scenario| ["pull", "staged", "copied"].iter().any(|op| s.name().starts_with(op));
    let mut sizes = vec![(2, 3), (3, 1)];
    if level >= Level::Full {
        sizes.push((3, 2));
    }
    for (ranks, calls) in sizes {
        for scenario in all_ops(ranks, calls).into_iter().filter(|s| !pulls(s)) {
            // First call numbers: 7, and one for which the last call refreshes words.
            for first in [7, REFRESH_PERIOD.wrapping_sub(calls as i32 - 1)] {
                let scenario = ops::given_up(scenario.clone().calls(calls, first));
                report(&search::exhaust(&scenario, &Rules::default(), STATES), 20);
                let groups: Vec<u32> = (0..ranks).map(|rank| 1 + u32::from(rank == 0)).collect();
                let wide = scenario.threads(2).groups(&groups);
                let runs = level.pick(200, 1_000, 5_000);
                report(&search::random(&wide, &Rules::default(), 1, runs), runs);
            }
        }
    }
}

/// Tests that a peer whose call succeeds has read correct data, although rank 0 leaves the call at
/// any moment. After that, the next kernel of rank 0 overwrites the shard that peers pull, or its
/// copies still write into memory that a peer reads.
#[test]
fn a_rank_that_leaves_tells_whoever_may_read_what_it_overwrites() {
    let both = |scenario: Scenario| [Some(scenario.clone()), scenario.on_headers()];
    let mut scenarios = Vec::new();
    for by_host in [false, true] {
        scenarios.push(ops::pull_of_leavers(2, by_host));
        scenarios.push(ops::pull_of_leavers(3, by_host));
        scenarios.push(ops::copied_of_leavers(2, by_host));
    }
    for scenario in scenarios.into_iter().flat_map(both).flatten() {
        report(&search::exhaust(&scenario, &Rules::default(), STATES), 100);
    }
    // Random schedules are used for three ranks, because all interleavings would exceed STATES.
    let runs = Level::from_env().pick(500, 3_000, 20_000);
    for scenario in [false, true].map(|by_host| ops::copied_of_leavers(3, by_host)) {
        for scenario in both(scenario).into_iter().flatten() {
            report(&search::random(&scenario, &Rules::default(), 1, runs), runs);
        }
    }
}

#[test]
fn random_schedules_of_up_to_four_ranks() {
    let runs = Level::from_env().pick(500, 3_000, 10_000);
    let mut scenarios: Vec<Scenario> = [2, 3, 4].into_iter().flat_map(|r| all_ops(r, 3)).collect();
    for ranks in [2, 3, 4] {
        let groups = vec![2; ranks as usize];
        scenarios.extend(all_ops(ranks, 2).into_iter().map(|s| s.threads(2)));
        scenarios.extend(all_ops(ranks, 2).into_iter().map(|s| s.groups(&groups)));
        scenarios.push(ops::staged(&groups, 2, 2).threads(2));
        scenarios.push(ops::beside(ranks, 2, 3, Beside::Right).threads(2));
    }
    let placed = scenarios.par_iter().enumerate().map(|(at, scenario)| {
        let seed = (at as u64 + 1) * 1_000_000;
        search::random(scenario, &Rules::default(), seed, runs)
    });
    let found: Vec<Report> = placed.collect();
    for found in &found {
        assert!(found.failure.is_none(), "{found}\n{}", found.history());
    }
    let total: u64 = found.iter().map(|found| found.executions).sum();
    println!(
        "{} scenarios, {runs} schedules each, seeds from 1000000 times the place in the list",
        scenarios.len()
    );
    assert_eq!(total, runs * scenarios.len() as u64);
}

/// Tests every op and the LL protocol with five and with eight ranks, as many as a node has GPUs.
#[test]
fn random_schedules_of_five_and_eight_ranks() {
    let runs = Level::from_env().pick(10, 25, 1_000);
    let mut scenarios = Vec::new();
    for ranks in [5, 8] {
        scenarios.extend(all_ops(ranks, 3));
        // Scenarios with two threads, each of which serves more than one peer.
        scenarios.extend(all_ops(ranks, 2).into_iter().map(|s| s.threads(2)));
        for (_, pattern) in Pattern::NAMED {
            scenarios.push(ll::exchange_two(pattern, ranks, 3).threads(3));
        }
        scenarios.push(ll::exchange_rows(ranks, 3, true, true).threads(4));
        scenarios.push(ll::exchange_tiles(ranks, 3, 3).threads(4));
        scenarios.push(ops::partial(ranks, 8, -2, &[3, 3, 1, 8]));
        scenarios.push(primitives::barrier(ranks, Members::all(ranks), 3, true));
    }
    let found =
        scenarios.par_iter().map(|scenario| search::random(scenario, &Rules::default(), 1, runs));
    let found: Vec<Report> = found.collect();
    for found in &found {
        report(found, runs);
    }
}

/// Tests the LL protocol in every communication pattern: in a row of LL calls, also with few LL words
/// in use, and in turns with calls of other protocols; with and without a rank that gives up.
#[test]
fn words_that_carry_their_data() {
    let level = Level::from_env();
    let mut scenarios = Vec::new();
    for (_, pattern) in Pattern::NAMED {
        scenarios.push(ll::exchange(pattern, 2, 2));
        for (ranks, calls) in [(2, 4), (3, 1)] {
            scenarios.push(ll::exchange(pattern, ranks, calls).without_heads());
        }
        if level >= Level::Full {
            scenarios.push(ll::exchange(pattern, 2, 3));
            scenarios.push(ll::exchange(pattern, 3, 2).without_heads());
        }
        for first in [REFRESH_PERIOD - 2, -2, i32::MAX - 1] {
            let partial = ll::partial(pattern, 2, first, &[1, 2, 0, 1]);
            scenarios.push(partial.without_heads());
        }
    }
    for scenario in &scenarios {
        report(&search::exhaust(scenario, &Rules::default(), STATES), 50);
    }
    for scenario in scenarios.into_iter().filter(|s| !s.name().contains("3 ranks, [1, 1]")) {
        report(&search::exhaust(&ops::given_up(scenario), &Rules::default(), STATES), 50);
    }
    let runs = level.pick(50, 200, 10_000);
    for (_, pattern) in Pattern::NAMED {
        for ranks in [2, 3, 4] {
            let wide = ll::exchange_two(pattern, ranks, 3).threads(3);
            // Two of three workgroups have items; the last one announces the entry.
            let groups =
                |rank: u32| (0..ranks).map(move |r| if r <= rank { 3 } else { 1 }).collect();
            let (first, all): (Vec<u32>, Vec<u32>) = (groups(0), groups(ranks));
            // If rank 0, which has several workgroups, gives up, it does not check the items that
            // it received. One of its workgroups may have given up, and then the items of the
            // others are no result.
            let given_up = ops::given_up(wide.clone().groups(&first).without_heads());
            for scenario in [wide.clone(), wide.groups(&all).without_heads(), given_up] {
                report(&search::random(&scenario, &Rules::default(), 1, runs), runs);
            }
        }
    }
}

/// Searches `scenario` with `groups` workgroups on every rank, and with one on every rank except
/// rank 0, which gives up.
fn in_groups(scenario: &Scenario, ranks: u32, groups: u32, runs: u64) {
    let all = scenario.clone().groups(&vec![groups; ranks as usize]);
    // If rank 0, which has several workgroups, gives up, it does not check the items that it took:
    // one of its workgroups may have given up, and then the items of the others are no result.
    let first = |rank| if rank == 0 { groups } else { 1 };
    let first: Vec<u32> = (0..ranks).map(first).collect();
    for scenario in [all, ops::given_up(scenario.clone().groups(&first))] {
        report(&search::random(&scenario, &Rules::default(), 1, runs), runs);
    }
}

/// Tests the LL protocol in rows. One workgroup receives a whole row: after its barrier, all of its
/// threads may read the row.
#[test]
fn rows_of_words_that_carry_their_data() {
    let runs = Level::from_env().pick(50, 300, 10_000);
    for (ranks, spread) in [(2, false), (2, true), (3, false), (3, true)] {
        report(&search::random(&ll::in_place(false), &Rules::default(), 1, runs), runs);
        let one = ll::exchange_rows(ranks, 1, false, spread).without_heads();
        report(&search::exhaust(&one, &Rules::default(), STATES), 50);
        // Numbers of workgroups and of threads. The last of several workgroups has no rows. With three
        // workgroups of two threads, a workgroup receives a row by itself; with four threads, a row
        // has too few items for each thread.
        for (groups, threads) in [(1, 2), (2, 2), (3, 2), (3, 4)] {
            let wide = ll::exchange_rows(ranks, 3, true, spread).threads(threads);
            in_groups(&wide, ranks, groups, runs);
        }
    }
}

/// Tests the LL protocol with GEMM tiles, one for each workgroup: a thread pushes items that
/// another thread has multiplied.
#[test]
fn tiles_of_words_that_carry_their_data() {
    let runs = Level::from_env().pick(50, 200, 10_000);
    for ranks in [2, 3] {
        // Shares of the workgroups: four threads share a row, two threads have two rows, or one
        // thread has four rows.
        let wide = ll::exchange_tiles(ranks, 3, 3).threads(4);
        for groups in [1, 2, 4] {
            in_groups(&wide, ranks, groups, runs);
        }
    }
}

/// Tests calls that start just below the largest number and just below each multiple of the refresh
/// period; they use three of eight tiles, then all of them.
#[test]
fn counters_about_to_wrap_or_to_refresh() {
    let level = Level::from_env();
    let starts = (-4..4).map(|k: i32| k.wrapping_mul(REFRESH_PERIOD)).chain([i32::MIN]);
    for multiple in starts {
        let first = multiple.wrapping_sub(2);
        for ranks in [2, 3, 4] {
            let scenario = ops::partial(ranks, 8, first, &[3, 3, 1, 8]);
            let runs = level.pick(100, 500, 5_000);
            report(&search::random(&scenario, &Rules::default(), 1, runs), runs);
        }
        if level >= Level::Normal {
            let scenario = ops::partial(2, 8, multiple.wrapping_sub(1), &[3, 3, 8]);
            report(&search::exhaust(&scenario, &Rules::default(), STATES), 5_000);
        }
    }
}

#[test]
fn once_round_the_counter() {
    // Searches the whole range of call numbers with sums that begin while other tiles are still
    // pushed, which leaves fewer orders of steps.
    report(&whole_range(&Rules::default(), &[3, 3, 8]), 30_000);
    report(&whole_range(&Rules::default(), &[3, PULL, PULL]), 30_000);
    report(&whole_range(&Rules::default(), &[3, TWO_SHOT, TWO_SHOT]), 30_000);
    report(&whole_range(&Rules::default(), &[3, GATHER, GATHER]), 30_000);
    report(&whole_range(&Rules::default(), &[1, STAGED, STAGED]), 10_000);
    for pattern in [Pattern::All, Pattern::Packs] {
        report(&slots_whole_range(false, pattern, &Rules::default()), 5_000);
    }
}

/// Tests that a refresh is shared evenly by all threads of the workgroup that ends the launch,
/// whichever that is, and that no other workgroup takes part.
#[test]
fn all_threads_of_the_last_workgroup_refresh_words() {
    const THREADS: u32 = 4;
    const UNUSED: std::ops::Range<u32> = THREADS..2 * THREADS;
    /// Stores of the threads of rank 0 to words of unused tiles, by workgroup; one item for each
    /// execution.
    struct Stores {
        signals: u32,
        results: u32,
        of: Vec<[[u32; THREADS as usize]; 2]>,
    }
    impl Observer for Stores {
        fn begin(&mut self) {
            self.of.push(Default::default());
        }
        fn performed(&mut self, by: ThreadId, op: &Operation, _: i64) -> Result<(), Forbidden> {
            if let (Operation::Store { .. }, Some(Place::Sym { rank: 1, index })) = (op, op.place())
                && [self.signals, self.results]
                    .iter()
                    .any(|it| UNUSED.contains(&index.wrapping_sub(*it)))
                && let Some(of) = self.of.last_mut()
            {
                of[by.group as usize][by.thread as usize] += 1;
            }
            Ok(())
        }
    }
    let scenario = ops::partial(2, UNUSED.end, REFRESH_PERIOD, &[2]).groups(&[2, 1]);
    let scenario = scenario.threads(THREADS);
    for scenario in [Some(scenario.clone()), scenario.on_headers()].into_iter().flatten() {
        let channel = scenario.channel(0);
        let word = |word: SymWord| word.index;
        let mut stores = Stores {
            signals: word(channel.signal(1, 0, 0)),
            results: word(channel.result(1, 0, 0)),
            of: Vec::new(),
        };
        let seen = search::observe(&scenario, &Rules::default(), (1, 50), &mut stores);
        report(&seen, 50);
        let (all, none) = ([2; THREADS as usize], [0; THREADS as usize]);
        assert!(
            stores.of.iter().all(|it| *it == [all, none] || *it == [none, all]),
            "{:?}",
            stores.of
        );
        assert!(
            [[all, none], [none, all]].iter().all(|it| stores.of.contains(it)),
            "{:?}",
            stores.of
        );
    }
}
