//! All checks of the protocols that need no GPU: models in Rust and in the device headers, their
//! mutants, comparison of the headers with the Rust code, and the compiled device code. `cargo
//! xtask check-protocols` prints the results.

mod catalogue;
pub mod device_code;
mod summary;

use std::collections::BTreeMap;
use std::io::{self, Write};

use rayon::prelude::*;

use crate::mutants::{self, Mutant};
use crate::proof::replay::replay;
use crate::proof::report::{self, Extent};
use crate::{Report, Rules, headers, schedule};

pub use catalogue::{Implementation, Model, catalogue};
pub use device_code::{Arch, Compiled, Finding, Outcome};
pub use summary::Summary;

/// Extent of the checks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Options {
    /// Whether the long searches run too.
    pub full: bool,
    /// Whether a missing required compiler is a failure.
    pub require: bool,
}

/// Runs all checks.
pub fn run(options: Options) -> Summary {
    let mut summary = Summary { required: options.require, ..Summary::default() };
    let compile = || {
        let source = device_code::Source::embedded();
        device_code::ARCHS.into_par_iter().map(|arch| device_code::check(arch, &source)).collect()
    };
    let models = || {
        let models = catalogue(options.full).into_par_iter().map(|model| {
            let report = model.run();
            if options.full {
                // Progress of long searches.
                let (protocol, source) = (model.protocol, model.implementation.name());
                let _ = writeln!(io::stderr(), "{protocol} ({source}): {report}");
            }
            (model, report)
        });
        summary.models = models.collect();
        let mutants = all_mutants().into_par_iter().map(|(implementation, mutant)| {
            let report = mutant.run();
            (implementation, mutant, report)
        });
        summary.mutants = mutants.collect();
        let controls = controls().into_par_iter().filter_map(|(implementation, mutant)| {
            mutant.control().map(|report| (implementation, report))
        });
        summary.controls = controls.collect();
        compare(&mut summary, options.full);
        summary.replayed = replays(options.full);
        summary.proof = report::run(Extent::Clauses);
    };
    let ((), compiled) = rayon::join(models, compile);
    summary.compiled = compiled;
    summary.scopes = headers::scopes_seen();
    if !headers::AVAILABLE {
        summary.skipped.push(format!(
            "device headers in the models: no C++ compiler, looked for {}",
            headers::COMPILER
        ));
    }
    if summary.proof.solver.is_none() {
        summary.skipped.push("the proof: no program z3; Debian's package z3 has it".into());
    }
    for Compiled { arch, outcome, .. } in &summary.compiled {
        if let Outcome::Skipped(why) = outcome {
            let line = format!("{}: {why}", arch.name);
            let list = if arch.required { &mut summary.skipped } else { &mut summary.optional };
            list.push(line);
        }
    }
    summary
}

/// Replays of one scenario's executions against the proved rule.
#[derive(Clone, Debug)]
pub struct Replayed {
    /// Implementation that was run.
    pub implementation: Implementation,
    /// Number of executions, and the first one that the rule does not allow.
    pub report: Report,
    /// Number of replayed steps, by the name of the rule's action.
    pub steps: BTreeMap<&'static str, u64>,
}

/// Replays random executions of all scenarios of the catalogue in which ranks enter calls, and of
/// calls that refresh words.
pub fn replays(full: bool) -> Vec<Replayed> {
    let runs = if full { 400 } else { 20 };
    let mut seen = std::collections::HashSet::new();
    let models = catalogue(full).into_iter().map(|it| (it.implementation, it.scenario));
    let mut all: Vec<_> = models.chain(catalogue::refreshing()).collect();
    all.retain(|(implementation, scenario)| {
        seen.insert((scenario.name().to_string(), *implementation))
    });
    let replayed = all.into_par_iter().filter_map(|(implementation, scenario)| {
        let (report, steps) = replay(&scenario, &Rules::default(), runs)?;
        Some(Replayed { implementation, report, steps })
    });
    replayed.collect()
}

/// Mutants of both implementations.
fn all_mutants() -> Vec<(Implementation, Mutant)> {
    let rust = mutants::all();
    let cxx: Vec<Mutant> = rust.iter().filter_map(Mutant::on_headers).collect();
    let rust = rust.into_iter().map(|mutant| (Implementation::Rust, mutant));
    let cxx = cxx.into_iter().chain(mutants::of_headers());
    rust.chain(cxx.map(|mutant| (Implementation::Headers, mutant))).collect()
}

/// Searches of the mutants' scenarios without the fault, each once; they must find nothing.
fn controls() -> Vec<(Implementation, Mutant)> {
    let mut seen = std::collections::HashSet::new();
    let mut all = all_mutants();
    all.retain(|(implementation, mutant)| {
        let unchecked = mutant.rules.changes.contains(&crate::Change::UncheckedRecords);
        let search = format!("{:?} {:?} {unchecked}", implementation, mutant.engine);
        seen.insert((mutant.scenario.name().to_string(), search))
    });
    all
}

#[cfg(iris_cxx)]
fn compare(summary: &mut Summary, full: bool) {
    let (cases, shapes) = if full { (1_000_000, 200_000) } else { (40_000, 10_000) };
    match crate::sequence::compare(cases) {
        Ok(compared) if compared.missing.is_empty() => summary.sequences = Some(compared),
        Ok(compared) => summary.failures.push(format!("never compared: {:?}", compared.missing)),
        Err(why) => summary.failures.push(format!("the headers differ from iris-sync: {why}")),
    }
    let compared = tuned_shapes().and_then(|given| match given.len() {
        0 => Err("no tuning table has a row".into()),
        rows => Ok((rows, schedule::compare(&given, shapes)?)),
    });
    match compared {
        Ok(equal) => summary.schedules = Some(equal),
        Err(why) => summary.failures.push(format!("schedule.h differs from schedule.rs: {why}")),
    }
}

#[cfg(not(iris_cxx))]
fn compare(_: &mut Summary, _: bool) {
    let _: Option<schedule::Shape> = None;
}

/// Shapes of every row of every tuning table, at both ends of its range of M, for every rank.
///
/// # Errors
/// The file that cannot be read, or the row with missing fields.
pub fn tuned_shapes() -> Result<Vec<schedule::Shape>, String> {
    catalogue::tuned_shapes()
}
