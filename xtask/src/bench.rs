//! `cargo xtask bench`: the benchmarks, through the `iris` program.

use std::ffi::OsString;
use std::path::Path;

use anyhow::Result;

use crate::program;

/// Becomes `iris bench ARGUMENTS`; returns only if that could not be started.
pub(crate) fn run(root: &Path, arguments: &[OsString]) -> Result<()> {
    program::become_iris(root, "bench", arguments)
}
