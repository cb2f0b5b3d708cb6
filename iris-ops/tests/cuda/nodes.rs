//! Tests of operators over several nodes of GPUs, over NCCL. Processes simulate the nodes on one host.
//! There are tests of graphs, of gathers in several steps, of ranks that make different calls, of a
//! rank that is killed, of a rank that makes no call, and of a heap that is dropped.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use bytemuck::bytes_of;
use iris_heap::{Stream, SymSlice, SymmetricHeap, World};
use iris_kernels::UserKernel;
use iris_kernels::rtc::{Compiler, Options};
use iris_ops::{
    AllGather, AllGatherMatmul, AllReduce, Barrier, CollectiveArgs, MatRef, MatmulAllReduce,
    MatmulArgs, Op, ReduceScatter, all_gather, all_reduce, matmul_all_reduce,
};
use iris_testkit::launch::{self, End};

use crate::comm::calls;
use crate::graphs::{callers, captured, drop_graph};
use crate::{numbers, open, product, products, summed};

const SOURCE: &str = r#"
#include "iris/sync.h"
using namespace iris;
// Runs for `ns` nanoseconds, and then writes the time to `to`. The clocks of the GPUs of a host are
// nearly equal.
IRIS_KERNEL linger(u64 ns, u64 to) {
    const u64 end = port::now() + ns;
    while (port::now() < end) {}
    if (port::thread() == 0) port::write(to, port::now());
}"#;

/// Command-line argument that makes this program one rank of a test over nodes. The next argument
/// names the test.
pub(crate) const NODES_RANK: &str = "nodes-rank";

/// Program of a rank of a test.
type RankProgram = fn(&World) -> Result<()>;

/// Tests by name.
const TESTS: [(&str, RankProgram); 9] = [
    ("replayed", replayed),
    ("in blocks", in_blocks),
    ("differs", differs),
    ("killed", |world| killed(world, false)),
    ("in the driver", |world| killed(world, true)),
    ("absent", absent),
    ("dropped", dropped),
    ("barrier", barrier),
    ("comm", |world| calls(world).and_then(|()| Ok(world.close()?))),
];

/// Number of replays of the graph, or of calls before a rank is killed.
const CALLS: usize = 50;

pub(crate) fn the_kernels_of_steps_between_nodes_compile() {
    for source in [include_str!("../../src/nodes/steps.cu"), SOURCE] {
        let code = Compiler::nvrtc().unwrap().compile(source.into(), &Options::new(), "sm_90a");
        assert!(code.unwrap_or_else(|error| panic!("{error}")).starts_with(b"\x7fELF"));
    }
}

/// Runs this process's rank of the test `which`.
pub(crate) fn nodes_rank(which: &str) -> Result<()> {
    let world = World::from_env()?;
    let nodes = if which == "in blocks" { 3 } else { 2 };
    ensure!(world.nodes() == nodes, "{} nodes, expected {nodes}", world.nodes());
    let test = TESTS.iter().find(|test| test.0 == which).expect("a test of this name");
    test.1(&world)
}

/// Kernel that keeps a stream busy, with memory for the times at which it ends.
struct Linger {
    kernel: UserKernel,
    times: SymSlice<u32>,
    address: u64,
}

impl Linger {
    /// Makes the kernel, with memory for `times` times.
    fn new(heap: &Arc<SymmetricHeap>, times: usize) -> Result<Linger> {
        let kernel = UserKernel::new(heap, SOURCE.into(), &Options::new(), "linger", (32, 0))?;
        let times = heap.zeros::<u32>(2 * times)?;
        Ok(Linger { kernel, times, address: heap.resolve(times, heap.rank())? as u64 })
    }

    /// Enqueues a kernel that runs for `duration` and then writes time number `at`.
    fn run(&self, stream: &Stream, duration: Duration, at: usize) -> Result<()> {
        let (ns, to) = (duration.as_nanos() as u64, self.address + 8 * at as u64);
        // SAFETY: the arguments match the kernel's parameters, and the memory lies in the heap,
        // which is closed only after the stream has finished.
        Ok(unsafe { self.kernel.launch(stream, 1, &[bytes_of(&ns), bytes_of(&to)]) }?)
    }
}

/// Replays a graph of a product and a gather with new inputs each time, and then makes calls
/// outside of the graph. The stream is busy before each replay and call. So data is ready long
/// after the ranks have compared their calls.
fn replayed(world: &World) -> Result<()> {
    let heap = open(world)?;
    let (rank, size) = (world.rank(), world.size());
    let (m, n, k) = (33, 70, 45);
    let product_of = matmul_all_reduce::Options::new(m, n, k).plan(&heap)?;
    let matmul = MatmulAllReduce::new(&heap, &product_of)?;
    let gather = AllGather::new(&heap, &all_gather::Options::rows(m * size, n).plan(&heap)?)?;
    let (a, b) = (heap.alloc::<f32>(m * k)?, heap.alloc::<f32>(k * n)?);
    let (c, all) = (heap.full::<f32>(m * n, f32::NAN)?, heap.full(m * n * size, f32::NAN)?);
    let (theirs, stream) = callers(&heap)?;
    let slow = Linger::new(&heap, 1)?;
    let step = || -> Result<()> {
        slow.run(&stream, Duration::from_millis(5), 0)?;
        let (a, b, c) = (MatRef::sym(a, m, k), MatRef::sym(b, k, n), MatRef::sym(c, m, n));
        matmul.run(&MatmulArgs::new(a, b, c), &stream)?;
        Ok(gather.run(&CollectiveArgs::new(c, MatRef::sym(all, m * size, n)), &stream)?)
    };
    let check = |call: usize| -> Result<()> {
        let expected = products(size, call, (m, n, k));
        let (c, all) = (heap.read(c)?, heap.read(all)?);
        ensure!(c == expected, "call {call} of rank {rank}: the product is wrong");
        let gathered = all.chunks(m * n).all(|part| part == expected);
        ensure!(gathered, "call {call} of rank {rank}: the gathered rows are wrong");
        Ok(())
    };
    let fill = |call: usize| -> Result<()> {
        heap.write(a, &numbers(m * k, rank, call))?;
        Ok(heap.write(b, &numbers(k * n, rank + 1, call))?)
    };
    let graph = captured(&theirs, step)?;
    for call in 0..CALLS {
        fill(call)?;
        heap.launch_graph(|| graph.launch())??;
        stream.sync()?;
        check(call)?;
    }
    drop_graph(graph);
    for call in CALLS..2 * CALLS {
        fill(call)?;
        step()?;
        stream.sync()?;
        check(call)?;
    }
    drop((matmul, gather));
    heap.close()?;
    Ok(world.close()?)
}

/// Makes calls of all-gather-matmul, all-gather and reduce-scatter with a step between nodes for each
/// other node, and replays a graph of them.
fn in_blocks(world: &World) -> Result<()> {
    let heap = open(world)?;
    let (rank, size) = (world.rank(), world.size());
    let (own, n, k) = (4096, 8, 64);
    let plan = |op: Op, n: usize, k: usize| {
        let mut request = op.request(own * size, n, k);
        request.blocks = Some(size - 1);
        request.plan(&heap)
    };
    let matmul = AllGatherMatmul::new(&heap, &plan(Op::AllGatherMatmul, n, k)?)?;
    let gather = AllGather::new(&heap, &plan(Op::AllGather, k, 0)?)?;
    let scatter = ReduceScatter::new(&heap, &plan(Op::ReduceScatter, k, 0)?)?;
    let (parts, sums) = (heap.alloc::<f32>(own * size * k)?, heap.alloc::<f32>(own * k)?);
    let (a, b) = (heap.alloc::<f32>(own * k)?, heap.alloc::<f32>(k * n)?);
    let (c, all) = (heap.alloc::<f32>(own * size * n)?, heap.alloc::<f32>(own * size * k)?);
    let (theirs, stream) = callers(&heap)?;
    let step = || -> Result<()> {
        let (a, b) = (MatRef::sym(a, own, k), MatRef::sym(b, k, n));
        matmul.run(&MatmulArgs::new(a, b, MatRef::sym(c, own * size, n)), &stream)?;
        gather.run(&CollectiveArgs::new(a, MatRef::sym(all, own * size, k)), &stream)?;
        let (parts, sums) = (MatRef::sym(parts, own * size, k), MatRef::sym(sums, own, k));
        Ok(scatter.run(&CollectiveArgs::new(parts, sums), &stream)?)
    };
    let graph = captured(&theirs, step)?;
    for call in 0..10 {
        heap.write(a, &numbers(own * k, rank, call))?;
        heap.write(parts, &numbers(own * size * k, rank, call))?;
        heap.write(sums, &vec![f32::NAN; own * k])?;
        heap.write(b, &numbers(k * n, 1, call))?;
        heap.write(c, &vec![f32::NAN; own * size * n])?;
        heap.write(all, &vec![f32::NAN; own * size * k])?;
        world.barrier()?;
        if call % 2 == 0 {
            step()?
        } else {
            heap.launch_graph(|| graph.launch())??
        }
        stream.sync()?;
        let whole: Vec<f32> = (0..size).flat_map(|rank| numbers(own * k, rank, call)).collect();
        let expected = product(&whole, &numbers(k * n, 1, call), (own * size, n, k));
        ensure!(heap.read(all)? == whole, "call {call} of rank {rank}: the gather is wrong");
        let sum = summed(size, |from| numbers(own * size * k, from, call));
        ensure!(
            heap.read(sums)? == sum[rank * own * k..][..own * k],
            "call {call} of rank {rank}: the sums are wrong"
        );
        ensure!(heap.read(c)? == expected, "call {call} of rank {rank}: the product is wrong");
    }
    drop_graph(graph);
    drop((matmul, gather, scatter));
    drop(stream);
    heap.close()?;
    Ok(world.close()?)
}

/// Largest difference in nanoseconds between the clocks of two GPUs of a host: 0.5 ms was seen.
const SKEW: u64 = 10_000_000;

/// Delays rank 1 before barriers, for longer than clocks differ. No rank may begin its work after a
/// barrier before rank 1 has finished its work before the barrier.
fn barrier(world: &World) -> Result<()> {
    let heap = open(world)?;
    let op = Barrier::new(&heap, &iris_ops::barrier::Options::new().plan(&heap)?)?;
    let (stream, calls) = (heap.stream()?, 10);
    let kernel = Linger::new(&heap, 2 * calls)?;
    let late = Duration::from_millis(if world.rank() == 1 { 50 } else { 0 });
    for call in 0..calls {
        kernel.run(&stream, late, 2 * call)?;
        op.run(&stream)?;
        kernel.run(&stream, Duration::ZERO, 2 * call + 1)?;
    }
    stream.sync()?;
    let times = heap.read(kernel.times)?;
    let all = world.allgather(bytemuck::cast_slice(&times))?;
    let time = |rank: usize, at: usize| {
        let bytes = all[rank][8 * at..].first_chunk().expect("all times");
        u64::from_le_bytes(*bytes)
    };
    for call in 0..calls {
        let arrived = (0..world.size()).map(|rank| time(rank, 2 * call)).max();
        let left = (0..world.size()).map(|rank| time(rank, 2 * call + 1)).min();
        ensure!(
            arrived <= left.map(|left| left + SKEW),
            "barrier {call} was left at {left:?}, before {arrived:?}"
        );
    }
    op.free()?;
    heap.close()?;
    Ok(world.close()?)
}

/// Number of elements of the messages in tests of faults.
const COUNT: usize = 4096;

/// Sum of a message of [`COUNT`] elements, and its arguments.
fn message(heap: &Arc<SymmetricHeap>) -> Result<(AllReduce, CollectiveArgs)> {
    let sum = AllReduce::new(heap, &all_reduce::Options::new(COUNT).plan(heap)?)?;
    let (x, y) = (heap.zeros::<f32>(COUNT)?, heap.zeros::<f32>(COUNT)?);
    Ok((sum, CollectiveArgs::new(MatRef::sym(x, 1, COUNT), MatRef::sym(y, 1, COUNT))))
}

/// Makes rank 1 gather while rank 0 sums. Both must fail with an error that names both ranks and
/// the operators.
fn differs(world: &World) -> Result<()> {
    let heap = open(world)?;
    let sum = AllReduce::new(&heap, &all_reduce::Options::new(COUNT).plan(&heap)?)?;
    let gather = AllGather::new(&heap, &all_gather::Options::rows(2, COUNT).plan(&heap)?)?;
    let (x, y) = (heap.zeros::<f32>(COUNT)?, heap.zeros::<f32>(2 * COUNT)?);
    let stream = heap.stream()?;
    let from = MatRef::sym(x, 1, COUNT);
    let begun = Instant::now();
    let to = heap.zeros::<f32>(COUNT)?;
    // The difference may be found before the whole call is enqueued.
    let call = || -> Result<()> {
        match world.rank() {
            0 => sum.run(&CollectiveArgs::new(from, MatRef::sym(to, 1, COUNT)), &stream)?,
            _ => gather.run(&CollectiveArgs::new(from, MatRef::sym(y, 2, COUNT)), &stream)?,
        }
        Ok(stream.sync()?)
    };
    let error = call().expect_err("the calls differ").to_string();
    println!("after {:.1?}: {error}", begun.elapsed());
    for part in ["operator is", "all_reduce", "all_gather", "rank 0", "rank 1"] {
        ensure!(error.contains(part), "no {part:?} in: {error}");
    }
    ensure!(begun.elapsed() < Duration::from_secs(30), "after {:.1?}", begun.elapsed());
    Ok(())
}

/// Kills rank 1 between two calls. Rank 0 must fail with an error that names rank 1, and its graph
/// of the call must be refused afterwards. Rank 0 waits by cudarc's function if `in_the_driver`.
fn killed(world: &World, in_the_driver: bool) -> Result<()> {
    let heap = open(world)?;
    let (sum, args) = message(&heap)?;
    let (theirs, stream) = callers(&heap)?;
    for _ in 0..CALLS {
        sum.run(&args, &stream)?;
    }
    stream.sync()?;
    let graph = captured(&theirs, || Ok(sum.run(&args, &stream)?))?;
    heap.launch_graph(|| graph.launch())??;
    stream.sync()?;
    if in_the_driver {
        if world.rank() == 0 {
            sum.run(&args, &stream)?;
        }
        world.barrier()?;
    }
    if world.rank() == 1 {
        launch::kill_myself();
    }
    let begun = Instant::now();
    let call = || -> Result<()> {
        if in_the_driver {
            theirs.synchronize()?;
            return Ok(heap.check()?);
        }
        sum.run(&args, &stream)?;
        Ok(stream.sync()?)
    };
    let error = call().expect_err("rank 1 was killed").to_string();
    println!("after {:.1?}: {error}", begun.elapsed());
    ensure!(error.contains("rank 1"), "{error}");
    ensure!(begun.elapsed() < Duration::from_secs(60), "after {:.1?}", begun.elapsed());
    let launched: iris_heap::Result<()> = heap.launch_graph(|| panic!("a graph was launched"));
    let refused = launched.expect_err("the heap has failed").to_string();
    ensure!(refused.contains("rank 1"), "{refused}");
    drop_graph(graph);
    Ok(())
}

/// Lets rank 1 make no call for longer than the deadline. Rank 0 must fail with an error that names
/// rank 1.
fn absent(world: &World) -> Result<()> {
    let heap = open(world)?;
    let (sum, args) = message(&heap)?;
    let stream = heap.stream()?;
    if world.rank() == 1 {
        std::thread::sleep(heap.local_world().settings().entry_deadline() * 3);
        return Ok(());
    }
    sum.run(&args, &stream)?;
    let error = stream.sync().expect_err("rank 1 makes no call").to_string();
    println!("{error}");
    ensure!(error.contains("did not end within") && error.contains("rank 1"), "{error}");
    Ok(())
}

/// Lets rank 0 drop its heap while a step waits for rank 1, which makes no call. The drop must not
/// wait, and both processes must end without an error.
fn dropped(world: &World) -> Result<()> {
    let heap = open(world)?;
    let (sum, args) = message(&heap)?;
    let stream = heap.stream()?;
    if world.rank() == 0 {
        sum.run(&args, &stream)?;
        let begun = Instant::now();
        drop((sum, stream, heap));
        println!("dropped after {:.1?}", begun.elapsed());
        ensure!(begun.elapsed() < Duration::from_secs(30), "after {:.1?}", begun.elapsed());
    }
    Ok(world.barrier()?)
}

/// Runs the test `which` on two nodes of one rank.
fn launched(which: &str, deadline: &str) -> launch::Outcome {
    launched_on((2, 1), which, launch::Options::default().env("IRIS_DEADLINE", deadline))
}

/// Runs the test `which` on `nodes` nodes of `per_node` ranks.
fn launched_on(
    (nodes, per_node): (usize, usize),
    which: &str,
    options: launch::Options,
) -> launch::Outcome {
    let program = std::env::current_exe().unwrap();
    let options = options.deadline(Duration::from_secs(150)).nodes(nodes);
    let options = options.grace(Duration::from_secs(100));
    launch::launch(&program, &[NODES_RANK, which], nodes * per_node, options).unwrap()
}

fn all_end_well(which: &str, deadline: &str) {
    all_ended_well(&launched(which, deadline));
}

#[track_caller]
fn all_ended_well(outcome: &launch::Outcome) {
    assert!(outcome.ok(), "{}", outcome.report());
}

pub(crate) fn operators_over_nodes_are_captured_and_replayed() {
    all_end_well("replayed", "1");
}

/// Tests graphs on two nodes of two ranks, which share the GPUs of the other node.
pub(crate) fn operators_over_nodes_of_two_ranks_are_captured_and_replayed() {
    all_ended_well(&launched_on((2, 2), "replayed", launch::Options::default()));
}

pub(crate) fn operators_over_two_nodes_on_one_gpu_are_captured_and_replayed() {
    const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";
    let all = std::env::var(VISIBLE).unwrap_or_else(|_| "0".into());
    let first = all.split(',').next().unwrap_or_default();
    all_ended_well(&launched_on(
        (2, 1),
        "replayed",
        launch::Options::default().env(VISIBLE, first),
    ));
}

pub(crate) fn exchanges_between_three_nodes_go_in_blocks() {
    all_ended_well(&launched_on((3, 1), "in blocks", launch::Options::default()));
}

pub(crate) fn calls_that_differ_between_nodes_are_named() {
    all_end_well("differs", "1");
}

pub(crate) fn a_rank_that_makes_no_call_is_named_by_the_other_node() {
    all_end_well("absent", "0.02");
}

pub(crate) fn a_heap_that_is_dropped_in_a_step_does_not_wait() {
    all_end_well("dropped", "1");
}

pub(crate) fn a_barrier_holds_the_ranks_of_all_nodes() {
    all_end_well("barrier", "1");
}

pub(crate) fn a_communicator_over_nodes_takes_memory_and_streams_of_cudarc() {
    all_end_well("comm", "1");
}

pub(crate) fn a_killed_rank_of_another_node_is_named() {
    rank_0_learns_of_the_killed_rank("killed");
}

pub(crate) fn a_killed_rank_of_another_node_ends_a_wait_in_the_driver() {
    rank_0_learns_of_the_killed_rank("in the driver");
}

fn rank_0_learns_of_the_killed_rank(which: &str) {
    let outcome = launched(which, "1");
    let ends = outcome.ranks.iter().map(|rank| rank.end).collect::<Vec<_>>();
    assert!(
        matches!(ends[..], [End::Exited(0), End::Signalled(9)]),
        "{ends:?}: {}",
        outcome.report()
    );
}
