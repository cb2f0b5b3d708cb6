//! A heap opened for a world of several nodes: one heap for each node, and the worlds beyond it.

use std::sync::Arc;

use super::{HeapOptions, SymmetricHeap};
use crate::abi::MAX_RANKS;
use crate::error::{Error, Result};
use crate::world::World;

/// The worlds beyond the node of a heap.
pub(super) struct Nodes {
    /// The world that the heap was opened with.
    all: World,
    /// The ranks with this local rank.
    across: World,
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
        let _ = heap.nodes.set(Nodes { all: world.clone(), across });
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
