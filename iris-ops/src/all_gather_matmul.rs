//! A is split over the ranks, and every rank multiplies all of it: the first half of a
//! sequence-parallel layer.

use iris_heap::Stream;
use iris_kernels::Kernel;
use iris_kernels::schedule::{self, Units};
use iris_sync::barrier::Members;

use crate::check::{check_product, part, shaped};
use crate::config::{Options, Ranks, Shard, StagingLayout};
use crate::core::{Call, Core};
use crate::op::{common_methods, variants};
use crate::{MatmulArgs, Plan, Result};

const NAME: &str = "all_gather_matmul";

variants! {
    /// Push the shards to all, barrier, multiply. The only one that takes A in any memory.
    Baseline = "baseline",
    /// Multiply straight from the peers' shards; A must be symmetric.
    Pull = "pull",
    /// Some workgroups fetch remote parts of A into a buffer and raise a flag for each, the others
    /// multiply and wait for the part they need; A must be symmetric.
    Staged = "staged",
}

/// C (`m` x `n`, each rank its own) = A (`m` x `k`, gathered) B (`k` x `n`, each rank its own),
/// plus a bias. `n` may differ between ranks.
///
/// A rank has the rows `split(m, size, rank)` of A, or with [`Shard::Columns`] the columns
/// `split(k, size, rank)`. In the variants that pull, A has the same offset on all ranks, its rows
/// have no gaps or are equally far apart on all ranks, and the call ends on the stream only when all
/// peers have read it.
pub struct AllGatherMatmul {
    core: Core,
}

common_methods!(AllGatherMatmul);

impl AllGatherMatmul {
    /// Plan for calls of up to `options.m` rows.
    pub fn plan(ranks: Ranks, options: &Options, variant: Variant) -> Result<Plan> {
        options.check(NAME, ranks)?;
        let variant = match variant {
            Variant::Auto => crate::tune::all_gather_matmul(ranks, options),
            chosen => chosen,
        };
        let mut plan = Plan::begin(NAME, variant.name(), ranks, options, ((false, true), true))?;
        if plan.alone() {
            return Ok(plan);
        }
        let group = options.columns_per_flag().min(options.k.max(1));
        plan.needs.k_group = group as u32;
        let bytes = (options.m * options.k * options.dtype.size()) as u64;
        match variant {
            Variant::Pull => {}
            Variant::Staged => {
                plan.needs.flags = units(&plan).units();
                plan.needs.workspace = bytes;
            }
            Variant::Baseline | Variant::Auto => {
                plan.needs.places = 1;
                plan.needs.sources = 1;
                plan.needs.slot = bytes.next_multiple_of(128);
            }
        }
        Ok(plan)
    }

    /// Enqueue a call on `stream`.
    pub fn run(&mut self, args: &MatmulArgs, stream: &Stream) -> Result<()> {
        let plan = self.core.plan();
        let (m, n, k) = (args.c.rows(), plan.options.n, plan.options.k);
        shaped(NAME, "C", &args.c, (m, n), "M x N of the plan")?;
        let shard = match plan.options.shard {
            Shard::Rows => (part(plan, m), k),
            Shard::Columns => (m, part(plan, k)),
        };
        shaped(NAME, "A", &args.a, shard, "this rank's shard of M x K")?;
        check_product(plan, args)?;
        let pulls = !plan.alone() && plan.variant != Variant::Baseline.name();
        let call = Call { pulls, direct: false, ..Call::product(m, args) };
        if plan.alone() || pulls {
            return self.core.run(stream, &[(plan.kernel(), None)], &call);
        }
        let members = Members::all(plan.size());
        let barrier = Kernel::Barrier { phase: 0, members, last: false };
        let kernels = [(Kernel::Gather, None), (barrier, Some(1)), (Kernel::Gathered, None)];
        self.core.run(stream, &kernels, &call)
    }
}

/// The units of the largest call.
fn units(plan: &Plan) -> Units {
    let options = &plan.options;
    Units {
        shard: match options.shard {
            Shard::Rows => schedule::Shard::Rows,
            Shard::Columns => schedule::Shard::Columns,
        },
        size: plan.size(),
        m: options.m as u32,
        k: options.k as u32,
        tile_m: plan.tile.m as u32,
        k_group: plan.needs.k_group,
        m_first: options.staging == StagingLayout::MContiguous,
    }
}
