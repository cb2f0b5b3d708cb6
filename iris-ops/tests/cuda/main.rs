//! Tests of operators on GPUs: in graphs, with streams, memory and kernels of the caller, and with
//! an absent rank. Without a GPU the tests are reported as ignored. The ranks are threads that
//! share the GPUs of the host. iris-testkit has further cases.

#![allow(unsafe_code, reason = "kernels and memory of the user's")]

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use iris_heap::{BackendKind, DType, HeapOptions, Settings, SymmetricHeap, World};
use iris_kernels::rtc::{self, Compiler};
use iris_ops::matmul_all_reduce::{Options, Variant};
use iris_ops::{
    AllReduce, CollectiveArgs, MatRef, MatmulAllReduce, MatmulArgs, Plan, TileShape, Topology,
    all_reduce,
};
use iris_testkit::error_texts::fails;
use iris_testkit::harness::{self, Group, named};

mod beside;
mod bits;
mod combine;
mod comm;
mod decode;
mod external;
mod graphs;
mod late;
mod lists;
mod nodes;
mod sample;

use beside::*;
use bits::*;
use combine::*;
use comm::*;
use decode::*;
use external::*;
use graphs::*;
use late::*;
use lists::*;
use nodes::*;
use sample::*;

fn main() -> ExitCode {
    match std::env::args().nth(1).as_deref() {
        Some(LEGACY_RANK) => legacy_rank().unwrap(),
        Some(NODES_RANK) => nodes_rank(&std::env::args().nth(2).unwrap()).unwrap(),
        Some(DECODE_RANK) => decode_rank(&std::env::args().nth(2).unwrap()).unwrap(),
        _ => return tests(),
    }
    ExitCode::SUCCESS
}

fn tests() -> ExitCode {
    let no_compiler = match Compiler::nvrtc() {
        Err(error @ rtc::Error::NotFound { .. }) => Some(error.to_string()),
        _ => None,
    };
    harness::run(vec![
        Group::new(
            None,
            named![
                samples_are_right_on_the_cpu,
                calls_that_succeed_beside_a_late_rank_are_right_on_the_cpu,
                a_tile_that_no_kernel_takes_is_refused_by_the_plan,
            ],
        ),
        Group::new(
            no_compiler,
            named![
                the_kernel_beside_ops_compiles,
                the_kernels_of_a_decode_step_compile,
                the_kernels_of_steps_between_nodes_compile
            ],
        ),
        Group::new(
            harness::no_program("g++"),
            named![
                a_kernel_beside_an_op_takes_tiles_on_the_host,
                tiles_that_do_not_come_are_faults_on_the_host,
            ],
        ),
        Group::new(
            harness::no_gpu(),
            named![
                sums_of_products_are_exact,
                rows_of_a_product_have_one_set_of_bits,
                rows_have_one_set_of_bits_on_one_gpu,
                rows_of_a_padded_graph_have_the_bits_of_eager_calls,
                weighted_parts_are_summed_like_the_same_steps_apart,
                a_graph_of_weighted_parts_is_replayed,
                new_streams_are_used_at_the_same_moment,
                ops_of_two_streams_are_in_order,
                only_ops_that_are_observed_count_and_trace,
                an_absent_rank_is_a_fault_and_the_process_lives,
                calls_that_succeed_beside_a_late_rank_are_right,
                a_kernel_beside_an_op_takes_tiles_as_they_come,
                a_kernel_beside_an_op_is_replayed,
                tiles_that_do_not_come_are_faults,
                invalid_kernels_beside_an_op_are_refused,
                a_graph_is_replayed_a_thousand_times,
                allocation_in_a_capture_is_refused,
                every_op_is_captured_and_replayed_beside_other_threads,
                lists_are_gathered_and_captured,
                matrices_and_streams_of_cudarc_work,
                comm_takes_memory_and_streams_of_cudarc,
                processes_over_legacy_handles,
                memory_comes_back_after_a_hundred_heaps_with_ops,
                operators_over_two_nodes_on_one_gpu_are_captured_and_replayed,
            ],
        ),
        Group::new(
            harness::fewer_gpus_than(2),
            named![
                rows_have_one_set_of_bits_on_all_gpus,
                heaps_come_and_go_while_graphs_run,
                ten_thousand_captured_steps_with_late_ranks_give_the_same_tokens,
                operators_over_nodes_are_captured_and_replayed,
                operators_over_nodes_of_two_ranks_are_captured_and_replayed,
                exchanges_between_three_nodes_go_in_blocks,
                a_barrier_holds_the_ranks_of_all_nodes,
                a_heap_that_is_dropped_in_a_step_does_not_wait,
                a_communicator_over_nodes_takes_memory_and_streams_of_cudarc,
                calls_that_differ_between_nodes_are_named,
                a_killed_rank_of_another_node_is_named,
                a_killed_rank_of_another_node_ends_a_wait_in_the_driver,
                a_rank_that_makes_no_call_is_named_by_the_other_node,
                a_rank_killed_between_captured_steps_is_named_and_the_tokens_before_are_right,
            ],
        ),
    ])
}

fn open(world: &World) -> Result<Arc<SymmetricHeap>> {
    let options = HeapOptions::new().backend(BackendKind::Cuda).data_bytes(64 << 20);
    Ok(SymmetricHeap::open(world, options)?)
}

/// Plan of an all-reduce of `count` elements by the variant `variant`.
fn message(heap: &Arc<SymmetricHeap>, count: usize, variant: all_reduce::Variant) -> Result<Plan> {
    Ok(all_reduce::Options::new(count).variant(variant).plan(heap)?)
}

/// Test data: small integers that differ between ranks and calls.
fn numbers(len: usize, rank: usize, call: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7 + rank * 5 + call * 3) % 9) as f32 - 4.0).collect()
}

fn product(a: &[f32], b: &[f32], (m, n, k): (usize, usize, usize)) -> Vec<f32> {
    let element = |i: usize| (0..k).map(|d| a[i / n * k + d] * b[d * n + i % n]).sum();
    (0..m * n).map(element).collect()
}

/// Sum over all ranks of the numbers that each rank has.
fn summed(size: usize, of_rank: impl Fn(usize) -> Vec<f32>) -> Vec<f32> {
    let add = |sum: Vec<f32>, more: Vec<f32>| sum.iter().zip(more).map(|(x, y)| x + y).collect();
    (0..size).map(of_rank).reduce(add).unwrap_or_default()
}

/// Sum over all ranks of the products of a call.
fn products(size: usize, call: usize, (m, n, k): (usize, usize, usize)) -> Vec<f32> {
    summed(size, |rank| {
        product(&numbers(m * k, rank, call), &numbers(k * n, rank + 1, call), (m, n, k))
    })
}

fn matmul_all_reduce(world: World, variant: Variant) -> Result<()> {
    let heap = open(&world)?;
    let (rank, size) = (world.rank(), world.size());
    let (m, n, k) = (33, 70, 45);
    let plan = Options::new(m, n, k).variant(variant).plan(&heap)?;
    let op = MatmulAllReduce::new(&heap, &plan)?;
    let (a, b) = (heap.alloc::<f32>(m * k)?, heap.alloc::<f32>(k * n)?);
    let c = heap.full::<f32>(m * n, f32::NAN)?;
    let stream = heap.stream()?;
    for call in 0..20 {
        heap.write(a, &numbers(m * k, rank, call))?;
        heap.write(b, &numbers(k * n, rank + 1, call))?;
        let args =
            MatmulArgs::new(MatRef::sym(a, m, k), MatRef::sym(b, k, n), MatRef::sym(c, m, n));
        op.run(&args, &stream)?;
        stream.sync()?;
        let expected = products(size, call, (m, n, k));
        let got = heap.read(c)?;
        let wrong = got.iter().zip(&expected).position(|(g, e)| g != e);
        ensure!(
            wrong.is_none(),
            "{variant:?}, {size} ranks, call {call}: element {wrong:?} is {:?}, expected {:?}",
            wrong.map(|i| got[i]),
            wrong.map(|i| expected[i])
        );
        // Peers may write C after this rank has entered the next call. So all ranks compare C
        // before any rank continues.
        world.barrier()?;
    }
    drop(op);
    heap.close()?;
    Ok(())
}

fn sums_of_products_are_exact() {
    for size in [1, 2, 4] {
        for variant in [Variant::OneShot, Variant::TwoShot, Variant::Spinlock, Variant::Atomic] {
            World::run_threads(size, |world| matmul_all_reduce(world, variant))
                .unwrap_or_else(|error| panic!("{variant:?} of {size} ranks: {error}"));
        }
    }
}

/// Tests that two ranks can issue their first calls at the same moment, on streams of the heap or
/// of cudarc that have not been used before.
fn new_streams_are_used_at_the_same_moment() {
    const ROUNDS: usize = 40;
    let ready = AtomicUsize::new(0);
    for round in 0..ROUNDS {
        let outcome = World::run_threads(2, |world| -> Result<()> {
            let heap = open(&world)?;
            let plan = message(&heap, 64, all_reduce::Variant::Atomic)?;
            let op = AllReduce::new(&heap, &plan)?;
            let (x, y) = (heap.ones::<f32>(64)?, heap.zeros::<f32>(64)?);
            let args = CollectiveArgs::new(MatRef::sym(x, 1, 64), MatRef::sym(y, 1, 64));
            let stream = if round % 4 == 3 { callers(&heap)?.1 } else { heap.stream()? };
            world.barrier()?;
            ready.fetch_add(1, Ordering::SeqCst);
            while ready.load(Ordering::SeqCst) < 2 * (round + 1) {
                std::hint::spin_loop();
            }
            op.run(&args, &stream)?;
            stream.sync()?;
            ensure!(heap.read(y)? == vec![2.0; 64]);
            drop(op);
            Ok(heap.close()?)
        });
        outcome.unwrap_or_else(|error| panic!("round {round}: {error}"));
    }
}

/// Tests that calls issued on two streams in turn run in the order in which they were issued.
fn ops_of_two_streams_are_in_order() {
    let outcome = World::run_threads(2, |world| -> Result<()> {
        let heap = open(&world)?;
        let streams = [heap.stream()?, heap.stream()?, heap.stream()?];
        let len = 1000;
        let plan = message(&heap, len, all_reduce::Variant::TwoShot)?;
        let op = AllReduce::new(&heap, &plan)?;
        let x = [heap.ones::<f32>(len)?, heap.zeros::<f32>(len)?];
        for call in 0..12 {
            let place = |i: usize| MatRef::sym(x[i % 2], 1, len);
            op.run(&CollectiveArgs::new(place(call), place(call + 1)), &streams[call % 3])?;
        }
        for stream in &streams {
            stream.sync()?;
        }
        ensure!(heap.read(x[0])? == vec![4096.0; len]);
        drop(op);
        Ok(heap.close()?)
    });
    outcome.unwrap();
}

/// Tests that operators planned without tracing have no spans, and that reading counters is an
/// error for operators planned without `count_traffic`.
fn only_ops_that_are_observed_count_and_trace() {
    let outcome = World::run_threads(2, |world| -> Result<()> {
        let heap = open(&world)?;
        let stream = heap.stream()?;
        let (x, y) = (heap.ones::<f32>(640)?, heap.zeros::<f32>(640)?);
        let args = CollectiveArgs::new(MatRef::sym(x, 10, 64), MatRef::sym(y, 10, 64));
        let plain = all_reduce::Options::rows(10, 64).variant(all_reduce::Variant::OneShot);
        let plain = plain.tile(TileShape { m: 2, n: 64 });
        let each = [plain.clone(), plain.clone().count_traffic(true), plain.trace_spans(32)];
        for (at, options) in each.iter().enumerate() {
            let op = AllReduce::new(&heap, &options.plan(&heap)?)?;
            op.run(&args, &stream)?;
            stream.sync()?;
            ensure!(heap.read(y)? == vec![2.0; 640]);
            match op.counters() {
                Ok(counters) => ensure!(at == 1 && counters.pushed == 640 * 4, "{counters:?}"),
                Err(error) => ensure!(at != 1 && error.to_string().contains("count_traffic(true)")),
            }
            let spans: usize = op.trace()?.iter().map(Vec::len).sum();
            // The operator at index 2 has five tiles. Each tile has a product, a signal and a sum
            // in the trace.
            ensure!(if at == 2 { spans >= 15 } else { spans == 0 }, "{spans} spans");
            op.free()?;
        }
        Ok(heap.close()?)
    });
    outcome.unwrap();
}

fn an_absent_rank_is_a_fault_and_the_process_lives() {
    let settings = Settings::default().deadline(0.01);
    let each = World::run_threads_each(2, &settings, |world| -> Result<()> {
        let heap = open(&world)?;
        let plan = message(&heap, 64, all_reduce::Variant::OneShot)?;
        let op = AllReduce::new(&heap, &plan)?;
        let (x, y) = (heap.ones::<f32>(64)?, heap.zeros::<f32>(64)?);
        let args = CollectiveArgs::new(MatRef::sym(x, 1, 64), MatRef::sym(y, 1, 64));
        let stream = heap.stream()?;
        let started = Instant::now();
        if world.rank() == 0 {
            op.run(&args, &stream)?;
            let error = stream.sync().expect_err("rank 1 does not call").to_string();
            ensure!(error.contains("all_reduce") && error.contains("rank 1"), "{error}");
            println!("after {:.1?}: {error}", started.elapsed());
            let again = op.run(&args, &stream).expect_err("the op is poisoned").to_string();
            ensure!(again.contains("all_reduce"), "{again}");
        }
        ensure!(started.elapsed() < Duration::from_secs(20));
        if world.rank() == 1 {
            // A host waits at most 6 s in the barrier below while a kernel waits for a peer to
            // enter the call. Rank 0 reaches the barrier 6 s late, so rank 1 must be late too.
            std::thread::sleep(Duration::from_secs(4));
        }
        world.barrier()?;
        ensure!(heap.check().is_err(), "rank {} was not told", world.rank());
        drop(op);
        Ok(heap.close()?)
    });
    each.unwrap().into_iter().collect::<Result<Vec<_>>>().unwrap();
    // The faults must have left the CUDA context intact: another world can use the device.
    World::run_threads(2, |world| matmul_all_reduce(world, Variant::OneShot)).unwrap();
}

fn a_tile_that_no_kernel_takes_is_refused_by_the_plan() {
    let ranks = Topology::new(0, 1).on(BackendKind::Cuda);
    let tile = TileShape { m: 256, n: 64 };
    let large = Options::new(512, 512, 64).dtype(DType::BF16).tile(tile);
    fails(large.plan(ranks), &["256 x 64"]);
    // For every shape, the tile that the plan chooses must be a tile for which kernels are built.
    for (m, n) in [(1, 8192), (16, 1024), (4096, 4096), (3, 5)] {
        let plan = Options::new(m, n, 64).dtype(DType::BF16).plan(ranks).unwrap();
        let tile = plan.tile();
        assert!(tile.m <= 128 && tile.n <= 128 && tile.m >= 8, "{m} x {n}: {tile:?}");
    }
}
