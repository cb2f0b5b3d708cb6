//! Protocols by which ranks synchronise and hand over data through symmetric memory.
//!
//! **Problem.** Ranks map each other's memory. A rank hands data over by writing it and then
//! storing a flag word. A wrong memory order, a wrong scope or a flag reset too early gives a wrong
//! number, sometimes, under load.
//!
//! **Solution.** Every protocol is written once, generic over [`Memory`]: the CPU backend runs the
//! code over atomics, the model checkers run it over their own memory, and the device headers
//! transcribe it operation by operation. Every access has a name, [`Access`], and that enum is the
//! only table of orders and scopes. `PROTOCOL.md` in this crate gives the reason for each row, and
//! the mutant (a model with the row weakened) that a test must catch.
//!
//! **Running.** A kernel makes a [`Workgroup`] for each of its workgroups and calls one of the
//! skeletons in [`flow`]. A user's own protocol uses [`epoch`], [`lock`], [`barrier`] and
//! [`tile_flags`].
//!
//! **Errors.** Functions fail only with [`Aborted`]: a wait timed out, or the rank or a peer gave
//! up. All threads of the workgroup then leave the call, and nothing in the call may be retried.
//!
//! **Debugging.** A wait that times out or is aborted leaves a [`Fault`] with op, call, tile,
//! awaited rank, the value seen and the value wanted.
//!
//! **Limits.** No sequentially consistent access is used or offered. A `Memory` moves words only.
//! The caller moves the bulk data, after the acquire and before the release that synchronise it.
#![forbid(unsafe_code)]
#![allow(
    clippy::missing_errors_doc,
    reason = "the crate's documentation has the only error, Aborted"
)]

pub mod barrier;
mod call;
mod channel;
pub mod entry;
pub mod epoch;
mod fault;
pub mod flow;
pub mod ll;
pub mod lock;
mod memory;
pub mod sym;
pub mod tile_flags;
mod wait;
mod workgroup;

pub use call::{Call, REFRESH_PERIOD};
pub use channel::{Channel, LINE_WORDS, PRIVATE_SEQUENCE, Shape, Words};
pub use entry::Record;
pub use fault::{Aborted, Config, Fault, FaultKind, Field};
pub use memory::{
    Access, DevWord, Limit, LlQuad, LlWord, Memory, Order, Scope, Span, SymPair, SymWord, divergent,
};
pub use wait::{Awaited, stopped, wait_for};
pub use workgroup::{End, Workgroup};

/// Number of words at the start of every rank's signal segment that are reserved for the heap. The
/// words of ops follow them.
///
/// Word [`ABORT_WORD`] is the abort word, which peers may set and which is never reset. The other
/// reserved words are unused.
pub const RESERVED_WORDS: u32 = 1024;

/// Index of the abort word in every rank's signal segment. Values of the word: 0 (no abort); 1 +
/// the rank that gave up, or for which a rank waited in vain; [`PEER_LOST`] + the rank that was
/// lost, or a later code of [`sym::abort`], which names no rank. Once set, it is never reset.
pub const ABORT_WORD: u32 = 0;

/// Base of the abort code that a host gives its kernels if a rank is lost: the code is this value
/// plus the number of the lost rank.
pub const PEER_LOST: i32 = 1000;

/// Version of the ranks' handshake and of the meaning of shared words. Ranks compare versions when
/// they open a heap together; opening fails if the versions differ.
pub const PROTOCOL_VERSION: u32 = 3;
