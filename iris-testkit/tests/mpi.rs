//! Test of every operator over several nodes whose steps between nodes run over MPI. The program
//! starts itself under mpirun, with another `IRIS_NODE` for each simulated node.

mod common;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use common::nodes::{fabric_of, run_on_nodes, shape_cases, type_cases};
use iris_heap::{BackendKind, World};
use iris_ops::Mpi;
use iris_testkit::launch::mpirun;

/// Worlds to test: number of nodes, and number of ranks per node.
const WORLDS: [(usize, usize); 4] = [(2, 1), (2, 2), (3, 1), (2, 3)];

fn main() -> ExitCode {
    if std::env::var_os("OMPI_COMM_WORLD_SIZE").is_some() {
        return match rank() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{error:#}");
                ExitCode::FAILURE
            }
        };
    }
    let mut failed = false;
    for (nodes, per_node) in WORLDS {
        let begun = Instant::now();
        let ok = job(nodes, per_node);
        let word = if ok { "ok" } else { "FAILED" };
        println!("{nodes} nodes of {per_node} ranks over MPI ... {word} ({:.1?})", begun.elapsed());
        failed |= !ok;
    }
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// Runs all cases on `nodes` nodes of `per_node` ranks; returns whether they passed on all ranks.
fn job(nodes: usize, per_node: usize) -> bool {
    /// Limit for a job that hangs; the longest job takes half a minute on two cores.
    const LIMIT: Duration = Duration::from_secs(600);
    let program = std::env::current_exe().unwrap();
    let arguments: [&str; 0] = [];
    let folder = tempfile::tempdir().unwrap();
    let command = mpirun(&program, &arguments, (nodes, per_node), (folder.path(), LIMIT));
    command.unwrap().status().expect("mpirun, of openmpi-bin, starts").success()
}

/// Runs one rank of a job under mpirun, with all cases.
fn rank() -> anyhow::Result<()> {
    let mpi = Mpi::init()?;
    let world = World::from_env()?;
    let fabric = fabric_of(&world, BackendKind::Cpu)?;
    anyhow::ensure!(fabric.contains("data by Communicator(node"), "no step over MPI: {fabric}");
    let cases = [shape_cases(), type_cases()].concat();
    run_on_nodes(&world, BackendKind::Cpu, cases)?;
    drop(mpi);
    Ok(())
}
