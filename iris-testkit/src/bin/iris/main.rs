//! `iris`: runs the operators over ranks of this host, checks them, times them.
//!
//! Exit codes: 0, all was right; 1, a check failed or a rank did; 2, the arguments, the environment
//! or a file are not what they should be.

#![deny(unsafe_code)]

mod bench;
mod check;
mod device;
mod errors;
mod job;
mod kernels;
mod layer;
mod matrices;
mod operator;
mod problem;
mod progress;
mod rank;
mod ratios;
mod suite;
mod trace;
mod weights;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use iris_testkit::launch;

/// Fused multi-rank operators: run them, check them, time them.
#[derive(Parser)]
#[command(name = "iris", version)]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// A transformer layer on four ranks; or one operator on random input, checked and timed.
    Run(Box<operator::Options>),
    /// Every op over ragged shapes, against the oracle.
    Test(suite::Options),
    /// Ratios of times, against what is asked of them.
    Bench(bench::Options),
    /// Compile the kernels of all ops for GPUs, ahead of time.
    Kernels(kernels::Options),
    /// One rank of a job: started by the other tasks.
    #[command(hide = true)]
    Rank(rank::Options),
}

fn main() -> ExitCode {
    let task = Arguments::parse().task;
    if std::env::args_os().any(|word| word.to_string_lossy().contains("cuda")) {
        launch::with_queues();
    }
    let done = log().and_then(|()| match task {
        Task::Run(options) => operator::main(*options),
        Task::Bench(options) => bench::main(&options),
        Task::Test(options) => suite::main(&options),
        Task::Kernels(options) => kernels::main(&options),
        Task::Rank(options) => rank::main(&options),
    });
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("iris: {error:#}");
            ExitCode::from(errors::code(&error))
        }
    }
}

/// What the libraries log goes to stderr, from the level in `IRIS_LOG` on.
fn log() -> anyhow::Result<()> {
    let level = std::env::var("IRIS_LOG").unwrap_or_default();
    let level = match level.as_str() {
        "" => tracing_subscriber::filter::LevelFilter::WARN,
        name => name.parse().map_err(|_| {
            errors::usage("IRIS_LOG", name, "off, error, warn, info, debug or trace")
        })?,
    };
    tracing_subscriber::fmt().with_max_level(level).with_writer(std::io::stderr).init();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
    }
}
