//! Feature `mpi` of iris-testkit: the operators' suite with steps between nodes over MPI.

use std::path::Path;

use anyhow::Result;

use crate::features::{by_mpicc, mpicc};
use crate::program::cargo;
use crate::steps::{self, Step};

/// Runs the operators' suite with steps between nodes over MPI; the test program starts itself
/// under mpirun.
pub(crate) fn run(root: &Path) -> Result<()> {
    let test = ["test", "--release", "-p", "iris-testkit", "--features", "mpi", "--test", "mpi"];
    let command = by_mpicc(cargo(root, &test));
    let step = Step::command("mpi", command).needs("mpicc (libopenmpi-dev)", mpicc());
    steps::run(vec![step])
}
