//! The sum over ranks, on all ranks.

use iris_heap::Stream;

use crate::check::{check_copy, input, same_output, shaped};
use crate::config::{Options, Ranks};
use crate::core::{Call, Core};
pub use crate::matmul_all_reduce::Variant;
use crate::matmul_all_reduce::{kernels, plan_variant, writes_directly};
use crate::op::{beside_method, common_methods};
use crate::{CopyArgs, Plan, Result};

const NAME: &str = "all_reduce";

/// Output (`m` x `n`, on all ranks) = sum over ranks of input (`m` x `n`). The output may be the
/// input itself.
pub struct AllReduce {
    core: Core,
}

common_methods!(AllReduce);
beside_method!(AllReduce, CopyArgs, crate::matmul_all_reduce::arrival);

impl AllReduce {
    /// Plan for calls of up to `options.m` rows; `options.k` is not used.
    pub fn plan(ranks: Ranks, options: &Options, variant: Variant) -> Result<Plan> {
        options.check(NAME, ranks)?;
        let variant = match variant {
            Variant::Auto => crate::tune::all_reduce(NAME, ranks, options),
            chosen => chosen,
        };
        let plan = plan_variant(NAME, ranks, options, variant, false)?;
        same_output(&plan)?;
        Ok(plan)
    }

    /// Enqueue a call on `stream`.
    pub fn run(&mut self, args: &CopyArgs, stream: &Stream) -> Result<()> {
        let call = self.call(args)?;
        self.core.run(stream, &kernels(self.core.plan()), &call)
    }

    /// A call of these matrices, checked against the plan.
    fn call<'a>(&self, args: &'a CopyArgs) -> Result<Call<'a>> {
        let plan = self.core.plan();
        let input = input(NAME, args)?;
        let (m, n) = (input.rows(), plan.options.n);
        shaped(NAME, "input", input, (m, n), "M x N of the plan")?;
        shaped(NAME, "output", &args.output, (m, n), "the shape of the input")?;
        check_copy(plan, args)?;
        let direct = writes_directly(plan);
        Ok(Call { in_place: true, direct, ..Call::message(m, Some(input), args) })
    }
}
