use crate::matrix::MatRef;
use crate::operand::sealed::MatrixArg;

/// The matrices of one call of an op with a product: C = A B, and a bias if there is one. All are [`MatRef`]s, or all are
/// [`Operand`](crate::Operand)s.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct MatmulArgs<M = MatRef> {
    /// Left factor.
    pub a: M,
    /// Right factor.
    pub b: M,
    /// Result.
    pub c: M,
    /// One row of N elements, added to every row of the result exactly once over all ranks.
    pub bias: Option<M>,
    /// What belongs to an RMSNorm: given where the plan has one, and only there.
    pub norm: Option<NormArgs<M>>,
}

impl<M> MatmulArgs<M> {
    /// C = A B.
    pub fn new(a: M, b: M, c: M) -> Self {
        Self { a, b, c, bias: None, norm: None }
    }

    /// C = A B + bias: 1 x N, the same on all ranks.
    #[must_use]
    pub fn bias(mut self, bias: M) -> Self {
        self.bias = Some(bias);
        self
    }

    /// With the RMSNorm that the plan has.
    #[must_use]
    pub fn norm(mut self, norm: NormArgs<M>) -> Self {
        self.norm = Some(norm);
        self
    }

    /// All that are given.
    pub(crate) fn all(&self) -> impl Iterator<Item = &M> {
        let own = [Some(&self.a), Some(&self.b), Some(&self.c), self.bias.as_ref()];
        own.into_iter().flatten().chain(self.norm.iter().flat_map(NormArgs::all))
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
pub struct NormArgs<M = MatRef> {
    /// M x N, of the type of C, the same on all ranks: what the sum is added to, behind bias and epilogue.
    /// It may be C itself, which is then the new residual where the old one was.
    pub residual: Option<M>,
    /// 1 x N, of any type that C may have, the same on all ranks.
    pub weight: M,
    /// M x N, of the type of C: apart from all other matrices of the call.
    pub normed: M,
}

impl<M> NormArgs<M> {
    /// The RMSNorm of the rows of C, times `weight`, goes to `normed`.
    pub fn new(weight: M, normed: M) -> Self {
        Self { residual: None, weight, normed }
    }

    /// And C is the sum with the residual added.
    #[must_use]
    pub fn residual(mut self, residual: M) -> Self {
        self.residual = Some(residual);
        self
    }

    fn all(&self) -> impl Iterator<Item = &M> {
        [Some(&self.weight), Some(&self.normed), self.residual.as_ref()].into_iter().flatten()
    }
}

impl<M: MatrixArg> NormArgs<M> {
    fn matrices(&self) -> NormArgs {
        let residual = self.residual.as_ref().map(MatrixArg::matrix);
        NormArgs { residual, weight: self.weight.matrix(), normed: self.normed.matrix() }
    }
}

/// What is sent and got in one call of an op without a product, as [`MatRef`]s or as [`Operand`](crate::Operand)s: matrices; or, of a message that was planned by elements,
/// [vectors](MatRef::vector), or matrices with one part of the message a row, which may have a leading dimension.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct CollectiveArgs<M = MatRef> {
    /// What this rank sends; none on a rank that only receives a broadcast.
    pub input: Option<M>,
    /// What it gets.
    pub output: M,
    /// What belongs to an RMSNorm, of an all-reduce: given where the plan has one, and only there.
    pub norm: Option<NormArgs<M>>,
}

impl<M> CollectiveArgs<M> {
    /// Send `input`, get `output`.
    pub fn new(input: M, output: M) -> Self {
        Self { input: Some(input), output, norm: None }
    }

    /// Get `output` only: of a broadcast, on all ranks but the root.
    pub fn receive(output: M) -> Self {
        Self { input: None, output, norm: None }
    }

    /// With the RMSNorm that the plan has.
    #[must_use]
    pub fn norm(mut self, norm: NormArgs<M>) -> Self {
        self.norm = Some(norm);
        self
    }

    /// All that are given.
    pub(crate) fn all(&self) -> impl Iterator<Item = &M> {
        let own = [self.input.as_ref(), Some(&self.output)];
        own.into_iter().flatten().chain(self.norm.iter().flat_map(NormArgs::all))
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
    /// Root of this call, where it is another than the plan's.
    pub(crate) root: Option<usize>,
}

impl<M: MatrixArg> From<&MatmulArgs<M>> for Matrices {
    fn from(args: &MatmulArgs<M>) -> Self {
        let [a, b, c] = [&args.a, &args.b, &args.c].map(|matrix| Some(matrix.matrix()));
        let bias = args.bias.as_ref().map(MatrixArg::matrix);
        Self { a, b, c, bias, norm: args.norm.as_ref().map(NormArgs::matrices), root: None }
    }
}

impl<M: MatrixArg> From<&CollectiveArgs<M>> for Matrices {
    fn from(args: &CollectiveArgs<M>) -> Self {
        let a = args.input.as_ref().map(MatrixArg::matrix);
        let norm = args.norm.as_ref().map(NormArgs::matrices);
        Self { a, c: Some(args.output.matrix()), norm, ..Self::default() }
    }
}
