//! Commands of Open MPI's `mpirun`: without arguments, and for a job on simulated nodes.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::free_port;

/// Name of Open MPI's launcher on Debian, where `mpirun` may be the launcher of MPICH.
const OPEN_MPI: &str = "mpirun.openmpi";

/// Command of Open MPI's `mpirun`, without arguments.
pub fn open_mpi() -> Command {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let is_debian = std::env::split_paths(&path).any(|folder| folder.join(OPEN_MPI).is_file());
    Command::new(if is_debian { OPEN_MPI } else { "mpirun" })
}

/// Makes Open MPI keep the files of a job in `folder`. By default all jobs of a user are in one folder,
/// which the last job that ends removes. A job that starts at that moment may fail (Open MPI 4.1.4:
/// `mkdir` of the folder, `File exists`).
pub fn keep_files_in<'a>(command: &'a mut Command, folder: &Path) -> &'a mut Command {
    ["OMPI_MCA_orte_tmpdir_base", "PRTE_MCA_prte_tmpdir_base"]
        .into_iter()
        .fold(command, |command, name| command.env(name, folder))
}

/// Command of Open MPI's `mpirun` that starts `program` with `arguments` as `per_node` ranks on
/// each of `nodes` nodes that are simulated on this host. The ranks find each other over loopback,
/// without a secret. `mpirun` keeps its files in `folder`, and ends the job after `limit`, or if a rank
/// has failed.
///
/// # Errors
/// An error of the system if there is no free port at 127.0.0.1.
pub fn mpirun(
    program: &Path,
    arguments: &[impl AsRef<OsStr>],
    (nodes, per_node): (usize, usize),
    (folder, limit): (&Path, Duration),
) -> Result<Command> {
    let port = free_port::on("127.0.0.1").context("opening a port at 127.0.0.1")?;
    let mut command = open_mpi();
    keep_files_in(&mut command, folder).args([
        "--allow-run-as-root",
        "--oversubscribe",
        "--bind-to",
        "none",
    ]);
    // Waits in MPI yield the core, because all ranks share this host's cores.
    command.args(["--mca", "mpi_yield_when_idle", "1"]);
    command.args(["--timeout", &limit.as_secs().max(1).to_string()]);
    // Each node is a separate application context of mpirun, with its own variables.
    let shared = ["MASTER_ADDR=127.0.0.1".to_owned(), format!("IRIS_PORT={port}")];
    for node in 0..nodes {
        command.args((node > 0).then_some(":")).args(["-np", &per_node.to_string()]);
        for variable in shared.iter().chain([&format!("IRIS_NODE={node}")]) {
            command.args(["-x", variable]);
        }
        command.arg(program).args(arguments);
    }
    Ok(command)
}
