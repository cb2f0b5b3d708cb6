//! Fused multi-rank operators: a matrix product together with the collective that follows or
//! precedes it, and the collectives alone.
//!
//! **Problem.** A product split over ranks needs a collective before or after it. Run one after
//! the other, the links idle while the product runs and the cores idle while the collective runs;
//! and everything between the two (buffers, flags, barriers) is a source of rare wrong numbers.
//!
//! **Solution.** One kernel multiplies and communicates tile by tile, over the protocols of
//! [`iris_sync`]. Making an op has three steps: `plan` is local and pure and tells the bytes it
//! needs; `new` is the one collective step; `run` enqueues a call on a stream, allocates nothing
//! and talks to no host.
//!
//! **Running.**
//! ```
//! use iris_heap::{HeapOptions, SymmetricHeap, World};
//! use iris_ops::{MatRef, MatmulAllReduce, MatmulArgs, matmul_all_reduce::Options};
//!
//! // Two ranks as threads; C = A B, where each rank has half of K.
//! let sums = World::run_threads(2, |world| -> anyhow::Result<Vec<f32>> {
//!     let heap = SymmetricHeap::open(&world, HeapOptions::new())?;
//!     let (m, n, k) = (4, 3, 8);
//!     let op = MatmulAllReduce::new(&heap, &Options::new(m, n, k).plan(&heap)?)?;
//!     let a = heap.full::<f32>(m * k, 0.5)?;
//!     let b = heap.full::<f32>(k * n, 2.0)?;
//!     let c = heap.zeros::<f32>(m * n)?;
//!     let stream = heap.stream()?;
//!     let args = MatmulArgs::new(
//!         MatRef::sym(a, m, k), MatRef::sym(b, k, n), MatRef::sym(c, m, n));
//!     op.run(&args, &stream)?;
//!     stream.sync()?;
//!     let result = heap.read(c)?;
//!     drop(op);
//!     heap.close()?;
//!     world.close()?;
//!     Ok(result)
//! })?;
//! assert!(sums.iter().all(|rank| rank == &[16.0; 12]));
//! # anyhow::Ok(())
//! ```
//!
//! On a GPU a kernel of the caller's may run beside a call and take the tiles of C as they arrive:
//! [`AllGather::beside`], of the ops whose peers write C directly, and `examples/wait_on_tile.rs`.
//! Calls may be captured in graphs; matrices may lie in memory of cudarc's, and streams be its own.
//!
//! **Options.** Each operator has a struct of its own in its module, with what it reads and nothing
//! else: what would be ignored does not compile.
//! ```compile_fail
//! iris_ops::all_gather::Options::new(100).epilogue(iris_ops::Epilogue::Gelu);
//! ```
//! ```compile_fail
//! iris_ops::all_gather_matmul::Options::new(8, 8, 8).fetchers(2); // of the variant `staged`
//! ```
//! ```
//! use iris_ops::all_gather_matmul::{Options, Staged, Variant};
//! Options::new(8, 8, 8).variant(Variant::Staged(Staged::new().fetchers(2)));
//! ```
//!
//! **Threads and streams.** Operators are `Send` and `Sync`, and `run` takes `&self`. The launches of a
//! call are enqueued under one lock of the heap, so calls of several threads do not mix; but all
//! ranks must issue the calls of a heap in the same order, and where several threads issue them that
//! order is for the program to make. Calls run in the order in which they were issued, whatever
//! streams they are issued on: on the CPU launches take turns, on a GPU a stream waits for an event
//! behind the call before.
//!
//! **Debugging.** Every wait ends: `stream.sync()` and `op.check()` return a fault that names op,
//! call, tile, awaited rank, the value seen and the value wanted. After a fault every further call
//! says so at once; close the heap and its world and open them anew.
//!
//! **Limits.** f32, f16 and bf16; sums are f32.

#![deny(unsafe_code)]

// First: its list of operators is read by the modules that follow.
#[macro_use]
mod ops;

mod any;
mod args;
mod check;
mod cost;
mod counters;
mod device;
mod error;
mod facade;
mod items;
mod kind;
mod matrix;
mod needs;
mod nodes;
mod operator;
mod options;
mod plan;
mod programs;
mod ranks;
mod spec;
mod split;
mod tune;
mod workspace;

pub use any::{AnyOp, Operands};
pub use args::{CollectiveArgs, MatmulArgs, NormArgs};
pub use cost::Machine;
pub use counters::Counters;
pub use device::Device;
// Under names of their own: iris_heap has an Error, a Result and a Request, too, and both crates may be imported whole.
pub use error::{Error as OpError, Result as OpResult};
pub use iris_kernels::Library;
#[doc(hidden)]
pub use iris_kernels::build::Injected;
pub use iris_kernels::trace::TraceSpan;
pub use kind::{Op, UnknownName, Variant, Why};
pub use matrix::MatRef;
pub use ops::*;
pub use options::{Epilogue, Request as OpRequest, Shard, Staged, StagingLayout, TileShape};
pub use plan::{Choice, Plan, Shapes};
pub use ranks::Ranks;
pub use split::split;
pub use tune::user::TuningFile;
pub use workspace::{Workspace, WorkspaceNotFreed};
