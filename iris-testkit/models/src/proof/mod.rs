//! Safety of the slot rule, the device barrier, staging flags, copy engines, kernels beside a call and the order of steps in a
//! call, proved for any number of ranks, threads, tiles and calls.
//!
//! **Problem.** Models explore two to four ranks and a few calls. A rule that breaks with five ranks, or after 2^31
//! calls, passes them.
//!
//! **Solution.** [`rule`] and [`barrier`] are the rules as transition systems over sorts without bounds, and each has an
//! invariant ([`rule::invariant`]). The solver z3 checks that the invariant holds at first, that each action keeps it, and that
//! each property follows from it ([`conditions`]). What the machine's words make of calls without bounds is the
//! [`wrap`] lemma.
//!
//! | module | holds |
//! |---|---|
//! | [`term`], [`system`] | the language: terms, actions, clauses |
//! | [`rule`], [`rule::invariant`], [`barrier`] | the rules and what is invariant of them |
//! | [`staging`] | flags of the staging buffer, which workgroups of one device share |
//! | [`engine`] | numbers that copy engines take from flag 0 |
//! | [`beside`] | kernels of the user beside a call |
//! | [`program`] | the rules of programs: which steps a call has, in which order |
//! | [`smt`], [`conditions`], [`wrap`] | the proof |
//! | [`concrete`], [`bounded`] | the same text over concrete values, and searches of small worlds |
//! | [`mutants`] | each clause switched off: the condition that fails, and a run to a violation |
//! | [`replay`] | executions of the code, replayed against all rules but those of programs |
//! | [`report`] | all of it, as a table |
//!
//! **What is proved.** Whoever writes a slot, a record or a peer's own memory knows that its last readers are done;
//! whoever reads a tile, a record or a shard finds that of its call, and knows of the stores that made it; every number
//! that is compared is within half the range; and what the stream does between two calls knows all direct writes and pulls
//! to be over. One step opens a call and one ends it, nothing of it is visible outside, and the next call finds its copies
//! over. A rank may give up at any point.
//!
//! **What is not.** Liveness (that waits end) and residency (that workgroups which wait for each other run at the same
//! time) are not proved; models explore lost signals. Locks, accumulation and versions are explored only. That the code
//! does what the rule says is what the replay of executions is for.
//!
//! **What is assumed.** Memory is C++11's without load buffering. A word has one writer. Tiles of one call lie apart, and a
//! tile is always a slot, or always a rank's own memory: plans see to that, and tests of iris-ops check it.

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
