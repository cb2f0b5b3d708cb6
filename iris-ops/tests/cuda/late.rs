//! Tests of a rank that enters a call about when the other rank times out: a call that succeeds
//! must have the right result.

use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use iris_heap::{BackendKind, HeapOptions, Settings, SymmetricHeap, World};
use iris_ops::Ranks;
use iris_testkit::suite::Op;

use crate::sample::Sample;

/// Times after which rank 1 enters the call, as multiples of the deadline for entering a call.
const LATE: [f64; 5] = [0.9, 0.99, 1.0, 1.01, 1.1];

/// Runs two calls. Rank 1 enqueues the first call when rank 0 may already have timed out. Returns
/// whether this rank's calls failed.
///
/// `both` is a barrier without a deadline.
fn calls(
    world: World,
    sample: usize,
    late: Duration,
    (backend, both): (BackendKind, &Barrier),
) -> Result<bool> {
    // A library GEMM needs 32 MiB of workspace.
    let options = HeapOptions::new().backend(backend).threads(3).data_bytes(64 << 20);
    let heap = SymmetricHeap::open(&world, options)?;
    let sample = Sample::all(Ranks::from(&world)).swap_remove(sample).on(backend, 3);
    let (op, room) = (sample.make(&heap)?, sample.room(&heap)?);
    sample.fill(&heap, &room, 0)?;
    let stream = heap.stream()?;
    both.wait();
    let operands = sample.operands(&room);
    let run = if world.rank() == 0 {
        op.run(&operands, &stream).and_then(|()| op.run(&operands, &stream))
    } else {
        std::thread::sleep(late);
        op.run(&operands, &stream)
    };
    let failed = run.is_err() | stream.sync().is_err();
    // Both ranks must stay alive until each has read C or found its error.
    let c = heap.read(room.c)?;
    both.wait();
    if !failed && sample.case.op != Op::Barrier {
        sample.check(&c, 0).context("the call ended well")?;
    }
    drop(op);
    Ok(failed)
}

/// Tests every sample on worlds of two ranks, `at_once` worlds at the same time.
fn every_op(backend: BackendKind, at_once: usize) {
    let settings = Settings::default().deadline(0.001);
    let samples = Sample::all(Ranks::new(0, 2)).len();
    let (next, ends) = (AtomicUsize::new(0), [const { AtomicUsize::new(0) }; 2]);
    let work = || {
        loop {
            let sample = next.fetch_add(1, Ordering::Relaxed);
            if sample >= samples {
                break;
            }
            let (both, entry) = (Barrier::new(2), settings.entry_deadline());
            let late = entry.mul_f64(LATE[sample % LATE.len()]);
            let each = World::run_threads_each(2, &settings, |world| {
                calls(world, sample, late, (backend, &both))
            });
            for failed in each.unwrap() {
                ends[usize::from(failed.unwrap())].fetch_add(1, Ordering::Relaxed);
            }
        }
    };
    std::thread::scope(|scope| (0..at_once).for_each(|_| drop(scope.spawn(work))));
    let [well, failed] = ends.map(AtomicUsize::into_inner);
    println!("{well} calls ended well, {failed} did not");
    assert!(failed > samples / 2, "hardly a rank gave up: {well} calls ended well");
}

pub(crate) fn calls_that_succeed_beside_a_late_rank_are_right_on_the_cpu() {
    // Most of the time is waiting.
    every_op(BackendKind::Cpu, 4);
}

pub(crate) fn calls_that_succeed_beside_a_late_rank_are_right() {
    every_op(BackendKind::Cuda, 1);
}
