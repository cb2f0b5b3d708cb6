//! Communicator with an interface like NCCL's: collectives by element count, on the program's own
//! memory and stream.
//!
//! **Problem.** A program that calls NCCL has its own buffers and stream, and makes calls of any
//! size. The operators of this crate first need a heap, a plan and a workspace.
//!
//! **Solution.** A [`Comm`] makes heap, plans and workspace once, in one collective step, and has
//! one method for each collective. Afterwards no host waits for another host: calls are enqueued on
//! the communicator's stream, and may be captured in graphs. The world may have several nodes.
//!
//! ```
//! use iris_heap::{BackendKind, World};
//! use iris_ops::comm::{Comm, Options, ReduceOp};
//!
//! // Two ranks as threads. As processes: Comm::from_rank(BackendKind::Cpu, rank, world_size, id).
//! let sums = World::run_threads(2, |world| -> anyhow::Result<Vec<f32>> {
//!     let comm = Comm::from_world(BackendKind::Cpu, &world, &Options::new().max_bytes(1 << 16))?;
//!     let (part, mut sum) = (vec![1.0 + comm.rank() as f32; 5], vec![0.0; 5]);
//!     comm.all_reduce(&part, &mut sum, &ReduceOp::Sum)?;
//!     let mut tokens = vec![0_u32; 6];
//!     comm.all_gather(&[7, 8, comm.rank() as u32], &mut tokens)?; // data of any plain type
//!     assert_eq!(tokens, [7, 8, 0, 7, 8, 1]);
//!     comm.close()?;
//!     Ok(sum)
//! })?;
//! assert_eq!(sums, [[3.0; 5], [3.0; 5]]);
//! # anyhow::Ok(())
//! ```
//!
//! # From `cudarc::nccl::Comm`
//!
//! With the feature `cudarc-0-19` the methods accept cudarc's slices and views. Like the methods of
//! `cudarc::nccl::Comm`, they wait for earlier work on these slices, and make later work wait for
//! the call, by cudarc's own events.
//!
//! | `cudarc::nccl` | here |
//! | --- | --- |
//! | `Id::new`, `internal`, `uninit` | the same, 128 bytes: [`Id`] |
//! | `Comm::from_rank(stream, rank, world_size, id)` | the same: [`Comm::from_rank`]; sizes by [`Comm::from_rank_with`] |
//! | `Comm::from_devices` | missing, because a rank needs a thread of its own: `World::threads` and [`Comm::from_world`] |
//! | `rank`, `world_size` | the same |
//! | `stream`, `context`, `ordinal` | [`Comm::stream`] is a `Stream` of the heap; the program keeps the cudarc stream that it passed |
//! | `all_reduce`, `all_reduce_in_place` | the same, for `ReduceOp::Sum` of f32, f16 and bf16 |
//! | `all_gather`, `broadcast`, `broadcast_in_place` | the same, for any plain type (`bytemuck::Pod`) |
//! | `reduce_scatter` | the same, for `ReduceOp::Sum` of f32, f16 and bf16 |
//! | `reduce`, `reduce_in_place` | the same, for `ReduceOp::Sum` of f32, f16 and bf16; not faster than `all_reduce` |
//! | | [`Comm::all_to_all`], [`Comm::gather`], [`Comm::scatter`], [`Comm::barrier`] |
//! | `ReduceOp::Prod`, `Max`, `Min`, `Avg`; sums of integers and of f64 | missing; the operation is refused by name, the type by the compiler |
//! | `send`, `recv` | missing: [`Comm::all_to_all`], or `SymmetricHeap::copy_on` and [`Comm::barrier`] |
//! | `group`, `group_start`, `group_end` | missing: calls of a communicator run one after the other |
//! | in-place `all_gather` and `reduce_scatter` by a slice of the other buffer | refused by name, as memory that overlaps |
//! | `Drop` aborts | the same for a communicator that opened its world ([`Comm::from_rank`]): peers that still wait get an error. After [`Comm::from_world`] and [`Comm::in_heap`] the world goes on. [`Comm::abort`] and [`Comm::abort_with`] end it in any case; [`Comm::close`] ends a communicator without an abort |
//! | returns `NcclStatus` or `NcclError` | returns `()` or [`OpError`](crate::OpError), which has `Debug` and `Display` |
//!
//! A `Comm` is `Send` and `Sync`, and threads may share one. All ranks must issue the calls in the
//! same order; as with NCCL, the program must ensure this.

mod calls;
mod epochs;
mod id;
mod memory;
mod message;
mod options;
mod stream;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use iris_heap::{
    Element, HeapOptions, MAX_RANKS, Member, RawSlice, Request, Segment, Stream, SymmetricHeap,
    World,
};

use crate::device::Device;
use crate::error::{Error, Result};
use crate::nodes::Operator;
use crate::op_names::Op;
use crate::plan::Plan;
use crate::topology::Topology;
use crate::workspace::{Workspace, outcome};
use options::Plans;
use stream::CommStream;

pub use id::Id;
pub use memory::{RecvBuffer, SendBuffer};
pub use options::{Footprint, Options};
pub use stream::OnStream;

/// Operation of a reduction. Only [`ReduceOp::Sum`] is supported. The other operations exist in
/// NCCL and are refused with an error.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReduceOp {
    /// Sum over all ranks.
    Sum,
    /// Product over ranks; not supported.
    Prod,
    /// Maximum over ranks; not supported.
    Max,
    /// Minimum over ranks; not supported.
    Min,
    /// Average over ranks; not supported.
    Avg,
}

/// Element types that a communicator can sum: f32, f16 and bf16. Sums are accumulated in f32 and
/// rounded once to the element type; over several nodes the sum of each node is rounded, too.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be summed over ranks",
    label = "sums are of f32, f16 and bf16",
    note = "data of any plain type can be moved: all_gather, all_to_all, broadcast"
)]
pub trait Summand: Element + sealed::Summand {}

mod sealed {
    pub trait Summand {}
}

macro_rules! summands {
    ($($type:ty),*) => {$(
        impl sealed::Summand for $type {}
        impl Summand for $type {}
    )*};
}
iris_kernels::wire_types!(summands);

/// Communicator of a rank; see [the module](self).
///
/// A call is enqueued on the communicator's stream and returns at once. A call with host memory, on
/// the CPU, returns when it is complete, because it borrows the memory only for its own duration.
///
/// A call with more bytes than [`Options::max_bytes`] is split into several launches, and one
/// without elements has none.
///
/// Ranks compare launches, not calls. If launches differ, an error names both. Calls that differ
/// but have equal launches are not detected: one long call and several shorter ones that fill the
/// same launches; types of different size with as many bytes; lengths of one-byte types that need
/// equally many words of four bytes; and two ranks that both act as the root of a broadcast.
pub struct Comm {
    heap: Arc<SymmetricHeap>,
    /// World that the communicator closes; `None` if the program closes the world itself.
    owned: Option<World>,
    /// Whether a close of the communicator also closes its heap: true if the communicator opened
    /// the heap.
    owns_heap: bool,
    stream: CommStream,
    /// Operators, locked during a call so that the launches of two calls do not mix. `None` after
    /// the communicator is closed.
    operators: Mutex<Option<Operators>>,
    /// Member that made the communicator, and the epoch of its world. `None` for a communicator of
    /// another world, and after [`Comm::next`].
    epoch: Mutex<Option<(Arc<Member>, u64)>>,
}

struct Operators {
    /// One operator for each collective and element type, and last the barrier.
    all: Vec<Operator>,
    workspace: Arc<Workspace>,
    /// Send buffer and receive buffer for element types with an alignment of one byte, and for
    /// `reduce`, `gather` and `scatter`.
    stage: Vec<RawSlice>,
}

impl fmt::Debug for Comm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Comm(rank {} of {})", self.rank(), self.world_size())
    }
}

impl Comm {
    /// Opens a communicator of `world_size` processes or threads of this host that pass the same
    /// `id`: collective. For ranks on several hosts, make a [`World`] and use [`Comm::from_world`].
    /// `stream` is a `BackendKind`, for a new stream of the communicator, or, with the feature
    /// `cudarc-0-19`, an `Arc<CudaStream>`.
    ///
    /// # Errors
    /// [`Error::Comm`] for an invalid `id`, a rank out of range, ranks that do not arrive by the
    /// deadline, or a device that cannot be opened; the errors of an operator's `new`.
    #[track_caller]
    pub fn from_rank(
        stream: impl Into<OnStream>,
        rank: usize,
        world_size: usize,
        id: Id,
    ) -> Result<Self> {
        Comm::from_rank_with(stream, rank, world_size, id, &Options::new())
    }

    /// Opens a communicator as [`Comm::from_rank`] does, with the sizes in `options`, which must be
    /// equal on all ranks.
    ///
    /// # Errors
    /// The errors of [`Comm::from_rank`]; [`Error::Comm`] or [`Error::Invalid`] for options that no
    /// communicator can have.
    #[track_caller]
    pub fn from_rank_with(
        stream: impl Into<OnStream>,
        rank: usize,
        world_size: usize,
        id: Id,
        options: &Options,
    ) -> Result<Self> {
        if world_size > MAX_RANKS {
            return Err(Error::comm(iris_heap::Error::Invalid {
                what: "world size of a communicator of one host".into(),
                value: world_size.to_string(),
                expected: format!("1 to {MAX_RANKS}; for several hosts see Comm::from_world"),
            }));
        }
        let id = id.unique()?;
        let world = match &options.settings {
            Some(settings) => World::from_unique_id_with(&id, rank, world_size, settings),
            None => World::from_unique_id(&id, rank, world_size),
        };
        let world = world.map_err(Error::comm)?;
        // Avoids a closure, which would hide the caller's location from `#[track_caller]`;
        // collective calls report this location.
        let mut comm = Comm::from_world(stream, &world, options)?;
        comm.owned = Some(world);
        Ok(comm)
    }

    /// Opens a communicator of the ranks of a world, with a heap of its own: collective. The
    /// program keeps the world and closes it after the communicator.
    ///
    /// # Errors
    /// The errors of [`Comm::from_rank_with`].
    #[track_caller]
    pub fn from_world(
        stream: impl Into<OnStream>,
        world: &World,
        options: &Options,
    ) -> Result<Self> {
        let stream = stream.into();
        let (backend, index) = all_ok(world, "opening a communicator", stream.device())?;
        let mut on = HeapOptions::new().backend(backend);
        on.device = index;
        let world = &world.for_heap(&on).map_err(Error::comm)?;
        let device = index.map(|index| Device::of_rank(backend, index)).transpose();
        let plans = device.map_err(Error::comm).and_then(|device| {
            let ranks = Topology::from(world);
            options.plans(device.map_or(ranks.on(backend), |device| ranks.on_device(device)))
        });
        let plans = all_ok(world, "planning a communicator", plans)?;
        world.agree("communicator", &options.items()).map_err(Error::comm)?;
        let mut opened = options.heap_options(&plans);
        opened.device = index;
        let heap = SymmetricHeap::open(world, opened).map_err(Error::comm)?;
        let mut comm = Comm::make(stream, &heap, &plans)?;
        comm.owns_heap = true;
        Ok(comm)
    }

    /// Makes a communicator in an open heap, next to other operators of the program: collective.
    /// [`Options::footprint`] returns the memory of the heap that the communicator needs.
    ///
    /// # Errors
    /// The errors of an operator's `new`; [`Error::Comm`] for a stream of another heap or device.
    #[track_caller]
    pub fn in_heap(
        stream: impl Into<OnStream>,
        heap: &Arc<SymmetricHeap>,
        options: &Options,
    ) -> Result<Self> {
        let plans = options.plans(heap.into());
        let plans = all_ok(heap.whole_world(), "planning a communicator", plans)?;
        heap.whole_world().agree("communicator", &options.items()).map_err(Error::comm)?;
        Comm::make(stream.into(), heap, &plans)
    }

    #[track_caller]
    fn make(stream: OnStream, heap: &Arc<SymmetricHeap>, plans: &Plans) -> Result<Self> {
        let stream = all_ok(heap.whole_world(), "communicator", stream.open(heap))?;
        let memory = Comm::memory(heap, plans);
        // Each node allocates its memory independently. So the nodes exchange whether they
        // succeeded.
        let told = heap.whole_world().all_ok("communicator", outcome(&memory));
        let (workspace, stage) = memory?;
        let mut operators = Operators { all: vec![], workspace, stage };
        let made = match told {
            Ok(()) => operators.make(heap, plans),
            Err(error) => Err(Error::comm(error)),
        };
        if let Err(error) = made {
            // If one rank fails, all ranks fail and free the memory here. In a broken world `free`
            // fails at once.
            if let Err(error) = operators.free(heap) {
                tracing::warn!(%error, "the memory of a communicator stays allocated");
            }
            return Err(error);
        }
        let heap = heap.clone();
        let operators = Mutex::new(Some(operators));
        let epoch = Mutex::default();
        Ok(Self { heap, owned: None, owns_heap: false, stream, operators, epoch })
    }

    /// Allocates the workspace, and the communicator's two buffers: collective over the ranks of this
    /// node.
    #[track_caller]
    fn memory(heap: &Arc<SymmetricHeap>, plans: &Plans) -> Result<(Arc<Workspace>, Vec<RawSlice>)> {
        let sharing: Vec<&Plan> = plans.sharing.iter().collect();
        let workspace = Workspace::for_plans(heap, &sharing)?;
        let buffer = |name| Request::new(Segment::Data, plans.stage, name);
        match heap.alloc_many("buffers", &[buffer("send buffer"), buffer("receive buffer")]) {
            Ok(stage) => Ok((workspace, stage)),
            Err(error) => {
                if let Err(error) = workspace.free() {
                    tracing::warn!(%error, "the workspace of a communicator stays allocated");
                }
                Err(Error::comm(error))
            }
        }
    }

    /// Index of this rank, from 0. Ranks on several nodes are numbered node by node.
    pub fn rank(&self) -> usize {
        self.heap.whole_world().rank()
    }

    /// Number of ranks, on all nodes.
    pub fn world_size(&self) -> usize {
        self.heap.whole_world().size()
    }

    /// Stream on which the communicator enqueues its calls.
    pub fn stream(&self) -> &Stream {
        &self.stream.ours
    }

    /// Heap of the communicator, in which a program may make further operators and allocate
    /// symmetric memory.
    pub fn heap(&self) -> &Arc<SymmetricHeap> {
        &self.heap
    }

    /// Returns the fault of an enqueued call as an error, if there is one. May be called at any
    /// time. Waits for no call; on a GPU it waits for the copy of one word from the device. Kernels
    /// write a fault to memory of the host before they end. So after a sync of the stream, `check`
    /// sees the faults of all calls that were enqueued before the sync.
    ///
    /// # Errors
    /// The fault, as [`Error::Comm`]. The communicator is then unusable: drop it on all ranks, and
    /// open another one with a new [`Id`].
    pub fn check(&self) -> Result<()> {
        self.heap.check().map_err(Error::comm)
    }

    /// Tells the peers that this rank cannot continue, as [`World::abort`] does. Calls that wait end on
    /// all ranks, and the communicator is then unusable: drop it. A world that the program has made
    /// ends, too. Not collective, and never waits for another rank.
    pub fn abort(&self) {
        self.heap.whole_world().abort();
    }

    /// Aborts like [`Comm::abort`], and tells the peers why, as [`World::abort_with`] does: their
    /// errors show `reason`.
    pub fn abort_with(&self, reason: impl fmt::Display) {
        self.heap.whole_world().abort_with(reason);
    }

    /// Closes the communicator: collective. Waits for its calls on all ranks, and closes the heap
    /// and the world if the communicator opened them. Later calls are refused. After a fault
    /// ([`Comm::check`]) this function waits for no other rank, like [`SymmetricHeap::close`]; the
    /// memory of a communicator in the program's heap then stays allocated until that heap is
    /// closed.
    ///
    /// # Errors
    /// [`Error::Comm`] if the communicator is already closed, if a rank is lost, or if a call of
    /// this rank has failed and no earlier function has reported the failure; in a heap of the program,
    /// if that heap has failed. Local resources are released even then, so another communicator can be
    /// opened with another [`Id`]. The communicator stays open only if it opened its heap and a rank
    /// closes it while its stream is captured.
    #[track_caller]
    pub fn close(&self) -> Result<()> {
        use iris_heap::Error::Closed;
        let mut open = self.lock();
        if open.is_none() {
            return Err(Error::comm(Closed { what: "the communicator" }));
        }
        let freed = if self.owns_heap {
            let closed = self.heap.close().map_err(Error::comm);
            // While a rank captures a stream of the heap, the heap stays open on all ranks.
            if closed.is_err() && !matches!(self.heap.check(), Err(Closed { .. })) {
                return closed;
            }
            closed
        } else {
            open.take().map_or(Ok(()), |operators| operators.free(&self.heap))
        };
        drop(open.take());
        drop(open);
        // The world is closed even if the heap cannot be closed, so that nothing stays open after a
        // rank is lost.
        let closed = match &self.owned {
            Some(world) => world.close().map_err(Error::comm),
            None => Ok(()),
        };
        freed.and(closed)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Operators>> {
        self.operators.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Comm {
    /// Tells the peers that this rank makes no more calls, if the communicator opened its world and
    /// was not closed. Operators of the program in the communicator's heap may keep heap and world
    /// alive.
    fn drop(&mut self) {
        if let Some(world) = self.owned.as_ref().filter(|_| self.lock().is_some()) {
            world.abort();
        }
    }
}

impl Operators {
    /// Makes the operators. All operators except the barrier use the memory of the shared
    /// workspace. Collective: all ranks call it. After an error, `self` has the operators made so
    /// far, so that they can be freed.
    #[track_caller]
    fn make(&mut self, heap: &Arc<SymmetricHeap>, plans: &Plans) -> Result<()> {
        // Avoids a closure, which would hide the caller's location from `#[track_caller]`;
        // collective calls report this location.
        for plan in &plans.sharing {
            self.all.push(Operator::within(plan.op(), &self.workspace, plan)?);
        }
        self.all.push(Operator::new(Op::Barrier, heap, &plans.barrier)?);
        Ok(())
    }

    /// Operators of the collective `op`, one for each element type.
    fn family(&self, op: Op) -> impl Iterator<Item = &Operator> {
        self.all.iter().filter(move |operator| operator.plan().op() == op)
    }

    /// Frees the operators, which returns their memory to the heap; goes on after an error and
    /// returns the first one. Collective: all ranks call it.
    #[track_caller]
    fn free(self, heap: &SymmetricHeap) -> Result<()> {
        let mut outcome = Ok(());
        for operator in self.all {
            outcome = outcome.and(operator.free());
        }
        outcome = outcome.and(self.workspace.free().map_err(Error::from));
        outcome.and(heap.free_many(&self.stage).map_err(Error::comm))
    }
}

/// Collective exchange of success or failure: if any rank passes an error, all ranks fail, each rank
/// that failed with its own error.
#[track_caller]
fn all_ok<T>(world: &World, what: &str, mine: Result<T>) -> Result<T> {
    let told = world.all_ok(what, outcome(&mine));
    let mine = mine?;
    told.map_err(Error::comm)?;
    Ok(mine)
}
