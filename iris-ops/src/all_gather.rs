//! Each rank has some rows, and all ranks get all.

use iris_heap::Stream;
use iris_kernels::args::arrival;

use crate::check::{check_copy, input, no_epilogue, part, same_output, shaped};
use crate::config::{Options, Ranks};
use crate::core::{Call, Core};
use crate::op::{beside_method, common_methods, variants};
use crate::{CopyArgs, Plan, Result};

const NAME: &str = "all_gather";

variants! {
    /// Each rank pushes its rows to all.
    Push = "push",
}

/// Output (`m` x `n`, on all ranks): its rows `split(m, size, rank)` are that rank's input.
pub struct AllGather {
    core: Core,
}

common_methods!(AllGather);
beside_method!(AllGather, CopyArgs, |_| Some(arrival::PARTS));

impl AllGather {
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
        let call = self.call(args)?;
        self.core.run(stream, &[(self.core.plan().kernel(), None)], &call)
    }

    /// A call of these matrices, checked against the plan.
    fn call<'a>(&self, args: &'a CopyArgs) -> Result<Call<'a>> {
        let plan = self.core.plan();
        let input = input(NAME, args)?;
        let (m, n) = (args.output.rows(), plan.options.n);
        let rows = part(plan, m);
        shaped(NAME, "input", input, (rows, n), "this rank's part of the rows of the output x N")?;
        shaped(NAME, "output", &args.output, (m, n), "M x N of the plan")?;
        check_copy(plan, args)?;
        Ok(Call::message(m, Some(input), args))
    }
}
