//! A rank among others, and its device: all that planning needs to know of a world or a heap.

use std::sync::Arc;

use iris_heap::{BackendKind, SymmetricHeap, World};

use crate::device::Device;
use crate::tune::data::Tuning;

/// A rank among others, and its device: all that planning needs to know of a world or a heap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ranks {
    /// This rank.
    pub rank: usize,
    /// Number of ranks.
    pub size: usize,
    /// Device of this rank, which all ranks have alike.
    pub device: Device,
    /// Number of this rank among those of its host, which decides on its GPU.
    local_rank: usize,
    /// Number of nodes that the ranks are on, as many on each, numbered node by node.
    nodes: usize,
    /// What is known of the device, once that was looked up.
    pub(crate) tuning: Option<&'static Tuning>,
}

impl Ranks {
    /// Rank `rank` of `size`, on the CPU.
    pub fn new(rank: usize, size: usize) -> Self {
        Self { rank, size, device: Device::host(), local_rank: rank, nodes: 1, tuning: None }
    }

    /// Moves the ranks to another kind of device: to the GPU of this host that a heap takes for this rank unless told
    /// otherwise, as the driver describes it. If there is none, a device is assumed ([`Device::assumed`]). Ranks that are
    /// on this kind of device stay as they are.
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

    /// Splits the ranks over this many nodes, as many on each.
    #[must_use]
    pub fn on_nodes(self, nodes: usize) -> Self {
        Self { nodes: nodes.max(1), ..self }
    }

    /// Number of nodes.
    pub fn nodes(&self) -> usize {
        self.nodes
    }

    /// This rank among those of its node.
    pub(crate) fn local(self) -> Self {
        let size = (self.size / self.nodes).max(1);
        Self { rank: self.rank % size, size, nodes: 1, ..self }
    }

    /// Node of this rank.
    pub(crate) fn node(&self) -> usize {
        self.rank / self.local().size
    }

    /// Moves the ranks to this device.
    #[must_use]
    pub fn on_device(self, device: Device) -> Self {
        Self { device, tuning: None, ..self }
    }

    /// Leaves out what `iris tune` has measured on this machine: plans go by built-in figures.
    #[must_use]
    pub fn untuned(self) -> Self {
        self.with(Tuning::of(self.device))
    }

    /// The same with this known of the device.
    pub(crate) fn with(self, tuning: &'static Tuning) -> Self {
        Self { tuning: Some(tuning), ..self }
    }

    /// What is known of the device.
    pub(crate) fn tuning(&self) -> &'static Tuning {
        self.tuning.unwrap_or_else(|| Tuning::of(self.device))
    }
}

impl From<&World> for Ranks {
    /// The ranks of a world, on the CPU, because a world knows no devices. [`Ranks::on`] takes them elsewhere.
    fn from(world: &World) -> Self {
        let local_rank = world.local_rank();
        let nodes = world.nodes();
        Self { local_rank, nodes, ..Self::new(world.rank(), world.size()) }
    }
}

impl From<&SymmetricHeap> for Ranks {
    /// The ranks of a heap, on its device.
    fn from(heap: &SymmetricHeap) -> Self {
        Self::from(heap.whole_world()).on_device(heap.into())
    }
}

impl From<&Arc<SymmetricHeap>> for Ranks {
    fn from(heap: &Arc<SymmetricHeap>) -> Self {
        Self::from(&**heap)
    }
}
