//! Comparison of the device headers with their Rust counterparts: operation by operation, and
//! schedule by schedule. `cargo xtask check-protocols` explores executions of the headers.
#![cfg(iris_cxx)]

use iris_models::{schedule, sequence};
use iris_testkit::Level;

#[test]
fn sync_h_asks_for_the_same_operations_as_iris_sync() {
    let compared = sequence::compare(Level::from_env().pick(5_000, 40_000, 1_000_000));
    let compared = compared.unwrap_or_else(|difference| panic!("{difference}"));
    println!("{compared:?}");
    assert!(compared.missing.is_empty(), "never asked for: {:?}", compared.missing);
    assert!(compared.faults > 1000, "only {} faults", compared.faults);
}

#[test]
fn tile_h_has_the_same_schedules_as_iris_kernels() {
    let given = iris_models::check::tuned_shapes().expect("tuning tables");
    assert!(!given.is_empty(), "no tuning table has a row");
    let random = Level::from_env().pick(2_000, 10_000, 200_000);
    match schedule::compare(&given, random) {
        Ok(answers) => println!("{} tuned shapes, {answers} equal answers", given.len()),
        Err(difference) => panic!("{difference}"),
    }
}
