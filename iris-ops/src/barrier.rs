//! A barrier on the device, stream-ordered: what any member's stream did before it is seen by what
//! any member's stream does after it.

use iris_heap::Stream;
use iris_kernels::Kernel;
use iris_sync::barrier::Members;

use crate::config::{Options, Ranks};
use crate::core::{Call, Core};
use crate::error::{Error, Result};
use crate::op::common_methods;
use crate::plan::Plan;

const NAME: &str = "barrier";

/// A barrier of all ranks of the heap, or of those in [`Options::members`]. All ranks make it; only
/// members run it.
pub struct Barrier {
    core: Core,
}

common_methods!(Barrier);

impl Barrier {
    /// Plan a barrier; of the options only `members`, `first_call` and `trace_spans` are used.
    pub fn plan(ranks: Ranks, options: &Options) -> Result<Plan> {
        Plan::begin(NAME, "flat", ranks, options, ((false, false), false))
    }

    /// Enqueue the barrier on `stream`. On a rank that is no member it is an error.
    pub fn run(&mut self, stream: &Stream) -> Result<()> {
        let plan = self.core.plan();
        let members = Members::from_bits(plan.members());
        if !members.contains(plan.ranks.rank as u32) {
            return Err(Error::Invalid {
                op: NAME,
                what: "rank".into(),
                value: plan.ranks.rank.to_string(),
                expected: format!("one of {:?}", plan.options.members),
            });
        }
        let call = Call::default();
        self.core.run(
            stream,
            &[(Kernel::Barrier { phase: 0, members, last: true }, Some(1))],
            &call,
        )
    }
}
