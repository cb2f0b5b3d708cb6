//! `iris`: runs the operators over ranks of this host, checks them, times them.
//!
//! Exit codes: 0, all was right; 1, a check failed or a rank did; 2, the arguments, the environment
//! or a file are not what they should be.

#![forbid(unsafe_code)]

mod check;
mod errors;
mod job;
mod layer;
mod matrices;
mod operator;
mod problem;
mod progress;
mod rank;
mod trace;
mod weights;

use std::process::ExitCode;

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
    /// One rank of a job: started by the other tasks.
    #[command(hide = true)]
    Rank(rank::Options),
}

fn main() -> ExitCode {
    let task = Arguments::parse().task;
    let done = match task {
        Task::Run(options) => operator::main(*options),
        Task::Rank(options) => rank::main(&options),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("iris: {error:#}");
            ExitCode::from(errors::code(&error))
        }
    }
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
