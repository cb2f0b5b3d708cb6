//! Tests of operators over several nodes of GPUs without a GPU: on a fake HIP runtime, which runs the
//! kernels on the host, and a fake RCCL, which moves the data of steps between nodes and can be late
//! or fail. Passing tests say nothing about a real device or library.
//!
//! The program starts itself as the ranks of pretended nodes. Each job compiles the kernels that the
//! ones before it did not need.
//!
//! This file is long because it has each fault twice: the test, and the program of its ranks.

#![allow(unsafe_code, reason = "the library gets addresses")]

mod common;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use common::nodes::{each, fabric_of, run_in_heap_on_nodes, run_on_nodes, shape_cases, type_cases};
use iris_heap::{BackendKind, HeapOptions, Segment, Stream, SymmetricHeap, World, abi};
use iris_kernels::vendor::{Communicator, CommunicatorOptions, Nccl, NcclCall, Release};
use iris_ops::comm::{self, Comm, ReduceOp};
use iris_ops::{
    AllGather, AllReduce, CollectiveArgs, HeapReserve, MatRef, Plan, Topology, Workspace,
    all_gather, all_reduce,
};
use iris_testkit::Level;
use iris_testkit::fake_hip::{Fake, failed};
use iris_testkit::harness::{self, Group, named};
use iris_testkit::launch::{self, End, end_with_launcher, launch};
use iris_testkit::suite::{Case, Options};
use tempfile::NamedTempFile;

const BACKEND: BackendKind = BackendKind::Hip;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, rank, which] = &arguments[..]
        && rank == "rank"
    {
        end_with_launcher();
        return match run_rank(which) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{error:#}");
                ExitCode::FAILURE
            }
        };
    }
    harness::run_together(vec![Group::new(
        harness::no_program("g++"),
        named![
            operators_on_2_nodes_of_1_rank,
            operators_on_2_nodes_of_2_ranks,
            operators_on_3_nodes_of_1_rank,
            operators_on_2_nodes_of_3_ranks,
            processes_on_gpus_without_peer_access_are_grouped,
            threads_on_gpus_without_peer_access_are_grouped,
            nodes_with_gpus_without_peer_access_are_divided,
            data_that_arrives_late_is_waited_for,
            a_communicator_that_is_never_ready_names_the_ranks,
            a_rank_that_is_lost_while_the_library_joins_ends_the_wait,
            an_asynchronous_error_fails_all_ranks,
            a_graph_that_is_kept_does_not_delay_errors,
            a_heap_that_is_closed_before_its_graph_says_so,
            calls_that_differ_between_nodes_are_named,
            a_killed_rank_of_another_node_is_named,
            a_killed_rank_without_peer_access_is_named,
            a_killed_node_of_two_ranks_is_named,
            a_killed_rank_ends_a_call_in_progress,
            a_killed_rank_ends_a_wait_in_the_driver,
            an_asynchronous_error_ends_a_wait_in_the_driver,
            a_rank_that_makes_no_call_is_named,
            a_rank_that_makes_no_call_is_named_and_not_a_healthy_peer,
            a_rank_that_has_failed_tells_the_other_node,
            heaps_that_are_dropped_do_not_wait_and_free_their_communicators,
            the_fake_refuses_wrong_calls,
        ],
    )])
}

/// Options of a heap with little memory, because the fake fills it.
fn small_heap() -> HeapOptions {
    HeapOptions::new().data_bytes(1 << 20).signal_bytes(1 << 20).backend(BACKEND)
}

/// Runs this process's rank of the job `which`.
fn run_rank(which: &str) -> Result<()> {
    if let Some(nodes) = which.strip_prefix("grouped threads ") {
        let nodes = nodes.parse()?;
        World::run_threads(GROUPED, |world| grouped(&world, nodes))?;
        return Ok(());
    }
    let world = World::from_env()?;
    if let Some(nodes) = which.strip_prefix("grouped ") {
        return grouped(&world, nodes.parse()?);
    }
    match which {
        "operators" => operators(&world),
        "late" => run_on_nodes(&world, BACKEND, bursts()),
        "unready" => unready(&world),
        "lost" => lost(&world),
        "asynchronous" => asynchronous(&world),
        "kept" => kept(&world),
        "differs" => differs(&world),
        "killed" => killed(&world),
        "in the driver" => in_the_driver(&world),
        "asynchronous in the driver" => asynchronous_in_the_driver(&world),
        "absent" => absent(&world),
        "marked" => marked(&world),
        "dropped" => dropped(&world),
        "refused" => refused(&world),
        other => bail!("no job is called {other}"),
    }
}

/// Runs `which` on the ranks of `nodes` nodes with the environment variables `set`; returns the
/// outcome, and a log of the calls of the fake libraries.
fn job(
    which: &str,
    (nodes, per_node): (usize, usize),
    set: &[(&str, &str)],
) -> (launch::Outcome, String) {
    let (log, size) = (NamedTempFile::new().unwrap(), nodes * per_node);
    let options = launch::Options::default().nodes(nodes).deadline(Duration::from_secs(300));
    let options = options.grace(Duration::from_secs(60));
    let options = options.env("FAKE_HIP_DEVICES", size.max(GROUPED).to_string());
    // A step between nodes may take eight compute units.
    let options = options.env("FAKE_HIP_UNITS", "10").env("HSA_NO_SCRATCH_RECLAIM", "1");
    let environment = Fake::with_libraries().environment(log.path());
    let options = environment.into_iter().fold(options, |it, (name, value)| it.env(name, value));
    let options = set.iter().fold(options, |it, (name, value)| it.env(name, value));
    let program = std::env::current_exe().unwrap();
    let outcome = launch(&program, &["rank", which], size, options).unwrap();
    (outcome, std::fs::read_to_string(log.path()).unwrap())
}

/// Runs `which` on two nodes of one rank, which must succeed on both: a rank succeeds if it sees the
/// failure that it expects. Returns the log of the fake libraries.
fn two_ranks_succeed(which: &str, set: &[(&str, &str)]) -> String {
    let (outcome, calls) = job(which, (2, 1), set);
    assert!(outcome.ok(), "{}", outcome.report());
    calls
}

fn operators_on(world: (usize, usize), set: &[(&str, &str)]) {
    let (outcome, calls) = job("operators", world, set);
    assert!(outcome.ok(), "{}", outcome.report());
    assert_eq!(failed(&calls), [""; 0]);
    // Each rank makes one call of each kind, except broadcasts, when it connects to the others.
    let each = ["ncclAllReduce", "ncclAllGather", "ncclGroupEnd", "ncclBroadcast"];
    let at_least = if Level::from_env() >= Level::Normal { 10 } else { 5 };
    for name in each {
        let count = calls.lines().filter(|call| *call == format!("{name} = 0")).count();
        assert!(count > world.0 * world.1 * at_least, "{count} calls of {name}");
    }
}

/// Tests that devices that cannot access each other's memory work as nodes of their own.
fn operators_on_2_nodes_of_1_rank() {
    operators_on((2, 1), &[("FAKE_HIP_NO_PEERS", "all")]);
}

fn operators_on_2_nodes_of_2_ranks() {
    operators_on((2, 2), &[]);
}

fn operators_on_3_nodes_of_1_rank() {
    operators_on((3, 1), &[]);
}

fn operators_on_2_nodes_of_3_ranks() {
    operators_on((2, 3), &[]);
}

/// Number of ranks that are grouped into nodes by the access of their devices.
const GROUPED: usize = 4;

/// Values of FAKE_HIP_NO_PEERS for [`GROUPED`] devices, and the number of nodes that the heap must
/// have. A missing direction is enough, and groups are consecutive ranks with access.
const ACCESS: [(&str, usize); 5] = [
    ("0-2,0-3,1-2,3-1", 2),
    ("all", 4),
    // Devices 0 and 1, and 1 and 2, have access.
    ("0-2,3-0,3-1,3-2", 4),
    // Devices 0 and 2, and 1 and 3, have access: not consecutive.
    ("0-1,1-2,2-3,3-0", 4),
    ("", 1),
];

/// Patterns of [`ACCESS`] to test at this level.
fn access_patterns() -> impl Iterator<Item = (&'static str, usize)> {
    ACCESS.into_iter().step_by(if Level::from_env() <= Level::Quick { 4 } else { 1 })
}

/// Checks that no driver call of a grouped job failed, and that it used RCCL if it has several
/// nodes.
fn check_grouped(outcome: &launch::Outcome, calls: &str, (access, nodes): (&str, usize)) {
    assert!(outcome.ok(), "{access:?}: {}", outcome.report());
    assert_eq!(failed(calls), [""; 0], "{access:?}");
    let uses = calls.contains("ncclAllReduce = 0");
    assert_eq!(uses, nodes > 1, "{access:?}: {calls}");
}

fn processes_on_gpus_without_peer_access_are_grouped() {
    for (access, nodes) in access_patterns() {
        let which = format!("grouped {nodes}");
        let (outcome, calls) = job(&which, (1, GROUPED), &[("FAKE_HIP_NO_PEERS", access)]);
        check_grouped(&outcome, &calls, (access, nodes));
    }
}

fn threads_on_gpus_without_peer_access_are_grouped() {
    for (access, nodes) in access_patterns() {
        let which = format!("grouped threads {nodes}");
        let (outcome, calls) = job(&which, (1, 1), &[("FAKE_HIP_NO_PEERS", access)]);
        check_grouped(&outcome, &calls, (access, nodes));
    }
}

/// Tests two nodes of two ranks; devices of node 1 have no access, so both nodes are divided. The
/// devices of different nodes need none.
fn nodes_with_gpus_without_peer_access_are_divided() {
    for (access, nodes) in [("0-2,2-3", 4), ("0-2,0-3,1-2,1-3", 2)] {
        let which = format!("grouped {nodes}");
        let (outcome, calls) = job(&which, (2, 2), &[("FAKE_HIP_NO_PEERS", access)]);
        check_grouped(&outcome, &calls, (access, nodes));
    }
}

/// Opens a heap, which must have `nodes` nodes of consecutive ranks; tries plans for this and for
/// the caller's number of nodes, and a communicator; and runs a case of each operator.
fn grouped(world: &World, nodes: usize) -> Result<()> {
    let (rank, size, before) = (world.rank(), world.size(), world.nodes());
    let per_node = size / nodes;
    let heap = SymmetricHeap::open(world, small_heap())?;
    let all = heap.whole_world();
    let (whole, local) = ((heap.rank(), heap.size()), (heap.local_rank(), heap.local_size()));
    let seen = (all.nodes(), all.node(), whole, local);
    let expected = (nodes, rank / per_node, (rank, size), (rank % per_node, per_node));
    ensure!(seen == expected, "{seen:?}, expected {expected:?}");
    ensure!(heap.device().index == rank, "rank {rank} has device {}", heap.device().index);
    ensure!(world.nodes() == before, "the nodes of the caller's world changed");
    let host = all.host_of(rank)?;
    let named = host.contains(&format!("(node {})", rank / per_node));
    ensure!(nodes == 1 || named, "rank {rank} is on host {host}");
    ensure!(world.for_heap(heap.options())?.nodes() == nodes, "for_heap finds other nodes");
    let request = all_reduce::Options::new(COUNT);
    if nodes > before {
        // Plans from the caller's world are for its nodes.
        let plan = request.plan(Topology::from(world).on(BACKEND))?;
        let parts = format!("planned for {before} nodes, expected {nodes}");
        let parts = [parts.as_str(), "World::for_heap"];
        fails_with(AllReduce::new(&heap, &plan).map_err(Into::into), &parts)?;
        fails_with(Workspace::for_plans(&heap, &[&plan]).map_err(Into::into), &parts)?;
        fails_with(
            Plan::open_heap(world, &[&plan], HeapReserve::none()).map_err(Into::into),
            &parts,
        )?;
    }
    heap.close()?;
    if nodes == 1 {
        return Ok(world.close()?);
    }
    let within = world.for_heap(&HeapOptions::new().backend(BACKEND))?;
    let plan = request.plan(Topology::from(&within).on(BACKEND))?;
    let heap = Plan::open_heap(&within, &[&plan], HeapReserve::none())?;
    AllReduce::new(&heap, &plan)?.free()?;
    heap.close()?;
    // A communicator plans before it opens its heap.
    let comm =
        Comm::from_world(BACKEND, world, &comm::Options::new().max_bytes(1 << 12).room(1 << 14))?;
    let (x, y) = (comm.heap().full::<f32>(COUNT, 1.0)?, comm.heap().zeros::<f32>(COUNT)?);
    comm.all_reduce(&x, &mut y.clone(), &ReduceOp::Sum)?;
    comm.stream().sync()?;
    let sums = comm.heap().read(y)?;
    ensure!(sums.iter().all(|sum| *sum == size as f32), "sums are {:?}", &sums[..4]);
    comm.close()?;
    run_in_heap_on_nodes(world, nodes, BACKEND, each(&Options::new(37, 21, 13)))
}

/// Runs all shapes and types on up to two nodes of two ranks, and a fifth of them on larger worlds.
fn operators(world: &World) -> Result<()> {
    let fabric = fabric_of(world, BACKEND)?;
    let (node, nodes) = (world.node(), world.nodes());
    let expected = format!("Communicator(rank {node} of {nodes}, Nccl(2.27.7");
    ensure!(fabric.contains(&expected), "no step over RCCL: {fabric}");
    // Operators alternate in the list, whose length is no multiple of five.
    let step = if nodes == 2 && world.size() <= 4 { 1 } else { 5 };
    let shapes = shape_cases().into_iter().step_by(step);
    run_on_nodes(world, BACKEND, shapes.chain(type_cases()).collect())
}

/// Calls of all operators that are enqueued without waiting for the ones before.
fn bursts() -> Vec<Case> {
    let mut options = Options::new(29, 21, 13);
    options.blocks = Some(2);
    let mut cases = each(&options);
    for case in &mut cases {
        (case.burst, case.rows) = (true, vec![29, 1, 29, 14]);
    }
    cases
}

/// Tests that calls wait for the end of their steps, steps for their input, and all for calls that the
/// library has not taken yet: collectives or kernels are late, and calls are in progress for long.
fn data_that_arrives_late_is_waited_for() {
    for late in ["FAKE_RCCL_DELAY", "FAKE_HIP_DELAY"] {
        let calls = two_ranks_succeed("late", &[(late, "5"), ("FAKE_RCCL_ANSWERS", "50")]);
        assert_eq!(failed(&calls), [""; 0], "{late}");
    }
}

/// Number of elements of the messages of the tests of faults.
const COUNT: usize = 1000;

/// All-reduce of [`COUNT`] elements, with its heap and matrices.
struct Sum {
    heap: Arc<SymmetricHeap>,
    op: AllReduce,
    args: CollectiveArgs,
    stream: Stream,
}

impl Sum {
    fn new(world: &World) -> Result<Sum> {
        Sum::within(SymmetricHeap::open(world, small_heap())?)
    }

    fn within(heap: Arc<SymmetricHeap>) -> Result<Sum> {
        let op = AllReduce::new(&heap, &all_reduce::Options::new(COUNT).plan(&heap)?)?;
        let (x, y) = (heap.full::<f32>(COUNT, 1.0)?, heap.zeros::<f32>(COUNT)?);
        let args = CollectiveArgs::new(MatRef::sym(x, 1, COUNT), MatRef::sym(y, 1, COUNT));
        Ok(Sum { op, args, stream: heap.stream()?, heap })
    }

    fn enqueue(&self) -> Result<()> {
        Ok(self.op.run(&self.args, &self.stream)?)
    }

    fn call(&self) -> Result<()> {
        self.enqueue()?;
        Ok(self.stream.sync()?)
    }
}

/// Checks that `result` is an error whose text has all `parts`.
fn fails_with<T>(result: Result<T>, parts: &[&str]) -> Result<()> {
    let error = format!("{:#}", result.err().context("no error")?);
    println!("{error}");
    for part in parts {
        ensure!(error.contains(part), "no {part:?} in: {error}");
    }
    Ok(())
}

/// Waits for the other ranks, because a rank that ends counts as lost.
fn stay(world: &World) -> Result<()> {
    Ok(world.barrier()?)
}

/// Rank of the other node in a world of two nodes of one rank.
fn other(world: &World) -> String {
    format!("rank {}", 1 - world.rank())
}

fn a_communicator_that_is_never_ready_names_the_ranks() {
    let set = [("FAKE_RCCL_JOINS", "1:3600000"), ("IRIS_DEADLINE", "0.01")];
    two_ranks_succeed("unready", &set);
}

/// Sees the error, and that the operator which was not made keeps no memory.
fn unready(world: &World) -> Result<()> {
    let heap = SymmetricHeap::open(world, small_heap())?;
    let free = || [Segment::Data, Segment::Signal].map(|segment| heap.free_bytes(segment));
    let before = free();
    let parts = ["ncclCommInitRankConfig", "within 7 s", &other(world)];
    fails_with(Sum::within(heap.clone()), &parts)?;
    ensure!(free() == before, "{:?} of {before:?} are free", free());
    Ok(())
}

fn a_rank_that_is_lost_while_the_library_joins_ends_the_wait() {
    // The deadline of rank 0 is later than that of the job.
    two_ranks_succeed("lost", &[("FAKE_RCCL_JOINS", "0:3600000")]);
}

/// Rank 1 leaves while rank 0 waits in the library for as long as it likes.
fn lost(world: &World) -> Result<()> {
    let heap = SymmetricHeap::open(world, small_heap())?;
    if world.rank() == 0 {
        return fails_with(Sum::within(heap), &["rank 1 on host", "is lost"]);
    }
    let (world, log) = (world.clone(), std::env::var("FAKE_HIP_LOG")?);
    std::thread::spawn(move || {
        let calls = || std::fs::read_to_string(&log).unwrap();
        while !calls().contains("ncclCommInitRankConfig 0 on") {
            std::thread::sleep(Duration::from_millis(10));
        }
        world.abort();
    });
    fails_with(Sum::within(heap), &[])
}

/// Tests that an error of the library on rank 1, in the middle of a call, ends the calls of both
/// ranks.
fn an_asynchronous_error_fails_all_ranks() {
    let calls = two_ranks_succeed("asynchronous", &[("FAKE_RCCL_FAILS", "1:12")]);
    for error in ["error of rank 1: a test asked for it = 2", "error of rank 0: rank 1 is lost = 6"]
    {
        assert!(calls.contains(error), "{error} in {calls}");
    }
}

fn asynchronous(world: &World) -> Result<()> {
    let sum = Sum::new(world)?;
    let error = if world.rank() == 1 { "unhandled system error" } else { "remote process exited" };
    let all = (0..10).try_for_each(|_| sum.call());
    fails_with(all, &["steps between nodes with", &other(world), error])?;
    // The heap's fault is the library's error, or the call that was enqueued only in part, if the
    // error came before the call's last launch.
    fails_with(sum.enqueue(), &["takes no calls after a fault"])?;
    // The communicator is aborted, so a graph with its steps must not be launched any more.
    let launched = sum.heap.launch_graph(|| panic!("a graph was launched"));
    fails_with::<()>(launched.map_err(Into::into), &[])?;
    stay(world)
}

/// Tests that calls end although the library does not return from its abort, because the program
/// keeps a graph.
fn a_graph_that_is_kept_does_not_delay_errors() {
    let set = [("FAKE_RCCL_FAILS", "1:12"), ("FAKE_RCCL_GRAPHS", "1")];
    let calls = two_ranks_succeed("asynchronous", &set);
    assert!(!calls.contains("ncclCommAbort"), "an abort returned: {calls}");
}

fn a_heap_that_is_closed_before_its_graph_says_so() {
    two_ranks_succeed("kept", &[("FAKE_RCCL_GRAPHS", "1"), ("IRIS_DEADLINE", "0.01")]);
}

/// Closes the heap while a graph with its calls seems to exist.
fn kept(world: &World) -> Result<()> {
    let sum = Sum::new(world)?;
    sum.call()?;
    stay(world)?;
    let closed = sum.heap.close().map_err(Into::into);
    fails_with(closed, &["not freed 6 s after", "graphs", "destroyed before"])
}

fn calls_that_differ_between_nodes_are_named() {
    two_ranks_succeed("differs", &[]);
}

/// Rank 1 gathers where rank 0 sums.
fn differs(world: &World) -> Result<()> {
    let sum = Sum::new(world)?;
    let heap = &sum.heap;
    let gather = AllGather::new(heap, &all_gather::Options::rows(2, COUNT).plan(heap)?)?;
    let (x, y) = (heap.zeros::<f32>(COUNT)?, heap.zeros::<f32>(2 * COUNT)?);
    let args = CollectiveArgs::new(MatRef::sym(x, 1, COUNT), MatRef::sym(y, 2, COUNT));
    let call = || -> Result<()> {
        match world.rank() {
            0 => sum.enqueue()?,
            _ => gather.run(&args, &sum.stream)?,
        }
        Ok(sum.stream.sync()?)
    };
    fails_with(call(), &["operator is", "all_reduce", "all_gather", "rank 0", "rank 1"])?;
    stay(world)
}

/// Runs one rank on each of two nodes; rank 1 is killed and rank 0 expects an error.
fn rank_1_is_killed(which: &str) {
    rank_1_of_two_is_killed(which, (2, 1), &[]);
}

/// Runs two ranks with the environment variables `set`; rank 1 is killed and rank 0 expects an
/// error.
fn rank_1_of_two_is_killed(which: &str, world: (usize, usize), set: &[(&str, &str)]) {
    let (outcome, _) = job(which, world, set);
    let ends = outcome.ranks.iter().map(|rank| rank.end).collect::<Vec<_>>();
    assert!(matches!(ends[..], [End::Exited(0), End::Signalled(9)]), "{}", outcome.report());
}

fn a_killed_rank_of_another_node_is_named() {
    rank_1_is_killed("killed");
}

/// Tests that ranks of one host, whose devices have no access, name each other with their nodes.
fn a_killed_rank_without_peer_access_is_named() {
    let set = [("FAKE_HIP_NO_PEERS", "all")];
    rank_1_of_two_is_killed("killed", (1, 2), &set);
    rank_1_of_two_is_killed("in the driver", (1, 2), &set);
}

/// Tests that both ranks of node 0 name a rank of node 1 if all ranks of node 1 are killed.
fn a_killed_node_of_two_ranks_is_named() {
    let (outcome, _) = job("killed", (2, 2), &[]);
    let ends = outcome.ranks.iter().map(|rank| rank.end).collect::<Vec<_>>();
    let expected = [End::Exited(0), End::Exited(0), End::Signalled(9), End::Signalled(9)];
    assert_eq!(ends, expected, "{}", outcome.report());
}

/// Tests that a call that the library has not taken yet ends when a rank is killed.
fn a_killed_rank_ends_a_call_in_progress() {
    let set = [("FAKE_RCCL_STALLS", "0:10")];
    rank_1_of_two_is_killed("killed", (2, 1), &set);
}

/// Kills all ranks of node 1 between two calls.
fn killed(world: &World) -> Result<()> {
    let sum = Sum::new(world)?;
    (0..3).try_for_each(|_| sum.call())?;
    // A call may end on one rank while others are still in it.
    world.barrier()?;
    if sum.heap.whole_world().node() == 1 {
        launch::kill_myself();
    }
    // The lost rank's host has a name that ends with the node.
    fails_with(sum.call(), &["rank", " on host ", "(node 1) is lost"])
}

fn a_killed_rank_ends_a_wait_in_the_driver() {
    rank_1_is_killed("in the driver");
}

/// Waits by a function of the driver for a step with a rank that is killed.
fn in_the_driver(world: &World) -> Result<()> {
    let sum = Sum::new(world)?;
    if world.rank() == 0 {
        sum.enqueue()?;
    }
    world.barrier()?;
    if world.rank() == 1 {
        launch::kill_myself();
    }
    wait_in_the_driver(&sum.stream)?;
    fails_with(sum.heap.check().map_err(Into::into), &["rank 1", "is lost"])
}

/// Waits for a stream by a function of the driver, without iris.
fn wait_in_the_driver(stream: &Stream) -> Result<()> {
    type Synchronize = unsafe extern "C" fn(u64) -> u32;
    // SAFETY: the library is the fake runtime that this process has loaded, and the function has
    // this type.
    unsafe {
        let driver = libloading::Library::new("libamdhip64.so.7")?;
        let synchronize = driver.get::<Synchronize>(b"hipStreamSynchronize\0")?;
        ensure!(synchronize(stream.raw_handle()) == 0, "the wait failed");
    }
    Ok(())
}

fn an_asynchronous_error_ends_a_wait_in_the_driver() {
    two_ranks_succeed("asynchronous in the driver", &[("FAKE_RCCL_FAILS", "1:12")]);
}

/// Waits by a function of the driver for calls of which the library fails on rank 1.
fn asynchronous_in_the_driver(world: &World) -> Result<()> {
    let sum = Sum::new(world)?;
    let all = (0..10).try_for_each(|_| {
        sum.enqueue()?;
        wait_in_the_driver(&sum.stream)?;
        Ok(sum.heap.check()?)
    });
    fails_with(all, &["steps between nodes with", &other(world)])?;
    stay(world)
}

fn a_rank_that_makes_no_call_is_named() {
    two_ranks_succeed("absent", &[("IRIS_DEADLINE", "0.01")]);
}

/// Tests two nodes of two ranks, of which the last makes no call. A rank of node 0 names its
/// counterpart on node 1, which is late or has given up, unless it gave up because the other rank
/// of node 0 did. None blames that other rank, which itself waits for node 1.
fn a_rank_that_makes_no_call_is_named_and_not_a_healthy_peer() {
    let (outcome, _) = job("absent", (2, 2), &[("IRIS_DEADLINE", "0.01")]);
    assert!(outcome.ok(), "{}", outcome.report());
    let named = [0, 1].map(|rank: usize| {
        let text = &outcome.ranks[rank].stdout;
        let named = text.contains(&format!("rank {} on host", rank + 2));
        // The other rank's reason, if it is known, names the rank for which that one has waited.
        let (other, awaited) = (1 - rank, 3 - rank);
        let followed = text.contains(&format!("the error of rank {other} says why"))
            || [format!("rank {other} on host"), format!("rank {awaited} on host")]
                .iter()
                .all(|part| text.contains(part));
        assert!(named || followed, "rank {rank}: {text}");
        named
    });
    assert_ne!(named, [false; 2], "{}", outcome.report());
}

/// Makes a call on all ranks except the last.
fn absent(world: &World) -> Result<()> {
    let sum = Sum::new(world)?;
    if world.rank() == world.size() - 1 {
        // Calls are given up after 6 s, and barriers after 7.2 s. The last rank sleeps, so that the
        // others arrive at the barrier in time.
        std::thread::sleep(Duration::from_secs(6));
        return stay(world);
    }
    let parts: &[&str] = match (world.node(), world.local_size()) {
        (0, 1) => &["all_reduce", "did not end within 6 s", "rank 1"],
        (0, _) => &[],
        // The last rank has the local number 1.
        _ => &["rank 3 has not entered", "rank 3 is on host", "(node 1)", "rank 2 is in"],
    };
    fails_with(sum.call(), parts)?;
    stay(world)
}

/// Tests that a rank whose call fails before a step says so in its record of the step. Rank 0's first
/// step takes long, so that at least its record of the second step is written after the failure.
fn a_rank_that_has_failed_tells_the_other_node() {
    two_ranks_succeed("marked", &[("FAKE_RCCL_DELAY", "0:400")]);
}

fn marked(world: &World) -> Result<()> {
    let sum = Sum::new(world)?;
    let calls = || {
        sum.enqueue()?;
        sum.enqueue()
    };
    if world.rank() == 0 {
        calls()?;
        sum.heap.poison(abi::abort::INCOMPLETE)?;
        stay(world)?;
        return fails_with(sum.stream.sync().map_err(Into::into), &["aborted"]);
    }
    let all = || -> Result<()> {
        calls()?;
        Ok(sum.stream.sync()?)
    };
    fails_with(all(), &["all_reduce, step 1 between nodes of call", "rank 0 on host", "gave up"])?;
    stay(world)
}

fn heaps_that_are_dropped_do_not_wait_and_free_their_communicators() {
    let calls = two_ranks_succeed("dropped", &[]);
    assert_eq!(calls.matches("ncclCommAbort").count(), 2, "{calls}");
}

/// Rank 1 drops its heap after a call. Rank 0 drops its heap while a step waits for rank 1.
fn dropped(world: &World) -> Result<()> {
    let sum = Sum::new(world)?;
    sum.call()?;
    if world.rank() == 0 {
        sum.enqueue()?;
    }
    // A call that is enqueued after rank 1 has dropped its heap may fail at once.
    stay(world)?;
    drop(sum);
    stay(world)
}

fn the_fake_refuses_wrong_calls() {
    two_ranks_succeed("refused", &[]);
}

/// Makes wrong calls on a communicator of this rank alone.
fn refused(world: &World) -> Result<()> {
    let heap = SymmetricHeap::open(world, small_heap())?;
    let (gpu, stream) = (heap.gpu()?, heap.stream()?);
    let library = Nccl::get(BACKEND)?;
    let options =
        CommunicatorOptions { most_blocks: Some(8), deadline: Some(Duration::from_secs(60)) };
    let make = || Communicator::new(&library, &library.new_id()?, (0, 1), options, || false);
    let in_device = |f: &dyn Fn() -> iris_kernels::vendor::Result<()>| {
        Ok(gpu.with_relaxed_capture(|| f().map_err(iris_heap::Error::other))?)
    };
    let one = gpu.with_relaxed_capture(|| make().map_err(iris_heap::Error::other))?;
    let data = heap.view().data[heap.local_rank()];
    let reduce = |at: u64| {
        let size = (16, Some(iris_heap::DType::F32));
        // SAFETY: the fake checks the address, and the heap is open until the stream has finished.
        unsafe { one.enqueue(NcclCall::AllReduce, (at, at), size, stream.raw_handle()) }
    };
    in_device(&|| reduce(data))?;
    let host = [0_f32; 16];
    fails_with(in_device(&|| reduce(host.as_ptr() as u64)), &["memory that the device cannot"])?;
    fails_with(in_device(&|| reduce(data + (1 << 40))), &["memory that the device cannot"])?;
    if world.rank() == 1 {
        // The second rank's device is the second one, but a thread begins with the first.
        fails_with(reduce(data).map_err(Into::into), &["another device is current"])?;
    }
    stream.sync()?;
    in_device(&|| one.close()?.map_or(Ok(()), Release::run))?;
    heap.close()?;
    Ok(world.close()?)
}
