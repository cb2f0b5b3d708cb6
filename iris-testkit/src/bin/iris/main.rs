//! `iris`: runs the operators over ranks of this host, checks them, times them.
//!
//! Exit codes: 0, all was right; 1, a check failed or a rank did; 2, the arguments, the environment
//! or a file are not what they should be.

#![deny(unsafe_code)]

mod bench;
mod check;
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
mod tune;
mod weights;

use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use clap::{Parser, Subcommand};

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
    /// Times what the operators could choose, and prints rows for the tuning table.
    Tune(tune::Options),
    /// Compile the kernels of all ops for GPUs, ahead of time.
    Kernels(kernels::Options),
    /// One rank of a job: started by the other tasks.
    #[command(hide = true)]
    Rank(rank::Options),
}

/// Ranks that share a GPU need a hardware queue for each of their streams, and the driver reads how
/// many there are when it starts: so this program starts itself again with that set.
fn with_queues() {
    const QUEUES: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
    let mut arguments = std::env::args_os();
    let program = arguments.next();
    let arguments: Vec<_> = arguments.collect();
    let on_cuda = arguments.iter().any(|word| word.to_string_lossy().contains("cuda"));
    if !on_cuda || std::env::var_os(QUEUES).is_some() {
        return;
    }
    if let (Some(program), Ok(own)) = (program, std::env::current_exe()) {
        let mut again = Command::new(own);
        let error = again.arg0(program).args(arguments).env(QUEUES, "32").exec();
        eprintln!("iris: {QUEUES} could not be set: {error}");
    }
}

fn main() -> ExitCode {
    let task = Arguments::parse().task;
    with_queues();
    let done = log().and_then(|()| match task {
        Task::Run(options) => operator::main(*options),
        Task::Bench(options) => bench::main(&options),
        Task::Test(options) => suite::main(&options),
        Task::Tune(options) => tune::main(&options),
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
