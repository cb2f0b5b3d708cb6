use std::collections::BTreeSet;
use std::fmt;

use iris_sync::Access;
use serde_json::json;

use super::protocol::Pointers;
use super::replayed::{self, Replayed, ReplayedMutant};
use super::{Compiled, Finding, Implementation, Model, Outcome, compositions};
use crate::mutants::Mutant;
use crate::proof::replay::is_replayed;
use crate::proof::report::{Proof, table};
use crate::{Report, sequence::Compared};

/// Results of all checks, printed as text or as JSON.
#[derive(Debug, Default)]
pub struct Summary {
    /// Models, each with the report of its search.
    pub models: Vec<(Model, Report)>,
    /// Mutants, each with the report of its search.
    pub mutants: Vec<(Implementation, Mutant, Report)>,
    /// Reports of searches of the mutants' scenarios with the correct protocol, which must find
    /// nothing.
    pub controls: Vec<(Implementation, Report)>,
    /// Name of every access, and how often hooks saw it at device scope and at system scope.
    pub scopes: Vec<(&'static str, u64, u64)>,
    /// Comparison of the device headers with iris-sync.
    pub sequences: Option<Compared>,
    /// Number of shapes from tuning tables, and number of equal results of schedule.h and
    /// schedule.rs.
    pub schedules: Option<(usize, u64)>,
    /// Executions that were replayed against the proved rules, by scenario.
    pub replayed: Vec<Replayed>,
    /// Replays of mutants' executions, which must break the proved rules.
    pub replayed_mutants: Vec<ReplayedMutant>,
    /// Sections of PROTOCOL.md that state the clauses of the proof.
    pub pointers: Pointers,
    /// Result of the proof, and of the proof with each clause switched off.
    pub proof: Proof,
    /// Result of the device code checks for each architecture.
    pub compiled: Vec<Compiled>,
    /// Required checks that were skipped, with the reason.
    pub skipped: Vec<String>,
    /// Optional checks that were skipped, with the reason.
    pub optional: Vec<String>,
    /// Failures that belong to none of the other fields.
    pub failures: Vec<String>,
    /// Whether a skipped required check counts as a failure.
    pub required: bool,
}

impl Summary {
    /// Mutants that were not caught by the expected check.
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

    /// Names of all failures; empty if every check passed.
    pub fn failed(&self) -> Vec<String> {
        let mut failed = self.failures.clone();
        for (model, report) in &self.models {
            if let Some(failure) = &report.failure {
                let (protocol, by) = (model.protocol, model.implementation.name());
                failed.push(format!("{protocol} ({by}): {failure:?}"));
            }
        }
        failed.extend(self.survivors());
        for Replayed { implementation, report, .. } in &self.replayed {
            if let Some(failure) = &report.failure {
                let (scenario, by) = (&report.scenario, implementation.name());
                failed.push(format!("replay of {scenario} ({by}): {failure:?}"));
            }
        }
        failed.extend(self.replayed_mutants.iter().filter_map(ReplayedMutant::fault));
        failed.extend(self.proof.failures.iter().map(|what| format!("proof: {what}")));
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

    /// Number of replayed steps of the proved rules.
    pub fn replayed_steps(&self) -> u64 {
        self.replayed.iter().map(|it| it.counts.total()).sum()
    }

    /// Exit code for a program that prints this summary: 0, or 1 if a check failed.
    pub fn exit_code(&self) -> u8 {
        u8::from(!self.failed().is_empty())
    }

    /// Summary as one JSON object.
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
            "replayed_executions": self.replayed.iter().map(|it| it.report.executions).sum::<u64>(),
            "replayed_steps": self.replayed_steps(),
            "replayed_mutants": {
                "total": self.replayed_mutants.len(),
                "stopped": self.replayed_mutants.iter().filter(|it| it.by().is_some()).count(),
            },
            "proved": self.proof.conditions() - self.proof.open(),
            "clauses": {
                "total": self.proof.weakened.len(),
                "caught": self.proof.caught(),
            },
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
        let mut replayed = table(&["rule", "action, or access", "replayed, rust", "replayed, c++"]);
        let [rust, headers] = [Implementation::Rust, Implementation::Headers]
            .map(|source| replayed::counts(&self.replayed, source));
        let times = |it: Option<&u64>| it.copied().unwrap_or_default().to_string();
        let names: BTreeSet<_> = rust.steps.keys().chain(headers.steps.keys()).collect();
        for name in names {
            let both = [&rust, &headers].map(|it| times(it.steps.get(name)));
            replayed.add_row([name.0, name.1, &both[0], &both[1]]);
        }
        for access in Access::ALL {
            let name = access.name();
            let both = [&rust, &headers].map(|it| times(it.accesses.get(name)));
            if is_replayed(*access) {
                replayed.add_row(["table of accesses", name, &both[0], &both[1]]);
            } else {
                replayed.add_row(["table of accesses", name, "explored only", "explored only"]);
            }
        }
        writeln!(f, "{replayed}\n")?;
        writeln!(
            f,
            "replayed: {} executions of {} scenarios, {} steps of the rule",
            self.replayed.iter().map(|it| it.report.executions).sum::<u64>(),
            self.replayed.len(),
            self.replayed_steps(),
        )?;
        let caught = self.replayed_mutants.iter().filter(|it| it.by().is_some()).count();
        let all = self.replayed_mutants.len();
        writeln!(f, "replayed mutants: {all}, that stop at a step: {caught}\n")?;
        writeln!(f, "{}\n", compositions::table(&self.replayed, &self.replayed_mutants))?;
        writeln!(f, "{}\n", replayed::table(&self.proof, &self.pointers, &self.replayed_mutants))?;
        // The results for each clause are left out, because the table above has them.
        writeln!(f, "{}", Proof { weakened: Vec::new(), ..self.proof.clone() })?;
        let (all, caught) = (self.proof.weakened.len(), self.proof.caught());
        writeln!(f, "clauses switched off: {all}, without which the proof fails: {caught}")?;
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
            // Several checks can be skipped for the same missing compiler: the reason is printed
            // once.
            let (name, reason) = what.split_once(": ").unwrap_or((what, ""));
            let shown = if reason == last { "as above" } else { reason };
            writeln!(f, "skipped, optional: {name}: {shown}")?;
            last = reason;
        }
        self.failed().iter().try_for_each(|what| writeln!(f, "FAILED: {what}"))
    }
}
