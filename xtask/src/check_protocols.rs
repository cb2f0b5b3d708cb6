//! Steps of `cargo xtask test` that check the protocols in models, and the compiled device code.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use crate::features::is_ci;
use crate::program;
use crate::steps::Step;

const PROGRAM: &str = "check-protocols";

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
