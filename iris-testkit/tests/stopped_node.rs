//! Test of a node whose processes are stopped: the ranks of the other node name it, and none blames a
//! healthy rank of its own node.
//!
//! The program starts itself as the ranks of two pretended nodes.

use std::process::ExitCode;
use std::time::Duration;

use iris_heap::{HeapOptions, SymmetricHeap, World};
use iris_ops::Barrier;
use iris_testkit::launch::{Options, end_with_launcher, launch};
use rustix::process::{Signal, getpid, kill_process};

/// Number of nodes of the world, and number of ranks per node.
const WORLD: (usize, usize) = (2, 2);

fn main() -> ExitCode {
    if std::env::args().nth(1).as_deref() == Some("rank") {
        end_with_launcher();
        let error = rank().expect_err("the other node has stopped");
        eprintln!("{error:#}");
        return ExitCode::FAILURE;
    }
    let (nodes, per_node) = WORLD;
    let program = std::env::current_exe().unwrap();
    let options = Options::default().nodes(nodes).env("IRIS_DEADLINE", "0.01");
    let options = options.grace(Duration::from_secs(4)).deadline(Duration::from_secs(60));
    let outcome = launch(&program, &["rank"], nodes * per_node, options).unwrap();
    // Expected errors: rank 0 waits for the stopped node in a step between nodes, and rank 1 waits
    // for rank 0 in a kernel.
    let [step, kernel] = [0, 1].map(|rank: usize| outcome.ranks[rank].stderr.clone());
    let report = outcome.report();
    assert!(kernel.contains("because rank 0 on host"), "{report}");
    assert!(kernel.contains("waits for node 1 (rank 2 on host"), "{report}");
    assert!(!kernel.contains("rank 0 has not entered"), "{report}");
    assert!(step.contains("rank 2 is on host") && step.contains("(node 1)"), "{report}");
    println!("a stopped node is named ... ok");
    ExitCode::SUCCESS
}

/// Program of each rank of the job; the ranks of node 1 stop before the second call.
fn rank() -> anyhow::Result<()> {
    let world = World::from_env()?;
    let heap = SymmetricHeap::open(&world, HeapOptions::new().data_bytes(1 << 20).threads(1))?;
    let barrier = Barrier::new(&heap, &iris_ops::barrier::Options::new().plan(&heap)?)?;
    let stream = heap.stream()?;
    barrier.run(&stream)?;
    stream.sync()?;
    if world.node() == 1 {
        kill_process(getpid(), Signal::STOP)?;
    }
    barrier.run(&stream)?;
    let outcome = stream.sync();
    // The rank waits before it returns. Otherwise the other rank of its node might end because this
    // rank is lost, and not by its own deadline.
    std::thread::sleep(Duration::from_secs(3));
    Ok(outcome?)
}
