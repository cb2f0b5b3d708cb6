//! The sum over ranks, each rank getting some of its rows.

use iris_heap::Stream;

use crate::check::{check_copy, input, part, same_output, shaped};
use crate::config::{Options, Ranks};
use crate::core::{Call, Core};
pub use crate::matmul_reduce_scatter::Variant;
use crate::op::common_methods;
use crate::{CopyArgs, Plan, Result};

const NAME: &str = "reduce_scatter";

/// Output (rows `split(m, size, rank)` x `n`) = those rows of the sum over ranks of input
/// (`m` x `n`).
pub struct ReduceScatter {
    core: Core,
}

common_methods!(ReduceScatter);

impl ReduceScatter {
    /// Plan for calls of up to `options.m` rows; `options.k` is not used.
    pub fn plan(ranks: Ranks, options: &Options, _variant: Variant) -> Result<Plan> {
        let name = Variant::Push.name();
        let plan = Plan::begin(NAME, name, ranks, options, ((true, true), false))?;
        same_output(&plan)?;
        Ok(if plan.alone() { plan } else { plan.needs_scatter() })
    }

    /// Enqueue a call on `stream`.
    pub fn run(&mut self, args: &CopyArgs, stream: &Stream) -> Result<()> {
        let plan = self.core.plan();
        let input = input(NAME, args)?;
        let (m, n) = (input.rows(), plan.options.n);
        shaped(NAME, "input", input, (m, n), "M x N of the plan")?;
        let rows = part(plan, m);
        shaped(NAME, "output", &args.output, (rows, n), "this rank's part of the rows x N")?;
        check_copy(plan, args)?;
        let call = Call { direct: false, ..Call::message(m, Some(input), args) };
        self.core.run(stream, &[(plan.kernel(), None)], &call)
    }
}
