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
}

impl MatmulArgs {
    /// C = A B.
    pub fn new(a: MatRef, b: MatRef, c: MatRef) -> Self {
        Self { a, b, c, bias: None }
    }

    /// C = A B + bias: 1 x N, the same on all ranks.
    #[must_use]
    pub fn bias(mut self, bias: MatRef) -> Self {
        self.bias = Some(bias);
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
}

impl CollectiveArgs {
    /// Send `input`, get `output`.
    pub fn new(input: MatRef, output: MatRef) -> Self {
        Self { input: Some(input), output }
    }

    /// Get `output` only: of a broadcast, on all ranks but the root.
    pub fn receive(output: MatRef) -> Self {
        Self { input: None, output }
    }
}

/// The matrices of one call of any op, whether it uses all of them or not.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Matrices {
    pub(crate) a: Option<MatRef>,
    pub(crate) b: Option<MatRef>,
    pub(crate) c: Option<MatRef>,
    pub(crate) bias: Option<MatRef>,
}

impl From<&MatmulArgs> for Matrices {
    fn from(args: &MatmulArgs) -> Self {
        let MatmulArgs { a, b, c, bias } = *args;
        Self { a: Some(a), b: Some(b), c: Some(c), bias }
    }
}

impl From<&CollectiveArgs> for Matrices {
    fn from(args: &CollectiveArgs) -> Self {
        Self { a: args.input, c: Some(args.output), ..Self::default() }
    }
}
