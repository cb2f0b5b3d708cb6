//! Symmetric memory for the ranks of a node: worlds of ranks, a heap that every rank maps, and
//! streams.
//!
//! # Problem
//!
//! Programs that spread one computation over several devices of a node want each device to read,
//! write and signal the memory of the others directly. That needs memory that every rank has mapped
//! with the same layout, so that one offset means the same thing everywhere. Mistakes are hard to
//! see: one rank allocates and the others do not, ranks free in different orders, a process dies
//! while its peers wait for its signal, or a stale socket of an earlier job is in the way.
//!
//! # Solution
//!
//! - [`World`]: the set of ranks. Ranks are threads of one process ([`World::threads`],
//!   [`World::run_threads`]) or processes of one or several hosts ([`World::from_env`],
//!   [`World::from_unique_id`]). Each collective call carries its number and call site and has a
//!   deadline. A difference between ranks, or an absent or dead rank, is an error on all ranks that
//!   names it.
//! - [`SymmetricHeap`]: data and signal segments that all ranks map. Allocation is collective,
//!   agreed before any rank changes its state, and deterministic: the same requests give the same
//!   offsets.
//! - [`SymSlice`]: a range of symmetric memory without an address. It is resolved through the heap,
//!   which checks heap, bounds, rank, and that the block has not been freed since.
//! - [`Stream`]: a queue of work in order. On the CPU it is a worker thread, whose kernels run as
//!   workgroups on a fixed set of threads, so that workgroups may wait for each other.
//! - [`BackendKind`]: the kinds of device: the CPU, and GPUs whose driver is loaded when a heap
//!   needs it. [`DeviceTraits`] holds their differences; [`SymmetricHeap::load`] loads compiled
//!   kernels; [`Gpu`] is for libraries that enqueue work of their own.
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
//!     world.barrier()?; // no rank frees memory that another rank still reads
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
//! [`World::from_env`] understands launchers that set `RANK` and `WORLD_SIZE` (torchrun, or a
//! shell: `for r in 0 1; do RANK=$r WORLD_SIZE=2 program & done; wait`), Open MPI, MPICH and others
//! that speak PMI, and Slurm's `srun`; without any of them it gives a world of one rank. The
//! processes meet at a Unix socket whose name is derived from the job's identity. If launcher and
//! shell provide no common identity, set `IRIS_RENDEZVOUS` to a private folder of the job.
//! [`env::VARIABLES`] lists all variables.
//!
//! On every rank, close the heaps, then split worlds, then the world. A drop waits for no rank. If a
//! world is dropped without close, the rank is lost to its peers; if only a heap is, peers learn that
//! the rank issues no further call of it.
//!
//! # Debugging
//!
//! - [`Error::Mismatch`]: the ranks are in different collective calls; the message has the call
//!   site of each. `if rank == 0 { barrier() } else { barrier() }` is such a difference, too.
//! - [`Error::Disagreement`]: the ranks made the same call with different arguments; the message
//!   has the first that differs.
//! - [`Error::Absent`]: a rank did not arrive in time. Deadlines are 600 s for entering a call, 30
//!   s for progress in it, and 720 s for a step of the host, unless [`Settings`] says otherwise.
//!   `IRIS_DEADLINE=0.01` shortens a hang in a test; a larger factor suits debuggers.
//! - [`Error::Order`]: the ranks issue the operators of a heap in different orders, or one skipped
//!   a call and issued another; the message has the first call that differs. It is found within
//!   seconds. A rank that skips a call, issues none after it and does not close the heap is found
//!   at a deadline ([`Error::Fault`]).
//! - [`Error::PeerLost`]: a process or thread ended; look for its own error. Kernels on other ranks
//!   that wait for it are told to leave ([`Control::host_abort`]).
//! - Spans and warnings go to `tracing`. A rank that has waited for some seconds, in a collective
//!   call or for a stream, logs which ranks it waits for; without a `tracing` subscriber that line
//!   goes to stderr.
//!
//! # Limits
//!
//! - A heap has at most [`MAX_RANKS`] ranks, on one Linux host; in a world over several hosts, each
//!   host has a heap of its own ([`World::nodes`]). A world may have 4096 ranks. Exchanges of
//!   processes go through rank 0, so they are for set-up, not for data.
//! - After an absence, a loss or the close of a heap that has failed, a world is unusable; close it
//!   and open another one.
//! - A stopped process (SIGSTOP) is named on stderr after seconds; the other ranks still wait for it
//!   until their deadlines, as for a late one, unless they are members of a job ([`Member`]).
//! - If a process dies before it has announced its rank, its absence is noticed only at the
//!   deadline, unless the launcher reports it (by a file `lost-RANK` in `IRIS_RENDEZVOUS`).
//! - On the CPU the system provides pages at their first touch. If it has none left, it kills the
//!   process and no error can be returned: choose heap sizes that fit into memory.
//! - Copies by the host are ordered neither with streams nor with writes by peers; use signals,
//!   events and barriers for that.

pub mod atomic_copy;
mod backend;
pub mod bootstrap;
mod bytes;
mod control;
mod dtype;
mod elastic;
mod encoding;
pub mod env;
mod error;
mod heap;
#[doc(hidden)]
pub mod host_memory;
mod issue_board;
mod launched;
pub mod layout;
mod limits;
mod module;
pub mod plain_access;
mod root_error;
mod segment;
mod slice;
pub mod stream;
mod system;
mod util;
mod world;

pub use backend::{
    BackendKind, CpuKernel, DeviceCopy, DeviceHandle, DeviceInfo, DeviceTraits, Gpu, Group,
    LaunchShape, Mapping, Memory,
};
pub use bootstrap::unique_id::UniqueId;
pub use bytes::Bytes;
pub use control::{Control, NodeEngine};
pub use dtype::{DType, Element};
pub use elastic::{Change, Loss, Member, MemberId, Next, Policy};
#[doc(hidden)]
pub use encoding::hash as fnv;
pub use env::Settings;
#[doc(hidden)]
pub use error::shortened;
pub use error::{Error, ErrorKind, Result};
pub use heap::fill::random_unit;
pub use heap::{HeapOptions, IssueGuard, NodeStream, Request, Retired, SymmetricHeap};
pub use iris_sync::PROTOCOL_VERSION;
pub use iris_sync::sym as abi;
pub use iris_sync::sym::{HeapView, MAX_RANKS};
pub use issue_board::{AwaitedNode, Pulled};
pub use launched::{launched, launcher_variables};
pub use layout::ALIGNMENT;
pub use module::{Function, Module};
pub use slice::{DevWords, RawSlice, Segment, SymSlice};
pub use stream::{Event, PendingRead, Stream};
#[doc(hidden)]
pub use system::Limit;
#[doc(hidden)]
pub use util::{check_file_size, read_file};
pub use world::network::Network;
pub use world::secret::Secret;
pub use world::{MAX_WORLD, World};
