//! Checks the protocols without a GPU and prints what was checked; see `iris_testkit::check`.

use std::process::ExitCode;

use clap::Parser;
use iris_testkit::output::READER_GONE;
use iris_testkit::{check, note, say};

/// Check the protocols in models, in Rust and in the source that runs on the GPU, and the code that
/// the compilers make of it.
#[derive(Parser)]
struct Arguments {
    /// End with one line of JSON.
    #[arg(long)]
    json: bool,
    /// The long searches too.
    #[arg(long)]
    full: bool,
    /// A required compiler may be missing: what it would have checked is named, and is no failure.
    #[arg(long)]
    allow_skips: bool,
    /// Print only what each kernel takes of a compute unit of gfx90a and gfx942: registers, shared
    /// memory, spills, waves.
    #[arg(long)]
    resources: bool,
}

fn main() -> ExitCode {
    let Arguments { json, full, allow_skips, resources } = Arguments::parse();
    if resources {
        return print_resources();
    }
    let start = std::time::Instant::now();
    let summary = check::run(check::Options { full, require: !allow_skips });
    let printed = say!("{summary}\n{:.0} s", start.elapsed().as_secs_f64());
    let printed = printed.and_then(|()| if json { say!("{}", summary.json()) } else { Ok(()) });
    match printed {
        Ok(()) => summary.exit_code().into(),
        Err(error) if error.reader_gone() => READER_GONE.into(),
        Err(error) => {
            note!("check-protocols: {error}");
            ExitCode::FAILURE
        }
    }
}

/// By architecture, a line a kernel.
fn print_resources() -> ExitCode {
    for arch in ["gfx90a", "gfx942"] {
        let kernels = match check::device_code::resources(arch) {
            Ok(kernels) => kernels,
            Err(error) => {
                note!("check-protocols: {arch}: {error}");
                return ExitCode::FAILURE;
            }
        };
        for kernel in kernels {
            if say!("{arch} {kernel}").is_err() {
                return READER_GONE.into();
            }
        }
    }
    ExitCode::SUCCESS
}
