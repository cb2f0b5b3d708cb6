//! What is put under stress.

use iris_heap::Element;
use iris_kernels::build::Hold;
use iris_ops::{Plan, Ranks, Shard, Variant};
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
    /// Every op, variant and shard; and the ring.
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
                    }));
                }
            }
        }
        all.push(Subject::Ring);
        all
    }

    /// Whether peers read or write matrices in it, in the way that is usual, however large they are.
    pub fn moves_matrices(self) -> bool {
        match self {
            Subject::Op { op, variant, place, .. } => {
                Meaning::of(op).exchanges()
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
        let plan = plan(op, variant, ranks, &options)?;
        Ok(Some((plan, Case::new(op, variant, options))))
    }

    const fn op(op: Op, variant: &'static str, place: Place) -> Subject {
        Subject::Op { op, variant, shard: Shard::Rows, place }
    }
}

impl std::fmt::Display for Subject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Subject::Ring => f.pad("ring of versioned locks"),
            Subject::Op { op, variant, shard, place } => {
                let shard = if *shard == Shard::Columns { " columns" } else { "" };
                let place = match place {
                    Place::Same => "",
                    Place::Apart => " apart",
                    Place::Own => " own",
                };
                f.pad(&format!("{op} {variant}{shard}{place}"))
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
