//! Setup of one rank: a heap with room for given plans, a stream, matrices, and timed calls.
//!
//! ```
//! use iris_heap::{DType, HeapOptions, World};
//! use iris_ops::{AnyOp, Op, Operands, Topology};
//! use iris_testkit::options::{Options, plan};
//! use iris_testkit::rank_setup::{Rig, Room};
//!
//! # fn main() -> anyhow::Result<()> {
//! let options = Options::new(8, 6, 0);
//! World::run_threads(2, |world| -> anyhow::Result<()> {
//!     let plan_of = |ranks| plan(Op::AllReduce, "auto", ranks, &options);
//!     let room = Room::of(world.size(), plan_of)?.matrices(DType::F32, [48, 0, 48]);
//!     let rig = Rig::open(&world, HeapOptions::new().threads(1), room)?;
//!     let [a, b, c] = rig.matrices(DType::F32, [48, 0, 48], [(8, 6), (0, 0), (8, 6)])?;
//!     a.fill(&rig.heap, |row, col| (row + col) as f64)?;
//!     let op = AnyOp::new(&rig.heap, &plan_of(Topology::from(&world))?)?;
//!     let operands = Operands::new(a.matrix()?, b.matrix()?, c.matrix()?);
//!     rig.time(|stream| Ok(op.run(&operands, stream)?))?;
//!     assert_eq!(c.read(&rig.heap)?[7], 4.0);
//!     op.free()?;
//!     Ok(rig.heap.close()?)
//! })?;
//! # Ok(())
//! # }
//! ```

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use iris_heap::{DType, HeapOptions, Stream, SymSlice, SymmetricHeap, World};
use iris_kernels::cpu::now;
use iris_ops::{Plan, Topology};

use crate::matrix::{Matrix, room};

/// Number of bytes that every rank needs in its data segment and its signal segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Room {
    /// Bytes of the data segment.
    pub data: u64,
    /// Bytes of the signal segment, without the part that the heap reserves for itself.
    pub signal: u64,
}

impl Room {
    /// Bytes that the heap reserves for itself at the start of the signal segment, rounded up.
    const RESERVED: u64 = 4096;

    /// Bytes that suffice on every rank: the largest need of the plans that `plan` makes for each
    /// rank of a world of `size` ranks.
    ///
    /// # Errors
    /// Errors of `plan`.
    pub fn of(size: usize, plan: impl Fn(Topology) -> Result<Plan>) -> Result<Room> {
        let mut largest = Room::default();
        for rank in 0..size {
            largest = largest.or(Room::from(&plan(Topology::new(rank, size))?));
        }
        Ok(largest)
    }

    /// Adds room for matrices of type `dtype`; `elements` has the number of elements of each.
    #[must_use]
    pub fn matrices(self, dtype: DType, elements: impl IntoIterator<Item = usize>) -> Room {
        let rooms = elements.into_iter().map(|elements| room(dtype, elements));
        Room { data: rooms.fold(self.data, u64::saturating_add), ..self }
    }

    /// Room for two users of memory that exist at the same time: the sum of both rooms.
    #[must_use]
    pub fn and(self, other: Room) -> Room {
        let sum = u64::saturating_add;
        Room { data: sum(self.data, other.data), signal: sum(self.signal, other.signal) }
    }

    /// Room for two users of memory that exist one after the other: the larger of both rooms.
    #[must_use]
    pub fn or(self, other: Room) -> Room {
        Room { data: self.data.max(other.data), signal: self.signal.max(other.signal) }
    }
}

impl From<&Plan> for Room {
    fn from(plan: &Plan) -> Room {
        Room { data: plan.data_bytes(), signal: plan.signal_bytes() }
    }
}

/// Heap of a rank, and a stream of it, as most tests and programs need them.
pub struct Rig {
    /// Heap of this rank.
    pub heap: Arc<SymmetricHeap>,
    /// Stream on which [`Rig::time`] enqueues.
    pub stream: Stream,
}

impl Rig {
    /// Opens a heap with these options that is large enough for `room`. Collective in `world`.
    ///
    /// # Errors
    /// Errors of [`SymmetricHeap::open`].
    #[track_caller]
    pub fn open(world: &World, options: HeapOptions, room: Room) -> Result<Rig> {
        let signal = room.signal.saturating_add(Room::RESERVED);
        let heap = SymmetricHeap::open(world, options.data_bytes(room.data).signal_bytes(signal))?;
        Ok(Rig { stream: heap.stream()?, heap })
    }

    /// Allocates A, B and C with room for `most` elements each, the same numbers on all ranks;
    /// `shapes` are this rank's (rows, columns) of each. Collective.
    ///
    /// # Errors
    /// Errors of [`SymmetricHeap::alloc`].
    #[track_caller]
    pub fn matrices(
        &self,
        dtype: DType,
        most: [usize; 3],
        shapes: [(usize, usize); 3],
    ) -> Result<[Matrix; 3]> {
        let matrix = |at: usize| Matrix::new(&self.heap, dtype, most[at], shapes[at]);
        Ok([matrix(0)?, matrix(1)?, matrix(2)?])
    }

    /// Times `calls`: microseconds from a host barrier of all ranks until the work that `calls`
    /// enqueues is complete. Collective.
    ///
    /// # Errors
    /// Errors of `calls`, of the host barrier and of the stream.
    #[track_caller]
    pub fn time(&self, calls: impl FnOnce(&Stream) -> Result<()>) -> Result<f64> {
        self.heap.local_world().barrier()?;
        let begun = Instant::now();
        calls(&self.stream)?;
        self.stream.sync()?;
        Ok(begun.elapsed().as_secs_f64() * 1e6)
    }
}

/// Test of barriers: data that every member writes on its stream before a barrier must be visible
/// to all members after the barrier.
pub struct Crossing {
    word: SymSlice<i32>,
    calls: i32,
    /// Time of the host's monotonic clock, in nanoseconds, at which this rank was about to call the
    /// barrier.
    arrived: u64,
}

impl Crossing {
    /// Allocates the data of the test, one i32 per rank. Collective.
    ///
    /// # Errors
    /// Errors of [`SymmetricHeap::zeros`].
    #[track_caller]
    pub fn new(heap: &SymmetricHeap) -> Result<Crossing> {
        Ok(Crossing { word: heap.zeros(1)?, calls: 0, arrived: 0 })
    }

    /// Sleeps for `late` on the host, then enqueues the write of this barrier's number into this
    /// rank's word. Call this function before each barrier.
    ///
    /// # Errors
    /// Errors of [`SymmetricHeap::write_on`].
    pub fn before(&mut self, heap: &SymmetricHeap, stream: &Stream, late: Duration) -> Result<()> {
        self.calls += 1;
        std::thread::sleep(late);
        self.arrived = now();
        Ok(heap.write_on(stream, self.word, &[self.calls])?)
    }

    /// Checks that no rank has left the barrier before the last rank of all nodes arrived. The
    /// check compares times of the common host's clock, because the memory of other nodes cannot be
    /// read. Collective.
    #[track_caller]
    fn on_all_nodes(&self, heap: &SymmetricHeap) -> Result<()> {
        let times = [self.arrived, now()].map(u64::to_le_bytes).concat();
        let all = heap.whole_world().allgather(&times)?;
        let time = |rank: &[u8], at: usize| {
            let bytes = rank.get(8 * at..8 * at + 8).and_then(<[u8]>::first_chunk);
            bytes.copied().map(u64::from_le_bytes).context("a rank sent no times")
        };
        let times = |at| all.iter().map(|rank| time(rank, at)).collect::<Result<Vec<_>>>();
        let last = times(0)?.into_iter().max().unwrap_or(0);
        let first = times(1)?.into_iter().min().unwrap_or(u64::MAX);
        ensure!(
            last <= first,
            "barrier {}: a rank left it {} us before the last rank arrived",
            self.calls,
            (last - first) / 1000
        );
        Ok(())
    }

    /// Checks that the numbers that all `members`, which are ranks of this node, wrote before the
    /// barrier are visible. Call this function after the barrier has completed. In a world of
    /// several nodes, which must be simulated on one host, call it on all ranks; it then also
    /// checks that no rank has left the barrier before the last rank arrived.
    ///
    /// # Errors
    /// A member's write is not visible, or a rank left the barrier too early.
    #[track_caller]
    pub fn after(
        &self,
        heap: &SymmetricHeap,
        members: impl IntoIterator<Item = usize>,
    ) -> Result<()> {
        if heap.whole_world().nodes() > 1 {
            self.on_all_nodes(heap)?;
        }
        let calls = self.calls;
        for member in members {
            let seen = heap.read_from(self.word, member)?[0];
            // A member that has already continued may have written the number of the next barrier.
            ensure!(
                (calls..=calls + 1).contains(&seen),
                "after barrier {calls}, rank {member} was seen before barrier {seen}"
            );
        }
        Ok(())
    }

    /// Frees the data of the test. Collective.
    ///
    /// # Errors
    /// Errors of [`SymmetricHeap::free`].
    #[track_caller]
    pub fn free(self, heap: &SymmetricHeap) -> Result<()> {
        Ok(heap.free(self.word)?)
    }
}
