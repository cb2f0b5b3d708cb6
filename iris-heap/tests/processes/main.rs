//! Tests of ranks that are processes: this test program starts itself once per rank.

#[path = "../job/mod.rs"]
mod job;
mod nodes;
mod ranks;
mod rendezvous;

/// Program of one rank, started by the tests.
#[test]
#[ignore = "the program of one rank, which the other tests start"]
fn rank_program() {
    job::run(&[nodes::CASES, ranks::CASES, rendezvous::CASES].concat());
}
