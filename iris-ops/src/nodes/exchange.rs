//! Descriptions of exchanges between nodes. An exchange is a collective over the ranks that have
//! the same local rank, one on each node.

use std::ops::Range;

use iris_heap::DType;

use crate::cost::network::Collective;
use crate::split::split;

/// Collective between nodes, from a block `from` to a block `to`; both consist of slots of the same
/// length. Sums are of elements of the given type, and all nodes get the same bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Exchange {
    /// Stores in `to` the sum over nodes of `from`; `from` and `to` may be the same block.
    AllReduce(DType),
    /// Stores in slot d of `to` the block `from` of node d.
    AllGather,
    /// Stores in slot d of `to` the slot for this node in `from` of node d.
    AllToAll,
    /// Stores in `to` the block `from` of the root's node; `from` of the other nodes is ignored.
    Broadcast {
        /// Index of the root's node.
        root: usize,
    },
    /// Every node sends data to the nodes that are `first` to `first + shifts - 1` places after it,
    /// modulo the number of nodes. The data of node d is stored in slot d of `to`. Other slots keep
    /// their content.
    Shifts {
        /// Smallest distance between sender and receiver, at least 1.
        first: usize,
        /// Number of distances.
        shifts: usize,
        /// Part of the block `from` that a node sends.
        sent: Sent,
    },
}

/// Part of its input that a node sends to another node in a shift, a step in which every node sends
/// to the node that is a fixed number of places after it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Sent {
    /// The whole input, which goes to all receivers. An all-gather consists of such shifts.
    Block,
    /// The part of the input that is meant for the receiver. An all-to-all consists of such shifts.
    Slot,
}

impl Sent {
    /// Range of the bytes of an input of `len` bytes that are sent to node `receiver` of `nodes`.
    pub(crate) fn bytes(self, len: usize, (receiver, nodes): (usize, usize)) -> Range<usize> {
        match self {
            Sent::Block => 0..len,
            Sent::Slot => split(len, nodes, receiver),
        }
    }
}

impl Exchange {
    /// Nodes from which node `node` of `nodes` receives data, in order of the distance, for shifts
    /// by `first` to `first + shifts - 1` nodes.
    pub(crate) fn senders(
        (first, shifts): (usize, usize),
        (node, nodes): (usize, usize),
    ) -> impl Iterator<Item = usize> {
        (first..first + shifts).map(move |distance| (node + nodes - distance) % nodes)
    }

    /// Nodes to which node `node` of `nodes` sends, in order of the distance, for shifts by `first`
    /// to `first + shifts - 1` nodes.
    pub(crate) fn receivers(
        (first, shifts): (usize, usize),
        (node, nodes): (usize, usize),
    ) -> impl Iterator<Item = usize> {
        (first..first + shifts).map(move |distance| (node + distance) % nodes)
    }

    /// Kind of the exchange. The kind of a broadcast does not contain the root.
    pub(crate) fn kind(self) -> Kind {
        match self {
            Exchange::AllReduce(_) => Kind::AllReduce,
            Exchange::AllGather => Kind::AllGather,
            Exchange::AllToAll => Kind::AllToAll,
            Exchange::Broadcast { .. } => Kind::Broadcast,
            Exchange::Shifts { shifts, sent, .. } => Kind::Shifts { shifts, sent },
        }
    }
}

/// Kind of an exchange between nodes: the collective, without its root.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    AllReduce,
    AllGather,
    AllToAll,
    Broadcast,
    /// One message to each of `shifts` other nodes, and one from each of as many nodes.
    Shifts {
        shifts: usize,
        sent: Sent,
    },
}

impl Kind {
    /// Collective of the cost model for an exchange of this kind. The input of the exchange has
    /// `bytes` bytes on each node.
    pub(crate) fn collective(self, bytes: f64, nodes: usize) -> Collective {
        match self {
            Kind::AllReduce => Collective::AllReduce { bytes },
            Kind::AllGather => Collective::AllGather { bytes: bytes * nodes as f64 },
            Kind::AllToAll => Collective::AllToAll { bytes },
            Kind::Broadcast => Collective::Broadcast { bytes },
            // Predicted as an all-to-all, in which a node also sends to several nodes at once. The
            // bytes of an all-to-all include the part that stays on the node.
            Kind::Shifts { shifts, sent } => {
                let parts = shifts as f64 / (nodes as f64 - 1.0).max(1.0);
                let slots = match sent {
                    Sent::Block => nodes as f64,
                    Sent::Slot => 1.0,
                };
                Collective::AllToAll { bytes: bytes * slots * parts }
            }
        }
    }
}

/// Splits an exchange between `nodes` nodes into `blocks` steps, so that a node works on the rows
/// of some nodes while those of others are on their way. Each step is returned with the smallest
/// distance between sender and receiver, and with the number of distances.
pub(crate) fn shift_steps(
    blocks: usize,
    nodes: usize,
    sent: Sent,
) -> impl Iterator<Item = (Exchange, (usize, usize))> {
    let others = nodes - 1;
    let blocks = blocks.clamp(1, others.max(1));
    (0..blocks).map(move |block| {
        let part = split(others, blocks, block);
        let (first, shifts) = (1 + part.start, part.len());
        let exchange = match (blocks, sent) {
            (1, Sent::Block) => Exchange::AllGather,
            _ => Exchange::Shifts { first, shifts, sent },
        };
        (exchange, (first, shifts))
    })
}
