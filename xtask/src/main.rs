//! The tasks of the workspace: `cargo xtask TASK`.
//!
//! xtask depends on no member: it starts cargo and programs, so that it builds in seconds and still
//! works when a member does not compile. One file a task, but for those that only start `iris`.

#![forbid(unsafe_code)]

mod beside;
mod check_protocols;
mod dist;
mod hip;
#[path = "../../iris-testkit/src/level.rs"]
#[allow(
    dead_code,
    unreachable_pub,
    reason = "written for iris-testkit, whose tests read the variable"
)]
mod level;
mod prepush;
mod program;
mod steps;
mod test;
mod tidy;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// The tasks of the workspace.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Everything CI checks: tidy, fmt, clippy, the tests, the models, the documentation, the licences.
    Test(test::Options),
    /// The rules of the house as code: layers, unsafe, kernel sources, sizes, links.
    Tidy(tidy::Options),
    /// What to run before a push: tidy, fmt, clippy, the quick tests.
    Prepush,
    /// Builds `iris` and starts `iris run ...`: without arguments, the transformer layer on four ranks.
    #[command(disable_help_flag = true)]
    Run(Passed),
    /// Builds `iris` and starts `iris bench ...`.
    #[command(disable_help_flag = true)]
    Bench(Passed),
    /// Builds `iris` and starts `iris secret FILE`: a secret for the ranks of a job on several hosts.
    #[command(disable_help_flag = true)]
    Secret(Passed),
    /// Builds `iris` and starts `iris record ...`: what was measured as a table, charts, a comparison.
    #[command(disable_help_flag = true)]
    Record(Passed),
    /// Builds `iris` and starts `iris stress ...`: thousands of calls on GPUs, late on purpose.
    #[command(disable_help_flag = true)]
    Stress(Passed),
    /// Builds `iris` and starts `iris attack ...`: ranks killed at every stage, and frames no rank sends.
    #[command(disable_help_flag = true)]
    Attack(Passed),
    /// Builds `iris` and starts `iris plan ...`: what is chosen for calls of an operator, and predicted times.
    #[command(disable_help_flag = true)]
    Plan(Passed),
    /// Builds `iris` and starts `iris tune ...`: the parameters of this machine, or choices for given shapes.
    #[command(disable_help_flag = true)]
    Tune(Passed),
    /// The protocols in models, in Rust and in the source that runs on the GPU, and the compiled
    /// device code: no GPU is needed. `--json`, `--full`, `--allow-skips`.
    #[command(disable_help_flag = true)]
    CheckProtocols(Passed),
    /// Type-checks iris beside a program with candle-core's features of cudarc and the types of several
    /// versions of CUDA.
    Beside,
    /// A folder dist/ with all that a GPU host needs which has neither Rust nor this repository.
    Dist(dist::Options),
}

/// Arguments that the started program reads, `--help` included.
#[derive(clap::Args)]
struct Passed {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    arguments: Vec<OsString>,
}

fn main() -> ExitCode {
    let task = Arguments::parse().task;
    let root = root();
    let done = match task {
        Task::Test(options) => test::run(&root, &options),
        Task::Tidy(options) => options.main(&root),
        Task::Prepush => prepush::run(&root),
        Task::Run(passed) => program::become_iris(&root, "run", &passed.arguments),
        Task::Bench(passed) => program::become_iris(&root, "bench", &passed.arguments),
        Task::Record(passed) => program::become_iris(&root, "record", &passed.arguments),
        Task::Secret(passed) => program::become_iris(&root, "secret", &passed.arguments),
        Task::Stress(passed) => program::become_iris(&root, "stress", &passed.arguments),
        Task::Attack(passed) => program::become_iris(&root, "attack", &passed.arguments),
        Task::Plan(passed) => program::become_iris(&root, "plan", &passed.arguments),
        Task::Tune(passed) => program::become_iris(&root, "tune", &passed.arguments),
        Task::CheckProtocols(passed) => check_protocols::run(&root, &passed.arguments),
        Task::Beside => beside::run(&root),
        Task::Dist(options) => dist::run(&root, &options),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The workspace's root: the folder above this package, wherever the task is started from.
fn root() -> PathBuf {
    // Asked at run time first: a target folder shared by two checkouts holds one xtask for both.
    let package = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    package.parent().map_or_else(|| package.clone(), PathBuf::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn arguments_of_a_program_are_passed_on_untouched() {
        for name in
            ["run", "bench", "record", "stress", "attack", "plan", "tune", "check-protocols"]
        {
            let line = ["xtask", name, "matmul-all-reduce", "--ranks", "4", "--help", "--json"];
            let (task, passed) = match Arguments::parse_from(line).task {
                Task::Run(passed) => ("run", passed),
                Task::Bench(passed) => ("bench", passed),
                Task::Record(passed) => ("record", passed),
                Task::Stress(passed) => ("stress", passed),
                Task::Attack(passed) => ("attack", passed),
                Task::Plan(passed) => ("plan", passed),
                Task::Tune(passed) => ("tune", passed),
                Task::CheckProtocols(passed) => ("check-protocols", passed),
                _ => panic!("`{name}` was read as another task"),
            };
            assert_eq!(passed.arguments, line[2..]);
            assert_eq!(task, name);
        }
    }
}
