//! Checks the protocols without a GPU and prints what was checked; see `iris_models::check`.

use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;

use clap::Parser;
use iris_models::check;

/// Check the protocols in models, in Rust and in the source that runs on the GPU, and the code that
/// the compilers make of it.
#[derive(Parser)]
struct Arguments {
    /// End with one line of JSON.
    #[arg(long)]
    json: bool,
    /// Also run the searches that take long.
    #[arg(long)]
    full: bool,
    /// Do not fail if a required compiler is missing: only print which checks were skipped.
    #[arg(long)]
    allow_skips: bool,
    /// Print only the resources that each kernel takes of a compute unit of gfx90a and gfx942:
    /// registers, shared memory, spills, waves.
    #[arg(long)]
    resources: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let done = if arguments.resources { print_resources() } else { print_checks(&arguments) };
    match done {
        Ok(code) => code.into(),
        // Exit code that a shell reports for a program that SIGPIPE ended: the reader of stdout is
        // gone.
        Err(error) if error.kind() == ErrorKind::BrokenPipe => (128 + 13).into(),
        Err(error) => {
            let _ = writeln!(io::stderr(), "check-protocols: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs all checks, prints the summary, and returns its exit code.
fn print_checks(&Arguments { json, full, allow_skips, .. }: &Arguments) -> io::Result<u8> {
    let start = std::time::Instant::now();
    let summary = check::run(check::Options { full, require: !allow_skips });
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{summary}\n{:.0} s", start.elapsed().as_secs_f64())?;
    if json {
        writeln!(stdout, "{}", summary.json())?;
    }
    Ok(summary.exit_code())
}

/// Prints a line for each kernel of each architecture, and returns 0.
fn print_resources() -> io::Result<u8> {
    let mut stdout = io::stdout().lock();
    for arch in ["gfx90a", "gfx942"] {
        let kernels = check::device_code::resources(arch);
        for kernel in kernels.map_err(|error| io::Error::other(format!("{arch}: {error}")))? {
            writeln!(stdout, "{arch} {kernel}")?;
        }
    }
    Ok(0)
}
