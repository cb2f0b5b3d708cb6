//! Test of every operator over several nodes whose steps between nodes run over MPI. The program
//! starts itself under mpirun, with another host name for each simulated node.

mod common;

use std::net::TcpListener;
use std::process::{Command, ExitCode};

use common::nodes::{fabric_of, run_on_nodes, shape_cases, type_cases};
use iris_heap::{BackendKind, World};
use iris_ops::Mpi;

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
        let begun = std::time::Instant::now();
        let ok = job(nodes, per_node);
        let word = if ok { "ok" } else { "FAILED" };
        println!("{nodes} nodes of {per_node} ranks over MPI ... {word} ({:.1?})", begun.elapsed());
        failed |= !ok;
    }
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// Runs all cases on `nodes` nodes of `per_node` ranks; returns whether they passed on all ranks.
fn job(nodes: usize, per_node: usize) -> bool {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let program = std::env::current_exe().unwrap();
    let mut command = Command::new("mpirun");
    command.args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]);
    // Waits in MPI yield the core, because all ranks share this host's cores.
    command.args(["--mca", "mpi_yield_when_idle", "1"]);
    // A job that hangs is ended by mpirun after 600 s; the longest takes half a minute on two cores.
    command.args(["--timeout", "600"]);
    // Each node is an mpirun application of its own, with its own variables.
    let variables = ["MASTER_ADDR=127.0.0.1".to_owned(), format!("IRIS_PORT={port}")];
    for node in 0..nodes {
        command.args((node > 0).then_some(":")).args(["-np", &per_node.to_string()]);
        for variable in variables.iter().chain([&format!("IRIS_NODE={node}")]) {
            command.args(["-x", variable]);
        }
        command.arg(&program);
    }
    command.status().expect("mpirun, of openmpi-bin, starts").success()
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
