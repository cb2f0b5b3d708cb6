//! Library for tests of operators: one oracle, one runner of cases for every operator, the stress
//! test, fakes of drivers, and the launcher of rank processes.
//!
//! Models of the protocols are in iris-models, the program `iris` is in iris-cli.

pub mod allocations;
pub mod fake_hip;
pub mod harness;
pub mod launch;
pub mod level;
pub mod numeric;
pub mod oracle;
pub mod output;
pub mod stress;
pub mod suite;

pub use level::Level;

/// The examples of the README.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
pub struct Readme;
