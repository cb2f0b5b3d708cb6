//! Each rank multiplies its rows, and all ranks get all rows.

use iris_heap::Stream;
use iris_kernels::args::arrival;

use crate::check::{check_product, part, shaped};
use crate::config::{Options, Ranks};
use crate::core::{Call, Core};
use crate::op::{beside_method, common_methods, variants};
use crate::{MatmulArgs, Plan, Result};

const NAME: &str = "matmul_all_gather";

variants! {
    /// Each rank pushes its finished tiles to all.
    Push = "push",
}

/// C (`m` x `n`, on all ranks): its rows `split(m, size, rank)` are A (those rows x `k`) B
/// (`k` x `n`) of that rank, plus a bias.
pub struct MatmulAllGather {
    core: Core,
}

common_methods!(MatmulAllGather);
beside_method!(MatmulAllGather, MatmulArgs, |_| Some(arrival::PARTS));

impl MatmulAllGather {
    /// Plan for calls of up to `options.m` rows over all ranks.
    pub fn plan(ranks: Ranks, options: &Options, _variant: Variant) -> Result<Plan> {
        let name = Variant::Push.name();
        let plan = Plan::begin(NAME, name, ranks, options, ((true, true), true))?;
        Ok(if plan.alone() { plan } else { plan.needs_parts() })
    }

    /// Enqueue a call on `stream`.
    pub fn run(&mut self, args: &MatmulArgs, stream: &Stream) -> Result<()> {
        let call = self.call(args)?;
        self.core.run(stream, &[(self.core.plan().kernel(), None)], &call)
    }

    /// A call of these matrices, checked against the plan.
    fn call<'a>(&self, args: &'a MatmulArgs) -> Result<Call<'a>> {
        let plan = self.core.plan();
        let (m, n, k) = (args.c.rows(), plan.options.n, plan.options.k);
        let rows = part(plan, m);
        shaped(NAME, "A", &args.a, (rows, k), "this rank's part of the rows of C x K")?;
        shaped(NAME, "C", &args.c, (m, n), "M x N of the plan")?;
        check_product(plan, args)?;
        Ok(Call::product(m, args))
    }
}
