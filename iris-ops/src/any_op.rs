//! One type for all operators, for programs that choose the operator at run time.

use std::sync::Arc;

use iris_heap::{DType, Stream, SymmetricHeap};
use iris_kernels::args::TileView;

use crate::args::{Matrices, NormArgs};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::matrix::MatRef;
use crate::nodes::Operator;
use crate::op_names::{Op, Variant};
use crate::op_row::Part;
use crate::operator_macros::common_methods;
use crate::ops;
use crate::options::Request;
use crate::plan::{Plan, on_device};
use crate::topology::Topology;
use crate::workspace::Workspace;

/// Operator whose kind the program chooses at run time; the plan from which it was made names the
/// kind.
#[derive(Debug)]
pub struct AnyOp {
    operator: Operator,
}

/// Matrices of one call of any operator. An operator ignores those matrices that it does not use.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Operands {
    /// Matrix A, or the input of a collective.
    pub a: MatRef,
    /// Matrix B; ignored by operators without a matrix product.
    pub b: MatRef,
    /// Matrix C, or the output of a collective.
    pub c: MatRef,
    /// Bias of 1 x N elements, or `None` for no bias; ignored by operators without a matrix
    /// product.
    pub bias: Option<MatRef>,
    /// Matrices of the RMSNorm; required exactly if the plan has `rms_norm`.
    pub norm: Option<NormArgs>,
}

impl AnyOp {
    /// Makes the operator of the plan. Collective, like `new` of each operator.
    ///
    /// # Errors
    /// Errors of the operator's `new`, such as [`AllReduce::new`](crate::AllReduce::new).
    #[track_caller]
    pub fn new(heap: &Arc<SymmetricHeap>, plan: &Plan) -> Result<Self> {
        has_one_tensor(plan)?;
        Ok(Self { operator: Operator::new(plan.op(), heap, plan)? })
    }

    /// Makes the operator of the plan in an existing workspace. Collective.
    ///
    /// # Errors
    /// Errors of the operator's `in_workspace`, such as
    /// [`AllReduce::in_workspace`](crate::AllReduce::in_workspace).
    #[track_caller]
    pub fn in_workspace(workspace: &Arc<Workspace>, plan: &Plan) -> Result<Self> {
        has_one_tensor(plan)?;
        Ok(Self { operator: Operator::within(plan.op(), workspace, plan)? })
    }

    /// Enqueues a call on `stream`.
    ///
    /// # Errors
    /// Errors of the operator's `run`, such as [`AllReduce::run`](crate::AllReduce::run).
    pub fn run(&self, operands: &Operands, stream: &Stream) -> Result<()> {
        self.operator.run(stream, &self.matrices(operands))
    }

    /// Returns a description of the next call, for a kernel of the caller that runs at the same
    /// time as the call; see [`AllReduce::beside`](crate::AllReduce::beside).
    ///
    /// # Errors
    /// Errors of `AllReduce::beside`; [`Invalid`](crate::OpError::Invalid) for an operator or
    /// variant whose tiles of C have no signals.
    pub fn beside(&self, operands: &Operands, stream: &Stream) -> Result<TileView> {
        self.operator.beside(stream, &self.matrices(operands))
    }

    fn matrices(&self, operands: &Operands) -> Matrices {
        let Operands { a, b, c, bias, norm } = *operands;
        let product = self.plan().row().multiplies();
        let (b, bias) = if product { (Some(b), bias) } else { (None, None) };
        Matrices { a: Some(a), b, c: Some(c), bias, norm, ..Matrices::default() }
    }
}

common_methods!(AnyOp);

impl Operands {
    /// Operands without bias and RMSNorm. For an operator without B, `b` is ignored.
    pub fn new(a: MatRef, b: MatRef, c: MatRef) -> Self {
        Self { a, b, c, bias: None, norm: None }
    }

    /// Sets the bias of 1 x N elements, or removes it if `bias` is `None`.
    #[must_use]
    pub fn bias(self, bias: impl Into<Option<MatRef>>) -> Self {
        Self { bias: bias.into(), ..self }
    }

    /// Sets the matrices of the RMSNorm, or removes them if `norm` is `None`.
    #[must_use]
    pub fn norm(self, norm: impl Into<Option<NormArgs>>) -> Self {
        Self { norm: norm.into(), ..self }
    }
}

/// Refuses plans of a list of tensors and of weighted parts, for which [`Operands`] have no place.
fn has_one_tensor(plan: &Plan) -> Result<()> {
    match plan.request().more.len() {
        0 if plan.row().combines() => {
            let expected = "none; `AllReduce` and `ReduceScatter` combine parts";
            Err(Error::invalid(plan.op(), "combine of the plan", plan.request().k, expected))
        }
        0 => Ok(()),
        more => {
            let expected = "1; `AllGather` gathers lists";
            Err(Error::invalid(plan.op(), "number of tensors of the plan", 1 + more, expected))
        }
    }
}

impl Op {
    /// Whether the operator has a matrix product.
    pub fn multiplies(self) -> bool {
        ops::row(self).multiplies()
    }

    /// All variants of the operator, including variants for which some kinds of device have no
    /// kernels.
    pub fn variants(self) -> Vec<Variant> {
        ops::row(self).forms.iter().map(|form| form.variant).collect()
    }

    /// Variants of the operator for which the device has kernels: all variants, except `epilogue`
    /// on GPUs without GEMMs that store to peers.
    pub fn variants_on(self, device: Device) -> Vec<Variant> {
        on_device::variants(ops::row(self), device).collect()
    }

    /// Returns the operator's variant with this name; in `name`, hyphens are read as underscores.
    /// `None` for the name `auto`, which leaves the choice to the plan.
    ///
    /// # Errors
    /// [`Invalid`](Error::Invalid) if the operator has no such variant; the error lists the
    /// variants of the operator.
    pub fn variant(self, name: &str) -> Result<Option<Variant>> {
        ops::row(self).variant(name)
    }

    /// Names of the options (setters) that the operator reads, except the options that every
    /// operator has.
    pub fn options(self) -> &'static [&'static str] {
        ops::options(self)
    }

    /// Request for a plan of the operator for at most `m` rows, `n` columns and inner dimension
    /// `k`; a dimension that the operator does not have is ignored. Set further options in the
    /// fields of the result.
    pub fn request(self, m: usize, n: usize, k: usize) -> Request {
        let row = ops::row(self);
        let (m, n) = if row.c == Part::None { (0, 0) } else { (m, n) };
        Request::new(row, (m, n, if row.multiplies() { k } else { 0 }))
    }
}

impl Request {
    /// Makes the plan, like `plan` of the operator's own `Options`.
    ///
    /// # Errors
    /// [`Invalid`](Error::Invalid) for a value that the operator cannot take, and for an option
    /// that the operator does not read.
    pub fn plan(&self, ranks: impl Into<Topology>) -> Result<Plan> {
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
            ("reserve_sms", asked(self.reserve_sms > 0, &self.reserve_sms)),
            ("uniform_shape", asked(self.uniform_shape, &self.uniform_shape)),
            ("library", asked(self.library != unasked.library, &self.library)),
            ("staged", asked(self.staged != unasked.staged && !staged, &self.staged)),
            ("elements", asked(self.elements && !message, &self.elements)),
        ] {
            if let Some(value) = value
                && !op.options().contains(&what)
            {
                let expected = "the default, because this operator does not read the option";
                return Err(Error::invalid(op, what, value, expected));
            }
        }
        Plan::new(ranks.into(), self)
    }
}
