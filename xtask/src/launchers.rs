//! Worlds under launchers that other projects make: the test program `launchers` of iris-testkit, of
//! which `cargo xtask test` runs a few cases, with all of its cases.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::Path;

use anyhow::{Context, Result};

use crate::program::cargo;

/// Replaces this process by the test program; `words` select cases by name.
pub(crate) fn run(root: &Path, words: &[OsString]) -> Result<()> {
    let test = ["test", "--quiet", "--release", "-p", "iris-testkit", "--test", "launchers"];
    let error = cargo(root, &test).args(["--", "--all"]).args(words).exec();
    Err(error).context("cargo did not start")
}
