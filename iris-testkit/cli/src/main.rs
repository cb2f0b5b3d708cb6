//! `iris`: runs the operators over ranks of this host, checks them, times them.
//!
//! Exit codes: 0, all was right; 1, a check failed or a rank did; 2, the arguments, the environment
//! or a file are not what they should be; 141, who read the output has gone.

#![deny(unsafe_code)]

mod attack;
mod bench;
mod check;
mod device;
mod doctor;
mod errors;
mod gpu_bench;
mod job;
mod kernels;
mod layer;
mod machine;
mod matrices;
mod memory;
mod operator;
mod plan;
mod problem;
mod progress;
mod rank;
mod ratios;
mod record;
mod report;
mod secret;
mod smoke;
mod stress;
mod suite;
mod trace;
mod tune;
mod watch;
mod weights;

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use iris_testkit::{launch, note};

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
    /// Thousands of calls on GPUs with random delays, compared on the device; and without each wait,
    /// which must be found. The vendor's compiler is needed.
    Stress(stress::Options),
    /// Kills ranks at every stage of a program, sends frames that no rank would, and counts what must
    /// not come of it.
    Attack(attack::Options),
    /// On the CPU, ratios of times against what is asked of them; on GPUs, every op beside NCCL and cuBLASLt, or RCCL and
    /// hipBLASLt.
    Bench(bench::Options),
    /// Prints a record of benchmarks as a table, draws its charts, or compares it with another.
    Record(record::Options),
    /// What is chosen for calls of an operator, its steps, and predicted times: no GPU is needed.
    Plan(plan::Options),
    /// Measures this machine, or times what operators could choose for given shapes, and keeps it for later programs.
    Tune(tune::Options),
    /// Compiles the kernels of all ops for GPUs, ahead of time, with NVRTC, hiprtc or clang; no GPU is
    /// needed.
    Kernels(kernels::Options),
    /// What is there on this machine, and what is missing: drivers, devices, compilers, variables.
    Doctor(doctor::Options),
    /// One file about a machine to send to whoever asked for it: doctor, a smoke test, a short stress test, a
    /// benchmark.
    Report(report::Options),
    /// Writes a new secret, by which the ranks of a job on several hosts recognise each other, to a file.
    Secret(secret::Options),
    /// One rank of a job: started by the other tasks.
    #[command(hide = true)]
    Rank(rank::Options),
}

/// The variables that the driver of the GPUs reads when it starts, where one is asked for by name, or by a
/// task that runs nowhere else. The report only starts others.
fn environment() -> &'static [(&'static str, &'static str)] {
    const CUDA: &[(&str, &str)] = &[launch::QUEUES, gpu_bench::NO_MULTICAST];
    let words: Vec<_> =
        std::env::args_os().skip(1).map(|w| w.to_string_lossy().into_owned()).collect();
    // On the command line, or in the JSON of a rank's job.
    let hip = ["hip", "--backend=hip"];
    let hip = words.iter().any(|w| hip.contains(&w.as_str()) || w.contains("\"backend\":\"hip\""));
    let cuda = words.iter().any(|word| word.contains("cuda"));
    match words.first().map(String::as_str) {
        Some("doctor" | "report") => &[],
        _ if hip => launch::HIP,
        Some("stress") => CUDA,
        _ if cuda => CUDA,
        _ => &[],
    }
}

fn main() -> ExitCode {
    let task = Arguments::parse().task;
    launch::with_environment(environment());
    let done = log().and_then(|()| match task {
        Task::Run(options) => operator::main(*options),
        Task::Attack(options) => attack::main(&options),
        Task::Bench(options) => bench::main(&options),
        Task::Test(options) => suite::main(&options),
        Task::Stress(options) => stress::main(&options),
        Task::Plan(options) => plan::main(&options),
        Task::Tune(options) => tune::main(&options),
        Task::Kernels(options) => kernels::main(&options),
        Task::Record(options) => record::main(&options),
        Task::Doctor(options) => doctor::main(&options),
        Task::Report(options) => report::main(&options),
        Task::Secret(options) => secret::main(&options),
        Task::Rank(options) => rank::main(&options),
    });
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            if !errors::reader_gone(&error) {
                note!("iris: {error:#}");
            }
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
    tracing_subscriber::fmt()
        .with_max_level(level)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr)
        // A full disk behind stderr would end in a panic.
        .log_internal_errors(false)
        .init();
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
