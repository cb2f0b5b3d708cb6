//! Functions that start cargo and the workspace's programs.

use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::features::by_mpicc;

/// Makes a command for the cargo that started xtask, run in the folder `root`.
pub(crate) fn cargo(root: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments).current_dir(root);
    command
}

/// Builds the program `iris`, with cargo's progress on stderr, and returns its path.
pub(crate) fn build_iris(root: &Path) -> Result<PathBuf> {
    build(root, "iris-cli", "iris", &[])
}

/// Builds a program of a package, with cargo's progress on stderr, and returns its path.
pub(crate) fn build(root: &Path, package: &str, name: &str, features: &[&str]) -> Result<PathBuf> {
    let arguments = ["build", "--release", "--package", package, "--bin", name];
    let features = features.iter().flat_map(|feature| ["--features", *feature]);
    let arguments: Vec<_> = arguments.into_iter().chain(features).collect();
    let mut command = by_mpicc(cargo(root, &arguments));
    let status = command.stdin(Stdio::null()).status().context("cargo did not start")?;
    if !status.success() {
        bail!("cargo {} ended with {status}", arguments.join(" "));
    }
    let program = built(name)?;
    if !program.is_file() {
        bail!("cargo built no {}: is CARGO_BUILD_TARGET set?", program.display());
    }
    Ok(program)
}

/// Path of the workspace's program `name`, which may not have been built yet. Cargo puts all programs
/// of a profile into one folder, so the program lies in the folder of xtask itself.
pub(crate) fn built(name: &str) -> Result<PathBuf> {
    let own = std::env::current_exe().context("where xtask lies is not known")?;
    Ok(own.with_file_name(name))
}

/// Program of the workspace that xtask becomes: output, signals and exit code are the program's.
#[derive(Clone, Copy)]
pub(crate) enum Program {
    /// Command of `iris` with the name of the task. The program keeps the caller's working folder,
    /// so that relative paths in its arguments stay valid.
    Iris,
    /// Program of iris-models with the name of the task.
    Models,
    /// Test program of iris-testkit with the name of the task; its first argument.
    Test(&'static str),
}

impl Program {
    /// Builds the program of the task `task` and replaces this process by it; returns only if it could
    /// not be started.
    pub(crate) fn start(
        self,
        root: &Path,
        task: &str,
        arguments: &[impl AsRef<OsStr>],
    ) -> Result<()> {
        let mut command = match self {
            Program::Iris => {
                // Only this option needs the feature, which takes a minute longer to build.
                let mpi = arguments.iter().any(|argument| argument.as_ref() == "--mpi");
                let features: &[&str] = if mpi { &["mpi"] } else { &[] };
                let mut iris = Command::new(build(root, "iris-cli", "iris", features)?);
                iris.arg(task);
                iris
            }
            Program::Models => Command::new(build(root, "iris-models", task, &[])?),
            Program::Test(first) => {
                let test = ["test", "--release", "--quiet", "--package", "iris-testkit", "--test"];
                let mut test = cargo(root, &test);
                test.args([task, "--", first]);
                test
            }
        };
        let error = command.args(arguments).exec();
        Err(error).with_context(|| format!("{} did not start", command.get_program().display()))
    }
}
