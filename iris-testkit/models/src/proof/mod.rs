//! Proof that the slot rule, the device barrier, staging flags, copy engines, kernels beside a call
//! and the order of steps in a call are safe, for any number of ranks, threads, tiles and calls.
//!
//! **Problem.** Models explore two to four ranks and a few calls. They do not notice a rule that
//! breaks with five ranks, or after 2^31 calls.
//!
//! **Solution.** [`rule`] and [`barrier`] state the rules as transition systems over sorts without
//! bounds; each has an invariant ([`rule::invariant`]). The solver z3 checks that the invariant
//! holds at first, that each action keeps it, and that each property follows from it
//! ([`conditions`]). The [`wrap`] lemmas show that numbers in machine words, which wrap around,
//! compare like numbers without bounds.
//!
//! | module | holds |
//! |---|---|
//! | [`term`], [`system`] | the language: terms, actions, clauses |
//! | [`rule`], [`rule::invariant`], [`barrier`] | the rules and their invariants |
//! | [`staging`] | flags of the staging buffer, which workgroups of one device share |
//! | [`engine`] | numbers that copy engines read from flag 0 |
//! | [`beside`] | kernels of the user beside a call |
//! | [`program`] | the rules of programs: which steps a call has, in which order |
//! | [`smt`], [`conditions`], [`wrap`] | the proof |
//! | [`concrete`], [`bounded`] | the rules over concrete values, and searches of small worlds |
//! | [`mutants`] | each clause switched off: the condition that fails, and a run to a violation |
//! | [`replay`] | executions of the code, replayed against all rules but those of programs |
//! | [`report`] | all results, as a table |
//!
//! **Proved.** A thread that writes a slot, a record or a peer's own memory knows that the last
//! readers of it are done. A thread that reads a tile, a record or a shard finds the one of its
//! call, and knows of the stores that made it. Every number that is compared is within half the
//! range. A kernel between two calls on a stream knows that all direct writes and pulls of the call
//! before are over. One step opens a call and one step ends it; no step of the call is visible to
//! peers outside of it; and the next call begins after all copies of the call. A rank may give up
//! at any point.
//!
//! **Not proved.** Liveness (waits end) and residency (workgroups that wait for each other run at
//! the same time) are not proved; models explore lost signals. Locks, accumulation and versions are
//! only explored. The replay of executions checks that the code follows the rules.
//!
//! **Assumed.** Memory behaves as in C++11, without load buffering. A word has one writer. Tiles of
//! one call do not overlap. A tile lies always in a slot, or always in a rank's own memory: plans
//! see to that, and tests of iris-ops check it.

pub mod barrier;
pub mod beside;
pub mod bounded;
pub mod concrete;
pub mod conditions;
pub mod engine;
pub mod mutants;
pub mod program;
pub mod replay;
pub mod report;
pub mod rule;
pub mod smt;
pub mod staging;
pub mod system;
pub mod term;
pub mod wrap;
