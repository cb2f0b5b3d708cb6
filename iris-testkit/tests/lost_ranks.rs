//! Tests of ranks that are processes on two nodes, while all make calls: a rank is killed, a node is
//! stopped, or a node cannot be reached any more. The other ranks must end with an error that names it.
//!
//! The program starts itself as the ranks of two simulated nodes.

use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use iris_heap::{HeapOptions, SymmetricHeap, World};
use iris_ops::{AllReduce, Barrier, CollectiveArgs, MatRef, OpResult, all_reduce, barrier};
use iris_testkit::harness::{self, Group, named};
use iris_testkit::launch::{self, End, Namespaces, Options, Outcome, launch};
use rustix::process::{Signal, getpid, kill_process};

/// Number of nodes of the world, and number of ranks per node.
const WORLD: (usize, usize) = (2, 2);
/// Number of calls before the fault.
const CALLS: usize = 20;
/// Number of elements of a message.
const COUNT: usize = 1000;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, rank, fault] = &arguments[..]
        && rank == "rank"
    {
        launch::end_with_launcher();
        let error = run_rank(fault).expect_err("calls without end");
        eprintln!("{error:#}");
        return ExitCode::FAILURE;
    }
    let missing = Namespaces::new(WORLD.0).err().map(|error| format!("{error:#}"));
    harness::run(vec![
        Group::new(
            None,
            named![
                a_rank_that_is_killed_between_calls_is_named_on_all_nodes,
                a_node_that_is_stopped_is_named_and_no_healthy_rank
            ],
        ),
        Group::new(missing, named![a_network_that_is_cut_between_calls_is_told_to_all_ranks]),
    ])
}

/// Runs all ranks of a job with the fault `fault`, and returns their outcome.
fn job(fault: &str, grace: u64, options: Options) -> Outcome {
    let (nodes, per_node) = WORLD;
    let program = std::env::current_exe().unwrap();
    let options = options.nodes(nodes).env("IRIS_DEADLINE", "0.01");
    let options = options.grace(Duration::from_secs(grace)).deadline(Duration::from_secs(120));
    launch(&program, &["rank", fault], nodes * per_node, options).unwrap()
}

/// Makes calls in an endless loop; the fault comes in the middle of a call.
fn run_rank(fault: &str) -> Result<()> {
    let world = World::from_env()?;
    let heap = SymmetricHeap::open(&world, HeapOptions::new().data_bytes(1 << 20).threads(1))?;
    let sum = AllReduce::new(&heap, &all_reduce::Options::new(COUNT).plan(&heap)?)?;
    let barrier = Barrier::new(&heap, &barrier::Options::new().plan(&heap)?)?;
    let matrix = MatRef::vector(heap.full::<f32>(COUNT, 1.0)?);
    let stream = heap.stream()?;
    let call = || -> OpResult<()> {
        match fault {
            // Rank 0 alone carries a barrier between nodes, and rank 1 waits for rank 0.
            "stopped" => barrier.run(&stream),
            _ => sum.run(&CollectiveArgs::new(matrix, matrix), &stream),
        }
    };
    for number in 0.. {
        call()?;
        if number == CALLS {
            make(fault, &world)?;
        }
        if let Err(error) = stream.sync() {
            if fault == "stopped" {
                // Otherwise the other rank of the node might end because this rank is lost, and not
                // by its own deadline.
                std::thread::sleep(Duration::from_secs(3));
            }
            return Err(error.into());
        }
    }
    Ok(())
}

/// Injects the fault if this rank is the one that fails.
fn make(fault: &str, world: &World) -> Result<()> {
    match (fault, world.rank()) {
        ("killed", 3) => launch::kill_myself(),
        ("stopped", 2 | 3) => Ok(kill_process(getpid(), Signal::STOP)?),
        ("cut", 0) => {
            let down = Command::new("ip").args(["link", "set", "node1", "down"]).status();
            ensure!(down.context("ip does not start")?.success(), "the cable was not cut");
            Ok(())
        }
        ("killed" | "stopped" | "cut", _) => Ok(()),
        _ => bail!("no fault is called {fault}"),
    }
}

/// Checks that each of `ranks` has ended by itself with an error for which `names` holds, or
/// because the other rank of its node gave up, and that on each node the error of one rank names
/// the cause.
#[track_caller]
fn check_errors(outcome: &Outcome, ranks: &[usize], names: impl Fn(usize, &str) -> bool) {
    let report = outcome.report();
    let mut named = [false; WORLD.0];
    for &rank in ranks {
        let it = &outcome.ranks[rank];
        assert_eq!(it.end, End::Exited(1), "rank {rank}:\n{report}");
        // The error is the last line, after notices of waits.
        let error = it.stderr.lines().last().unwrap_or_default();
        let (node, local) = (rank / WORLD.1, rank % WORLD.1);
        let other = node * WORLD.1 + 1 - local;
        let followed = error.contains(&format!("the error of rank {other} says why"));
        assert!(names(node, error) || followed, "rank {rank}:\n{report}");
        named[node] |= names(node, error);
    }
    assert_eq!(named, [true; WORLD.0], "{report}");
}

fn a_rank_that_is_killed_between_calls_is_named_on_all_nodes() {
    let outcome = job("killed", 60, Options::default());
    assert_eq!(outcome.ranks[3].end, End::Signalled(9), "{}", outcome.report());
    check_errors(&outcome, &[0, 1, 2], |_, error| {
        error.contains("rank 3 on host ") && error.contains("(node 1) is lost")
    });
}

fn a_network_that_is_cut_between_calls_is_told_to_all_ranks() {
    let outcome = job("cut", 60, Options::default().namespaces(true));
    check_errors(&outcome, &[0, 1, 2, 3], |node, error| {
        let other = format!("host node{}", 1 - node);
        // Rank 0, on node 0, carries the messages between nodes.
        let carrier = node == 1 && error.contains("rank 0 of the launched world is lost");
        error.contains(&other) || carrier
    });
}

/// Tests that rank 0, which waits for the stopped node in a step between nodes, and rank 1, which waits
/// for rank 0 in a kernel, both name that node.
fn a_node_that_is_stopped_is_named_and_no_healthy_rank() {
    let outcome = job("stopped", 4, Options::default());
    let [step, kernel] = [0, 1].map(|rank: usize| outcome.ranks[rank].stderr.clone());
    let report = outcome.report();
    assert!(kernel.contains("because rank 0 on host"), "{report}");
    assert!(kernel.contains("waits for node 1 (rank 2 on host"), "{report}");
    assert!(!kernel.contains("rank 0 has not entered"), "{report}");
    assert!(step.contains("rank 2 is on host") && step.contains("(node 1)"), "{report}");
}
