//! The kernels of iris.
pub mod args;
pub mod schedule;
