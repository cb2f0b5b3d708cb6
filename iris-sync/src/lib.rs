//! The protocols of iris: who writes which word, in which order, and why that is enough.
//!
//! **Problem.** Ranks that map each other's memory hand data over by writing it and then raising
//! a word. Get the order, the scope or the life of that word wrong and the result is a wrong
//! number, sometimes, under load.
//!
//! **Solution.** Every protocol is written once, generic over [`Memory`]: the CPU backend runs it
//! over atomics, the model checkers over theirs, and the device headers transcribe it operation by
//! operation. Every access has a name, [`Access`], and that enum is the only table of orders and
//! scopes. `PROTOCOL.md` beside this crate argues each of them and names the mutant that shows it
//! is needed.
//!
//! **Running.** A kernel makes a [`Workgroup`] for each of its workgroups and calls one of the
//! skeletons in [`flow`]; a protocol of one's own uses [`epoch`], [`lock`], [`barrier`] and
//! [`tile_flags`].
//!
//! **Debugging.** A wait that cannot end leaves a [`Fault`] that names op, call, tile, awaited
//! rank, the value seen and the value wanted.
//!
//! **Limits.** No sequentially consistent access is used or offered. A `Memory` moves words only;
//! the bulk data between the words is moved by the caller, between the same two points.
#![forbid(unsafe_code)]

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
pub mod tile_flags;
mod wait;
mod workgroup;

pub use call::{Call, RESTAMP_PERIOD};
pub use channel::{Channel, LINE_WORDS, PRIVATE_SEQUENCE, Shape, Words};
pub use entry::Record;
pub use fault::{Fault, FaultKind, Field, Stop};
pub use memory::{
    Access, DevWord, Limit, LlWord, Memory, Order, Scope, Span, SymPair, SymWord, divergent,
};
pub use wait::{Awaited, stopped, wait_for};
pub use workgroup::{End, Workgroup};

/// Words at the start of every rank's signal segment that belong to the heap, not to an op.
///
/// Word [`ABORT_WORD`] is the sticky abort word that peers may set; the rest is reserved.
pub const RESERVED_WORDS: u32 = 1024;

/// Index of the sticky abort word in every rank's signal segment: 0, or 1 + the rank that gave up.
pub const ABORT_WORD: u32 = 0;

/// What a host tells its kernels when a rank is gone: this plus the rank.
pub const PEER_LOST: i32 = 1000;

/// Version of what ranks say to each other and of the meaning of shared words. Ranks compare it when they
/// open a heap together, and those of different versions do not.
pub const PROTOCOL_VERSION: u32 = 2;
