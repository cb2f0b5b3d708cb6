//! Kernels of the operators, with their names and their effects on other ranks.

use iris_sync::barrier::Members;

use crate::args::{OpArgs, element_bytes};
use crate::schedule::{Collective, Items};

/// Kernel of an operator. A launch runs one kernel on a number of workgroups.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Kernel {
    /// Kernel of one rank without communication: the product, or for a collective the copy of its
    /// input.
    Local,
    /// All-reduce in which every rank reduces every tile.
    OneShot,
    /// All-reduce in which the owner of a tile reduces it and sends the result to all ranks.
    TwoShot,
    /// Reduce-scatter in which the owner of a tile reduces it.
    ReduceScatter,
    /// Accumulating all-reduce, step 1: set the workspace to zero.
    Zero,
    /// Accumulating all-reduce, step 2: add partials under a lock.
    AddLocked,
    /// Accumulating all-reduce, step 2: add partials atomically.
    AddAtomic,
    /// Accumulating all-reduce, step 3: read the sums into C.
    Convert,
    /// RMSNorm of the rows of C. It is launched after the last step of the call that writes to this
    /// rank's C.
    Norm,
    /// All-gather before a product, step 1: push the shard to all ranks.
    Gather,
    /// All-gather before a product, step 2: multiply the pushed shards.
    Gathered,
    /// All-gather before a product, in one step: multiply the peers' shards directly from their
    /// memory.
    Pull,
    /// All-gather before a product, in one step: some workgroups fetch units of A and the others
    /// multiply.
    Staged,
    /// All-gather of each rank's rows of the product, or of the message.
    AllGather,
    /// All-to-all: block j of each rank's rows goes to rank j.
    AllToAll,
    /// Broadcast of the root's message to all ranks.
    Broadcast,
    /// Broadcast in which one receiver of each tile, the relay, forwards the tile to the other
    /// ranks.
    Relay,
    /// First launch of a message by copy engines: waits until all peers have entered the call, so
    /// that the copy engine may write to their memory.
    Open,
    /// Copy step of a message by copy engines, done by workgroups in place of a copy engine. The
    /// workgroups copy this rank's rows to all ranks.
    Copies,
    /// First copy step of a sum by copy engines, done by workgroups in place of a copy engine. Each
    /// rank gets the rows of this rank's partial result that it owns.
    Blocks,
    /// Second copy step of a sum by copy engines, done by workgroups in place of a copy engine. It
    /// follows [`Kernel::Blocks`] and copies this rank's rows of the sum to all ranks.
    Results,
    /// Sum step of a message by copy engines: adds up the blocks received from all ranks. If there
    /// is only one block, it is copied.
    Sums,
    /// Wait of a message by copy engines: a kernel that lets the stream continue only when the
    /// given parts of a rank's rows have arrived.
    Gate {
        /// Rank from which the parts come.
        source: u32,
        /// Number of the first part that is awaited.
        first: u32,
        /// Number of parts that are awaited.
        parts: u32,
    },
    /// Last launch of a message by copy engines, which ends the call.
    Close,
    /// [`Kernel::OneShot`] for small messages, by the LL protocol (data and flag in one word).
    OneShotLl,
    /// [`Kernel::ReduceScatter`] for small messages, by the LL protocol.
    ReduceScatterLl,
    /// [`Kernel::AllGather`] for small messages, by the LL protocol.
    AllGatherLl,
    /// [`Kernel::AllToAll`] for small messages, by the LL protocol.
    AllToAllLl,
    /// [`Kernel::Broadcast`] for small messages, by the LL protocol.
    BroadcastLl,
    /// [`Kernel::TwoShot`] for small messages, by the LL protocol.
    TwoShotLl,
    /// [`Kernel::Relay`] for small messages, by the LL protocol.
    RelayLl,
    /// Kernel that writes a time stamp into the trace, before or after a GEMM that writes no trace
    /// itself. The stamp after the GEMM ends the GEMM's trace span.
    Stamp {
        /// Whether the stamp is the one after the GEMM.
        after: bool,
        /// Number of rows that the GEMM multiplies.
        rows: u32,
    },
    /// Barrier of ranks on the device.
    Barrier {
        /// Number of the barrier in its call, 0 or 1.
        phase: u32,
        /// Ranks that take part in the barrier.
        members: Members,
        /// Whether the barrier ends the call.
        last: bool,
    },
}

/// Effects of a launch, or of another step of a call, on other ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Effects {
    /// Whether the step tells peers that this rank has entered the call.
    pub opens: bool,
    /// Whether the step writes to peers (data or synchronisation words), or waits for peers.
    pub peers: bool,
    /// Whether the step ends the call.
    pub ends: bool,
}

impl Effects {
    /// Effects of a step that no other rank can observe.
    pub(crate) const NONE: Effects = Effects { opens: false, peers: false, ends: false };
    /// Effects of a launch that is a whole call: it opens the call, accesses peers, and ends the
    /// call.
    pub(crate) const ALL: Effects = Effects { opens: true, peers: true, ends: true };

    /// Whether a peer can observe that the step was enqueued. If the host fails to enqueue the rest
    /// of a call after such a step, the call can never end.
    pub fn are_visible(self) -> bool {
        self.opens || self.peers || self.ends
    }
}

impl Kernel {
    /// Whether the kernel multiplies tiles if the operator has a product, and so needs shared
    /// memory for slabs of A and B. The match is exhaustive: this function compiles only if every
    /// kernel is in one of its two lists.
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
            | BroadcastLl
            | TwoShotLl
            | RelayLl => false,
        }
    }

    /// Effects of a launch of the kernel on other ranks.
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
            | TwoShotLl
            | RelayLl
            | Barrier { last: true, .. } => Effects::ALL,
        }
    }

    /// Name of the kernel for messages that consist of packs (48 bytes in four words of 128 bits);
    /// `None` if the kernel has no such form.
    pub fn name_of_packs(self) -> Option<&'static str> {
        match self {
            Kernel::OneShotLl => Some("one_shot_ll_packs"),
            Kernel::ReduceScatterLl => Some("reduce_scatter_ll_packs"),
            Kernel::AllGatherLl => Some("all_gather_ll_packs"),
            Kernel::AllToAllLl => Some("all_to_all_ll_packs"),
            Kernel::BroadcastLl => Some("broadcast_ll_packs"),
            Kernel::TwoShotLl => Some("two_shot_ll_packs"),
            Kernel::RelayLl => Some("relay_ll_packs"),
            _ => None,
        }
    }

    /// Division of the kernel's message into items of the LL protocol; `None` for kernels that do
    /// not use this protocol.
    pub(crate) fn items(self, args: &OpArgs) -> Option<Items> {
        let collective = match self {
            Kernel::OneShotLl => Collective::AllReduce,
            Kernel::ReduceScatterLl => Collective::ReduceScatter,
            Kernel::AllGatherLl => Collective::AllGather,
            Kernel::AllToAllLl => Collective::AllToAll,
            Kernel::BroadcastLl => Collective::Broadcast { root: args.root },
            Kernel::TwoShotLl => Collective::TwoShot { root: None },
            Kernel::RelayLl => Collective::TwoShot { root: Some(args.root) },
            _ => return None,
        };
        let dtype = if collective.reduces() { args.wire } else { args.c.dtype };
        let per_item = 8 / element_bytes(dtype) as u32;
        Some(Items { collective, size: args.channel.size, rows: args.m, cols: args.n, per_item })
    }

    /// Name of the kernel in traces and errors.
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
            Kernel::TwoShotLl => "two_shot_ll",
            Kernel::RelayLl => "relay_ll",
            Kernel::Barrier { .. } => "barrier",
        }
    }
}
