//! Tests of operators and communicators on the CPU.

mod combine;
mod comm;
mod epochs;
mod external;
mod invariant;
mod lists;
mod losses;
mod names;
mod other_threads;
mod roles;
mod sharing;
mod streams;
