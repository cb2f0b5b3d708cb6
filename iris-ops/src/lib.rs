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
//! use iris_ops::{MatRef, MatmulAllReduce, MatmulArgs, Options, matmul_all_reduce::Variant};
//!
//! // Two ranks as threads; C = A B, where each rank has half of K.
//! let sums = World::run_threads(2, |world| -> anyhow::Result<Vec<f32>> {
//!     let heap = SymmetricHeap::open(&world, HeapOptions::new())?;
//!     let (m, n, k) = (4, 3, 8);
//!     let plan = MatmulAllReduce::plan((&world).into(), &Options::new(m, n, k), Variant::Auto)?;
//!     let mut op = MatmulAllReduce::new(&heap, &plan)?;
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
//! **Debugging.** Every wait ends: `stream.sync()` and `op.check()` return a fault that names op,
//! call, tile, awaited rank, the value seen and the value wanted. After a fault every further call
//! says so at once; close the heap and its world and open them anew.
//!
//! **Limits.** f32, f16 and bf16; sums are f32. One stream at a time for an op; all ranks issue
//! the ops of a heap in the same order.

#![deny(unsafe_code)]

pub mod all_gather;
pub mod all_gather_matmul;
pub mod all_reduce;
pub mod all_to_all;
mod args;
pub mod barrier;
pub mod broadcast;
mod check;
mod config;
mod core;
mod error;
pub mod matmul;
pub mod matmul_all_gather;
pub mod matmul_all_reduce;
pub mod matmul_reduce_scatter;
mod matrix;
mod op;
mod plan;
pub mod reduce_scatter;
pub mod tune;

pub use all_gather::AllGather;
pub use all_gather_matmul::AllGatherMatmul;
pub use all_reduce::AllReduce;
pub use all_to_all::AllToAll;
pub use args::{CopyArgs, MatmulArgs};
pub use barrier::Barrier;
pub use broadcast::Broadcast;
pub use config::{Epilogue, Options, Ranks, Shard, StagingLayout, TileShape};
pub use core::Counters;
pub use error::{Error, Result};
pub use iris_kernels::build::Injected;
pub use iris_kernels::schedule::split;
pub use iris_kernels::trace::TraceSpan;
pub use matmul::Matmul;
pub use matmul_all_gather::MatmulAllGather;
pub use matmul_all_reduce::MatmulAllReduce;
pub use matmul_reduce_scatter::MatmulReduceScatter;
pub use matrix::MatRef;
pub use plan::Plan;
pub use reduce_scatter::ReduceScatter;
