//! `cargo xtask mpi`: the operators' suite with steps between nodes over MPI.
//!
//! CI does not run it yet: building MPI's bindings, and the workspace with the feature, takes more
//! than a minute.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use crate::program::cargo;
use crate::steps::{self, Step};

/// Runs the operators' suite with steps between nodes over MPI; the test program starts itself
/// under mpirun.
pub(crate) fn run(root: &Path) -> Result<()> {
    let test = ["test", "--release", "-p", "iris-testkit", "--features", "mpi", "--test", "mpi"];
    let mut mpicc = Command::new("mpicc");
    mpicc.arg("--version");
    let step = Step::command("mpi", cargo(root, &test)).needs("mpicc (libopenmpi-dev)", mpicc);
    steps::run(vec![step])
}
