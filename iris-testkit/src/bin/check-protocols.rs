//! Checks the protocols without a GPU and prints what was checked; see `iris_testkit::check`.

use std::process::ExitCode;

use clap::Parser;
use iris_testkit::check;

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
    /// A required compiler that is missing is a failure; so it is where CI is set to true.
    #[arg(long)]
    require: bool,
}

fn main() -> ExitCode {
    let Arguments { json, full, require } = Arguments::parse();
    let require = require || std::env::var_os("CI").is_some_and(|value| value == "true");
    let start = std::time::Instant::now();
    let summary = check::run(check::Options { full, require });
    println!("{summary}");
    println!("{:.0} s", start.elapsed().as_secs_f64());
    if json {
        println!("{}", summary.json());
    }
    if summary.failed().is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
