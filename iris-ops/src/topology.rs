//! Rank, number of ranks and device: the properties of a world or a heap that planning needs.

use std::sync::Arc;

use iris_heap::{BackendKind, Settings, SymmetricHeap, World};

use crate::cost::network::NetworkRate;
use crate::device::Device;
use crate::tune::data::Tuning;

/// Rank, world size and device: the properties of a world or a heap that planning needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Topology {
    /// Index of this rank, less than `size`.
    pub rank: usize,
    /// Number of ranks of the world.
    pub size: usize,
    /// Device of this rank. All ranks must have the same kind of device.
    pub device: Device,
    /// Index of this rank among the ranks of its host; a heap picks its GPU by this index.
    local_rank: usize,
    /// Number of nodes. All nodes have the same number of ranks, which are numbered node by node.
    nodes: usize,
    /// Line rate in Gbit/s of the network port that each rank has.
    network_gbit: u32,
    /// Tuning data of the device; `None` until it has been looked up.
    pub(crate) tuning: Option<&'static Tuning>,
}

impl Topology {
    /// Makes rank `rank` of `size` ranks, on the CPU.
    pub fn new(rank: usize, size: usize) -> Self {
        Self {
            rank,
            size,
            device: Device::host(),
            local_rank: rank,
            nodes: 1,
            network_gbit: Settings::default().network_gbit,
            tuning: None,
        }
    }

    /// Moves the ranks to another backend. The device is the GPU that a heap would use for this
    /// rank, as the driver describes it. Without a driver, the device is assumed
    /// ([`Device::assumed`]). Ranks that already are on this backend keep their device.
    #[must_use]
    pub fn on(self, backend: BackendKind) -> Self {
        if self.device.backend == backend {
            return self;
        }
        let device = Device::of_rank(backend, self.local_rank).unwrap_or_else(|error| {
            let device = Device::assumed(backend);
            tracing::debug!(%error, %device, "no driver describes the device of plans");
            device
        });
        self.on_device(device)
    }

    /// Places the ranks on `nodes` nodes, with the same number of ranks on each.
    #[must_use]
    pub fn on_nodes(self, nodes: usize) -> Self {
        Self { nodes: nodes.max(1), ..self }
    }

    /// Sets the line rate in Gbit/s of the network port that each rank has, by which calls over
    /// several nodes are cut into blocks. Default: 400 or, for the ranks of a world, the value of
    /// `IRIS_NETWORK_GBIT`.
    #[must_use]
    pub fn network_gbit(self, gbit: u32) -> Self {
        Self { network_gbit: gbit.max(1), ..self }
    }

    /// Network between the nodes.
    pub(crate) fn network(&self) -> NetworkRate {
        NetworkRate::of_gbit(f64::from(self.network_gbit))
    }

    /// Number of nodes of the world.
    pub fn nodes(&self) -> usize {
        self.nodes
    }

    /// Returns the topology of this rank's node alone: `rank` is the index within the node, and
    /// `size` the number of ranks of the node.
    pub(crate) fn local(self) -> Self {
        let size = (self.size / self.nodes).max(1);
        Self { rank: self.rank % size, size, nodes: 1, ..self }
    }

    /// Index of the node on which this rank is.
    pub(crate) fn node(&self) -> usize {
        self.rank / self.local().size
    }

    /// Replaces the device, and drops the tuning data of the former device.
    #[must_use]
    pub fn on_device(self, device: Device) -> Self {
        Self { device, tuning: None, ..self }
    }

    /// Makes plans use the built-in tuning data instead of the measurements of `iris tune` on this
    /// machine.
    #[must_use]
    pub fn untuned(self) -> Self {
        self.with(Tuning::of(self.device))
    }

    /// Makes plans use the built-in tuning data and send no packs (48-byte units of the LL
    /// protocol). For comparison with benchmark records of versions that had no packs.
    #[doc(hidden)]
    #[must_use]
    pub fn without_packs(self) -> Self {
        self.with(Tuning::without_packs(self.device))
    }

    /// Makes plans use the tuning data `tuning`.
    pub(crate) fn with(self, tuning: &'static Tuning) -> Self {
        Self { tuning: Some(tuning), ..self }
    }

    /// Tuning data by which plans are made: the data that was looked up, otherwise the built-in
    /// data of the device.
    pub(crate) fn tuning(&self) -> &'static Tuning {
        self.tuning.unwrap_or_else(|| Tuning::of(self.device))
    }
}

impl From<&World> for Topology {
    /// Ranks of a world. They are on the CPU, because a world has no devices; [`Topology::on`]
    /// moves them to a GPU. For GPUs that may not have access to each other's memory, pass the
    /// world that [`World::for_heap`] returns, whose nodes are those of a heap.
    fn from(world: &World) -> Self {
        let local_rank = world.local_rank();
        let (nodes, network_gbit) = (world.nodes(), world.settings().network_gbit);
        Self { local_rank, nodes, network_gbit, ..Self::new(world.rank(), world.size()) }
    }
}

impl From<&SymmetricHeap> for Topology {
    /// Ranks of the heap's world, on the heap's device.
    fn from(heap: &SymmetricHeap) -> Self {
        Self::from(heap.whole_world()).on_device(heap.into())
    }
}

impl From<&Arc<SymmetricHeap>> for Topology {
    fn from(heap: &Arc<SymmetricHeap>) -> Self {
        Self::from(&**heap)
    }
}
