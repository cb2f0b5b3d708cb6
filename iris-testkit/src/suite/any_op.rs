//! Any op behind one type.

use std::sync::Arc;

use iris_heap::{Stream, SymmetricHeap};
use iris_ops::{
    AllGather, AllGatherMatmul, AllReduce, AllToAll, Barrier, Broadcast, CopyArgs, Counters,
    MatRef, Matmul, MatmulAllGather, MatmulAllReduce, MatmulArgs, MatmulReduceScatter, Options,
    Plan, Ranks, ReduceScatter, TraceSpan,
};

use super::OpName;

/// Plan an op by name; `auto` leaves the variant to the plan.
pub fn plan(
    op: OpName,
    variant: &str,
    ranks: Ranks,
    options: &Options,
) -> Result<Plan, anyhow::Error> {
    let only = |name: &str| {
        anyhow::ensure!(["auto", name].contains(&variant), "{op}: variant {variant}, not {name}");
        Ok(())
    };
    Ok(match op {
        OpName::MatmulAllReduce => MatmulAllReduce::plan(ranks, options, variant.parse()?)?,
        OpName::MatmulReduceScatter => MatmulReduceScatter::plan(ranks, options, variant.parse()?)?,
        OpName::AllGatherMatmul => AllGatherMatmul::plan(ranks, options, variant.parse()?)?,
        OpName::MatmulAllGather => MatmulAllGather::plan(ranks, options, variant.parse()?)?,
        OpName::Matmul => {
            only("local")?;
            Matmul::plan(ranks, options)?
        }
        OpName::AllReduce => AllReduce::plan(ranks, options, variant.parse()?)?,
        OpName::AllGather => AllGather::plan(ranks, options, variant.parse()?)?,
        OpName::ReduceScatter => ReduceScatter::plan(ranks, options, variant.parse()?)?,
        OpName::AllToAll => AllToAll::plan(ranks, options, variant.parse()?)?,
        OpName::Broadcast => Broadcast::plan(ranks, options, variant.parse()?)?,
        OpName::Barrier => {
            only("flat")?;
            Barrier::plan(ranks, options)?
        }
    })
}

macro_rules! any_op {
    ($($name:ident),*) => {
        /// An op that was made.
        #[allow(missing_docs, reason = "as in iris_ops")]
        pub enum AnyOp {
            $($name($name),)*
        }

        impl AnyOp {
            /// Make the op of this plan: collective.
            #[track_caller]
            pub fn new(op: OpName, heap: &Arc<SymmetricHeap>, plan: &Plan) -> iris_ops::Result<Self> {
                match op {
                    $(OpName::$name => Ok(Self::$name($name::new(heap, plan)?)),)*
                }
            }

            /// The plan it was made of.
            pub fn plan(&self) -> &Plan {
                match self { $(Self::$name(op) => op.plan_made(),)* }
            }

            /// What its calls did so far.
            pub fn counters(&self) -> iris_ops::Result<Counters> {
                match self { $(Self::$name(op) => op.counters(),)* }
            }

            /// The spans of its calls so far.
            pub fn trace(&self) -> iris_ops::Result<Vec<Vec<TraceSpan>>> {
                match self { $(Self::$name(op) => op.trace(),)* }
            }

            /// Whether its heap has a fault.
            pub fn check(&self) -> iris_ops::Result<()> {
                match self { $(Self::$name(op) => op.check(),)* }
            }

            /// Give its workspace back: collective.
            #[track_caller]
            pub fn free(self) -> iris_ops::Result<()> {
                match self { $(Self::$name(op) => op.free(),)* }
            }
        }
    };
}

any_op!(
    MatmulAllReduce,
    MatmulReduceScatter,
    AllGatherMatmul,
    MatmulAllGather,
    Matmul,
    AllReduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    Broadcast,
    Barrier
);

/// The matrices of one call.
#[derive(Clone, Copy, Debug)]
pub struct Operands {
    /// A, or the message.
    pub a: MatRef,
    /// B; not used by an op without a product.
    pub b: MatRef,
    /// C, or where the message goes.
    pub c: MatRef,
    /// The bias, if there is one.
    pub bias: Option<MatRef>,
}

impl AnyOp {
    /// Enqueue a call.
    pub fn run(&mut self, operands: &Operands, stream: &Stream) -> iris_ops::Result<()> {
        let Operands { a, b, c, bias } = *operands;
        let mut product = MatmulArgs::new(a, b, c);
        product.bias = bias;
        let mut copy = CopyArgs::new(a, c);
        match self {
            AnyOp::MatmulAllReduce(op) => op.run(&product, stream),
            AnyOp::MatmulReduceScatter(op) => op.run(&product, stream),
            AnyOp::AllGatherMatmul(op) => op.run(&product, stream),
            AnyOp::MatmulAllGather(op) => op.run(&product, stream),
            AnyOp::Matmul(op) => op.run(&product, stream),
            AnyOp::AllReduce(op) => op.run(&copy, stream),
            AnyOp::AllGather(op) => op.run(&copy, stream),
            AnyOp::ReduceScatter(op) => op.run(&copy, stream),
            AnyOp::AllToAll(op) => op.run(&copy, stream),
            AnyOp::Broadcast(op) => {
                let plan = op.plan_made();
                if plan.ranks().rank != plan.options().root {
                    copy = CopyArgs::receive(c);
                }
                op.run(&copy, stream)
            }
            AnyOp::Barrier(op) => op.run(stream),
        }
    }
}
