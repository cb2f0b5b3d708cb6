//! `cargo xtask attack`: the attack on jobs of many shapes, in the test program that also makes its
//! small sample.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::Path;

use anyhow::{Context, Result};

use crate::program::cargo;

/// Builds the test program `attack` of iris-testkit, and replaces this process by its whole attack.
pub(crate) fn run(root: &Path, arguments: &[OsString]) -> Result<()> {
    let test =
        ["test", "--release", "--quiet", "--package", "iris-testkit", "--test", "attack", "--"];
    Err(cargo(root, &test).arg("attack").args(arguments).exec()).context("cargo did not start")
}
