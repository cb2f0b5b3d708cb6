//! Tasks of the workspace: `cargo xtask TASK`.
//!
//! xtask depends on no member of the workspace: it starts cargo and programs, so it builds in
//! seconds and works even if a member does not compile. One file per task, except for tasks that
//! only start `iris` or a test program.

#![forbid(unsafe_code)]

mod beside;
mod check_protocols;
mod dist;
mod features;
mod hip;
#[path = "../../iris-testkit/src/level.rs"]
#[allow(
    dead_code,
    unreachable_pub,
    reason = "written for iris-testkit, whose tests read the variable"
)]
mod level;
mod lines;
mod mpi;
mod package;
mod prepush;
mod program;
mod steps;
mod test;
mod test_programs;
mod tidy;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
// Only its features are needed: see Cargo.toml.
use serde as _;

/// Tasks that `cargo xtask` can run.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Everything that CI checks: tidy, fmt, clippy, tests, models, documentation, licences.
    Test(test::Options),
    /// The project's rules as code: layers, kernel sources, file sizes, links.
    Tidy(tidy::Options),
    /// Counts the lines of code of each folder: tracked Rust, C++ and device source, without comments
    /// and blank lines.
    Lines(lines::Options),
    /// Checks to run before pushing to the repository: tidy, fmt, clippy, the quick tests.
    Prepush,
    /// Builds `iris` and starts `iris run ...`: without arguments, the transformer layer on four
    /// ranks.
    #[command(disable_help_flag = true)]
    Run(Passed),
    /// Builds `iris` and starts `iris bench ...`.
    #[command(disable_help_flag = true)]
    Bench(Passed),
    /// Builds `iris` and starts `iris secret FILE`: a secret for the ranks of a job on several hosts.
    #[command(disable_help_flag = true)]
    Secret(Passed),
    /// Builds `iris` and starts `iris record ...`: measurements as a table, as charts, or in
    /// comparison.
    #[command(disable_help_flag = true)]
    Record(Passed),
    /// Builds `iris` and starts `iris stress ...`: thousands of calls on GPUs with injected delays.
    #[command(disable_help_flag = true)]
    Stress(Passed),
    /// Strikes ranks of many jobs at every stage of their program, and counts hangs, signals, wrong
    /// results and wrong names. `--seed S`, `--cases N`, `--case NAME`; `--help` has the others.
    #[command(disable_help_flag = true)]
    Attack(Passed),
    /// Builds `iris` and starts `iris plan ...`: variants chosen for calls of an operator, and
    /// their predicted times.
    #[command(disable_help_flag = true)]
    Plan(Passed),
    /// Builds `iris` and starts `iris tune ...`: measures this machine's parameters, or the fastest
    /// variants for given shapes.
    #[command(disable_help_flag = true)]
    Tune(Passed),
    /// Checks the protocols in models, in Rust and in the device source, and the compiled device
    /// code, without a GPU. Options: `--json`, `--full`, `--allow-skips`.
    #[command(disable_help_flag = true)]
    CheckProtocols(Passed),
    /// Proves six rules of iris-sync/PROTOCOL.md by z3, in seconds. `--weaken` switches off each
    /// clause of the rules, too; `--allow-skips` lets z3 be missing.
    #[command(disable_help_flag = true)]
    Prove(Passed),
    /// Type-checks iris in a program with candle-core's features of cudarc, for several CUDA
    /// versions.
    Beside,
    /// The operators' suite with steps between nodes over MPI, started by mpirun. Needs
    /// libopenmpi-dev, openmpi-bin and libclang.
    Mpi,
    /// Worlds under every launcher that is installed, and under each launcher inside each other one;
    /// arguments select cases by name. Prints how to install the launchers that are missing.
    Launchers(Passed),
    /// Packs the library crates as files for a registry, and runs a program outside of the
    /// workspace that depends on these files alone.
    Package(package::Options),
    /// Makes the folder dist/ with everything for a GPU host without Rust and without this
    /// repository.
    Dist(dist::Options),
}

/// Arguments that are passed on to the started program unchanged, including `--help` if the task
/// does not have it.
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
        Task::Lines(options) => lines::run(&root, &options),
        Task::Prepush => prepush::run(&root),
        Task::Run(passed) => program::become_iris(&root, "run", &passed.arguments),
        Task::Bench(passed) => program::become_iris(&root, "bench", &passed.arguments),
        Task::Record(passed) => program::become_iris(&root, "record", &passed.arguments),
        Task::Secret(passed) => program::become_iris(&root, "secret", &passed.arguments),
        Task::Stress(passed) => program::become_iris(&root, "stress", &passed.arguments),
        Task::Attack(passed) => program::become_test(&root, "attack", "attack", &passed.arguments),
        Task::Plan(passed) => program::become_iris(&root, "plan", &passed.arguments),
        Task::Tune(passed) => program::become_iris(&root, "tune", &passed.arguments),
        Task::CheckProtocols(passed) => check_protocols::run(&root, &passed.arguments),
        Task::Prove(passed) => check_protocols::prove(&root, &passed.arguments),
        Task::Beside => beside::run(&root),
        Task::Mpi => mpi::run(&root),
        Task::Launchers(passed) => {
            program::become_test(&root, "launchers", "--all", &passed.arguments)
        }
        Task::Package(options) => package::run(&root, &options),
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

/// Root folder of the workspace, wherever the task is started from.
fn root() -> PathBuf {
    // The variable at run time takes precedence, because two checkouts that share a target folder
    // also share one xtask.
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
        for name in [
            "run",
            "bench",
            "record",
            "stress",
            "attack",
            "plan",
            "tune",
            "check-protocols",
            "prove",
        ] {
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
                Task::Prove(passed) => ("prove", passed),
                _ => panic!("`{name}` was read as another task"),
            };
            assert_eq!(passed.arguments, line[2..]);
            assert_eq!(task, name);
        }
    }
}
