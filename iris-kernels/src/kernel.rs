//! The kernels by name, and how one is launched.

use iris_sync::barrier::Members;

use crate::args::{OpArgs, element_bytes};
use crate::schedule::{Collective, Items};

/// Every kernel of the ops. One launch is one of these over some workgroups.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Kernel {
    /// The product of this rank alone.
    Local,
    /// All-reduce: every rank adds up every tile.
    OneShot,
    /// All-reduce: the owner of a tile adds it up and sends the result to all.
    TwoShot,
    /// Reduce-scatter: the owner of a tile adds it up.
    ReduceScatter,
    /// Accumulating all-reduce: clear.
    Zero,
    /// Accumulating all-reduce: add under a lock.
    AddLocked,
    /// Accumulating all-reduce: add atomically.
    AddAtomic,
    /// Accumulating all-reduce: read the sums.
    Convert,
    /// The RMSNorm of the rows of C, behind what a rank does alone.
    Norm,
    /// All-gather in front of a product: push the shard to all.
    Gather,
    /// All-gather in front of a product: multiply what was pushed.
    Gathered,
    /// All-gather in front of a product: multiply straight from the peers.
    Pull,
    /// All-gather in front of a product: some workgroups fetch, the others multiply.
    Staged,
    /// Every rank's rows of the product, or of the message, to all.
    AllGather,
    /// Every rank's block for each other rank.
    AllToAll,
    /// The root's message to all.
    Broadcast,
    /// The same, each tile by one of those that get it.
    Relay,
    /// A message by a copy engine beside products: before it may copy.
    Open,
    /// The same: this rank's rows to all, where workgroups copy them.
    Copies,
    /// The same: the rows of this rank's partial that each rank owns, to that.
    Blocks,
    /// The same: this rank's rows of the sum to all, behind [`Kernel::Blocks`].
    Results,
    /// The same: the sum of blocks that have come, or one of them as it is.
    Sums,
    /// The same: in front of what reads parts of a rank's rows.
    Gate {
        /// The rank.
        source: u32,
        /// Its first part.
        first: u32,
        /// How many.
        parts: u32,
    },
    /// The same: behind all of it.
    Close,
    /// [`Kernel::OneShot`] of a small message, in words that carry their data.
    OneShotLl,
    /// [`Kernel::ReduceScatter`] of a small message, likewise.
    ReduceScatterLl,
    /// [`Kernel::AllGather`] of a small message, likewise.
    AllGatherLl,
    /// [`Kernel::AllToAll`] of a small message, likewise.
    AllToAllLl,
    /// [`Kernel::Broadcast`] of a small message, likewise.
    BroadcastLl,
    /// The time before a GEMM that writes no trace itself, or the span that ends after it.
    Stamp {
        /// Whether the GEMM is over.
        after: bool,
        /// Rows that the GEMM multiplies.
        rows: u32,
    },
    /// A barrier. `phase` tells two of one call apart; `last` ends the call.
    Barrier {
        /// 0 or 1.
        phase: u32,
        /// Who takes part.
        members: Members,
        /// Whether the call is over after it.
        last: bool,
    },
}

/// The meaning of a launch, or of another step of a call, to other ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Effects {
    /// Peers are told that this rank is in the call.
    pub opens: bool,
    /// Peers' memory or words are written, or peers are waited for.
    pub peers: bool,
    /// The call is over when it is.
    pub ends: bool,
}

impl Effects {
    /// Nothing that a peer sees.
    pub(crate) const NONE: Effects = Effects { opens: false, peers: false, ends: false };
    /// A call in one launch.
    pub(crate) const ALL: Effects = Effects { opens: true, peers: true, ends: true };

    /// Whether a peer can see that it was enqueued: a call that stops after it can never end.
    pub fn are_visible(self) -> bool {
        self.opens || self.peers || self.ends
    }
}

impl Kernel {
    /// Whether it multiplies, in an op that has a product, and so needs shared memory for its tiles. A new kernel
    /// does not compile until it stands in one of the lists.
    pub fn multiplies(self) -> bool {
        use Kernel::*;
        match self {
            Local | OneShot | TwoShot | ReduceScatter | AddLocked | AddAtomic | Gathered | Pull
            | Staged | AllGather => true,
            Norm
            | Zero
            | Convert
            | Gather
            | AllToAll
            | Broadcast
            | Relay
            | Open
            | Copies
            | Blocks
            | Results
            | Sums
            | Gate { .. }
            | Close
            | Stamp { .. }
            | Barrier { .. }
            | OneShotLl
            | ReduceScatterLl
            | AllGatherLl
            | AllToAllLl
            | BroadcastLl => false,
        }
    }

    /// The meaning of a launch to other ranks.
    pub fn effects(self) -> Effects {
        use Kernel::*;
        let peers = Effects { peers: true, ..Effects::NONE };
        match self {
            Local | Norm | Sums | Gate { .. } | Stamp { .. } => Effects::NONE,
            Open => Effects { opens: true, ..Effects::NONE },
            Close => Effects { ends: true, ..Effects::NONE },
            Zero | Gather => Effects { opens: true, ..peers },
            Convert | Gathered => Effects { ends: true, ..peers },
            AddLocked | AddAtomic | Copies | Blocks | Results | Barrier { last: false, .. } => {
                peers
            }
            OneShot
            | TwoShot
            | ReduceScatter
            | Pull
            | Staged
            | AllGather
            | AllToAll
            | Broadcast
            | Relay
            | OneShotLl
            | ReduceScatterLl
            | AllGatherLl
            | AllToAllLl
            | BroadcastLl
            | Barrier { last: true, .. } => Effects::ALL,
        }
    }

    /// The name of the form in which each thread has several items of a message between two ranks, where there is one.
    pub fn name_of_pair(self) -> Option<&'static str> {
        match self {
            Kernel::OneShotLl => Some("one_shot_ll_pair"),
            Kernel::ReduceScatterLl => Some("reduce_scatter_ll_pair"),
            Kernel::AllGatherLl => Some("all_gather_ll_pair"),
            Kernel::AllToAllLl => Some("all_to_all_ll_pair"),
            _ => None,
        }
    }

    /// The items of a message in words that carry their data, of such a kernel.
    pub(crate) fn items(self, args: &OpArgs) -> Option<Items> {
        let collective = match self {
            Kernel::OneShotLl => Collective::AllReduce,
            Kernel::ReduceScatterLl => Collective::ReduceScatter,
            Kernel::AllGatherLl => Collective::AllGather,
            Kernel::AllToAllLl => Collective::AllToAll,
            Kernel::BroadcastLl => Collective::Broadcast { root: args.root },
            _ => return None,
        };
        let reduces = matches!(collective, Collective::AllReduce | Collective::ReduceScatter);
        let dtype = if reduces { args.wire } else { args.c.dtype };
        let per_item = 8 / element_bytes(dtype) as u32;
        Some(Items { collective, size: args.channel.size, rows: args.m, cols: args.n, per_item })
    }

    /// The name in traces and errors.
    pub fn name(self) -> &'static str {
        match self {
            Kernel::Local => "local",
            Kernel::Norm => "norm",
            Kernel::OneShot => "one_shot",
            Kernel::TwoShot => "two_shot",
            Kernel::ReduceScatter => "reduce_scatter",
            Kernel::Zero => "zero",
            Kernel::AddLocked => "add_locked",
            Kernel::AddAtomic => "add_atomic",
            Kernel::Convert => "convert",
            Kernel::Gather => "gather",
            Kernel::Gathered => "gathered",
            Kernel::Pull => "pull",
            Kernel::Staged => "staged",
            Kernel::AllGather => "all_gather",
            Kernel::AllToAll => "all_to_all",
            Kernel::Broadcast => "broadcast",
            Kernel::Relay => "relay",
            Kernel::Open => "open",
            Kernel::Copies => "copies",
            Kernel::Blocks => "blocks",
            Kernel::Results => "results",
            Kernel::Sums => "sums",
            Kernel::Gate { .. } => "gate",
            Kernel::Close => "close",
            Kernel::Stamp { .. } => "stamp",
            Kernel::OneShotLl => "one_shot_ll",
            Kernel::ReduceScatterLl => "reduce_scatter_ll",
            Kernel::AllGatherLl => "all_gather_ll",
            Kernel::AllToAllLl => "all_to_all_ll",
            Kernel::BroadcastLl => "broadcast_ll",
            Kernel::Barrier { .. } => "barrier",
        }
    }
}
