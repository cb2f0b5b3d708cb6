//! Compositions: protocols made of several parts, such as gates between launches. The rules cover
//! the parts one by one and have no actions for a composition. So each operation of a composition
//! must be a step of some rule, and a mutant that leaves out a link between two parts must stop at
//! a clause.

use std::collections::BTreeSet;

use comfy_table::Table;

use super::replayed::{Replayed, ReplayedMutant};
use super::{Implementation, replayed};
use crate::headers;
use crate::proof::mutants::clauses;
use crate::proof::report::{self, SYSTEMS};
use crate::proof::rule::Numbers;

/// Protocol made of parts that are proved one by one.
struct Composition {
    name: &'static str,
    /// Prefixes of the names of the scenarios that run the composition.
    scenarios: &'static [&'static str],
    /// Whether the device headers have programs for the composition.
    in_headers: bool,
    /// Steps of rules that executions of the composition must take, as system and actions.
    steps: &'static [(&'static str, &'static [&'static str])],
    /// Mutants that leave out a link between parts of the composition.
    mutants: &'static [&'static str],
}

const SLOTS: &str = "slot rule";

const COMPOSITIONS: &[Composition] = &[
    Composition {
        name: "launches that open and close a call, with gates between",
        scenarios: &["copied, ", "copied on, "],
        in_headers: true,
        steps: &[(
            SLOTS,
            &[
                "load",
                "turn",
                "credit",
                "enter",
                "entry",
                "compare",
                "push_direct",
                "raise",
                "see",
                "read",
                "count",
                "advance",
                "finish",
            ],
        )],
        mutants: &["no-gate", "open-ends-the-call"],
    },
    Composition {
        name: "launches that wait and store while they multiply",
        scenarios: &["copied beside, ", "stored, "],
        in_headers: true,
        steps: &[(SLOTS, &["turn", "push_direct", "raise", "see", "read", "quit", "die"])],
        mutants: &["no-wait-for-arrivals", "stores-before-turn", "stores-of-who-gave-up"],
    },
    Composition {
        name: "copy engines",
        scenarios: &["copied, ", "copied on, ", "copied beside, "],
        in_headers: true,
        steps: &[
            (SLOTS, &["push_direct", "raise"]),
            ("copy engines", &["arrive", "open", "fail", "copy", "signal", "stamp", "next"]),
        ],
        mutants: &["copies-before-entries", "copied-number-ahead"],
    },
    Composition {
        name: "dedicated senders",
        scenarios: &[
            "two_shot, senders, ",
            "reduce_scatter, senders, ",
            "all_gather, senders, ",
            "all_gather, direct, senders, ",
        ],
        in_headers: true,
        steps: &[(
            SLOTS,
            &["credit", "enter", "entry", "push", "push_direct", "raise", "see", "read", "count"],
        )],
        mutants: &["no-vote-before-signal-of-sender", "no-wait-for-senders"],
    },
    Composition {
        name: "barriers between the launches of a call",
        scenarios: &["gather, ", "spinlock, ", "atomic, "],
        in_headers: true,
        steps: &[
            (SLOTS, &["turn", "push", "raise", "see", "read", "finish"]),
            ("device barrier", &["work", "arrive", "look", "pass", "finish"]),
        ],
        mutants: &[
            "gather-no-barrier",
            "spinlock-no-first-barrier",
            "spinlock-no-second-barrier",
            "atomic-no-first-barrier",
            "atomic-no-second-barrier",
            "spinlock-no-done",
            "atomic-no-done",
        ],
    },
    Composition {
        name: "a kernel beside a call",
        scenarios: &["all_gather, a kernel beside, "],
        in_headers: false,
        steps: &[
            (SLOTS, &["push_direct", "raise", "see", "finish"]),
            ("kernel beside a call", &["note", "start", "look", "use", "end"]),
        ],
        mutants: &["beside-own-number", "beside-not-awaited"],
    },
];

impl Composition {
    fn sources(&self) -> &'static [Implementation] {
        if self.in_headers && headers::AVAILABLE {
            &[Implementation::Rust, Implementation::Headers]
        } else {
            &[Implementation::Rust]
        }
    }

    /// Replays of the composition's scenarios in one implementation.
    fn of(&self, replayed: &[Replayed], source: Implementation) -> Vec<Replayed> {
        let begins =
            |it: &Replayed| self.scenarios.iter().any(|name| it.report.scenario.starts_with(name));
        let all = replayed.iter().filter(|it| it.implementation == source && begins(it));
        all.cloned().collect()
    }

    fn steps(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        self.steps.iter().flat_map(|&(system, all)| all.iter().map(move |&step| (system, step)))
    }
}

/// Steps that the compositions require, but that no execution took.
pub fn missing(replayed: &[Replayed]) -> Vec<String> {
    let mut missing = Vec::new();
    for it in COMPOSITIONS {
        for &source in it.sources() {
            let counts = replayed::counts(&it.of(replayed, source), source);
            let never = it.steps().filter(|step| !counts.steps.contains_key(step));
            missing.extend(never.map(|(system, step)| {
                format!("{} ({}): no step {step} of the {system}", it.name, source.name())
            }));
        }
    }
    missing
}

/// Clauses at which the replay of the mutant `name` stops, in any implementation.
fn stops(mutants: &[ReplayedMutant], name: &str) -> BTreeSet<&'static str> {
    let all = mutants.iter().filter(|it| it.mutant.name == name);
    all.filter_map(ReplayedMutant::by).collect()
}

/// Mutants of compositions that were not replayed, or whose replay does not stop at a clause of a
/// rule.
pub fn unlinked(mutants: &[ReplayedMutant]) -> Vec<String> {
    let known: BTreeSet<_> =
        SYSTEMS.iter().flat_map(|make| clauses(&make(Numbers::REAL, None))).collect();
    let mut faults = Vec::new();
    for it in COMPOSITIONS {
        for name in it.mutants {
            let by = stops(mutants, name);
            if by.is_empty() || !by.is_subset(&known) {
                faults.push(format!("{}: mutant {name} stops at {by:?}, not at a clause", it.name));
            }
        }
    }
    faults
}

/// Table of the compositions: number of executions replayed, and mutants with the clauses at which
/// their replay stops.
pub(super) fn table(replayed: &[Replayed], mutants: &[ReplayedMutant]) -> Table {
    let header =
        ["composition", "executions, rust", "executions, c++", "without a link it stops at"];
    let mut rows = report::table(&header);
    for it in COMPOSITIONS {
        let [rust, headers] = [Implementation::Rust, Implementation::Headers].map(|source| {
            let all = it.of(replayed, source);
            all.iter().map(|it| it.report.executions).sum::<u64>().to_string()
        });
        let links = it.mutants.iter().map(|name| {
            let by: Vec<_> = stops(mutants, name).into_iter().collect();
            format!("{name}: {}", by.join(", "))
        });
        rows.add_row([it.name, &rust, &headers, &links.collect::<Vec<_>>().join("; ")]);
    }
    rows
}
