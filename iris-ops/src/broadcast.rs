//! What the root has, on all ranks.

use iris_heap::Stream;
use iris_kernels::args::arrival;

use crate::check::{check_copy, input, no_epilogue, same_output, shaped};
use crate::config::{Options, Ranks};
use crate::core::{Call, Core};
use crate::op::{beside_method, common_methods, variants};
use crate::{CopyArgs, Plan, Result};

const NAME: &str = "broadcast";

variants! {
    /// The root pushes to all.
    Push = "push",
}

/// Output (`m` x `n`, on all ranks) = input of rank `options.root`. The other ranks have no input; on the
/// root the output may be the input itself.
pub struct Broadcast {
    core: Core,
}

common_methods!(Broadcast);
beside_method!(Broadcast, CopyArgs, |_| Some(arrival::ROOT));

impl Broadcast {
    /// Plan for calls of up to `options.m` rows; `options.k` is not used.
    pub fn plan(ranks: Ranks, options: &Options, _variant: Variant) -> Result<Plan> {
        let name = Variant::Push.name();
        let plan = Plan::begin(NAME, name, ranks, options, ((true, true), false))?;
        same_output(&plan)?;
        no_epilogue(&plan)?;
        Ok(if plan.alone() { plan } else { plan.needs_broadcast() })
    }

    /// Enqueue a call on `stream`.
    pub fn run(&mut self, args: &CopyArgs, stream: &Stream) -> Result<()> {
        let call = self.call(args)?;
        self.core.run(stream, &[(self.core.plan().kernel(), None)], &call)
    }

    /// A call of these matrices, checked against the plan.
    fn call<'a>(&self, args: &'a CopyArgs) -> Result<Call<'a>> {
        let plan = self.core.plan();
        let (m, n) = (args.output.rows(), plan.options.n);
        shaped(NAME, "output", &args.output, (m, n), "M x N of the plan")?;
        let root = plan.ranks.rank == plan.options.root;
        let input = if root { Some(input(NAME, args)?) } else { None };
        if let Some(input) = input {
            shaped(NAME, "input", input, (m, n), "the shape of the output")?;
        }
        check_copy(plan, args)?;
        Ok(Call { in_place: true, ..Call::message(m, input, args) })
    }
}
