//! C = sum over ranks of A B, each rank getting some rows of C: the second half of a
//! sequence-parallel layer.

use iris_heap::Stream;

use crate::check::{check_product, part, shaped};
use crate::config::{Options, Ranks};
use crate::core::{Call, Core};
use crate::op::{common_methods, variants};
use crate::{MatmulArgs, Plan, Result};

const NAME: &str = "matmul_reduce_scatter";

variants! {
    /// Tiles are pushed to the rank that owns their rows, which adds its own first, then the
    /// others in ascending order: the same bits in every run.
    Push = "push",
}

/// C (rows `split(m, size, rank)` x `n`) = those rows of the sum over ranks of A (`m` x `k`)
/// B (`k` x `n`), plus a bias added once. `k` is the rank's own and may differ between ranks.
pub struct MatmulReduceScatter {
    core: Core,
}

common_methods!(MatmulReduceScatter);

impl MatmulReduceScatter {
    /// Plan for calls of up to `options.m` rows.
    pub fn plan(ranks: Ranks, options: &Options, _variant: Variant) -> Result<Plan> {
        let name = Variant::Push.name();
        let plan = Plan::begin(NAME, name, ranks, options, ((true, false), true))?;
        Ok(if plan.alone() { plan } else { plan.needs_scatter() })
    }

    /// Enqueue a call on `stream`.
    pub fn run(&mut self, args: &MatmulArgs, stream: &Stream) -> Result<()> {
        let plan = self.core.plan();
        let (m, n, k) = (args.a.rows(), plan.options.n, plan.options.k);
        shaped(NAME, "A", &args.a, (m, k), "M x K of the plan")?;
        shaped(NAME, "C", &args.c, (part(plan, m), n), "this rank's part of the rows of A x N")?;
        check_product(plan, args)?;
        let call = Call { direct: false, ..Call::product(m, args) };
        self.core.run(stream, &[(plan.kernel(), None)], &call)
    }
}
