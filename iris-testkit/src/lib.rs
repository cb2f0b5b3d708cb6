//! iris-testkit

pub mod launch;
