//! All checks of the protocols that need no GPU: models in Rust and in the device headers, their
//! mutants, comparison of the headers with the Rust code, and the compiled device code. `cargo
//! xtask check-protocols` prints the results.

mod catalogue;
pub mod compositions;
pub mod device_code;
pub mod protocol;
pub mod replayed;
mod summary;

use std::io::{self, Write};

use rayon::prelude::*;

use crate::mutants::{self, Mutant};
use crate::proof::report::{self, Extent};
use crate::{headers, schedule};

pub use catalogue::{Implementation, Model, catalogue};
pub use device_code::{Arch, Compiled, Finding, Outcome};
pub use summary::Summary;

/// Extent of the checks, and handling of missing compilers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Options {
    /// Whether the long searches run too.
    pub full: bool,
    /// Whether it is a failure if a compiler for a required architecture is missing.
    pub require: bool,
}

/// Runs all checks of protocols and device code, and collects their results.
pub fn run(options: Options) -> Summary {
    let mut summary = Summary { required: options.require, ..Summary::default() };
    let compile = || {
        let source = device_code::DeviceSource::embedded();
        device_code::ARCHS.into_par_iter().map(|arch| device_code::check(arch, &source)).collect()
    };
    let models = || {
        let models = catalogue(options.full).into_par_iter().map(|model| {
            let (report, replayed) = replayed::explore(&model);
            if options.full {
                // Each report is printed as soon as it is made, because the searches can take long.
                let (protocol, source) = (model.protocol, model.implementation.name());
                let _ = writeln!(io::stderr(), "{protocol} ({source}): {report}");
            }
            ((model, report), replayed)
        });
        let (models, replayed): (Vec<_>, Vec<_>) = models.unzip();
        summary.models = models;
        summary.replayed = replayed.into_iter().flatten().collect();
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
        summary.replayed.extend(replayed::random(options.full));
        summary.failures.extend(replayed::missing(&summary.replayed));
        summary.failures.extend(compositions::missing(&summary.replayed));
        summary.replayed_mutants = replayed::mutants(all_mutants());
        summary.failures.extend(compositions::unlinked(&summary.replayed_mutants));
        match protocol::Pointers::of_iris_sync() {
            Ok(pointers) => {
                summary.failures.extend(pointers.faults());
                summary.pointers = pointers;
            }
            Err(why) => summary.failures.push(why),
        }
        let worlds = if options.full { Extent::Worlds } else { Extent::Clauses };
        summary.proof = report::run(worlds);
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

/// Returns the mutants of the Rust protocols and of the device headers.
pub fn all_mutants() -> Vec<(Implementation, Mutant)> {
    let rust = mutants::all();
    let cxx: Vec<Mutant> = rust.iter().filter_map(Mutant::on_headers).collect();
    let rust = rust.into_iter().map(|mutant| (Implementation::Rust, mutant));
    let cxx = cxx.into_iter().chain(mutants::of_headers());
    rust.chain(cxx.map(|mutant| (Implementation::Headers, mutant))).collect()
}

/// Searches of the mutants' scenarios with the correct protocol, each scenario once; they must find
/// nothing.
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
