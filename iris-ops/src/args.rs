use iris_kernels::args::MOST_TENSORS;

use crate::matrix::MatRef;
use crate::operand::sealed::MatrixArg;

/// Matrices of one call of an operator with a matrix product: C = A B (+ bias), reduced or gathered
/// over the ranks as the operator defines. Either all matrices are [`MatRef`]s, or all are
/// [`Operand`](crate::Operand)s.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct MatmulArgs<M = MatRef> {
    /// Left factor, M x K, with the element type of the plan; the operator defines which rows or
    /// columns of the factor this rank passes.
    pub a: M,
    /// Right factor, K x N, with the element type of the plan.
    pub b: M,
    /// Result C, with the plan's output type; the operator defines which rows of the result this
    /// rank gets.
    pub c: M,
    /// Bias of 1 x N elements, f32, f16 or bf16. It is added to every row of the result once, not
    /// once per rank; all ranks pass the same values.
    pub bias: Option<M>,
    /// Matrices of the RMSNorm. They are required if the plan has `rms_norm`, otherwise an error.
    pub norm: Option<NormArgs<M>>,
}

impl<M> MatmulArgs<M> {
    /// Arguments for C = A B, without a bias and without an RMSNorm: A is M x K, B is K x N.
    /// [`Plan::shapes`](crate::Plan::shapes) gives the parts of these matrices that this rank
    /// passes.
    pub fn new(a: M, b: M, c: M) -> Self {
        Self { a, b, c, bias: None, norm: None }
    }

    /// Adds a bias of 1 x N elements to every row of C. All ranks must pass the same values, or none
    /// may pass a bias.
    #[must_use]
    pub fn bias(mut self, bias: M) -> Self {
        self.bias = Some(bias);
        self
    }

    /// Sets the matrices of the RMSNorm, for a plan with `rms_norm`.
    #[must_use]
    pub fn norm(mut self, norm: NormArgs<M>) -> Self {
        self.norm = Some(norm);
        self
    }
}

/// Matrices of the RMSNorm of one call, in addition to the result C (for a collective: the output).
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
/// use iris_heap::World;
/// use iris_ops::{AllReduce, CollectiveArgs, HeapReserve, MatRef, NormArgs, Plan, all_reduce::Options};
///
/// let all = World::run_threads(2, |world| -> anyhow::Result<_> {
///     let plan = Options::rows(3, 4).rms_norm(1e-5).plan(&world)?;
///     let heap = Plan::open_heap(&world, &[&plan], HeapReserve::matrices())?;
///     let op = AllReduce::new(&heap, &plan)?;
///     let (x, residual) = (heap.full::<f32>(12, 1.5)?, heap.ones::<f32>(12)?);
///     let (weight, normed) = (heap.full::<f32>(4, 0.5)?, heap.zeros::<f32>(12)?);
///     let [x, c, y] = [x, residual, normed].map(|slice| MatRef::sym(slice, 3, 4));
///     // The new residual takes the place of the old one.
///     let norm = NormArgs::new(MatRef::vector(weight), y).residual(c);
///     let stream = heap.stream()?;
///     op.run(&CollectiveArgs::new(x, c).norm(norm), &stream)?;
///     stream.sync()?;
///     let results = (heap.read(residual)?, heap.read(normed)?);
///     heap.close()?;
///     world.close()?;
///     Ok(results)
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
    /// Residual, M x N, with the element type of C and the same values on all ranks, or `None` on
    /// all. It is added to the sum after bias and epilogue. The residual may be C itself: then the
    /// call replaces the old residual by the new one.
    pub residual: Option<M>,
    /// Weight, 1 x N, of type f32, f16 or bf16, with the same values on all ranks.
    pub weight: M,
    /// Normalised rows, M x N, with the element type of C; written by the call. This matrix must
    /// not overlap any other matrix of the call.
    pub normed: M,
}

impl<M> NormArgs<M> {
    /// Arguments for an RMSNorm without a residual: `normed` (M x N, dtype of C) = RMSNorm of the
    /// rows of C, times `weight` (1 x N; f32, f16 or bf16).
    pub fn new(weight: M, normed: M) -> Self {
        Self { residual: None, weight, normed }
    }

    /// Adds `residual`, M x N with the dtype of C, to the sum before C is written and normalised.
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

/// Input and output of one call of a collective without a matrix product, as [`MatRef`]s or as
/// [`Operand`](crate::Operand)s. If the plan counts elements, input and output are
/// [vectors](MatRef::vector), or matrices in which each row is the data from or for one rank, with
/// or without gaps between rows. If the plan counts rows, they are matrices.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct CollectiveArgs<M = MatRef> {
    /// Data that this rank sends; `None` on a rank that only receives a broadcast.
    pub input: Option<M>,
    /// Data that this rank receives; written by the call.
    pub output: M,
    /// Matrices of the RMSNorm of an all-reduce. They are required if the plan has `rms_norm`,
    /// otherwise an error.
    pub norm: Option<NormArgs<M>>,
    pub(crate) more: More<M>,
    pub(crate) parts: PartArgs<M>,
}

/// Largest number of matrices that a call adds to its sum, the residual included.
pub(crate) const MOST_ADDED: usize = 2;

/// Weights of the parts of a sum, and matrices that are added to the sum.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PartArgs<M = MatRef> {
    pub(crate) weights: Option<M>,
    /// Number of added matrices that the program passed. If they are too many, the last ones are not
    /// kept.
    pub(crate) count: usize,
    pub(crate) added: [Option<M>; MOST_ADDED],
}

impl<M> Default for PartArgs<M> {
    fn default() -> Self {
        Self { weights: None, count: 0, added: std::array::from_fn(|_| None) }
    }
}

impl<M: MatrixArg> PartArgs<M> {
    fn all(&self) -> impl Iterator<Item = &M> {
        self.weights.iter().chain(self.added.iter().flatten())
    }

    fn matrices(&self) -> PartArgs {
        let matrix = |matrix: &Option<M>| matrix.as_ref().map(MatrixArg::matrix);
        let added = self.added.each_ref().map(matrix);
        PartArgs { weights: matrix(&self.weights), count: self.count, added }
    }
}

/// Tensors of a gather of a list after the first one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct More<M = MatRef> {
    /// Number of tensors that the program passed. If they are too many, the last ones are not kept.
    pub(crate) count: usize,
    /// Input and output of each tensor.
    pub(crate) tensors: [Option<[M; 2]>; MOST_TENSORS - 1],
}

impl<M> Default for More<M> {
    fn default() -> Self {
        Self { count: 0, tensors: std::array::from_fn(|_| None) }
    }
}

impl<M: MatrixArg> More<M> {
    fn all(&self) -> impl Iterator<Item = &M> {
        self.tensors.iter().flatten().flatten()
    }

    fn matrices(&self) -> More {
        let matrices = |pair: &[M; 2]| pair.each_ref().map(MatrixArg::matrix);
        let tensors = self.tensors.each_ref().map(|pair| pair.as_ref().map(matrices));
        More { count: self.count, tensors }
    }
}

impl<M> CollectiveArgs<M> {
    /// Arguments that send `input` and receive `output`, both with the plan's dtype.
    /// [`Plan::shapes`](crate::Plan::shapes) gives their shapes.
    pub fn new(input: M, output: M) -> Self {
        Self { input: Some(input), ..Self::receive(output) }
    }

    /// Arguments for a rank that only receives: in a broadcast, every rank except the root.
    pub fn receive(output: M) -> Self {
        let (more, parts) = (More::default(), PartArgs::default());
        Self { input: None, output, norm: None, more, parts }
    }

    /// Adds the next tensor of a list, for a plan with
    /// [`Options::and`](crate::all_gather::Options::and): `input` has this rank's rows of the
    /// tensor, and `output` the rows of all ranks.
    #[must_use]
    pub fn and(mut self, input: M, output: M) -> Self {
        if let Some(free) = self.more.tensors.get_mut(self.more.count) {
            *free = Some([input, output]);
        }
        self.more.count += 1;
        self
    }

    /// Sets the weights of the parts, for a plan with
    /// [`Options::combine`](crate::all_reduce::Options::combine): M x K elements of f32, one for each
    /// part of each row of the input. Ranks may pass different weights.
    #[must_use]
    pub fn weights(mut self, weights: M) -> Self {
        self.parts.weights = Some(weights);
        self
    }

    /// Adds a matrix to the sum over ranks before the output is rounded and normalised, for a plan
    /// with [`Options::combine`](crate::all_reduce::Options::combine): such as the residual, or the
    /// output of shared experts. It has shape and element type of the output, and may be the output
    /// itself. A call adds at most two matrices, [`NormArgs::residual`] included, which comes first.
    /// All ranks pass equally many; in an all-reduce all ranks pass the same values.
    #[must_use]
    pub fn plus(mut self, matrix: M) -> Self {
        if let Some(free) = self.parts.added.get_mut(self.parts.count) {
            *free = Some(matrix);
        }
        self.parts.count += 1;
        self
    }

    /// Sets the matrices of the RMSNorm, for a plan with `rms_norm`.
    #[must_use]
    pub fn norm(mut self, norm: NormArgs<M>) -> Self {
        self.norm = Some(norm);
        self
    }
}

/// Matrices of one call of any operator. A field is `None` if the operator has no such matrix. For
/// a collective, `a` is the input and `c` the output.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Matrices {
    pub(crate) a: Option<MatRef>,
    pub(crate) b: Option<MatRef>,
    pub(crate) c: Option<MatRef>,
    pub(crate) bias: Option<MatRef>,
    pub(crate) norm: Option<NormArgs>,
    pub(crate) more: More,
    pub(crate) parts: PartArgs,
    /// Rank that is the root of this call, for a broadcast; `None` for the plan's root.
    pub(crate) root: Option<usize>,
}

impl Matrices {
    /// Whether this call has a bias, and whether a residual or another matrix is added to the sum:
    /// either all ranks pass such a matrix or none does.
    pub(crate) fn options(&self) -> [bool; 2] {
        [self.bias.is_some(), self.added().next().is_some()]
    }

    /// Matrices that the call writes.
    pub(crate) fn outputs(&self) -> impl Iterator<Item = &MatRef> {
        let normed = self.norm.iter().map(|norm| &norm.normed);
        let more = self.more.tensors.iter().flatten().map(|[_, output]| output);
        self.c.iter().chain(normed).chain(more)
    }

    /// Matrices that are added to the sum, with their names in errors, in the order of the additions.
    pub(crate) fn added(&self) -> impl Iterator<Item = (&'static str, &MatRef)> {
        const NAMES: [&str; MOST_ADDED] = ["added matrix 1", "added matrix 2"];
        let residual = self.norm.as_ref().and_then(|norm| norm.residual.as_ref());
        let others = NAMES.into_iter().zip(&self.parts.added);
        let others = others.filter_map(|(name, matrix)| Some((name, matrix.as_ref()?)));
        residual.map(|residual| ("residual", residual)).into_iter().chain(others)
    }
}

/// Arguments of a call, with the matrices in the type that the program uses: `MatRef` or `Operand`.
pub(crate) trait CallArgs {
    /// Type in which the program passes a matrix.
    type Matrix: MatrixArg;

    /// All matrices that the program passes, without optional ones that are `None`.
    fn all(&self) -> impl Iterator<Item = &Self::Matrix>;

    /// Matrices of the call, each in the field for its role: A, B, C, bias or RMSNorm.
    fn matrices(&self) -> Matrices;
}

impl<M: MatrixArg> CallArgs for MatmulArgs<M> {
    type Matrix = M;

    fn all(&self) -> impl Iterator<Item = &M> {
        let own = [Some(&self.a), Some(&self.b), Some(&self.c), self.bias.as_ref()];
        own.into_iter().flatten().chain(self.norm.iter().flat_map(NormArgs::all))
    }

    fn matrices(&self) -> Matrices {
        let [a, b, c] = [&self.a, &self.b, &self.c].map(|matrix| Some(matrix.matrix()));
        let bias = self.bias.as_ref().map(MatrixArg::matrix);
        let norm = self.norm.as_ref().map(NormArgs::matrices);
        Matrices { a, b, c, bias, norm, ..Matrices::default() }
    }
}

impl<M: MatrixArg> CallArgs for CollectiveArgs<M> {
    type Matrix = M;

    fn all(&self) -> impl Iterator<Item = &M> {
        let own = [self.input.as_ref(), Some(&self.output)];
        let norm = self.norm.iter().flat_map(NormArgs::all);
        own.into_iter().flatten().chain(norm).chain(self.more.all()).chain(self.parts.all())
    }

    fn matrices(&self) -> Matrices {
        let a = self.input.as_ref().map(MatrixArg::matrix);
        let norm = self.norm.as_ref().map(NormArgs::matrices);
        let c = Some(self.output.matrix());
        let (more, parts) = (self.more.matrices(), self.parts.matrices());
        Matrices { a, c, norm, more, parts, ..Matrices::default() }
    }
}
