use crate::matrix::MatRef;

/// Matrices of one call of an operator with a matrix product: C = A B (+ bias), reduced or gathered
/// over the ranks as the operator defines.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct MatmulArgs {
    /// Left factor, M x K, with the plan's dtype; the operator defines which rows or columns of it
    /// this rank passes.
    pub a: MatRef,
    /// Right factor, K x N, with the plan's dtype.
    pub b: MatRef,
    /// Result, with the plan's output dtype; the operator defines which rows of it this rank gets.
    pub c: MatRef,
    /// Bias of 1 x N elements, f32, f16 or bf16. It is added to every row of the result once, not
    /// once per rank; all ranks pass the same values.
    pub bias: Option<MatRef>,
    /// Matrices of the RMSNorm; required if the plan has `rms_norm`, and an error if it has not.
    pub norm: Option<NormArgs>,
}

impl MatmulArgs {
    /// Arguments for C = A B, without a bias and without an RMSNorm.
    pub fn new(a: MatRef, b: MatRef, c: MatRef) -> Self {
        Self { a, b, c, bias: None, norm: None }
    }

    /// Adds a bias of 1 x N elements to every row of C. All ranks must pass the same values.
    #[must_use]
    pub fn bias(mut self, bias: MatRef) -> Self {
        self.bias = Some(bias);
        self
    }

    /// Sets the matrices of the RMSNorm, if the plan has `rms_norm`.
    #[must_use]
    pub fn norm(mut self, norm: NormArgs) -> Self {
        self.norm = Some(norm);
        self
    }
}

/// Matrices of the RMSNorm of one call, in addition to its result C (of a collective: the output).
///
/// ```text
/// C[i, j]      = sum + residual[i, j]            rounded to the type of C
/// normed[i, j] = C[i, j] / sqrt(mean over j of C[i, j]^2 + epsilon) * weight[j]
/// ```
///
/// `normed` is computed in f32 from the rounded C and then rounded to the type of C. Squares are
/// summed in a fixed order, so ranks with the same residual and weight get the same bits.
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
    /// Residual, M x N, same dtype as C, same values on all ranks. It is added to the sum after
    /// bias and epilogue. It may be C itself: then the call replaces the old residual by the new
    /// one.
    pub residual: Option<MatRef>,
    /// Weight, 1 x N, f32, f16 or bf16, same values on all ranks.
    pub weight: MatRef,
    /// Normalised rows, M x N, same dtype as C; written by the call. Must not overlap any other
    /// matrix of the call.
    pub normed: MatRef,
}

impl NormArgs {
    /// Arguments for an RMSNorm without a residual: `normed` = RMSNorm of the rows of C, times
    /// `weight`.
    pub fn new(weight: MatRef, normed: MatRef) -> Self {
        Self { residual: None, weight, normed }
    }

    /// Adds `residual` to the sum before C is written and normalised.
    #[must_use]
    pub fn residual(mut self, residual: MatRef) -> Self {
        self.residual = Some(residual);
        self
    }
}

/// Input and output of one call of a collective without a matrix product: matrices, or
/// [vectors](MatRef::vector) if it was planned by elements.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct CollectiveArgs {
    /// Data that this rank sends; `None` on a rank that only receives a broadcast.
    pub input: Option<MatRef>,
    /// Data that this rank receives; written by the call.
    pub output: MatRef,
    /// Matrices of the RMSNorm of an all-reduce; required if the plan has `rms_norm`, and an error
    /// if it has not.
    pub norm: Option<NormArgs>,
}

impl CollectiveArgs {
    /// Arguments that send `input` and receive `output`.
    pub fn new(input: MatRef, output: MatRef) -> Self {
        Self { input: Some(input), output, norm: None }
    }

    /// Arguments for a rank without input: every rank of a broadcast but its root.
    pub fn receive(output: MatRef) -> Self {
        Self { input: None, output, norm: None }
    }

    /// Sets the matrices of the RMSNorm, if the plan has `rms_norm`.
    #[must_use]
    pub fn norm(mut self, norm: NormArgs) -> Self {
        self.norm = Some(norm);
        self
    }
}

/// Matrices of one call of any operator; `None` for those that it does not have. A collective's
/// input is `a`, its output `c`.
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
