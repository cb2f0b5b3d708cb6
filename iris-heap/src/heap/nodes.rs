//! Heap of a world of several nodes: one symmetric heap per node, with the worlds that connect the
//! nodes.

use std::sync::{Arc, Mutex, MutexGuard};

use super::{HeapOptions, Opening, SymmetricHeap};
use crate::abi::MAX_RANKS;
use crate::control::NodeEngine;
use crate::error::{Error, Result};
use crate::stream::{Event, Stream};
use crate::util::{lock, unsupported};
use crate::world::network::machine;
use crate::world::{PeerAccess, World};

/// Worlds that connect the node of a heap with the other nodes.
pub(super) struct Nodes {
    /// World in which the heap was opened, with the nodes of the heap.
    all: World,
    /// World of the ranks with this rank's local rank, one per node.
    across: World,
    stream: Mutex<NodeStream>,
}

/// Queue of the steps between nodes (exchanges of data with other nodes). Its order is the same on
/// all ranks that have equal local ranks.
pub struct NodeStream {
    /// Stream for steps between nodes, separate from the streams of the program.
    pub stream: Stream,
    /// Number of the last call with steps between nodes.
    pub call: u64,
    /// Event after the last call with steps between nodes, and the number of the capture that the
    /// call is part of; `None` if there was no such call.
    pub last: Option<(Event, Option<u64>)>,
}

impl World {
    /// Returns this world, divided into the nodes that a heap with `options` would have:
    /// collective. These nodes have fewer ranks than the nodes of this world if GPUs cannot access
    /// each other's memory (see [`SymmetricHeap::open`]). A program that makes plans before it
    /// opens a heap makes them from the returned world. Only the backend and the device of
    /// `options` matter.
    ///
    /// The result is another handle of the same ranks, like a clone: closing one closes both.
    ///
    /// ```
    /// # use iris_heap::{Error, HeapOptions, World};
    /// World::run_threads(2, |world| -> Result<(), Error> {
    ///     let world = world.for_heap(&HeapOptions::new())?;
    ///     assert_eq!(world.nodes(), 1); // ranks on the CPU share memory
    ///     world.close()
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// Errors of the device; [`Error::PeerFailed`] if another rank could not open its device;
    /// [`Error::Unsupported`] for nodes with unequal numbers of ranks; errors of
    /// [`World::barrier`].
    #[track_caller]
    pub fn for_heap(&self, options: &HeapOptions) -> Result<World> {
        self.check_nodes("a heap")?;
        let (_, access) = choose_device(self, options.clone())?;
        Ok(self.grouped_by_access(&access)?.unwrap_or_else(|| self.clone()))
    }
}

impl SymmetricHeap {
    /// Opens one heap per node of a world. If devices of a node cannot access each other's memory,
    /// all nodes are divided into smaller ones first.
    #[track_caller]
    pub(super) fn open_on_nodes(world: &World, options: HeapOptions) -> Result<Arc<SymmetricHeap>> {
        world.check_nodes("a heap")?;
        let (options, access) = choose_device(world, options)?;
        let grouped = world.grouped_by_access(&access)?;
        let world = grouped.as_ref().unwrap_or(world);
        let (local, across) = (world.local()?, world.across()?);
        let heap = SymmetricHeap::open_node(&local, options).and_then(|opening| match opening {
            Opening::Heap(heap) => Ok(heap),
            Opening::Grouped(..) => Err(unsupported(
                "a heap on this node",
                "its devices have lost access to each other's memory since the ranks were grouped into \
                 nodes: open the heap anew",
            )),
        });
        let heap = world.all_ok("open on all nodes", heap)?;
        heap.control().set_nodes(world.node_names(), world.node());
        world.watch_for(heap.control());
        let stream = world.all_ok("open on all nodes", heap.stream())?;
        let stream = Mutex::new(NodeStream { stream, call: 0, last: None });
        let _ = heap.nodes.set(Nodes { all: world.clone(), across, stream });
        Ok(heap)
    }

    /// World of all ranks, with the nodes of the heap: the ranks of a node share memory. It is the
    /// world in which the heap was opened, but may have more nodes (see [`SymmetricHeap::open`]).
    /// [`SymmetricHeap::local_world`] is the world of this rank's node.
    pub fn whole_world(&self) -> &World {
        self.nodes.get().map_or(&self.world, |nodes| &nodes.all)
    }

    /// World of the ranks that have this rank's local rank, one per node; `None` if there is one
    /// node. Only operators make exchanges in this world, in the order of their calls.
    pub fn across(&self) -> Option<&World> {
        self.nodes.get().map(|nodes| &nodes.across)
    }

    /// Locks the queue of steps between nodes while a call with such steps is enqueued; `None` if
    /// there is one node.
    pub fn node_stream(&self) -> Option<MutexGuard<'_, NodeStream>> {
        self.nodes.get().map(|nodes| lock(&nodes.stream))
    }

    /// Sets the engine that runs the steps between nodes, for a heap on a GPU; later calls have no
    /// effect.
    pub fn set_node_engine(&self, engine: Arc<dyn NodeEngine>) {
        self.memory.control.set_engine(engine);
    }

    /// Engine that [`SymmetricHeap::set_node_engine`] has set.
    pub fn node_engine(&self) -> Option<&Arc<dyn NodeEngine>> {
        self.memory.control.engine()
    }

    /// Launches a graph with calls of this heap's operators by `launch`, unless the heap has failed
    /// or is closed.
    ///
    /// If a heap of several GPU nodes fails, it aborts the communicator of its steps between nodes.
    /// A graph that contains such steps must not run afterwards, because it would use freed memory.
    /// This function refuses to launch the graph then, and no thread aborts the communicator while
    /// `launch` runs. The library cannot refuse a graph that is launched by other means.
    ///
    /// `launch` must only enqueue the graph: it must not wait for the heap's streams, close the
    /// heap or call this function.
    ///
    /// ```
    /// # use iris_heap::{HeapOptions, SymmetricHeap, UniqueId, World};
    /// # let heap = SymmetricHeap::open(&World::from_unique_id(&UniqueId::new()?, 0, 1)?, HeapOptions::new())?;
    /// # struct Graph;
    /// # impl Graph { fn launch(&self) -> Result<(), iris_heap::Error> { Ok(()) } }
    /// # let graph = Graph;
    /// heap.launch_graph(|| graph.launch())??;
    /// # Ok::<_, iris_heap::Error>(())
    /// ```
    ///
    /// # Errors
    /// Errors of [`SymmetricHeap::check`], but the abort word on the device is not read. If there
    /// is an error, `launch` is not called.
    pub fn launch_graph<T>(&self, launch: impl FnOnce() -> T) -> Result<T> {
        drop(self.open_state()?);
        let control = &self.memory.control;
        control.attend();
        let _launching = control.launching();
        drop(self.open_state()?);
        control.check_without_engine()?;
        Ok(launch())
    }

    /// Closes the worlds (of this node, and across nodes) that the heap's world was split into for the
    /// heap.
    #[track_caller]
    pub(super) fn leave_nodes(&self) -> Result<()> {
        match self.nodes.get() {
            None => Ok(()),
            Some(nodes) => {
                let launching = self.memory.control.launching();
                let engine = self.node_engine().map_or(Ok(()), |engine| engine.close());
                drop(launching);
                let across = match nodes.across.close() {
                    // The world across nodes is closed already if this rank gave up a call; the
                    // error was returned to the program then.
                    Err(Error::Closed { .. }) => Ok(()),
                    closed => closed,
                };
                let local = self.world.close();
                // If the close failed because ranks were in different collective calls, the world
                // is still open, and peers would go on waiting in it.
                for (world, closed) in [(&nodes.across, &across), (&self.world, &local)] {
                    if closed.is_err() {
                        world.abort();
                    }
                }
                engine.and(across).and(local)
            }
        }
    }
}

/// Chooses the GPU of each rank by the rank's number on its machine. The rank's number on its node
/// cannot be used, because if one machine has several nodes, ranks of different nodes would get the
/// same GPU. Also returns the encoded [`PeerAccess`] of each rank's device.
#[track_caller]
fn choose_device(world: &World, mut options: HeapOptions) -> Result<(HeapOptions, Vec<Vec<u8>>)> {
    if options.backend.traits().host_threads {
        return Ok((options, vec![PeerAccess::default().encode(); world.size()]));
    }
    let before = if world.nodes() == 1 {
        world.local_rank()
    } else {
        let machine = machine();
        let all = world.allgather(machine.as_bytes())?;
        all[..world.rank()].iter().filter(|&other| other == machine.as_bytes()).count()
    };
    let backend = options.backend;
    let chosen = backend.device_count().and_then(|count| {
        let device = options.device.unwrap_or(before % count);
        backend.peer_access(device)
    });
    let (access, all) = world.all_ok_with("open on all nodes", chosen, PeerAccess::encode)?;
    options.device = Some(access.index);
    Ok((options, all))
}

/// Checks that a world has at most as many ranks as a heap can have.
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
