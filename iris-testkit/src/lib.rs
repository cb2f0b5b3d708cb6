//! iris-testkit
pub mod model;
