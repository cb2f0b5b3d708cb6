//! What is put under stress.

use iris_heap::{BackendKind, DType, DeviceInfo, Element};
use iris_kernels::build::{Hold, Without};
use iris_kernels::gemm::Gemm;
use iris_ops::{Library, Plan, Ranks, Shard, TileShape, Variant};
use iris_sync::Access;

use super::Setting;
use crate::oracle::Meaning;
use crate::suite::{Case, Op, Options, plan};

/// What is put under stress.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Subject {
    /// An op.
    Op {
        /// Which.
        op: Op,
        /// Which variant.
        variant: &'static str,
        /// How A is split, where it is gathered.
        shard: Shard,
        /// Where C lies.
        place: Place,
        /// Whether copy engines, and products of whole matrices that wait for peers and store to them, do
        /// it, as they do in a program; else kernels of messages do, which can be held up at more places.
        whole: bool,
    },
    /// A ring of ranks with a versioned lock beside each message.
    Ring,
}

/// Where the result of an op lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// At the same place of the heap on all ranks, so that peers may write it directly.
    Same,
    /// Elsewhere in the heap on every other rank: each rank finds that out in each call.
    Apart,
    /// As the caller's own memory, which no peer knows.
    Own,
}

impl Subject {
    /// Every op, variant and shard; those that products of whole matrices take part in; and the ring.
    pub fn all() -> Vec<Subject> {
        let mut all = Vec::new();
        for op in Op::ALL {
            for variant in op.variants().into_iter().map(Variant::name) {
                // Where peers may write results, every way is tried.
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

    /// Why these ranks cannot run it, if they cannot.
    ///
    /// # Errors
    /// Those of a driver that is there and does not work.
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

    /// Ranks that a product stores to, and itself.
    const MOST_RANKS: usize = 8;

    /// Whether a device has the kernels that it is about.
    fn has_kernels(self, device: &DeviceInfo) -> bool {
        match self {
            Subject::Op { whole: true, .. } => Gemm::is_there_for(device),
            Subject::Op { op, variant, .. } => {
                op.variants_on(device.into()).iter().any(|it| it.name() == variant)
            }
            Subject::Ring => true,
        }
    }

    /// Whether products of whole matrices take part in it.
    pub(super) fn is_whole(self) -> bool {
        matches!(self, Subject::Op { whole: true, .. })
    }

    /// The types of matrices that it is run with.
    pub fn types(self) -> [DType; 2] {
        match self.is_whole() {
            true => [DType::F16, DType::BF16],
            false => [DType::F32, DType::BF16],
        }
    }

    /// How many calls it gets where so many are asked for: of large matrices one takes as long as many.
    pub fn calls(self, asked: usize) -> usize {
        if self.is_whole() { asked.div_ceil(20) } else { asked }
    }

    /// M, N, K where products of whole matrices take part: tiles of 256 columns by clusters of two, or of 64
    /// columns of few rows, fill the device once, and sums are exact in 16 bits. And by how many rows calls
    /// differ: where A is split by rows, those of each rank stay whole tiles. So many ranks may share a device, of
    /// which each has its part.
    pub(super) fn whole_shape(
        self,
        ranks: usize,
        sharing: usize,
    ) -> Option<((usize, usize, usize), usize)> {
        const UNIT: usize = 256;
        // A tile is stored in the shadow of the next from so many slabs of 64 on.
        const DEPTH: usize = 5 * 64;
        let Subject::Op { op, variant, shard, whole: true, .. } = self else { return None };
        if matches!(variant, "unfused_ll" | "unfused_one_shot") {
            // A tile for each multiprocessor, or nearly each.
            return Some(((64, 128 / sharing * 64, DEPTH), 7));
        }
        let (m, n) = ((16 / ranks).max(1) * UNIT * ranks, 4 * UNIT);
        Some(match (op, shard) {
            (Op::AllGatherMatmul, Shard::Rows) => ((m, n, DEPTH), UNIT * ranks),
            // Of each rank as many slabs.
            (Op::AllGatherMatmul, _) => ((m, n, DEPTH.next_multiple_of(64 * ranks)), 67),
            _ => ((m, n, DEPTH), 67),
        })
    }

    /// The tile of a message of few rows that a product does itself: on a part of a device the plan has another.
    pub(super) fn exchanged_tile(self) -> Option<TileShape> {
        match self {
            Subject::Op { variant: "unfused_one_shot", whole: true, .. } => {
                Some(TileShape { m: 64, n: 64 })
            }
            _ => None,
        }
    }

    /// Whether peers read or write matrices in it, in the way that is usual, however large they are.
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

    /// Its plan, if it is an op.
    pub(super) fn plan<T: Element>(
        self,
        ranks: Ranks,
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
        let options = options.first_call(setting.first_call).injected(setting.injected);
        // So that ours multiplies on any number of ranks.
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

    /// What products of whole matrices take part in.
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

/// Every wait of the protocols, a subject that must be found wrong without it, and the place where
/// that is certain: who is held up there has not yet done, or not yet read, what the wait is about,
/// while the others, who should wait for it, go on.
///
/// | without | who is late | what the others do meanwhile |
/// |---|---|---|
/// | CreditLoad | a receiver that has seen a tile's signal | the root is two calls on and writes the same slot again |
/// | EntryLoad | a rank before it fills C with NaN | its peers write their rows into its C, and NaN goes over them |
/// | SignalLoad | a rank that has entered and sent nothing | its peers add up what an older call left in their inboxes |
/// | DoneLoad | a rank that has entered and read nothing | its peers end the call and fill A for the next |
/// | BarrierLoad | a rank that has entered and pushed nothing | its peers multiply what an older call left |
/// | VersionLoad | a rank before it sends its message | the next one reads its own place |
/// | LockTake | every rank, having read a sum | each writes its own over those of the others |
/// | FlagLoad | the workgroups that fetch | the others multiply what is in the buffer |
/// | LlLoad | a rank that has the credit and sent nothing | its peers add up what an older call left in the words |
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

/// The waits that are not those of the kernels above: of gates, which stand in front of what reads what engines
/// or products brought, and of the products of whole matrices that wait for it themselves. Where such a product
/// takes part, which kernels go without the wait: the others keep it.
///
/// | who goes without | who is late | what the others do meanwhile |
/// |---|---|---|
/// | gates | a rank that has entered, whose A has not left | its peers multiply what an older call left |
/// | the product, of an A that comes | the same | the same, by the same launch |
/// | gates | a rank that has entered, whose partial has not left | its peers add up what an older call left |
/// | the product, of a sum | a rank that has entered and multiplied nothing | the same, by the same launch |
/// | gates, behind such a product | a rank that has its sums, and has not stored them | its peers end the call without them |
/// | the same, of a C that ranks own | a rank that has entered and multiplied nothing | the same |
/// | the product of few rows, by words or by signals | a rank that has the credit, or has entered, and sent nothing | its peers add up what an older call left |
pub const MORE_WAITS: [(Access, Option<Without>, Subject, Hold); 10] = {
    use {Access::LlLoad, Access::SignalLoad, Without::Others, Without::Products};
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
