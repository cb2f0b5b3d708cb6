//! How iris is checked: one oracle, one runner of cases for every op, and models that explore the
//! protocols, in Rust and in the source that runs on a device. Also the launcher of rank processes
//! and the program `iris`.
//!
//! To check a protocol of one's own begin with [`model`]: a [`model::Scenario`] is a small program
//! over words and cells, an engine explores its executions, and mutants show that it would have found
//! a fault. [`model::headers`] does the same for a header that runs on a device;
//! `examples/check_my_protocol.rs` is both, in some forty lines.

pub mod allocations;
pub mod check;
pub mod guide;
pub mod harness;
pub mod launch;
pub mod level;
pub mod model;
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
