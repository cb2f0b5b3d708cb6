//! Tests of operators on the CPU: every operator against a reference, wrong calls, and failures of
//! ranks that are threads or processes.

#[path = "../common/mod.rs"]
mod common;
mod counters;
mod faults;
mod misuse;
mod node_faults;
mod nodes;
mod order;
mod plans;
mod processes;
mod random_cases;
mod suite;
mod sums;
