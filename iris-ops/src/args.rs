use crate::matrix::MatRef;

/// The matrices of one call of an op with a product: C = A B, and a bias if there is one.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct MatmulArgs {
    /// Left factor.
    pub a: MatRef,
    /// Right factor.
    pub b: MatRef,
    /// Result.
    pub c: MatRef,
    /// One row of N elements, added to every row of the result exactly once over all ranks.
    pub bias: Option<MatRef>,
    /// What belongs to an RMSNorm: given where the plan has one, and only there.
    pub norm: Option<NormArgs>,
}

impl MatmulArgs {
    /// C = A B.
    pub fn new(a: MatRef, b: MatRef, c: MatRef) -> Self {
        Self { a, b, c, bias: None, norm: None }
    }

    /// C = A B + bias: 1 x N, the same on all ranks.
    #[must_use]
    pub fn bias(mut self, bias: MatRef) -> Self {
        self.bias = Some(bias);
        self
    }

    /// With the RMSNorm that the plan has.
    #[must_use]
    pub fn norm(mut self, norm: NormArgs) -> Self {
        self.norm = Some(norm);
        self
    }
}

/// The matrices of the RMSNorm of one call, beside its result: C, or the output.
///
/// ```text
/// C[i, j]      = sum + residual[i, j]            rounded to the type of C
/// normed[i, j] = C[i, j] / sqrt(mean over j of C[i, j]^2 + epsilon) * weight[j]
/// ```
///
/// The second line is reckoned in f32 from C as it was rounded, and rounded to the same type. Sums of
/// squares are added in one order: where ranks have the same residual and weight, they get the same bits.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct NormArgs {
    /// M x N, of the type of C, the same on all ranks: what the sum is added to, behind bias and epilogue.
    /// It may be C itself, which is then the new residual where the old one was.
    pub residual: Option<MatRef>,
    /// 1 x N, of any type that C may have, the same on all ranks.
    pub weight: MatRef,
    /// M x N, of the type of C: apart from all other matrices of the call.
    pub normed: MatRef,
}

impl NormArgs {
    /// The RMSNorm of the rows of C, times `weight`, goes to `normed`.
    pub fn new(weight: MatRef, normed: MatRef) -> Self {
        Self { residual: None, weight, normed }
    }

    /// And C is the sum with the residual added.
    #[must_use]
    pub fn residual(mut self, residual: MatRef) -> Self {
        self.residual = Some(residual);
        self
    }
}

/// What is sent and got in one call of an op without a product: matrices, or
/// [vectors](MatRef::vector) of elements.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct CollectiveArgs {
    /// What this rank sends; none on a rank that only receives a broadcast.
    pub input: Option<MatRef>,
    /// What it gets.
    pub output: MatRef,
    /// What belongs to an RMSNorm, of an all-reduce: given where the plan has one, and only there.
    pub norm: Option<NormArgs>,
}

impl CollectiveArgs {
    /// Send `input`, get `output`.
    pub fn new(input: MatRef, output: MatRef) -> Self {
        Self { input: Some(input), output, norm: None }
    }

    /// Get `output` only: of a broadcast, on all ranks but the root.
    pub fn receive(output: MatRef) -> Self {
        Self { input: None, output, norm: None }
    }

    /// With the RMSNorm that the plan has.
    #[must_use]
    pub fn norm(mut self, norm: NormArgs) -> Self {
        self.norm = Some(norm);
        self
    }
}

/// The matrices of one call of any op, whether it uses all of them or not.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Matrices {
    pub(crate) a: Option<MatRef>,
    pub(crate) b: Option<MatRef>,
    pub(crate) c: Option<MatRef>,
    pub(crate) bias: Option<MatRef>,
    pub(crate) norm: Option<NormArgs>,
}

impl From<&MatmulArgs> for Matrices {
    fn from(args: &MatmulArgs) -> Self {
        let MatmulArgs { a, b, c, bias, norm } = *args;
        Self { a: Some(a), b: Some(b), c: Some(c), bias, norm }
    }
}

impl From<&CollectiveArgs> for Matrices {
    fn from(args: &CollectiveArgs) -> Self {
        Self { a: args.input, c: Some(args.output), norm: args.norm, ..Self::default() }
    }
}
