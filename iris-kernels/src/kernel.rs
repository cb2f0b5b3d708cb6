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
    /// All-reduce that accumulates partials in a workspace, step 1: set the workspace to zero.
    Zero,
    /// All-reduce that accumulates partials in a workspace, step 2: add partials under a lock.
    AddLocked,
    /// All-reduce that accumulates partials in a workspace, step 2: add partials atomically.
    AddAtomic,
    /// All-reduce that accumulates partials in a workspace, step 3: convert the sums into C.
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
    /// All-gather before a product, in one step: some workgroups fetch units of A (pieces that are
    /// fetched at once) and the others multiply.
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
    /// Copies of this rank's rows to all ranks, done by workgroups in place of a copy engine.
    Copies,
    /// First copies of an all-reduce or reduce-scatter, done by workgroups in place of a copy
    /// engine. Each peer gets those rows of this rank's partial result that the peer owns.
    Blocks,
    /// Second copies of an all-reduce, done by workgroups in place of a copy engine. This rank's
    /// rows of the sum go to all ranks. The copies follow those of [`Kernel::Blocks`].
    Results,
    /// Sum of the blocks that copy engines have delivered from all ranks. If there is only one
    /// block, it is copied.
    Sums,
    /// Wait for copy engines: the stream continues only when the given parts of a peer's rows have
    /// arrived.
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
    /// [`Kernel::OneShotLl`] of weighted sums: a row of the message is the sum of the weighted parts of
    /// a row of A, and up to two matrices are added to the result. With one rank it communicates with
    /// nobody.
    OneShotCombineLl,
    /// [`Kernel::ReduceScatterLl`] of weighted sums, like [`Kernel::OneShotCombineLl`].
    ReduceScatterCombineLl,
    /// [`Kernel::AllGather`] for small messages, by the LL protocol.
    AllGatherLl,
    /// All-gather of a list of tensors as one small message, by the LL protocol. With one rank it
    /// copies the tensors.
    AllGatherListLl,
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

/// Properties that a kernel has in every launch; a row of the table in `Kernel::row`.
struct Row {
    /// Name of the kernel in traces and errors.
    name: &'static str,
    /// Whether the kernel multiplies tiles if the operator has a product.
    multiplies: bool,
    effects: Effects,
    /// For a kernel with the LL protocol: the name of its version for messages that consist of
    /// packs (units of 48 bytes), if there is one, and the collective of the message. Otherwise
    /// `None`.
    ll: Option<(Option<&'static str>, Collective)>,
}

impl Kernel {
    /// Properties of the kernel. A collective with a root has root 0 here, because the table does
    /// not know the call's root.
    fn row(self) -> Row {
        use Kernel::*;
        const NONE: Effects = Effects::NONE;
        const ALL: Effects = Effects::ALL;
        const PEERS: Effects = Effects { peers: true, ..NONE };
        const OPENS: Effects = Effects { opens: true, ..NONE };
        const ENDS: Effects = Effects { ends: true, ..NONE };
        const ENTERS: Effects = Effects { opens: true, ..PEERS };
        const LEAVES: Effects = Effects { ends: true, ..PEERS };
        let row = |name, multiplies, effects| Row { name, multiplies, effects, ll: None };
        let ll = |name, packs, collective| Row {
            ll: Some((Some(packs), collective)),
            ..row(name, false, ALL)
        };
        let pairs =
            |name, collective| Row { ll: Some((None, collective)), ..row(name, false, ALL) };
        match self {
            Local => row("local", true, NONE),
            OneShot => row("one_shot", true, ALL),
            TwoShot => row("two_shot", true, ALL),
            ReduceScatter => row("reduce_scatter", true, ALL),
            Zero => row("zero", false, ENTERS),
            AddLocked => row("add_locked", true, PEERS),
            AddAtomic => row("add_atomic", true, PEERS),
            Convert => row("convert", false, LEAVES),
            Norm => row("norm", false, NONE),
            Gather => row("gather", false, ENTERS),
            Gathered => row("gathered", true, LEAVES),
            Pull => row("pull", true, ALL),
            Staged => row("staged", true, ALL),
            AllGather => row("all_gather", true, ALL),
            AllToAll => row("all_to_all", false, ALL),
            Broadcast => row("broadcast", false, ALL),
            Relay => row("relay", false, ALL),
            Open => row("open", false, OPENS),
            Copies => row("copies", false, PEERS),
            Blocks => row("blocks", false, PEERS),
            Results => row("results", false, PEERS),
            Sums => row("sums", false, NONE),
            Gate { .. } => row("gate", false, NONE),
            Close => row("close", false, ENDS),
            Stamp { .. } => row("stamp", false, NONE),
            Barrier { last: true, .. } => row("barrier", false, ALL),
            Barrier { last: false, .. } => row("barrier", false, PEERS),
            OneShotLl => ll("one_shot_ll", "one_shot_ll_packs", Collective::AllReduce),
            ReduceScatterLl => {
                ll("reduce_scatter_ll", "reduce_scatter_ll_packs", Collective::ReduceScatter)
            }
            AllGatherLl => ll("all_gather_ll", "all_gather_ll_packs", Collective::AllGather),
            AllGatherListLl => pairs("all_gather_list_ll", Collective::AllGather),
            OneShotCombineLl => pairs("one_shot_combine_ll", Collective::AllReduce),
            ReduceScatterCombineLl => pairs("reduce_scatter_combine_ll", Collective::ReduceScatter),
            AllToAllLl => ll("all_to_all_ll", "all_to_all_ll_packs", Collective::AllToAll),
            BroadcastLl => {
                ll("broadcast_ll", "broadcast_ll_packs", Collective::Broadcast { root: 0 })
            }
            TwoShotLl => ll("two_shot_ll", "two_shot_ll_packs", Collective::TwoShot { root: None }),
            RelayLl => ll("relay_ll", "relay_ll_packs", Collective::TwoShot { root: Some(0) }),
        }
    }

    /// Whether the kernel multiplies tiles if the operator has a product, and so needs shared
    /// memory for slabs of A and B.
    pub fn multiplies(self) -> bool {
        self.row().multiplies
    }

    /// Effects of a launch of the kernel on other ranks.
    pub fn effects(self) -> Effects {
        self.row().effects
    }

    /// Name of the kernel for messages that consist of packs (48 bytes in four words of 128 bits);
    /// `None` if the kernel has no such form.
    pub fn name_of_packs(self) -> Option<&'static str> {
        self.row().ll?.0
    }

    /// Division of the kernel's message into items (eight bytes each) of the LL protocol; `None`
    /// for kernels that do not use this protocol.
    pub(crate) fn items(self, args: &OpArgs) -> Option<Items> {
        let collective = match self.row().ll?.1 {
            Collective::Broadcast { .. } => Collective::Broadcast { root: args.root },
            Collective::TwoShot { root: Some(_) } => Collective::TwoShot { root: Some(args.root) },
            collective => collective,
        };
        let (size, rows) = (args.channel.size, args.m);
        if self == Kernel::AllGatherListLl {
            return Some(Items { collective, size, rows, cols: args.list_items(), per_item: 1 });
        }
        let dtype = if collective.reduces() { args.wire } else { args.c.dtype };
        let per_item = 8 / element_bytes(dtype) as u32;
        Some(Items { collective, size, rows, cols: args.n, per_item })
    }

    /// Name of the kernel in traces and errors.
    pub fn name(self) -> &'static str {
        self.row().name
    }
}
