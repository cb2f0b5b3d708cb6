//! C = sum over ranks of A B, and the same C on all ranks: row-parallel linear layers.

use iris_heap::Stream;
use iris_kernels::Kernel;
use iris_kernels::args::arrival;

use crate::check::{check_product, shaped};
use crate::config::{Options, Ranks};
use crate::core::{Call, Core};
use crate::op::{beside_method, common_methods, variants};
use crate::{MatmulArgs, Plan, Result};

const NAME: &str = "matmul_all_reduce";

variants! {
    /// Each rank pushes its partial of every tile to all; each adds up all of them, in the order
    /// of ranks: the same bits everywhere. For small results.
    OneShot = "one_shot",
    /// The owner of a tile adds it up, its own partial first, and sends the result to all: the
    /// same bits everywhere.
    TwoShot = "two_shot",
    /// Ranks add into the owner's f32 tile under a lock. The order, and so the last bits, vary.
    Spinlock = "spinlock",
    /// Ranks add into the owner's f32 tile atomically. The order, and so the last bits, vary.
    Atomic = "atomic",
}

/// C (`m` x `n`, on all ranks) = sum over ranks of A (`m` x `k`) B (`k` x `n`), plus a bias added
/// once. `k` is the rank's own and may differ between ranks.
pub struct MatmulAllReduce {
    core: Core,
}

common_methods!(MatmulAllReduce);
beside_method!(MatmulAllReduce, MatmulArgs, arrival);

impl MatmulAllReduce {
    /// Plan for calls of up to `options.m` rows.
    pub fn plan(ranks: Ranks, options: &Options, variant: Variant) -> Result<Plan> {
        options.check(NAME, ranks)?;
        let variant = match variant {
            Variant::Auto => crate::tune::all_reduce(NAME, ranks, options),
            chosen => chosen,
        };
        plan_variant(NAME, ranks, options, variant, true)
    }

    /// Enqueue a call on `stream`.
    pub fn run(&mut self, args: &MatmulArgs, stream: &Stream) -> Result<()> {
        let call = self.call(args)?;
        self.core.run(stream, &kernels(self.core.plan()), &call)
    }

    /// A call of these matrices, checked against the plan.
    fn call<'a>(&self, args: &'a MatmulArgs) -> Result<Call<'a>> {
        let plan = self.core.plan();
        let (m, n, k) = (args.a.rows(), plan.options.n, plan.options.k);
        shaped(NAME, "A", &args.a, (m, k), "M x K of the plan")?;
        shaped(NAME, "C", &args.c, (m, n), "rows of A x N of the plan")?;
        check_product(plan, args)?;
        Ok(Call { direct: writes_directly(plan), ..Call::product(m, args) })
    }
}

/// The plan of an all-reduce, with a product or without.
pub(crate) fn plan_variant(
    name: &'static str,
    ranks: Ranks,
    options: &Options,
    variant: Variant,
    product: bool,
) -> Result<Plan> {
    let plan = Plan::begin(name, variant.name(), ranks, options, ((true, !product), product))?;
    Ok(match variant {
        _ if plan.alone() => plan,
        Variant::Auto | Variant::OneShot => plan.needs_one_shot(),
        Variant::TwoShot => plan.needs_two_shot(),
        Variant::Spinlock => plan.needs_accumulate(true),
        Variant::Atomic => plan.needs_accumulate(false),
    })
}

/// Whether peers write C. In the other variants nobody need wait for a peer's entry before a push.
pub(crate) fn writes_directly(plan: &Plan) -> bool {
    plan.variant == "two_shot"
}

/// Which words say that a tile of C has come, of a variant whose peers write it directly.
pub(crate) fn arrival(plan: &Plan) -> Option<u32> {
    (plan.alone() || writes_directly(plan)).then_some(arrival::RESULTS)
}

/// The launches of a call.
pub(crate) fn kernels(plan: &Plan) -> Vec<(Kernel, Option<u32>)> {
    let barrier = |phase| {
        let members = iris_sync::barrier::Members::all(plan.size());
        (Kernel::Barrier { phase, members, last: false }, Some(1))
    };
    let add = |kernel| {
        vec![(Kernel::Zero, None), barrier(0), (kernel, None), barrier(1), (Kernel::Convert, None)]
    };
    match plan.variant {
        _ if plan.alone() => vec![(Kernel::Local, None)],
        "two_shot" => vec![(Kernel::TwoShot, None)],
        "spinlock" => add(Kernel::AddLocked),
        "atomic" => add(Kernel::AddAtomic),
        _ => vec![(Kernel::OneShot, None)],
    }
}
