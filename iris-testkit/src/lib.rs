//! Library for tests of operators: one oracle, one runner of cases for every operator, the stress
//! test, fakes of drivers, and the launcher of rank processes.
//!
//! Models of the protocols are in iris-models, the program `iris` is in iris-cli.

pub mod allocations;
pub mod bits;
pub mod combine;
pub mod error_texts;
pub mod fake_hip;
pub mod free_port;
pub mod harness;
pub mod launch;
pub mod level;
pub mod matrix;
pub mod numeric;
pub mod options;
pub mod oracle;
pub mod output;
pub mod rank_setup;
pub mod stress;
pub mod suite;
pub mod worlds;

pub use level::Level;

/// Holds the README, so that its examples are compiled as doc tests.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
pub struct Readme;
