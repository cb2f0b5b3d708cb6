//! Any operator behind one type, for programs that know only at run time which.

use std::sync::Arc;

use iris_heap::{Stream, SymmetricHeap};
use iris_kernels::args::TileView;
use iris_kernels::trace::TraceSpan;

use crate::args::Matrices;
use crate::counters::Counters;
use crate::error::Result;
use crate::kind::{Op, Variant};
use crate::matrix::MatRef;
use crate::operator::Operator;
use crate::ops;
use crate::plan::Plan;
use crate::workspace::Workspace;

/// An operator, whichever its plan is of.
#[derive(Debug)]
pub struct AnyOp {
    operator: Operator,
}

/// The matrices of one call of any operator: what it does not use may be anything.
#[derive(Clone, Copy, Debug)]
pub struct Operands {
    /// A, or the input.
    pub a: MatRef,
    /// B; not used by an op without a product.
    pub b: MatRef,
    /// C, or the output.
    pub c: MatRef,
    /// The bias, if there is one; not used by an op without a product.
    pub bias: Option<MatRef>,
}

impl AnyOp {
    /// Make the operator of this plan: collective, as `new` of each.
    ///
    /// # Errors
    /// As `new` of each.
    #[track_caller]
    pub fn new(heap: &Arc<SymmetricHeap>, plan: &Plan) -> Result<Self> {
        Ok(Self { operator: Operator::new(plan.op(), heap, plan)? })
    }

    /// Make it in a workspace that there is: collective, as `in_workspace` of each.
    ///
    /// # Errors
    /// As `in_workspace` of each.
    #[track_caller]
    pub fn in_workspace(workspace: &Arc<Workspace>, plan: &Plan) -> Result<Self> {
        Ok(Self { operator: Operator::within(plan.op(), workspace, plan)? })
    }

    /// Enqueue a call.
    ///
    /// # Errors
    /// As `run` of each.
    pub fn run(&self, operands: &Operands, stream: &Stream) -> Result<()> {
        self.operator.run(stream, &self.matrices(operands))
    }

    /// What a user's kernel needs that runs beside the next call, as of each operator that has it.
    ///
    /// # Errors
    /// As `beside` of each; [`Invalid`](crate::Error::Invalid) for one that has none.
    pub fn beside(&self, operands: &Operands, stream: &Stream) -> Result<TileView> {
        self.operator.beside(stream, &self.matrices(operands))
    }

    fn matrices(&self, operands: &Operands) -> Matrices {
        let Operands { a, b, c, bias } = *operands;
        let product = self.plan().op().multiplies();
        let (b, bias) = if product { (Some(b), bias) } else { (None, None) };
        Matrices { a: Some(a), b, c: Some(c), bias }
    }

    /// What it was planned for.
    pub fn plan(&self) -> &Plan {
        self.operator.plan()
    }

    /// What its calls did so far.
    ///
    /// # Errors
    /// As `counters` of each.
    pub fn counters(&self) -> Result<Counters> {
        self.operator.counters()
    }

    /// The spans of its calls so far.
    ///
    /// # Errors
    /// As `trace` of each.
    pub fn trace(&self) -> Result<Vec<Vec<TraceSpan>>> {
        self.operator.trace()
    }

    /// Whether its heap has a fault.
    ///
    /// # Errors
    /// That fault.
    pub fn check(&self) -> Result<()> {
        self.operator.check()
    }

    /// Give its memory back: collective.
    ///
    /// # Errors
    /// As `free` of each.
    #[track_caller]
    pub fn free(self) -> Result<()> {
        self.operator.free()
    }
}

impl Op {
    /// Its variants.
    pub fn variants(self) -> Vec<Variant> {
        ops::row(self).forms.iter().map(|form| form.variant).collect()
    }
}
