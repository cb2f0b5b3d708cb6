//! `cargo xtask run`: the main job, or one operator, through the `iris` program.

use std::ffi::OsString;
use std::path::Path;

use anyhow::Result;

use crate::program;

/// Becomes `iris run ARGUMENTS`; returns only if that could not be started.
pub(crate) fn run(root: &Path, arguments: &[OsString]) -> Result<()> {
    program::become_iris(root, "run", arguments)
}
