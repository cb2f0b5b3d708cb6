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
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use clap::{Arg, ArgMatches, CommandFactory, FromArgMatches, Parser, Subcommand, value_parser};
use program::Program::{self, Iris, Models, Test};
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
    /// Type-checks iris in a program with candle-core's features of cudarc, for several CUDA
    /// versions.
    Beside,
    /// The operators' suite with steps between nodes over MPI, started by mpirun. Needs
    /// libopenmpi-dev, openmpi-bin and libclang.
    Mpi,
    /// Packs the library crates as files for a registry, and runs a program outside of the
    /// workspace that depends on these files alone.
    Package(package::Options),
    /// Makes the folder dist/ with everything for a GPU host without Rust and without this
    /// repository.
    Dist(dist::Options),
}

/// Tasks that build a program and become it, with arguments that are passed on unchanged, including
/// `--help`: name, program, description.
const PASSED: [(&str, Program, &str); 11] = [
    ("run", Iris, "`iris run`: without arguments, the transformer layer on four ranks"),
    ("bench", Iris, "`iris bench`: benchmarks"),
    ("secret", Iris, "`iris secret FILE`: a secret for the ranks of a job on several hosts"),
    ("record", Iris, "`iris record`: measurements as a table, as charts, or in comparison"),
    ("stress", Iris, "`iris stress`: thousands of calls on GPUs with injected delays"),
    ("plan", Iris, "`iris plan`: variants chosen for calls, and their predicted times"),
    ("tune", Iris, "`iris tune`: measures this machine, or the fastest variants for shapes"),
    (
        "attack",
        Test("attack"),
        "Strikes ranks at every stage of their program, and judges the ends",
    ),
    ("launchers", Test("--all"), "Worlds under every installed launcher; arguments select cases"),
    ("check-protocols", Models, "Checks the protocols in models, and the compiled device code"),
    ("prove", Models, "Proves six rules of iris-sync/PROTOCOL.md by z3, in seconds"),
];

/// Command line of xtask, with the tasks of [`PASSED`].
fn command() -> clap::Command {
    let task = |(name, _, about): (&'static str, Program, &'static str)| {
        let arguments = Arg::new(ARGUMENTS).num_args(0..).value_parser(value_parser!(OsString));
        let arguments = arguments.trailing_var_arg(true).allow_hyphen_values(true);
        // The test program of the launchers has no help of its own.
        clap::Command::new(name).about(about).disable_help_flag(name != "launchers").arg(arguments)
    };
    Arguments::command().subcommands(PASSED.map(task))
}

/// Name of the arguments that are passed on.
const ARGUMENTS: &str = "arguments";

/// Task of [`PASSED`] in a command line, with its program and arguments; `None` for another task.
fn passed(matches: &ArgMatches) -> Option<(&'static str, Program, Vec<OsString>)> {
    let (task, matches) = matches.subcommand()?;
    let (name, program, _) = PASSED.into_iter().find(|(name, ..)| *name == task)?;
    let arguments = matches.get_many(ARGUMENTS).into_iter().flatten().cloned();
    Some((name, program, arguments.collect()))
}

fn main() -> ExitCode {
    let matches = command().get_matches();
    let root = root();
    let done = match passed(&matches) {
        Some((name, program, arguments)) => program.start(&root, name, &arguments),
        None => run(&root, &matches),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs a task that is no program.
fn run(root: &Path, matches: &ArgMatches) -> Result<()> {
    match Arguments::from_arg_matches(matches)?.task {
        Task::Test(options) => test::run(root, &options),
        Task::Tidy(options) => options.main(root),
        Task::Lines(options) => lines::run(root, &options),
        Task::Prepush => prepush::run(root),
        Task::Beside => beside::run(root),
        Task::Mpi => mpi::run(root),
        Task::Package(options) => package::run(root, &options),
        Task::Dist(options) => dist::run(root, &options),
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

    #[test]
    fn the_command_line_is_consistent() {
        command().debug_assert();
    }

    #[test]
    fn arguments_of_a_program_are_passed_on_untouched() {
        for (name, ..) in PASSED {
            let line = ["xtask", name, "matmul-all-reduce", "--ranks", "4", "--json"];
            let help = (name != "launchers").then_some("--help");
            let matches = command().get_matches_from(line.into_iter().chain(help));
            let (task, _, arguments) = passed(&matches).expect("a task that is passed on");
            assert_eq!(task, name);
            assert!(arguments.into_iter().eq(line[2..].iter().copied().chain(help)));
        }
    }
}
