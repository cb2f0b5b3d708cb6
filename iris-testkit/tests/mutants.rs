//! Every mutant of the protocols is caught, by the check that should catch it, and nothing else is.
//! Prints the table of mutants; a survivor or another catcher fails.

use comfy_table::Table;
use iris_sync::{Access, Order, Scope};
use iris_testkit::harness::over_all;
use iris_testkit::model::headers;
use iris_testkit::model::mutants::{self, Mutant};
use iris_testkit::model::{Change, Report};

#[test]
fn every_mutant_is_caught_by_the_expected_check() {
    let mutants = mutants::all();
    let reports: Vec<Report> = over_all(&mutants, Mutant::run);
    let mut table = Table::new();
    table.load_preset(comfy_table::presets::NOTHING);
    table.set_header(["mutant", "scenario", "bound", "expected", "caught by", "executions"]);
    let mut wrong = Vec::new();
    for (mutant, report) in mutants.iter().zip(&reports) {
        let caught = report.caught_by();
        let by = caught.map_or_else(|| format!("{:?}", report.failure), |check| check.to_string());
        table.add_row([
            mutant.name.to_string(),
            report.scenario.clone(),
            report.bound.clone(),
            mutant.expected.to_string(),
            by.clone(),
            report.executions.to_string(),
        ]);
        if caught != Some(mutant.expected) {
            wrong.push(format!("{}: expected {}, got {by}", mutant.name, mutant.expected));
        }
    }
    println!("{table}\nmutants: {}, caught: {}", mutants.len(), mutants.len() - wrong.len());
    assert!(wrong.is_empty(), "mutants not caught as expected: {wrong:#?}");
}

#[test]
fn the_same_searches_find_nothing_where_nothing_is_broken() {
    let mutants = mutants::all();
    let mut seen = std::collections::HashSet::new();
    let distinct: Vec<Mutant> = mutants
        .into_iter()
        .filter(|m| {
            let unchecked = m.rules.changes.contains(&Change::UncheckedRecords);
            seen.insert((m.scenario.name().to_string(), format!("{:?}", m.engine), unchecked))
        })
        .collect();
    let reports = over_all(&distinct, Mutant::control);
    let reports: Vec<Report> = reports.into_iter().flatten().collect();
    assert!(reports.len() > 15, "only {} controls", reports.len());
    for report in &reports {
        println!("{report}");
        assert!(report.failure.is_none(), "{report}");
    }
}

#[test]
fn every_row_of_the_table_has_its_mutants() {
    let mutants = mutants::all();
    let mut names: Vec<_> = mutants.iter().map(|mutant| mutant.name).collect();
    names.sort_unstable();
    names.windows(2).for_each(|pair| assert_ne!(pair[0], pair[1], "two mutants of one name"));
    for &access in Access::ALL {
        let of = |expected: fn(&Mutant) -> bool| {
            mutants.iter().filter(|m| m.access == Some(access) && expected(m)).count()
        };
        let orders = of(|m| m.name.rsplit('-').next() != Some("device"));
        let scopes = of(|m| m.name.ends_with("-device"));
        let needed = match access.order() {
            Order::Relaxed => 0,
            Order::Acquire | Order::Release => 1,
            Order::AcqRel => 2,
        };
        assert_eq!(orders, needed, "mutants that weaken the order of {access:?}");
        let needed = usize::from(access.scope() == Scope::System);
        assert_eq!(scopes, needed, "mutants that narrow the scope of {access:?}");
    }
}

/// Words between backquotes.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

#[test]
fn protocol_md_names_every_access_with_its_mutants() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../iris-sync/PROTOCOL.md");
    let text = std::fs::read_to_string(path).unwrap();
    let mutants = mutants::all();
    for &access in Access::ALL {
        let row = text
            .lines()
            .find(|line| line.starts_with(&format!("| `{}` |", access.name())))
            .unwrap_or_else(|| panic!("PROTOCOL.md has no row for {}", access.name()));
        let order = format!("{:?}, {:?}", access.order(), access.scope());
        assert!(row.contains(&order.to_lowercase()), "not {order}: {row}");
        let own: Vec<_> = mutants.iter().filter(|m| m.access == Some(access)).collect();
        for mutant in &own {
            assert!(
                quoted(row).any(|name| name == mutant.name),
                "{} is not in: {row}",
                mutant.name
            );
        }
        assert!(!own.is_empty() || row.contains("no mutant: "), "no reason given: {row}");
    }
    // Those of the device headers exist only where these could be compiled.
    let of_headers = mutants::of_headers();
    for mutant in mutants.iter().chain(&of_headers) {
        assert!(quoted(&text).any(|name| name == mutant.name), "{} is not argued", mutant.name);
    }
    // And every mutant that the text speaks of exists.
    let is_mutant = |name: &&str| {
        name.contains('-') && name.chars().all(|c| c.is_ascii_lowercase() || c == '-')
    };
    for name in quoted(&text).filter(is_mutant).filter(|_| headers::AVAILABLE) {
        let exists = mutants.iter().chain(&of_headers).any(|mutant| mutant.name == name);
        assert!(exists, "there is no mutant {name}");
    }
}
