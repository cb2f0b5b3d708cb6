//! Symmetric memory for the ranks of a node: a world, a heap that every rank maps, streams.
//!
//! # Problem
//!
//! Programs that spread one computation over several devices of a node want each to read, write and
//! signal the memory of the others directly. That needs memory which every rank has mapped, with
//! the same layout everywhere, so that one offset means the same thing on all; and it fails in ways
//! that are hard to see: one rank allocates and the others do not, frees come in another order, a
//! process dies while its peers wait for its signal, a socket of yesterday's job lies in the way.
//!
//! # Solution
//!
//! - [`World`]: who takes part. Ranks are threads of one process ([`World::threads`],
//!   [`World::run_threads`]) or processes of one host ([`World::from_env`],
//!   [`World::from_unique_id`]). Its collective calls carry their number and call site and have a
//!   deadline: a difference between ranks is an error on all of them that names it, and so is an
//!   absent or a dead rank.
//! - [`SymmetricHeap`]: data and signal segments that all ranks map. Allocation is collective,
//!   agreed before any rank changes its state, and deterministic: same requests, same offsets.
//! - [`SymSlice`]: a place in it, without an address. It is resolved through the heap, which checks
//!   heap, bounds, rank, and that the block has not been given back since.
//! - [`Stream`]: work in order. On the CPU a worker thread, whose kernels run as workgroups on a
//!   fixed set of threads, so that workgroups may wait for each other.
//! - [`BackendKind`]: the kinds of device: the CPU, and GPUs whose driver is loaded when a heap asks for
//!   it. What is different about them is in [`DeviceTraits`]; [`SymmetricHeap::load`] loads compiled
//!   kernels, and [`Gpu`] is for libraries that enqueue work of their own.
//!
//! ```
//! use iris_heap::{Error, HeapOptions, SymmetricHeap, World};
//!
//! let sums = World::run_threads(4, |world| {
//!     let heap = SymmetricHeap::open(&world, HeapOptions::new().data_bytes(1 << 20))?;
//!     let x = heap.full::<f32>(100, world.rank() as f32)?; // collective: 100 elements a rank
//!     let mut sum = 0.0;
//!     for rank in 0..world.size() {
//!         sum += heap.read_from(x.slice(7..8)?, rank)?[0]; // reads the memory of its peer
//!     }
//!     world.barrier()?; // nobody gives back what another still reads
//!     heap.free(x)?;
//!     heap.close()?;
//!     Ok::<_, Error>(sum)
//! })?;
//! assert_eq!(sums, [6.0; 4]);
//! # Ok::<(), Error>(())
//! ```
//!
//! # Running
//!
//! A launcher that sets `RANK` and `WORLD_SIZE` (torchrun, or a shell: `for r in 0 1; do RANK=$r
//! WORLD_SIZE=2 program & done; wait`), Open MPI, MPICH and others that speak PMI, and Slurm's
//! `srun` are understood by [`World::from_env`]; without any of them it gives a world of one. The
//! processes meet at a Unix socket whose name is made from the job's identity; where launcher and
//! shell give none that they share, set `IRIS_RENDEZVOUS` to a private folder of the job's.
//! [`env::VARIABLES`] lists all variables.
//!
//! Close heaps, then split worlds, then the world, on every rank. What is dropped instead waits for
//! nobody, and its peers are told that the rank is lost.
//!
//! # Debugging
//!
//! - [`Error::Mismatch`]: the ranks are in different calls; the message has each one's call site.
//!   `if rank == 0 { barrier() } else { barrier() }` is such a difference, too.
//! - [`Error::Disagreement`]: the same call with different arguments; the first that differs.
//! - [`Error::Absent`]: a rank did not come in time. Deadlines are 600 s to enter, 30 s to make
//!   progress, and 720 s for a step of the host; `IRIS_DEADLINE=0.01` makes a hang in a test short, a
//!   larger factor suits debuggers.
//! - [`Error::Order`]: the ranks issue the operators of a heap in different orders, or one left out a call and went
//!   on with another operator; the first call that differs. It is found within seconds.
//! - [`Error::PeerLost`]: a process or thread ended; its own error is the one to look for. The
//!   kernels of the others that wait for it are told to leave ([`Control::host_abort`]).
//! - Spans and warnings go to `tracing`. A rank that has waited for some seconds, in a collective call or for a
//!   stream, says for whom; without a subscriber of `tracing` that line goes to stderr.
//!
//! # Limits
//!
//! - At most [`MAX_RANKS`] ranks, on one Linux host. Exchanges of processes go through rank 0: they
//!   are for setting up, not for data.
//! - After an absence or a loss a world is of no further use; close it and open another one.
//! - A process that is stopped (SIGSTOP) looks like one that is late.
//! - A process that dies before it has said which rank it is, and was not started by a launcher that
//!   leaves word of it (a file `lost-RANK` in `IRIS_RENDEZVOUS`), is missed at the deadline only.
//! - On the CPU pages are taken at the first touch. If the system has none then, it kills the
//!   process, and no error can be returned: size heaps by what there is.
//! - Copies by the host are not ordered with streams, nor with what peers write; that is what
//!   signals, events and barriers are for.

pub mod abi;
pub mod atomic_copy;
mod backend;
mod board;
pub mod bootstrap;
mod control;
mod dtype;
pub mod env;
mod error;
mod heap;
pub mod layout;
mod limits;
mod module;
pub mod plain_access;
mod root;
mod segment;
mod slice;
pub mod stream;
mod util;
mod wire;
mod world;

pub use abi::{HeapView, MAX_RANKS};
pub use backend::{
    BackendKind, CpuKernel, DeviceCopy, DeviceInfo, DeviceTraits, Gpu, Group, LaunchShape, Mapping,
    Memory,
};
pub use bootstrap::launcher_env::UniqueId;
pub use control::Control;
pub use dtype::{DType, Element};
pub use env::Settings;
pub use error::{Error, ErrorKind, Result};
pub use heap::fill::random_unit;
pub use heap::{ALIGNMENT, HeapOptions, Issuing, Lane, Request, SymmetricHeap};
pub use iris_sync::PROTOCOL_VERSION;
pub use module::{Function, Module};
pub use slice::{DevWords, RawSlice, Segment, SymSlice};
pub use stream::{Event, Stream};
#[doc(hidden)]
pub use util::check_file_size;
#[doc(hidden)]
pub use wire::hash as fnv;
pub use world::network::{Network, Secret};
pub use world::{MAX_WORLD, World};
