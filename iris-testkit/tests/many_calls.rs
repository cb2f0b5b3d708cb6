//! Thousands of calls in which each rank runs as far ahead as the protocol allows.
//!
//! `IRIS_TEST_BACKEND=cuda` runs the tests on a GPU; they are ignored if there is no GPU.

mod common;

use std::process::ExitCode;

use common::backend;
use iris_heap::{HeapOptions, SymmetricHeap, World};
use iris_ops::{MatRef, TileShape};
use iris_testkit::Level;
use iris_testkit::harness::{self, Group, named};
use iris_testkit::suite::{AnyOp, Op, Operands, Options, plan};

fn main() -> ExitCode {
    harness::run(vec![Group::new(
        harness::no_backend(backend()),
        named![
            ten_thousand_calls_one_shot,
            ten_thousand_calls_two_shot,
            ten_thousand_calls_broadcast,
            a_thousand_calls_spinlock_and_atomic,
        ],
    )])
}

/// Runs `calls` calls with changing shapes and inputs, without synchronising the ranks in between,
/// so that each rank runs as far ahead as the protocol allows.
fn many_calls(op: Op, variant: &str, calls: usize) {
    const BATCH: usize = 100;
    const MOST: usize = 12;
    const N: usize = 8;
    World::run_threads(4, |world| -> anyhow::Result<()> {
        let (rank, size) = (world.rank(), world.size());
        let heap = SymmetricHeap::open(&world, HeapOptions::new().threads(1).backend(backend()))?;
        let options = Options::new(MOST, N, 0).tile(TileShape { m: 2, n: 4 }).backend(backend());
        let options = options.first_call(i32::MAX - calls as i32 / 2);
        let plan = plan(op, variant, &world, &options)?;
        let op = AnyOp::new(&heap, &plan)?;
        let stream = heap.stream()?;
        let buffers: Vec<_> = (0..BATCH)
            .map(|_| Ok((heap.alloc::<f32>(MOST * N)?, heap.alloc::<f32>(MOST * N)?)))
            .collect::<Result<_, iris_heap::Error>>()?;
        let value = |call: usize, rank: usize, at: usize| {
            ((call * 31 + rank * 17 + at * 7) % 1001) as f32 - 500.0
        };
        for batch in 0..calls / BATCH {
            let shape = |index: usize| {
                let call = batch * BATCH + index;
                (call, (call * 5 + call / 7) % (MOST + 1))
            };
            for (index, &(input, output)) in buffers.iter().enumerate() {
                let (call, m) = shape(index);
                let values: Vec<_> = (0..MOST * N).map(|at| value(call, rank, at)).collect();
                heap.write(input, &values)?;
                heap.write(output, &[f32::NAN; MOST * N])?;
                let (a, c) = (MatRef::sym(input, m, N), MatRef::sym(output, m, N));
                op.run(&Operands::new(a, a, c), &stream)?;
            }
            stream.sync()?;
            for (index, &(_, output)) in buffers.iter().enumerate() {
                let (call, m) = shape(index);
                for (at, seen) in heap.read(output)?.into_iter().take(m * N).enumerate() {
                    let wanted = match op.plan().op() {
                        Op::AllReduce => (0..size).map(|rank| value(call, rank, at)).sum(),
                        _ => value(call, 0, at),
                    };
                    anyhow::ensure!(seen == wanted, "call {call}, {at}: {seen}, not {wanted}");
                }
            }
        }
        heap.close()?;
        Ok(())
    })
    .unwrap();
}

fn calls() -> usize {
    if Level::from_env() <= Level::Quick { 1000 } else { 10_000 }
}

fn ten_thousand_calls_one_shot() {
    many_calls(Op::AllReduce, "one_shot", calls());
}

fn ten_thousand_calls_two_shot() {
    many_calls(Op::AllReduce, "two_shot", calls());
}

/// Tests a broadcast, whose root receives nothing and so runs ahead of the other ranks.
fn ten_thousand_calls_broadcast() {
    many_calls(Op::Broadcast, "push", calls());
    many_calls(Op::Broadcast, "two_shot", calls());
}

fn a_thousand_calls_spinlock_and_atomic() {
    many_calls(Op::AllReduce, "spinlock", calls() / 10);
    many_calls(Op::AllReduce, "atomic", calls() / 10);
}
