//! Operators of the benchmark with the matrices of their calls.

use std::sync::Arc;

use anyhow::{Result, bail};
use iris_heap::{Stream, SymmetricHeap};
use iris_ops::{AllGather, AllReduce, CollectiveArgs, Plan, ReduceScatter};
use iris_testkit::suite::{AnyOp, Op, Operands};

/// Matrices of a call.
#[allow(clippy::large_enum_variant, reason = "a shape has one value")]
pub(super) enum Arguments {
    /// Matrices of any op.
    Any(Operands),
    /// Matrices of a list, or of weighted parts, which [`Operands`] cannot name.
    Collective(CollectiveArgs),
}

/// Operator with the matrices of its calls.
pub(super) enum Called {
    Any(AnyOp, Operands),
    List(AllGather, CollectiveArgs),
    Sum(AllReduce, CollectiveArgs),
    OwnSum(ReduceScatter, CollectiveArgs),
}

/// Evaluates an expression of the operator and the matrices.
macro_rules! each {
    ($called:expr, ($op:ident, $args:pat) => $value:expr) => {
        match $called {
            Called::Any($op, $args) => $value,
            Called::List($op, $args) => $value,
            Called::Sum($op, $args) => $value,
            Called::OwnSum($op, $args) => $value,
        }
    };
}

impl Called {
    /// Makes the operator of the plan. Collective.
    pub(super) fn new(heap: &Arc<SymmetricHeap>, plan: &Plan, args: &Arguments) -> Result<Called> {
        Ok(match (args, plan.op()) {
            (Arguments::Any(operands), _) => Called::Any(AnyOp::new(heap, plan)?, *operands),
            (Arguments::Collective(args), Op::AllGather) => {
                Called::List(AllGather::new(heap, plan)?, *args)
            }
            (Arguments::Collective(args), Op::AllReduce) => {
                Called::Sum(AllReduce::new(heap, plan)?, *args)
            }
            (Arguments::Collective(args), Op::ReduceScatter) => {
                Called::OwnSum(ReduceScatter::new(heap, plan)?, *args)
            }
            (Arguments::Collective(_), op) => bail!("{op} has neither lists nor weighted parts"),
        })
    }

    /// Enqueues a call on `stream`.
    pub(super) fn run(&self, stream: &Stream) -> Result<()> {
        Ok(each!(self, (op, args) => op.run(args, stream))?)
    }

    /// Name of the operator in messages.
    pub(super) fn name(&self) -> String {
        each!(self, (op, _) => format!("{op:?}"))
    }

    /// Frees the operator. Collective.
    pub(super) fn free(self) -> Result<()> {
        Ok(each!(self, (op, _) => op.free())?)
    }
}
