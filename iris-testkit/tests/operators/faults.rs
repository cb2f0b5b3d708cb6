//! Tests of calls that fail: every rank gets an error that gives the cause, within the deadline,
//! and no call fails without a cause.
//!
//! Faults known from comparable systems, and the test that shows their absence:
//!
//! | fault | test |
//! |---|---|
//! | polling for the literal 1 | `counters::counters_at_the_ends_of_their_range` (calls begin anywhere) |
//! | counters compared with `<` | `counters::counters_at_the_ends_of_their_range` |
//! | accumulating in bf16 | `oracle::the_bounds_tell_accumulating_in_bf16_from_accumulating_in_f32` and every bf16 case |
//! | own tile added first, so that ranks differ | [`every_rank_has_the_same_bits`] |
//! | row groups that do not divide the tiles, so that flags stay unset | `suite::choices_of_the_plan`, `schedules` |
//! | no entry barrier before a peer's shard is read | [`a_late_shard_is_waited_for`] |
//! | a timeout that exists in debug builds only | [`a_rank_that_skips_a_call_is_named`] (tests are release builds) |
//! | a barrier whose first call allocates | `misuse::calls_take_no_memory` |
//! | a subgroup that enters a barrier of all | [`a_barrier_of_some_ranks_waits_for_those_only`] |
//! | frees in a different order on each rank | `misuse::frees_in_another_order_are_refused` |
//! | a host exchange on every call | `misuse::run_returns_before_any_peer_has_come` |
//! | bias silently dropped | [`a_bias_is_added_once`] |
//! | validated on ones | inputs of every case are random, outputs poisoned |
//! | device scope on a word that peers see | the models of `iris-sync` |

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use iris_heap::{ErrorKind, HeapOptions, Settings, SymmetricHeap, World};
use iris_ops::{Barrier, MatRef, OpError as Error, TileShape, Topology, Variant, barrier};
use iris_sync::{FaultKind, Field};
use iris_testkit::error_texts::fails;
use iris_testkit::harness::rows;
use iris_testkit::oracle::Meaning;
use iris_testkit::suite::{Case, Input, Op, Options};

use crate::common::ready::{Ready, all_cases, kind_of, operands};
use crate::common::{run_all, taken};

/// Small cases of ops and variants that `is_meant` selects.
fn cases(is_meant: impl Fn(&Case) -> bool) -> Vec<Case> {
    all_cases().into_iter().filter(is_meant).collect()
}

/// Runs `f` for every case, several cases at a time, each in its own world of 3 ranks, and passes
/// the ranks' results to `check`. Deadlines are minutes; a test that needs a timeout advances the
/// clock by [`Ready::pass_until_a_fault`].
fn everywhere<T: Send>(
    cases: &[Case],
    f: impl Fn(World, &Case) -> anyhow::Result<T> + Sync,
    check: impl Fn(&Case, Vec<anyhow::Result<T>>) + Sync,
) {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let results =
                        World::run_threads_each(3, &Settings::default(), |world| f(world, case))
                            .unwrap();
                    check(case, results);
                }
            });
        }
    });
}

fn all_succeed(case: &Case, results: Vec<anyhow::Result<()>>) {
    for result in results {
        result.unwrap_or_else(|e| panic!("{case:?}: {e:?}"));
    }
}

/// Whether `rank`, one of three ranks, waits for `other` in each call. If `other` sends `rank`
/// nothing, the result is false: `rank` first waits for `other` two calls later.
fn waits(case: &Case, rank: usize, other: usize) -> bool {
    let needed = || case.task(Topology::new(rank, 3), case.options.m).sent(other, rank) > 0;
    rank != other && (case.op == Op::Barrier || needed())
}

/// Fault that `error` reports, with the op's name; `None` if the error is not a fault.
fn fault_of(error: &anyhow::Error) -> Option<(String, iris_sync::Fault)> {
    let fault = |error: &iris_heap::Error| match error {
        iris_heap::Error::Fault { op, fault, .. } => Some((op.clone(), *fault)),
        _ => None,
    };
    match error.downcast_ref::<Error>() {
        Some(Error::Heap { cause, .. } | Error::Poisoned { cause, .. }) => fault(cause),
        _ => error.downcast_ref::<iris_heap::Error>().and_then(fault),
    }
}

#[test]
fn a_rank_that_skips_a_call_is_named() {
    // Rank that skips the call: the one of ranks 0 and 1 that more of the other ranks wait for.
    let skips = |case: &Case| {
        let waiting = |other| (0..3).filter(|&rank| waits(case, rank, other)).count();
        if waiting(0) > waiting(1) { 0 } else { 1 }
    };
    everywhere(
        &cases(|case| case.op != Op::Matmul),
        |world, case| {
            let mut ready = Ready::new(&world, case)?;
            let waited = ready.call_unless(&world, skips(case))?;
            let synced = ready.sync();
            if !waits(case, world.rank(), skips(case)) {
                return Ok(None);
            }
            let error = anyhow::Error::from(synced.unwrap_err());
            let checked = ready.op.check().unwrap_err();
            let (_, fault) = fault_of(&error).unwrap();
            let kind = match fault.kind {
                FaultKind::PeerGaveUp => ErrorKind::Fault,
                _ => ErrorKind::Timeout,
            };
            assert_eq!(checked.kind(), kind, "{checked}");
            let again = ready.call().unwrap_err();
            assert!(matches!(again, Error::Poisoned { .. }), "{again}");
            assert_eq!(again.kind(), kind);
            Ok(Some((error, waited)))
        },
        |case, results| {
            let mut named = 0;
            for result in results.into_iter().map(Result::unwrap) {
                let Some((error, waited)) = result else { continue };
                let (op, fault) = fault_of(&error).unwrap_or_else(|| panic!("{case:?}: {error:?}"));
                assert!(op.starts_with(case.op.name()), "{error}");
                assert_eq!(fault.call, 2, "{error}");
                match fault.kind {
                    FaultKind::NotEntered => {
                        assert_eq!(fault.rank, skips(case) as i32, "{case:?}: {error}");
                        // The fault names the number of the peer's last call, 0 or 1, as the value
                        // that the word still had.
                        assert!(fault.seen < 2 && fault.wanted == 2, "{error}");
                        named += 1;
                    }
                    FaultKind::PeerGaveUp => assert_eq!(fault.rank, skips(case) as i32, "{error}"),
                    other => panic!("{case:?}: {other:?}: {error}"),
                }
                let least = Settings::default().entry_deadline();
                let early = fault.kind == FaultKind::PeerGaveUp;
                assert!(waited >= least || early, "{case:?}: {waited:?}");
            }
            assert!(named > 0, "{case:?}: nobody named the rank that skipped the call");
        },
    );
}

/// Tests that the other ranks wait for a rank that enters the call after the progress deadline, but
/// before the entry deadline.
#[test]
fn a_rank_that_is_late_is_waited_for() {
    everywhere(
        &all_cases(),
        |world, case| {
            let mut ready = Ready::new(&world, case)?;
            for late in [0, 2, 1] {
                ready.call_late(&world, late)?;
            }
            ready.heap.close()?;
            Ok(())
        },
        all_succeed,
    );
}

/// Tests that peers read the data that a late rank wrote into its shard just before its call.
#[test]
fn a_late_shard_is_waited_for() {
    everywhere(
        &cases(|case| case.op == Op::AllGatherMatmul),
        |world, case| {
            let rank = world.rank();
            let heap = SymmetricHeap::open(&world, HeapOptions::new().threads(1))?;
            let mut ready = Ready::on(heap.clone(), case)?;
            let (a, b) = (heap.alloc::<f32>(4096)?, heap.full::<f32>(4096, 1.0)?);
            let ranks = Topology::from(&world);
            ready.operands = operands(case, ranks, [a, b, ready.c], case.options.m);
            for call in 0..6 {
                if (call + rank) % 3 == 0 {
                    std::thread::sleep(Duration::from_millis(20));
                }
                heap.write(a, &vec![(1 + call + rank) as f32; 4096])?;
                ready.call_and_sync()?;
                let seen = heap.read(ready.c)?;
                for row in 0..8 {
                    let sum = (0..9).map(|col| {
                        let source = match case.options.shard {
                            iris_ops::Shard::Columns => col / 3,
                            _ => [0, 0, 0, 1, 1, 1, 2, 2][row],
                        };
                        (1 + call + source) as f32
                    });
                    assert_eq!(seen[row * 6], sum.sum::<f32>(), "{case:?}, call {call}, row {row}");
                }
            }
            heap.close()?;
            Ok(())
        },
        all_succeed,
    );
}

rows! {
    ranks_with_different_m_are_named: ranks_with_other_rows_are_named(5);
    a_rank_without_rows_is_named: ranks_with_other_rows_are_named(0);
}

/// Tests that ranks with different numbers of rows get a fault that names both numbers, before any
/// rank uses data of another. Rank 0 has `rows` rows, the others 8.
fn ranks_with_other_rows_are_named(rows: usize) {
    everywhere(
        &cases(|case| !matches!(case.op, Op::Matmul | Op::Barrier)),
        |world, case| {
            let mut ready = Ready::new(&world, case)?;
            let m = if world.rank() == 0 { rows } else { 8 };
            let slice = ready.heap.rand::<f32>(4096, 3)?;
            let slices = [slice, ready.heap.rand(4096, 4)?, ready.c];
            ready.operands = operands(case, Topology::from(&world), slices, m);
            ready.call()?;
            Ok(ready.sync())
        },
        |case, results| {
            let results: Vec<_> = results.into_iter().map(Result::unwrap).collect();
            let mut named = 0;
            for (rank, result) in results.into_iter().enumerate() {
                let error = match result {
                    Err(error) => anyhow::Error::from(error),
                    // A rank that waits for no other rank, such as the root of a broadcast or
                    // one without rows, succeeds.
                    Ok(()) if rows == 0 && rank == 0 => continue,
                    Ok(()) => {
                        let waited = (0..3).any(|other| waits(case, rank, other));
                        assert!(!waited, "{case:?}: rank {rank}");
                        continue;
                    }
                };
                let (_, fault) = fault_of(&error).unwrap_or_else(|| panic!("{error:?}"));
                if fault.kind == FaultKind::Mismatch {
                    assert_eq!(fault.differing(), Some(Field::M), "{error}");
                    let mut both = [fault.seen, fault.wanted];
                    both.sort_unstable();
                    assert_eq!(both, [rows as i32, 8], "{error}");
                    assert!(error.to_string().contains("entered with M"), "{error}");
                    named += 1;
                } else {
                    assert_eq!(fault.kind, FaultKind::PeerGaveUp, "{error}");
                }
            }
            assert!(named > 0, "{case:?}");
        },
    );
}

/// Tests ranks whose A has different offsets in the heap, or different leading dimensions: the error
/// shows both for each rank.
#[test]
fn another_place_of_a_is_named() {
    let cases = cases(|case| case.op == Op::AllGatherMatmul && case.variant == "pull");
    let wide = cases[0].options.k + 7;
    for (start, ld) in [(64, None), (0, Some(wide))] {
        let rows = ld.map_or("contiguous".into(), |ld| format!("leading dimension {ld}"));
        everywhere(
            &cases,
            |world, case| {
                let mut ready = Ready::new(&world, case)?;
                // A good call comes first, so that an error with the place of an earlier call would be
                // found.
                ready.call_and_sync()?;
                let whole = ready.heap.rand::<f32>(4096, 3)?;
                let [(m, k), ..] = case.shapes(Topology::from(&world), case.options.m);
                ready.operands.a = match world.rank() {
                    0 => MatRef::sym(whole.slice(start..)?, m, k).with_ld(ld.unwrap_or(k)),
                    _ => MatRef::sym(whole, m, k),
                };
                ready.call()?;
                Ok((whole.offset(), ready.sync().unwrap_err().to_string()))
            },
            |case, results| {
                let told: Vec<_> = results.into_iter().map(Result::unwrap).collect();
                let offset = told[0].0;
                // A rank that has not issued the call when another one fails is not listed.
                let expected = [
                    "entered with A at one offset and leading dimension, this rank has it at another".into(),
                    format!("A is at byte {} of the data segment, {rows}, on rank 0; ", offset + 4 * start as u64),
                    format!("at byte {offset} of the data segment, contiguous, on rank "),
                ];
                let named = |text: &str| expected.iter().all(|part: &String| text.contains(part));
                assert!(told.iter().any(|it| named(&it.1)), "{case:?}: {expected:?}, {told:?}");
            },
        );
    }
}

/// Tests ranks of which only one passes a bias: without an error, ranks would have other sums, or
/// some elements with it and some without.
#[test]
fn a_bias_on_one_rank_is_named() {
    everywhere(
        &cases(|case| case.op != Op::Matmul && case.op.name().contains("matmul")),
        |world, case| {
            let mut ready = Ready::new(&world, case)?;
            let n = case.options.n;
            let bias = MatRef::sym(ready.heap.rand::<f32>(n, 5)?, 1, n);
            let bias = (world.rank() == 1).then_some(bias);
            ready.operands = ready.operands.bias(bias);
            ready.call()?;
            Ok(ready.sync())
        },
        |case, results| {
            let errors = results.into_iter().filter_map(|result| result.unwrap().err());
            let told = errors.map(|error| error.to_string()).collect::<Vec<_>>();
            let named = |text: &String| text.contains("a bias") && text.contains("no bias");
            assert!(told.iter().any(named) && told.len() == 3, "{case:?}: {told:?}");
        },
    );
}

#[test]
fn every_rank_has_the_same_bits() {
    // `run_case` fails if the bits differ between ranks or between equal calls.
    let options = Options::new(40, 30, 50).tile(TileShape { m: 8, n: 8 });
    let cases = [Variant::OneShot, Variant::TwoShot].map(|variant| {
        let mut case = Case::new(Op::MatmulAllReduce, variant, options.clone());
        assert!(case.same_on_all_ranks(variant) && case.same_in_all_runs(variant));
        case.input = Input::Reals;
        case
    });
    run_all(8, 1, &cases).unwrap();
}

#[test]
fn a_bias_is_added_once() {
    let options = Options::new(9, 10, 11).tile(TileShape { m: 4, n: 4 });
    for size in [1, 4] {
        let cases: Vec<_> =
            Case::each(&options).into_iter().map(|case| Case { bias: true, ..case }).collect();
        let multiply = cases.iter().filter(|case| case.op.multiplies()).count();
        let ways = |op: Op| op.variants().len() * Meaning::of(op).shards().len();
        let products = Op::ALL.into_iter().filter(|op| op.multiplies());
        assert_eq!(multiply, products.map(ways).sum::<usize>());
        assert!(cases.iter().all(|case| taken(case, size)));
        run_all(size, 1, &cases).unwrap();
    }
}

#[test]
fn a_barrier_of_some_ranks_waits_for_those_only() {
    let results = World::run_threads_each(3, &Settings::default(), |world| -> anyhow::Result<()> {
        let heap = SymmetricHeap::open(&world, HeapOptions::new().threads(1))?;
        let options = barrier::Options::new().members(vec![0, 2]);
        let some = Barrier::new(&heap, &options.plan(&world)?)?;
        let all = Barrier::new(&heap, &barrier::Options::new().plan(&world)?)?;
        let stream = heap.stream()?;
        for _ in 0..100 {
            if world.rank() == 1 {
                fails(some.run(&stream), &["rank is 1", "[0, 2]"]);
            } else {
                some.run(&stream)?;
            }
        }
        stream.sync()?;
        // The operators of all ranks must still agree on the number of calls made.
        let case = Case::new(Op::AllReduce, "two_shot", Options::new(8, 6, 0));
        let mut ready = Ready::on(heap.clone(), &case)?;
        for _ in 0..3 {
            all.run(&stream)?;
            ready.call()?;
        }
        stream.sync()?;
        ready.sync()?;
        heap.close()?;
        Ok(())
    });
    for result in results.unwrap() {
        result.unwrap();
    }
    for members in [vec![], vec![0, 3]] {
        let options = barrier::Options::new().members(members);
        fails(options.plan(Topology::new(0, 3)), &["below 3"]);
    }
}

#[test]
fn a_rank_that_panics_is_named_at_once() {
    let results = World::run_threads_each(3, &Settings::default(), |world| -> anyhow::Result<_> {
        let case = Case::new(Op::MatmulAllReduce, "two_shot", Options::new(8, 6, 9));
        let mut ready = Ready::new(&world, &case)?;
        ready.call_and_sync()?;
        assert_ne!(world.rank(), 2, "on purpose");
        let begun = Instant::now();
        // The call fails if the loss of the peer is known before it; otherwise `sync` fails.
        let error = ready.call_and_sync().unwrap_err();
        assert!(
            begun.elapsed() < Settings::default().entry_deadline(),
            "found at the deadline only"
        );
        Ok(error)
    });
    let mut results = results.unwrap();
    fails(results.pop().unwrap(), &["on purpose"]);
    let errors: Vec<_> = results.into_iter().map(Result::unwrap).collect();
    for error in &errors {
        // One of the two ranks may get the fault that the other rank gave up, because the other
        // rank noticed the loss first.
        let told =
            matches!(fault_of(error), Some((_, fault)) if fault.kind == FaultKind::PeerGaveUp);
        assert!(told || kind_of(error) == Some(ErrorKind::PeerLost), "{error:?}");
        let reason = ["rank 2 gave up: ", "on purpose"];
        assert!(told || reason.iter().all(|it| error.to_string().contains(it)), "{error}");
    }
}

/// Tests that the same process can go on with a new world after a fault.
#[test]
fn a_new_world_works_after_a_fault() {
    for round in 0..2 {
        let results =
            World::run_threads_each(2, &Settings::default(), |world| -> anyhow::Result<()> {
                let case = Case::new(Op::AllReduce, "one_shot", Options::new(8, 6, 0));
                let mut ready = Ready::new(&world, &case)?;
                ready.call_and_sync()?;
                if round == 0 && world.rank() == 0 {
                    ready.call()?;
                    ready.pass_until_a_fault();
                    let error = ready.sync().unwrap_err();
                    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
                    // After a fault every op of the heap returns that fault, and host functions of the
                    // heap still work.
                    fails(ready.call(), &["takes no calls after a fault"]);
                }
                while round == 0 && world.rank() == 1 && ready.op.check().is_ok() {
                    std::thread::sleep(Duration::from_millis(5));
                }
                ready.heap.close()?;
                world.close()?;
                Ok(())
            });
        for result in results.unwrap() {
            result.unwrap();
        }
    }
}
