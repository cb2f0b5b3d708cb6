//! Subjects of the stress test: ops with their variants, and a ring.

use iris_heap::{BackendKind, DType, DeviceInfo, Element};
use iris_kernels::build::{Hold, OmittedWait};
use iris_kernels::gemm::Gemm;
use iris_ops::{Library, Plan, Shard, TileShape, Topology, Variant};
use iris_sync::Access;

use super::Setting;
use crate::oracle::Meaning;
use crate::suite::{Case, Op, Options, plan};

/// Subject of the stress test: work that is run in many calls with random delays.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Subject {
    /// Operator with one of its variants.
    Op {
        /// Operator to call.
        op: Op,
        /// Name of the operator's variant.
        variant: &'static str,
        /// Dimension of A that is split over the ranks, if A is gathered.
        shard: Shard,
        /// Location of C in memory.
        place: Place,
        /// Whether copy engines and whole-matrix GEMMs that communicate take part, as in normal
        /// use. If not, kernels that only communicate replace them, because these kernels can be
        /// stalled at more places.
        whole: bool,
    },
    /// Ring of ranks: each rank sends messages, guarded by a versioned lock, to the next rank.
    Ring,
}

/// Location of an op's result C.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// Same offset in the heap on all ranks, so that peers may write it directly.
    Same,
    /// Two different offsets in the heap, alternating from rank to rank; ranks find out in each
    /// call that the offsets of peers differ.
    Apart,
    /// External memory, which peers cannot write.
    Own,
}

impl Subject {
    /// All subjects: every op, variant and shard, subjects with whole-matrix GEMMs, and the ring.
    pub fn all() -> Vec<Subject> {
        let mut all = Vec::new();
        for op in Op::ALL {
            for variant in op.variants().into_iter().map(Variant::name) {
                // Variants that may write results directly into peers' C are tested with every
                // location of C.
                let places: &[Place] = match variant {
                    "two_shot" | "push" => &[Place::Same, Place::Apart, Place::Own],
                    _ => &[Place::Same],
                };
                for &shard in Meaning::of(op).shards() {
                    all.extend(places.iter().map(|&place| Subject::Op {
                        op,
                        variant,
                        shard,
                        place,
                        whole: false,
                    }));
                }
            }
        }
        all.extend(Self::WHOLE);
        all.push(Subject::Ring);
        all
    }

    /// Reason why `ranks` ranks of `backend` cannot run the subject; `None` if they can.
    ///
    /// # Errors
    /// Errors of a driver that exists but does not work.
    pub fn missing(self, backend: BackendKind, ranks: usize) -> anyhow::Result<Option<String>> {
        let devices = backend.devices()?;
        let mut unable = devices.iter().filter(|device| !self.has_kernels(device));
        Ok(if let Some(device) = unable.next() {
            Some(format!("there are no such products on {}, only on sm_90", device.name))
        } else if !self.is_whole() {
            None
        } else if ranks > Self::MOST_RANKS {
            Some(format!("such products are for {} ranks at most", Self::MOST_RANKS))
        } else {
            None
        })
    }

    /// Maximum number of ranks of a GEMM that stores to peers, itself included.
    const MOST_RANKS: usize = 8;

    /// Whether `device` has the kernels that the subject tests.
    fn has_kernels(self, device: &DeviceInfo) -> bool {
        match self {
            Subject::Op { whole: true, .. } => Gemm::is_there_for(device),
            Subject::Op { op, variant, .. } => {
                op.variants_on(device.into()).iter().any(|it| it.name() == variant)
            }
            Subject::Ring => true,
        }
    }

    /// Whether copy engines or whole-matrix GEMMs that communicate take part in the subject.
    pub(super) fn is_whole(self) -> bool {
        matches!(self, Subject::Op { whole: true, .. })
    }

    /// Whether the subject sends larger messages as packs (groups of four 128-bit LL words).
    pub(super) fn has_packs(self) -> bool {
        matches!(self, Subject::Op { variant, whole: false, .. } if Setting::has_packs(variant))
    }

    /// Pair of element types with which the subject is run.
    pub fn types(self) -> [DType; 2] {
        match self.is_whole() {
            true => [DType::F16, DType::BF16],
            false => [DType::F32, DType::BF16],
        }
    }

    /// Number of calls of the subject if the user asks for `asked` calls; a twentieth of `asked`
    /// for subjects with large matrices, whose calls take longer.
    pub fn calls(self, asked: usize) -> usize {
        if self.is_whole() { asked.div_ceil(20) } else { asked }
    }

    /// M, N, K and row granularity for subjects with whole-matrix GEMMs; `None` for others. C has
    /// about as many tiles (256 columns in clusters of two, or 64 columns for few rows) as fit on
    /// the device at once, and sums are exact in 16-bit types. If A is split by rows, each rank's
    /// rows are whole tiles. `sharing` is the number of ranks that share a device; the tiles are
    /// for a rank's share of it.
    pub(super) fn whole_shape(
        self,
        ranks: usize,
        sharing: usize,
    ) -> Option<((usize, usize, usize), usize)> {
        const UNIT: usize = 256;
        // Smallest K (five slabs of 64) for which the epilogue of a tile overlaps the mainloop of
        // the next tile.
        const DEPTH: usize = 5 * 64;
        let Subject::Op { op, variant, shard, whole: true, .. } = self else { return None };
        if matches!(variant, "unfused_ll" | "unfused_one_shot") {
            // The shape has nearly as many tiles (64 columns) as the rank's share of the device has
            // multiprocessors.
            return Some(((64, 128 / sharing * 64, DEPTH), 7));
        }
        let (m, n) = ((16 / ranks).max(1) * UNIT * ranks, 4 * UNIT);
        Some(match (op, shard) {
            (Op::AllGatherMatmul, Shard::Rows) => ((m, n, DEPTH), UNIT * ranks),
            // K is a multiple of 64 times the number of ranks, so that all ranks get the same
            // number of slabs.
            (Op::AllGatherMatmul, _) => ((m, n, DEPTH.next_multiple_of(64 * ranks)), 67),
            _ => ((m, n, DEPTH), 67),
        })
    }

    /// Tile of subjects in which a GEMM of few rows sends its own result. It must be set
    /// explicitly, because the plan chooses another tile if ranks share a device.
    pub(super) fn exchanged_tile(self) -> Option<TileShape> {
        match self {
            Subject::Op { variant: "unfused_one_shot", whole: true, .. } => {
                Some(TileShape { m: 64, n: 64 })
            }
            _ => None,
        }
    }

    /// Whether peers read or write whole matrices of any size in place, with C at the same offset
    /// on all ranks. Only these subjects can be tested with matrices of more than 2 GiB.
    pub fn moves_matrices(self) -> bool {
        match self {
            Subject::Op { op, variant, place, whole, .. } => {
                Meaning::of(op).exchanges()
                    && !whole
                    && !matches!(variant, "spinlock" | "atomic" | "one_shot" | "ll")
                    && place == Place::Same
            }
            Subject::Ring => false,
        }
    }

    /// Plan and test case of the subject; `None` for the ring, which is no op.
    pub(super) fn plan<T: Element>(
        self,
        ranks: Topology,
        setting: &Setting,
    ) -> anyhow::Result<Option<(Plan, Case)>> {
        let Subject::Op { op, variant, shard, .. } = self else { return Ok(None) };
        let (m, n, k) = setting.shape;
        let (m, n) = if op == Op::Barrier { (0, 0) } else { (m, n) };
        let k = if op.multiplies() { k } else { 0 };
        let mut options = Options::new(m, n, k).dtype(T::DTYPE).backend(setting.backend);
        options.tile = setting.tile;
        if setting.shape == Setting::SMALL {
            options = options.columns_per_flag(8);
        }
        let options = options.shard(shard).root(ranks.size - 1);
        let options =
            options.first_call(setting.first_call).fault_injection(setting.fault_injection);
        // The whole-matrix GEMMs are iris's own and not a vendor's library, because only iris's
        // GEMMs run for any number of ranks.
        let options = if self.is_whole() { options.library(Library::Ours) } else { options };
        let plan = plan(op, variant, ranks, &options)?;
        Ok(Some((plan, Case::new(op, variant, options))))
    }

    const fn op(op: Op, variant: &'static str, place: Place) -> Subject {
        Subject::Op { op, variant, shard: Shard::Rows, place, whole: false }
    }

    const fn whole(op: Op, variant: &'static str, shard: Shard, place: Place) -> Subject {
        Subject::Op { op, variant, shard, place, whole: true }
    }

    /// Subjects with copy engines or whole-matrix GEMMs that communicate.
    const WHOLE: [Subject; 12] = {
        use {Op::AllGatherMatmul as Gather, Place::Own, Place::Same, Shard::Columns, Shard::Rows};
        [
            Subject::whole(Gather, "copy_engine", Rows, Same),
            Subject::whole(Gather, "copy_engine", Columns, Same),
            Subject::whole(Op::MatmulReduceScatter, "copy_engine", Rows, Same),
            Subject::whole(Op::MatmulReduceScatter, "epilogue", Rows, Same),
            Subject::whole(Op::MatmulAllReduce, "epilogue", Rows, Same),
            Subject::whole(Op::MatmulAllReduce, "epilogue", Rows, Own),
            Subject::whole(Op::MatmulAllGather, "epilogue", Rows, Same),
            Subject::whole(Op::MatmulAllGather, "epilogue", Rows, Own),
            Subject::whole(Op::MatmulAllReduce, "unfused_ll", Rows, Same),
            Subject::whole(Op::MatmulAllReduce, "unfused_one_shot", Rows, Same),
            Subject::whole(Op::MatmulAllReduce, "copy_engine", Rows, Same),
            Subject::whole(Op::MatmulAllGather, "copy_engine", Rows, Same),
        ]
    };
}

impl std::fmt::Display for Subject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Subject::Ring => f.pad("ring of versioned locks"),
            Subject::Op { op, variant, shard, place, whole } => {
                let whole = if *whole { " whole" } else { "" };
                let shard = if *shard == Shard::Columns { " columns" } else { "" };
                let place = match place {
                    Place::Same => "",
                    Place::Apart => " apart",
                    Place::Own => " own",
                };
                f.pad(&format!("{op} {variant}{shard}{place}{whole}"))
            }
        }
    }
}

/// Waits of the protocols, each with a subject and a stall. Without the wait, results of the
/// subject must be wrong. The stall makes this certain: the stalled workgroup has not yet done the
/// work, or not yet read the data, that the wait protects. Other ranks, which should wait for this
/// workgroup, continue.
///
/// | without | stalled | meanwhile |
/// |---|---|---|
/// | CreditLoad | a receiver that has seen a tile's signal | the root is two calls ahead and overwrites the slot |
/// | EntryLoad | a rank before it fills C with NaN | peers write their rows into its C, then NaN overwrites them |
/// | SignalLoad | a rank that has entered and sent nothing | peers add data of an older call in their inboxes |
/// | DoneLoad | a rank that has entered and read nothing | peers end the call and fill A for the next |
/// | BarrierLoad | a rank that has entered and pushed nothing | peers multiply data of an older call |
/// | VersionLoad | a rank before it sends its message | the next rank reads its own memory too early |
/// | LockTake | every rank after it has read a sum | each rank overwrites the sums of the others |
/// | FlagLoad | workgroups that fetch | the others multiply old data of the staging buffer |
/// | LlLoad | a rank that has the credit and sent nothing | peers add data of an older call in the words |
pub const WAITS: [(Access, Subject, Hold); 9] = [
    (Access::CreditLoad, Subject::op(Op::Broadcast, "push", Place::Own), Hold::Received),
    (Access::EntryLoad, Subject::op(Op::AllGather, "push", Place::Same), Hold::Filling),
    (Access::SignalLoad, Subject::op(Op::MatmulAllReduce, "one_shot", Place::Same), Hold::Entered),
    (Access::DoneLoad, Subject::op(Op::AllGatherMatmul, "pull", Place::Same), Hold::Entered),
    (Access::BarrierLoad, Subject::op(Op::AllGatherMatmul, "baseline", Place::Same), Hold::Entered),
    (Access::VersionLoad, Subject::Ring, Hold::Filling),
    (Access::LockTake, Subject::op(Op::AllReduce, "spinlock", Place::Same), Hold::Adding),
    (Access::FlagLoad, Subject::op(Op::AllGatherMatmul, "staged", Place::Same), Hold::Fetching),
    (Access::LlLoad, Subject::op(Op::AllReduce, "ll", Place::Same), Hold::Entered),
];

/// Further waits, listed like [`WAITS`]: waits inside whole-matrix GEMMs, and waits of gates. A
/// gate is a launch that waits for data from copy engines or GEMMs, so that the next launch can
/// read the data. If a whole-matrix GEMM takes part, the entry says which kernels lack the wait;
/// all other kernels keep it.
///
/// | without the wait | stalled | meanwhile |
/// |---|---|---|
/// | gates | a rank that has entered, whose A has not been sent | peers multiply data of an older call |
/// | GEMM that waits for parts of A | a rank that has entered, whose A has not been sent | peers multiply data of an older call, in the same launch |
/// | gates | a rank that has entered, whose partial has not been sent | peers add data of an older call |
/// | GEMM that adds partials | a rank that has entered and multiplied nothing | peers add data of an older call, in the same launch |
/// | gates after such a GEMM | a rank that has its sums and has not stored them | peers end the call without them |
/// | gates, if ranks own rows of C | a rank that has entered and multiplied nothing | peers end the call without its rows |
/// | GEMM of few rows, by LL words or by signals | a rank that has the credit, or has entered, and sent nothing | peers add data of an older call |
pub const MORE_WAITS: [(Access, Option<OmittedWait>, Subject, Hold); 10] = {
    use {Access::LlLoad, Access::SignalLoad, OmittedWait::Others, OmittedWait::Products};
    let [rows, columns, copied, scattered, summed, _, gathered, _, words, few, ..] = Subject::WHOLE;
    let gate = Subject::op(Op::AllGatherMatmul, "copy_engine", Place::Same);
    [
        (SignalLoad, None, gate, Hold::Entered),
        (SignalLoad, Some(Products), rows, Hold::Entered),
        (SignalLoad, Some(Products), columns, Hold::Entered),
        (SignalLoad, Some(Others), copied, Hold::Entered),
        (SignalLoad, Some(Products), scattered, Hold::Entered),
        (SignalLoad, Some(Products), summed, Hold::Entered),
        (SignalLoad, Some(Others), summed, Hold::Storing),
        (SignalLoad, Some(Others), gathered, Hold::Entered),
        (LlLoad, Some(Products), words, Hold::Entered),
        (SignalLoad, Some(Products), few, Hold::Entered),
    ]
};
