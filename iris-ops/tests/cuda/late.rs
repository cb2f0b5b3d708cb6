//! Tests of a rank that enters a call about when the other rank times out: a call that succeeds
//! must have the right result.

use std::sync::Barrier;
use std::time::Duration;

use anyhow::{Context, Result};
use iris_heap::{BackendKind, HeapOptions, Settings, SymmetricHeap, World};
use iris_ops::Topology;
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
    let sample = Sample::all(Topology::from(&world)).swap_remove(sample).on(backend, 3);
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
    let samples = Sample::all(Topology::new(0, 2)).len();
    // Number of ranks of the world that gave up.
    let failures = |sample: usize| {
        let late = settings.entry_deadline().mul_f64(LATE[sample % LATE.len()]);
        let both = Barrier::new(2);
        let each = World::run_threads_each(2, &settings, |world| {
            calls(world, sample, late, (backend, &both))
        });
        each.unwrap().into_iter().filter(|failed| *failed.as_ref().unwrap()).count()
    };
    let of_thread = &|first| (first..samples).step_by(at_once).map(&failures).sum::<usize>();
    let failed: usize = std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..at_once).map(|first| scope.spawn(move || of_thread(first))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    println!("{} calls ended well, {failed} did not", 2 * samples - failed);
    assert!(failed > samples / 2, "hardly a rank gave up: {failed} of {}", 2 * samples);
}

pub(crate) fn calls_that_succeed_beside_a_late_rank_are_right_on_the_cpu() {
    // Most of the time is waiting.
    every_op(BackendKind::Cpu, 4);
}

pub(crate) fn calls_that_succeed_beside_a_late_rank_are_right() {
    every_op(BackendKind::Cuda, 1);
}
