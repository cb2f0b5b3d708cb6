//! `iris`: runs the operators with ranks of this host, checks them, and times them.
//!
//! Exit codes: 0, everything was right; 1, a check or a rank failed; 2, invalid arguments,
//! environment or file; 141, the reader of the output is gone.

mod bench;
mod check;
mod device;
mod doctor;
mod errors;
mod gpu_bench;
mod job;
mod kernels;
mod layer;
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
mod timing;
mod trace;
mod tune;
mod watch;

use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use iris_testkit::{launch, note};

/// Run, check and time fused multi-rank operators.
#[derive(Parser)]
#[command(name = "iris", version)]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Run a transformer layer on four ranks, or one operator on random input; check and time it.
    Run(Box<operator::Options>),
    /// Test every operator, over shapes that are no multiples of tiles, against a reference.
    Test(suite::Options),
    /// Make thousands of calls on GPUs with random delays and compare them on the device; then
    /// leave out each wait, which must be found. Needs the vendor's compiler.
    Stress(stress::Options),
    /// On the CPU, compare ratios of times with their limits; on GPUs, time every operator and, for
    /// comparison, NCCL and cuBLASLt, or RCCL and hipBLASLt.
    Bench(bench::options::Options),
    /// Print a record of benchmarks as a table, draw its charts, or compare it with another.
    Record(record::Options),
    /// Print the chosen variants for calls of an operator, their steps and predicted times; needs
    /// no GPU.
    ///
    /// Columns: `limit` is an expected lower bound, the longer of the product alone and of the
    /// transfer alone; `because` tells whether a variant was asked for, measured or predicted to be
    /// the fastest; `run` tells whether it has passed the tests on such a device with as many
    /// ranks. Times are predictions.
    Plan(plan::Options),
    /// Measure this machine, or time the choices for given shapes, and save the results for later
    /// programs.
    Tune(tune::options::Options),
    /// Compile the kernels of all operators for GPUs ahead of time, with NVRTC, hiprtc or clang;
    /// needs no GPU.
    Kernels(kernels::Options),
    /// Report what this machine has and what is missing: drivers, devices, compilers, variables.
    Doctor(doctor::Options),
    /// Write one file about a machine, to be sent to the person who asked for it: doctor, a smoke
    /// test, a short stress test, a benchmark.
    Report(report::Options),
    /// Writes a new secret, by which the ranks of a job on several hosts recognise each other, to a file.
    Secret(secret::Options),
    /// Run one rank of a job (started by the other tasks).
    #[command(hide = true)]
    Rank(rank::Options),
}

/// Environment variables to set because the GPU driver reads them when it starts; none unless the
/// command line names a GPU backend or a task that only runs on GPUs. `doctor` and `report` need
/// none: the report only starts other processes.
fn environment() -> &'static [(&'static str, &'static str)] {
    const CUDA: &[(&str, &str)] = &[launch::QUEUES, gpu_bench::NO_MULTICAST];
    let words: Vec<_> =
        std::env::args_os().skip(1).map(|w| w.to_string_lossy().into_owned()).collect();
    // The backend is named by `--backend` or, for a rank's process, in the JSON of its job.
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
    let with_vendors = matches!(task, Task::Bench(_) | Task::Tune(_));
    let done = log().and_then(|()| {
        iris_heap::env::tell_unknown();
        run(task)
    });
    let code = match done {
        Ok(right) => u8::from(!right),
        Err(error) => {
            if !errors::reader_gone(&error) {
                note!("iris: {error:#}");
            }
            errors::code(&error)
        }
    };
    if with_vendors && std::io::stdout().flush().is_ok() {
        // With NCCL 2.28.9 loaded, two of some fifty benchmarks on four GPUs ended with a
        // segmentation fault after all results had been written.
        watch::end(code);
    }
    code.into()
}

fn run(task: Task) -> anyhow::Result<bool> {
    match task {
        Task::Run(options) => operator::main(*options),
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
    }
}

/// Sends log messages of the libraries to stderr, without colours; `IRIS_LOG` names the lowest
/// level that is shown.
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
        .with_ansi(false)
        .with_writer(std::io::stderr)
        // Errors of writing a log message (disk full) are ignored, because they would otherwise be
        // a panic.
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
