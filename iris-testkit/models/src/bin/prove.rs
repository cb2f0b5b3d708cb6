//! Proves the rules of the protocols, and prints what was proved; see `iris_models::proof`.

use std::process::ExitCode;

use clap::Parser;
use iris_models::proof::report::{self, Extent};

/// Prove the slot rule, the device barrier, staging flags, copy engines, kernels beside a call and
/// the rules of programs with z3, for any number of ranks, threads, tiles, calls and steps.
#[derive(Parser)]
struct Arguments {
    /// Also switch off each clause of the rules: the proof must then fail, and a small world must
    /// show a violation.
    #[arg(long)]
    weaken: bool,
    /// Succeed without a proof if z3 is not installed.
    #[arg(long)]
    allow_skips: bool,
}

fn main() -> ExitCode {
    let Arguments { weaken, allow_skips } = Arguments::parse();
    let extent = if weaken { Extent::Worlds } else { Extent::Conditions };
    let proof = report::run(extent);
    println!("{proof}");
    if proof.solver.is_none() {
        println!("skipped: the proof: no program z3; Debian's package z3 has it");
        return if allow_skips { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    proof.failures.iter().for_each(|what| println!("FAILED: {what}"));
    if proof.failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
