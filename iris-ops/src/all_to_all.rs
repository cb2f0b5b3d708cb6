//! Each rank has a block of rows for every rank.

use iris_heap::Stream;

use crate::check::{check_copy, input, no_epilogue, part, same_output, shaped};
use crate::config::{Options, Ranks};
use crate::core::{Call, Core};
use crate::op::{common_methods, variants};
use crate::{CopyArgs, Plan, Result};

const NAME: &str = "all_to_all";

variants! {
    /// Each rank pushes its blocks to whom they are for.
    Push = "push",
}

/// Output (`size` blocks of `split(m, size, rank)` rows x `n`): block s is what rank s has in the rows
/// `split(m, size, rank)` of its input (`m` x `n`).
pub struct AllToAll {
    core: Core,
}

common_methods!(AllToAll);

impl AllToAll {
    /// Plan for calls of up to `options.m` rows; `options.k` is not used.
    pub fn plan(ranks: Ranks, options: &Options, _variant: Variant) -> Result<Plan> {
        let name = Variant::Push.name();
        let plan = Plan::begin(NAME, name, ranks, options, ((true, true), false))?;
        same_output(&plan)?;
        no_epilogue(&plan)?;
        Ok(if plan.alone() { plan } else { plan.needs_parts() })
    }

    /// Enqueue a call on `stream`.
    pub fn run(&mut self, args: &CopyArgs, stream: &Stream) -> Result<()> {
        let plan = self.core.plan();
        let input = input(NAME, args)?;
        let (m, n) = (input.rows(), plan.options.n);
        let rows = plan.ranks.size * part(plan, m);
        shaped(NAME, "input", input, (m, n), "M x N of the plan")?;
        shaped(
            NAME,
            "output",
            &args.output,
            (rows, n),
            "a block of this rank's rows from each rank x N",
        )?;
        check_copy(plan, args)?;
        let call = Call::message(m, Some(input), args);
        self.core.run(stream, &[(plan.kernel(), None)], &call)
    }
}
