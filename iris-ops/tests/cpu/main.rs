//! Tests of operators and communicators on the CPU.

mod comm;
mod external;
mod losses;
mod names;
mod other_threads;
mod sharing;
mod streams;
