//! `cargo xtask check-protocols`: checks the protocols in models, and the compiled device code.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use crate::features::is_ci;
use crate::program;
use crate::steps::Step;

const PROGRAM: &str = "check-protocols";

/// Replaces this process by the program `check-protocols` with `arguments`; returns only if the
/// program could not be started.
pub(crate) fn run(root: &Path, arguments: &[OsString]) -> Result<()> {
    become_program(root, PROGRAM, arguments)
}

/// Replaces this process by the program `prove`, which runs the proof alone; returns only if the
/// program could not be started.
pub(crate) fn prove(root: &Path, arguments: &[OsString]) -> Result<()> {
    become_program(root, "prove", arguments)
}

fn become_program(root: &Path, name: &str, arguments: &[OsString]) -> Result<()> {
    let program = program::build(root, "iris-models", name, &[])?;
    let error = Command::new(&program).args(arguments).exec();
    Err(error).with_context(|| format!("{} did not start", program.display()))
}

/// Steps that start `check-protocols` and wait for its end; it runs at the same time as other steps
/// of `cargo xtask test`. If a compiler is missing, a developer's machine skips the checks that
/// need it, but in CI this is an error. The program must have been built with the tests: cargo
/// would build it and its dependencies once more without them, because the tests need other features.
///
/// # Errors
/// The path of this process is not known.
pub(crate) fn steps(root: &Path, full: bool) -> Result<[Step; 2]> {
    let options = ["--json"].into_iter().chain(full.then_some("--full"));
    let options: Vec<_> = options.chain((!is_ci()).then_some("--allow-skips")).collect();
    let rerun = format!("cargo xtask {PROGRAM} {}", options.join(" "));
    let mut command = Command::new(program::built(PROGRAM)?);
    command.current_dir(root).args(options);
    Ok(Step::beside("models", &rerun, command, root.join("target/models.log")))
}
