//! Fused multi-rank operators: a matrix product together with the collective that follows or
//! precedes it, and the collectives alone.
//!
//! **Problem.** A matrix product that is split over ranks needs a collective before or after it. If
//! the two run one after the other, the links idle while the product runs and the cores idle while
//! the collective runs. Everything between the two (buffers, flags, barriers) is a source of rare
//! wrong results.
//!
//! **Solution.** One operator ("op") computes the product and communicates tile by tile, over the
//! protocols of [`iris_sync`]. Using an op takes three steps: `plan` is local and pure, and
//! computes the bytes of heap that the op needs; `new` is collective, and takes that memory; `run`
//! enqueues a call on a stream, without allocating and without talking to other hosts.
//!
//! **Running.**
//!
//! ```
//! use iris_heap::World;
//! use iris_ops::{HeapReserve, MatRef, MatmulAllReduce, MatmulArgs, Plan, matmul_all_reduce::Options};
//!
//! // Two ranks as threads; C = A B, where each rank has half of K.
//! let sums = World::run_threads(2, |world| -> anyhow::Result<Vec<f32>> {
//!     let (m, n, k) = (4, 3, 8);
//!     let plan = Options::new(m, n, k).plan(&world)?;
//!     let heap = Plan::open_heap(&world, &[&plan], HeapReserve::matrices())?;
//!     let op = MatmulAllReduce::new(&heap, &plan)?;
//!     let a = heap.full::<f32>(m * k, 0.5)?;
//!     let b = heap.full::<f32>(k * n, 2.0)?;
//!     let c = heap.zeros::<f32>(m * n)?;
//!     let stream = heap.stream()?;
//!     let args = MatmulArgs::new(
//!         MatRef::sym(a, m, k), MatRef::sym(b, k, n), MatRef::sym(c, m, n));
//!     op.run(&args, &stream)?;
//!     stream.sync()?;
//!     let result = heap.read(c)?;
//!     heap.close()?;
//!     world.close()?;
//!     Ok(result)
//! })?;
//! assert!(sums.iter().all(|rank| rank == &[16.0; 12]));
//! # anyhow::Ok(())
//! ```
//!
//! On a GPU, a kernel of the caller can run beside a call and consume tiles of C as they arrive:
//! see [`AllGather::beside`] (also on the other ops whose peers write C directly) and
//! `examples/wait_on_tile.rs`. Calls can be captured in graphs. Matrices may lie in memory
//! allocated by cudarc, and streams may be cudarc's. Programs that call NCCL begin with
//! [`coming_from_nccl`] and [`comm`].
//!
//! **Options.** The module of each operator has an `Options` struct with exactly the options that
//! the operator reads, so an option that would be ignored does not compile.
//!
//! ```compile_fail
//! iris_ops::all_gather::Options::new(100).epilogue(iris_ops::Epilogue::Gelu);
//! ```
//!
//! ```compile_fail
//! iris_ops::all_gather_matmul::Options::new(8, 8, 8).fetchers(2); // of the variant `staged`
//! ```
//!
//! ```
//! use iris_ops::all_gather_matmul::{Options, Staged, Variant};
//! Options::new(8, 8, 8).variant(Variant::Staged(Staged::new().fetchers(2)));
//! ```
//!
//! **Threads and streams.** Operators are `Send` and `Sync`, and `run` takes `&self`. The launches
//! of a call are enqueued under one lock of the heap, so calls of several threads do not
//! interleave. All ranks must issue the calls of a heap in the same order, except those of
//! [`Matmul`]; if several threads issue calls, the program must establish that order. Calls run in
//! the order in which they were issued, on whatever streams: on the CPU launches run one at a time,
//! and on a GPU a stream waits for an event recorded after the previous call.
//! **Debugging.** Every wait within a node has a deadline. After a timeout, `stream.sync()` and
//! `op.check()` return a fault that names the op, the call, the tile, the awaited rank, and the
//! value seen and expected. After a fault every further call fails at once; close the heap and its
//! world and open new ones.
//!
//! **Guide.** [`guide`] leads from two ranks on a laptop to GPUs, launchers, graphs and users'
//! kernels. It has a section for each error that a user can meet. [`engine`] is for authors of
//! model servers: it handles requests, and starts again after a rank is lost, fails or hangs.
//! **Limits.** Element types are f32, f16 and bf16. Sums are accumulated in f32. All limits are in
//! [docs/limits.md](https://github.com/iris-rs/iris/blob/main/docs/limits.md).

#[doc = include_str!("../COMING_FROM_NCCL.md")]
pub mod coming_from_nccl {}

// `ops` must be the first module: it defines the macro `each_operator!`, which the modules below
// use.
#[macro_use]
mod ops;

mod any_op;
mod args;
mod check;
pub mod comm;
mod cost;
mod counters;
mod device;
mod error;
mod heap_reserve;
mod ll_items;
mod matrix;
mod memory_needs;
mod nodes;
mod op_label;
mod op_names;
mod op_row;
mod operand;
mod operator;
mod operator_macros;
mod options;
mod plan;
mod programs;
mod session;
mod split;
mod topology;
mod tune;
mod workspace;

#[doc = include_str!("../ENGINE.md")]
pub mod engine {}

#[doc = include_str!("../GUIDE.md")]
pub mod guide {}

#[doc = include_str!("../SCALING.md")]
pub mod scaling {}

pub use any_op::{AnyOp, Operands};
pub use args::{CollectiveArgs, MatmulArgs, NormArgs};
pub use comm::Comm;
pub use cost::{CostParameters, NetworkRate};
pub use counters::Counters;
pub use device::Device;
pub use heap_reserve::HeapReserve;
// These names are changed because iris_heap also exports `Error`, `Result` and `Request`, and a
// program may glob-import both crates.
pub use error::{Error as OpError, Result as OpResult};
pub use iris_kernels::Library;
#[doc(hidden)]
pub use iris_kernels::build::FaultInjection;
pub use iris_kernels::schedule::Shard;
pub use iris_kernels::trace::TraceSpan;
pub use matrix::MatRef;
pub use nodes::Forecast;
#[cfg(feature = "mpi")]
pub use nodes::mpi::{Mpi, MpiError};
pub use op_label::OpLabel;
pub use op_names::{ChoiceReason, Op, UnknownName, Variant};
pub use operand::{HostScope, MatrixArg, Operand, scope};
pub use ops::*;
pub use options::{Epilogue, Request as OpRequest, Staged, StagingLayout, TileShape};
pub use plan::{Choice, Plan, Shapes};
pub use session::{Session, StepOutcome};
pub use split::split;
pub use topology::Topology;
pub use tune::user::TuningFile;
pub use workspace::{Workspace, WorkspaceNotFreed};
