//! Any operator behind one type, for programs that know only at run time which.

use std::sync::Arc;

use iris_heap::{DType, Stream, SymmetricHeap};
use iris_kernels::args::TileView;
use iris_kernels::trace::TraceSpan;

use crate::args::{Matrices, NormArgs};
use crate::counters::Counters;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::kind::{Op, Variant};
use crate::matrix::MatRef;
use crate::nodes::Operator;
use crate::ops;
use crate::options::Request;
use crate::plan::{Plan, on_device};
use crate::ranks::Ranks;
use crate::spec::Part;
use crate::workspace::Workspace;

/// An operator, whichever its plan is of.
#[derive(Debug)]
pub struct AnyOp {
    operator: Operator,
}

/// The matrices of one call of any operator: what it does not use may be anything.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Operands {
    /// A, or the input.
    pub a: MatRef,
    /// B; not used by an op without a product.
    pub b: MatRef,
    /// C, or the output.
    pub c: MatRef,
    /// The bias, if there is one; not used by an op without a product.
    pub bias: Option<MatRef>,
    /// What belongs to an RMSNorm, if the plan has one.
    pub norm: Option<NormArgs>,
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
    /// As `beside` of each; [`Invalid`](crate::OpError::Invalid) for one that has none.
    pub fn beside(&self, operands: &Operands, stream: &Stream) -> Result<TileView> {
        self.operator.beside(stream, &self.matrices(operands))
    }

    fn matrices(&self, operands: &Operands) -> Matrices {
        let Operands { a, b, c, bias, norm } = *operands;
        let product = self.plan().row().multiplies();
        let (b, bias) = if product { (Some(b), bias) } else { (None, None) };
        Matrices { a: Some(a), b, c: Some(c), bias, norm }
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

impl Operands {
    /// Neither bias nor RMSNorm.
    pub fn new(a: MatRef, b: MatRef, c: MatRef) -> Self {
        Self { a, b, c, bias: None, norm: None }
    }

    /// With a bias: 1 x N.
    #[must_use]
    pub fn bias(self, bias: impl Into<Option<MatRef>>) -> Self {
        Self { bias: bias.into(), ..self }
    }

    /// With what belongs to an RMSNorm.
    #[must_use]
    pub fn norm(self, norm: impl Into<Option<NormArgs>>) -> Self {
        Self { norm: norm.into(), ..self }
    }
}

impl Op {
    /// Whether there is a product in it.
    pub fn multiplies(self) -> bool {
        ops::row(self).multiplies()
    }

    /// Its variants.
    pub fn variants(self) -> Vec<Variant> {
        ops::row(self).forms.iter().map(|form| form.variant).collect()
    }

    /// Its variants that a device has kernels for: all but `epilogue`, unless GEMMs there store to peers.
    pub fn variants_on(self, device: Device) -> Vec<Variant> {
        on_device::variants(ops::row(self), device).collect()
    }

    /// Its variant of this name, where hyphens are as good as underscores; none for `auto`, which leaves the choice
    /// to the plan.
    ///
    /// # Errors
    /// [`Invalid`](Error::Invalid) for what is no variant of it; the error names those that are.
    pub fn variant(self, name: &str) -> Result<Option<Variant>> {
        ops::row(self).variant(name)
    }

    /// The options that it reads, by the names of their setters, beside those that every operator has.
    pub fn options(self) -> &'static [&'static str] {
        ops::options(self)
    }

    /// To plan it for at most `m` rows, `n` columns and depth `k`, of which it takes those that it has;
    /// what else is asked of it is written into the fields.
    pub fn request(self, m: usize, n: usize, k: usize) -> Request {
        let row = ops::row(self);
        let (m, n) = if row.c == Part::None { (0, 0) } else { (m, n) };
        Request::new(row, (m, n, if row.multiplies() { k } else { 0 }))
    }
}

impl Request {
    /// Plan it, as `plan` of the operator's own options.
    ///
    /// # Errors
    /// [`Invalid`](Error::Invalid) for what the operator does not take, and for what it does not read.
    pub fn plan(&self, ranks: impl Into<Ranks>) -> Result<Plan> {
        let op = self.op();
        let unasked = op.request(0, 0, 0);
        let asked = |is: bool, value: &dyn std::fmt::Debug| is.then(|| format!("{value:?}"));
        let staged = self.variant == Some(Variant::Staged);
        let message = !self.row.multiplies() && self.row.c != Part::None;
        let name = |dtype: Option<DType>| dtype.map(|dtype| dtype.to_string());
        for (what, value) in [
            ("dtype", name(Some(self.dtype).filter(|&dtype| dtype != unasked.dtype))),
            ("output", name(self.output)),
            ("wire", name(self.wire)),
            ("tile", self.tile.map(|tile| tile.to_string())),
            ("rms_norm", self.rms_norm.map(|epsilon| epsilon.to_string())),
            ("epilogue", asked(self.epilogue != unasked.epilogue, &self.epilogue)),
            ("shard", asked(self.shard != unasked.shard, &self.shard)),
            ("root", asked(self.root != unasked.root, &self.root)),
            ("members", self.members.as_ref().map(|members| format!("{members:?}"))),
            ("workgroups", self.workgroups.map(|groups| groups.to_string())),
            ("beside", asked(self.beside > 0, &self.beside)),
            ("even", asked(self.even, &self.even)),
            ("library", asked(self.library != unasked.library, &self.library)),
            ("staged", asked(self.staged != unasked.staged && !staged, &self.staged)),
            ("elements", asked(self.elements && !message, &self.elements)),
        ] {
            if let Some(value) = value
                && !op.options().contains(&what)
            {
                let expected = "nothing, since this operator does not read it".into();
                return Err(Error::Invalid { op, what: what.into(), value, expected });
            }
        }
        Plan::new(ranks.into(), self)
    }
}
