//! The tasks of the workspace: `cargo xtask TASK`.
//!
//! xtask depends on no member: it starts cargo and programs, so that it builds in seconds and still
//! works when a member does not compile. One file a task.

#![forbid(unsafe_code)]

mod bench;
mod check_protocols;
mod dist;
mod prepush;
mod program;
mod run;
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
    /// Everything CI checks: tidy, fmt, clippy, the tests, the documentation, the licences.
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
    /// The protocols in models, in Rust and in the source that runs on the GPU, and the compiled
    /// device code: no GPU is needed. `--json`, `--full`, `--allow-skips`.
    #[command(disable_help_flag = true)]
    CheckProtocols(Passed),
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
        Task::Tidy(options) => tidy::run(options.root(&root)),
        Task::Prepush => prepush::run(&root),
        Task::Run(passed) => run::run(&root, &passed.arguments),
        Task::Bench(passed) => bench::run(&root, &passed.arguments),
        Task::CheckProtocols(passed) => check_protocols::run(&root, &passed.arguments),
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
        let line = ["xtask", "run", "matmul-all-reduce", "--ranks", "4", "--help", "--json"];
        let Task::Run(passed) = Arguments::parse_from(line).task else {
            panic!("`run` was read as another task");
        };
        assert_eq!(passed.arguments, line[2..]);
    }
}
