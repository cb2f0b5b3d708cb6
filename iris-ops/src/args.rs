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
///
/// ```
/// use iris_heap::{HeapOptions, SymmetricHeap, World};
/// use iris_ops::{AllReduce, CollectiveArgs, MatRef, NormArgs, all_reduce::Options};
///
/// let all = World::run_threads(2, |world| -> anyhow::Result<_> {
///     let heap = SymmetricHeap::open(&world, HeapOptions::new())?;
///     let op = AllReduce::new(&heap, &Options::rows(3, 4).rms_norm(1e-5).plan(&heap)?)?;
///     let (x, residual) = (heap.full::<f32>(12, 1.5)?, heap.ones::<f32>(12)?);
///     let (weight, normed) = (heap.full::<f32>(4, 0.5)?, heap.zeros::<f32>(12)?);
///     let [x, c, y] = [x, residual, normed].map(|slice| MatRef::sym(slice, 3, 4));
///     // The new residual takes the place of the old one.
///     let norm = NormArgs::new(MatRef::vector(weight), y).residual(c);
///     let stream = heap.stream()?;
///     op.run(&CollectiveArgs::new(x, c).norm(norm), &stream)?;
///     stream.sync()?;
///     Ok((heap.read(residual)?, heap.read(normed)?))
/// })?;
/// for (residual, normed) in all {
///     assert_eq!(residual, [4.0; 12]); // 1.5 + 1.5 + 1
///     assert!(normed.iter().all(|&y| (y - 0.5).abs() < 1e-6));
/// }
/// # Ok::<(), anyhow::Error>(())
/// ```
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
