//! The product of one rank alone, with the same options as the fused ones.

use iris_heap::Stream;

use crate::check::{check_product, shaped};
use crate::config::{Options, Ranks};
use crate::core::{Call, Core};
use crate::op::common_methods;
use crate::{MatmulArgs, Plan, Result};

const NAME: &str = "matmul";

/// C (`m` x `n`) = A (`m` x `k`) B (`k` x `n`), plus a bias: nobody else takes part in a call.
pub struct Matmul {
    core: Core,
}

common_methods!(Matmul);

impl Matmul {
    /// Plan for calls of up to `options.m` rows. `n` and `k` are the rank's own.
    pub fn plan(ranks: Ranks, options: &Options) -> Result<Plan> {
        Plan::begin(NAME, "local", ranks, options, ((false, false), true))
    }

    /// Enqueue a call on `stream`.
    pub fn run(&mut self, args: &MatmulArgs, stream: &Stream) -> Result<()> {
        let plan = self.core.plan();
        let (m, n, k) = (args.a.rows(), plan.options.n, plan.options.k);
        shaped(NAME, "A", &args.a, (m, k), "M x K of the plan")?;
        shaped(NAME, "C", &args.c, (m, n), "rows of A x N of the plan")?;
        check_product(plan, args)?;
        let call = Call { direct: false, ..Call::product(m, args) };
        self.core.run(stream, &[(plan.kernel(), None)], &call)
    }
}
