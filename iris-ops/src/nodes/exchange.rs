//! Exchanges between nodes: collectives over the ranks with the same local rank, as data.

use iris_heap::DType;

use crate::cost::network::Collective;
use crate::split::split;

/// Collective between nodes, from a block `from` to a block `to`; both consist of slots of the same
/// length. Sums are of elements of the given type, and all nodes get the same bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Exchange {
    /// Stores in `to` the sum over nodes of `from`; both may be the same block.
    AllReduce(DType),
    /// Stores in slot d of `to` the block `from` of node d.
    AllGather,
    /// Stores in `to` the sum over nodes of their slots for this node in `from`.
    ReduceScatter(DType),
    /// Stores in slot d of `to` the slot for this node in `from` of node d.
    AllToAll,
    /// Stores in `to` the block `from` of the root's node; `from` of the other nodes is ignored.
    Broadcast {
        /// Index of the root's node.
        root: usize,
    },
    /// Stores in slot d of `to` the block `from` of node d, for each node d that is `first` to
    /// `first + shifts - 1` nodes before this one, modulo the number of nodes; the other slots are
    /// left. These are parts of a gather.
    Shifts {
        /// Smallest distance between sender and receiver, at least 1.
        first: usize,
        /// Number of distances.
        shifts: usize,
    },
}

impl Exchange {
    /// Nodes whose blocks are stored by node `node` of `nodes`, in order of the distance, for
    /// shifts by `first` to `first + shifts - 1` nodes.
    pub(crate) fn senders(
        (first, shifts): (usize, usize),
        (node, nodes): (usize, usize),
    ) -> impl Iterator<Item = usize> {
        (first..first + shifts).map(move |distance| (node + nodes - distance) % nodes)
    }

    /// Kind of the exchange. The kind of a broadcast does not contain the root.
    pub(crate) fn kind(self) -> Kind {
        match self {
            Exchange::AllReduce(_) => Kind::AllReduce,
            Exchange::AllGather => Kind::AllGather,
            Exchange::ReduceScatter(_) => Kind::ReduceScatter,
            Exchange::AllToAll => Kind::AllToAll,
            Exchange::Broadcast { .. } => Kind::Broadcast,
            Exchange::Shifts { shifts, .. } => Kind::Shifts(shifts),
        }
    }
}

/// Kind of an exchange between nodes: the collective, without its root.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    AllReduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    Broadcast,
    /// Part of a gather that brings the blocks of this many other nodes.
    Shifts(usize),
}

impl Kind {
    /// Collective of the cost model for an exchange of this kind. The input of the exchange has
    /// `bytes` bytes on each node.
    pub(crate) fn collective(self, bytes: f64, nodes: usize) -> Collective {
        match self {
            Kind::AllReduce => Collective::AllReduce { bytes },
            Kind::AllGather => Collective::AllGather { bytes: bytes * nodes as f64 },
            Kind::ReduceScatter => Collective::ReduceScatter { bytes },
            Kind::AllToAll => Collective::AllToAll { bytes },
            Kind::Broadcast => Collective::Broadcast { bytes },
            // Messages to several nodes at once, as in an all-to-all, which also counts the part
            // that stays on the node.
            Kind::Shifts(shifts) => {
                let parts = shifts as f64 / (nodes as f64 - 1.0).max(1.0);
                Collective::AllToAll { bytes: bytes * nodes as f64 * parts }
            }
        }
    }
}

/// Exchanges of a gather between `nodes` nodes that is cut into `blocks` steps: an all-gather, or
/// shifts, each with the first distance between nodes and the number of distances. With several
/// steps, a node works on the rows of some nodes while those of others arrive.
pub(crate) fn gather_steps(
    blocks: usize,
    nodes: usize,
) -> impl Iterator<Item = (Exchange, (usize, usize))> {
    let others = nodes - 1;
    let blocks = blocks.clamp(1, others.max(1));
    (0..blocks).map(move |block| {
        let part = split(others, blocks, block);
        let (first, shifts) = (1 + part.start, part.len());
        let exchange = match blocks {
            1 => Exchange::AllGather,
            _ => Exchange::Shifts { first, shifts },
        };
        (exchange, (first, shifts))
    })
}
