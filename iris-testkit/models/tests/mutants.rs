//! Tests that every access of the protocols has mutants, and that PROTOCOL.md names every mutant.
//! `cargo xtask check-protocols` runs the mutants.

use iris_models::headers;
use iris_models::mutants::{self, Mutant};
use iris_sync::{Access, Order, Scope};

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

/// Words of a text that stand between backquotes.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

#[test]
fn protocol_md_names_every_access_with_its_mutants() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../iris-sync/PROTOCOL.md");
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
        let named = mutants.iter().any(|mutant| quoted(row).any(|name| name == mutant.name));
        assert!(named || row.contains("no mutant: "), "no reason given: {row}");
    }
    // Mutants of the device headers are compared only if the headers could be compiled; otherwise
    // there are none.
    let of_headers = mutants::of_headers();
    for mutant in mutants.iter().chain(&of_headers) {
        assert!(quoted(&text).any(|name| name == mutant.name), "{} is not argued", mutant.name);
    }
    // Every mutant that PROTOCOL.md names must exist.
    let is_mutant = |name: &&str| {
        name.contains('-') && name.chars().all(|c| c.is_ascii_lowercase() || c == '-')
    };
    for name in quoted(&text).filter(is_mutant).filter(|_| headers::AVAILABLE) {
        let exists = mutants.iter().chain(&of_headers).any(|mutant| mutant.name == name);
        assert!(exists, "there is no mutant {name}");
    }
}
