use std::fmt;

use comfy_table::{Table, presets};
use serde_json::json;

use super::{Compiled, Finding, Implementation, Model, Outcome};
use crate::mutants::Mutant;
use crate::{Report, sequence::Compared};

/// What was found.
#[derive(Debug, Default)]
pub struct Summary {
    /// Every model and what its search found.
    pub models: Vec<(Model, Report)>,
    /// Every mutant and what its search found.
    pub mutants: Vec<(Implementation, Mutant, Report)>,
    /// The same searches of what is not broken.
    pub controls: Vec<(Implementation, Report)>,
    /// Every access by name, and how often hooks saw it at the scope of the device and the system.
    pub scopes: Vec<(&'static str, u64, u64)>,
    /// The device headers against iris-sync.
    pub sequences: Option<Compared>,
    /// Shapes of tuning tables, and how many answers of schedule.h were equal to those of schedule.rs.
    pub schedules: Option<(usize, u64)>,
    /// The architectures.
    pub compiled: Vec<Compiled>,
    /// Required checks that were left out, and why.
    pub skipped: Vec<String>,
    /// Other checks that were left out, and why.
    pub optional: Vec<String>,
    /// What failed besides.
    pub failures: Vec<String>,
    /// Whether what is skipped counts as failed.
    pub required: bool,
}

impl Summary {
    /// Mutants that were not caught by the check that should catch them.
    pub fn survivors(&self) -> Vec<String> {
        let wrong = |(_, mutant, report): &&(Implementation, Mutant, Report)| {
            report.caught_by() != Some(mutant.expected)
        };
        self.mutants
            .iter()
            .filter(wrong)
            .map(|(implementation, mutant, report)| {
                let (name, expected) = (mutant.name, mutant.expected);
                let name = format!("{name} ({})", implementation.name());
                format!("mutant {name}: expected {expected}, found {:?}", report.failure)
            })
            .collect()
    }

    /// Everything that failed, by name; empty if all is well.
    pub fn failed(&self) -> Vec<String> {
        let mut failed = self.failures.clone();
        for (model, report) in &self.models {
            if let Some(failure) = &report.failure {
                let (protocol, by) = (model.protocol, model.implementation.name());
                failed.push(format!("{protocol} ({by}): {failure:?}"));
            }
        }
        failed.extend(self.survivors());
        for (implementation, report) in &self.controls {
            if report.failure.is_some() {
                failed.push(format!("control ({}): {report}", implementation.name()));
            }
        }
        for Compiled { arch, outcome, .. } in &self.compiled {
            if let Outcome::Failed(findings) = outcome {
                let line = |it: &Finding| format!("{}, {}: {}", arch.name, it.by, it.what);
                failed.extend(findings.iter().map(line));
            }
        }
        if self.models.is_empty() || self.mutants.is_empty() || self.compiled.is_empty() {
            failed.push("a part of the checks did not run".into());
        }
        if self.required {
            failed.extend(self.skipped.iter().map(|what| format!("skipped: {what}")));
        }
        failed
    }

    /// What a program that prints this ends with: 0, or 1 if anything failed.
    pub fn exit_code(&self) -> u8 {
        u8::from(!self.failed().is_empty())
    }

    /// The whole as one JSON object.
    pub fn json(&self) -> serde_json::Value {
        let models = self.models.iter().map(|(model, report)| {
            json!({
                "protocol": model.protocol,
                "implementation": model.implementation.name(),
                "ranks": model.ranks,
                "executions": report.executions,
                "bound": report.bound,
                "ok": report.failure.is_none(),
            })
        });
        let done = |compiled: &&Compiled| matches!(compiled.outcome, Outcome::Done { .. });
        let scopes = self.scopes.iter().map(
            |(name, device, system)| json!({ "access": name, "device": device, "system": system }),
        );
        let failed = self.failed();
        json!({
            "ok": failed.is_empty(),
            "failed": failed,
            "models": models.collect::<Vec<_>>(),
            "mutants": {
                "total": self.mutants.len(),
                "caught": self.mutants.len() - self.survivors().len(),
            },
            "controls": self.controls.len(),
            "operations_compared": self.sequences.as_ref().map(|compared| compared.events),
            "schedule_answers_compared": self.schedules.map(|(_, answers)| answers),
            "tuned_shapes_compared": self.schedules.map(|(tuned, _)| tuned),
            "scopes": scopes.collect::<Vec<_>>(),
            "architectures":
                self.compiled.iter().filter(done).map(|it| it.arch.name).collect::<Vec<_>>(),
            "skipped": self.skipped,
            "optional_skipped": self.optional,
        })
    }
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(header);
    table
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut mutants =
            table(&["mutant", "source", "scenario", "bound", "expected", "caught by"]);
        for (implementation, mutant, report) in &self.mutants {
            let by = report.caught_by().map_or("NOTHING".into(), |check| check.to_string());
            mutants.add_row([
                mutant.name,
                implementation.name(),
                &report.scenario,
                &report.bound,
                &mutant.expected.to_string(),
                &by,
            ]);
        }
        writeln!(f, "{mutants}\n")?;
        let mut models =
            table(&["protocol", "source", "ranks", "executions", "bound", "seconds", "result"]);
        for (model, report) in &self.models {
            models.add_row([
                model.protocol,
                model.implementation.name(),
                &model.ranks.to_string(),
                &report.executions.to_string(),
                &report.bound,
                &format!("{:.1}", report.seconds),
                if report.failure.is_none() { "ok" } else { "FAILED" },
            ]);
        }
        writeln!(f, "{models}\n")?;
        let mut scopes = table(&["access seen by the hooks", "at device scope", "at system scope"]);
        for (name, device, system) in &self.scopes {
            scopes.add_row([*name, &device.to_string(), &system.to_string()]);
        }
        writeln!(f, "{scopes}\n")?;
        let mut compiled =
            table(&["architecture", "kernels", "probes", "twice", "seconds", "result"]);
        for Compiled { arch, outcome, seconds } in &self.compiled {
            let seconds = format!("{seconds:.1}");
            let (numbers, result) = match outcome {
                Outcome::Done { compiler, kernels, probes, twice } => {
                    ([kernels, probes, twice].map(usize::to_string), format!("ok, {compiler}"))
                }
                Outcome::Skipped(_) => (["-"; 3].map(String::from), "skipped".into()),
                Outcome::Failed(_) => (["-"; 3].map(String::from), "FAILED".into()),
            };
            let [kernels, probes, twice] = numbers;
            compiled.add_row([arch.name, &kernels, &probes, &twice, &seconds, &result]);
        }
        writeln!(f, "{compiled}\n")?;
        if let Some(Compared { cases, events, faults, .. }) = &self.sequences {
            let what = format!("{events} operations, {faults} faults, in {cases} cases");
            writeln!(f, "headers and iris-sync: equal in {what}")?;
        }
        if let Some((tuned, answers)) = &self.schedules {
            writeln!(
                f,
                "schedule.h and schedule.rs: {answers} equal answers, {tuned} tuned shapes"
            )?;
        }
        let caught = self.mutants.len() - self.survivors().len();
        writeln!(f, "mutants: {}, caught: {caught}", self.mutants.len())?;
        writeln!(f, "searches of what is not broken: {}", self.controls.len())?;
        self.skipped.iter().try_for_each(|what| writeln!(f, "skipped: {what}"))?;
        let mut last = "";
        for what in &self.optional {
            // One missing compiler is the reason for several: it is written once.
            let (name, reason) = what.split_once(": ").unwrap_or((what, ""));
            let shown = if reason == last { "as above" } else { reason };
            writeln!(f, "skipped, optional: {name}: {shown}")?;
            last = reason;
        }
        self.failed().iter().try_for_each(|what| writeln!(f, "FAILED: {what}"))
    }
}
