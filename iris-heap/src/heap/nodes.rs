//! A heap opened for a world of several nodes: one heap for each node, and the worlds beyond it.

use std::sync::{Arc, Mutex, MutexGuard};

use super::{HeapOptions, SymmetricHeap};
use crate::abi::MAX_RANKS;
use crate::error::{Error, Result};
use crate::stream::{Event, Stream};
use crate::util::lock;
use crate::world::World;

/// The worlds beyond the node of a heap.
pub(super) struct Nodes {
    /// The world that the heap was opened with.
    all: World,
    /// The ranks with this local rank.
    across: World,
    lane: Mutex<Lane>,
}

/// The order of steps between nodes, the same on all ranks with one local rank.
pub struct Lane {
    /// Stream of the steps between nodes, beside those of the program.
    pub stream: Stream,
    /// Number of the last call.
    pub call: u64,
    /// The end of the last call, if there was one.
    pub last: Option<Event>,
}

impl SymmetricHeap {
    /// Opens one heap for each node of a world.
    #[track_caller]
    pub(super) fn open_on_nodes(world: &World, options: HeapOptions) -> Result<Arc<SymmetricHeap>> {
        world.check_nodes("a heap")?;
        let (local, across) = (world.local()?, world.across()?);
        let heap = SymmetricHeap::open(&local, options);
        let heap = world.all_ok("open on all nodes", heap)?;
        world.watch_for(heap.control());
        heap.control().set_nodes(world.node_names());
        let stream = world.all_ok("open on all nodes", heap.stream())?;
        let lane = Mutex::new(Lane { stream, call: 0, last: None });
        let _ = heap.nodes.set(Nodes { all: world.clone(), across, lane });
        Ok(heap)
    }

    /// The world that the heap was opened with, which may have several nodes. [`SymmetricHeap::world`] is that of
    /// this rank's node.
    pub fn whole_world(&self) -> &World {
        self.nodes.get().map_or(&self.world, |nodes| &nodes.all)
    }

    /// The ranks with this rank's local rank, one for each node; none on one node. Its exchanges are those of
    /// operators, in the order of their calls.
    pub fn across(&self) -> Option<&World> {
        self.nodes.get().map(|nodes| &nodes.across)
    }

    /// The order of steps between nodes, held while a call with such steps is enqueued; none on one node.
    pub fn lane(&self) -> Option<MutexGuard<'_, Lane>> {
        self.nodes.get().map(|nodes| lock(&nodes.lane))
    }

    /// Closes the worlds that were split off for the heap.
    #[track_caller]
    pub(super) fn leave_nodes(&self) -> Result<()> {
        match self.nodes.get() {
            None => Ok(()),
            Some(nodes) => nodes.across.close().and(self.world.close()),
        }
    }
}

/// Checks that a world is no larger than a heap can be.
pub(super) fn check_size(world: &World) -> Result<()> {
    match world.size() {
        1..=MAX_RANKS => Ok(()),
        size => Err(Error::invalid(
            "number of ranks of a heap",
            size,
            format!("1 to {MAX_RANKS} on a node"),
        )),
    }
}
