//! Product, then the sum over ranks; each rank gets some rows of the sum. It is the second half of
//! a sequence-parallel layer.

use iris_kernels::Kernel;
use iris_kernels::program::{always, kernel};

use crate::MatmulArgs;
use crate::op_names::{self, Op};
use crate::op_row::{Common, Composition, Dims, Form, GemmStage, Memory, Part, Row, Tiles};
use crate::operator_macros::{operator, variants};
use crate::options::options;
use crate::programs::{MATMUL, SCATTER_COPIED, SCATTER_STORED, UNFUSED_SCATTER};

operator! {
    /// C (rows `split(m, size, rank)` x `n`) = these rows of the sum over ranks of A (`m` x `k`) B
    /// (`k` x `n`), plus a bias that is added once. `k` may differ between ranks.
    ///
    /// Tiles are sent to the rank that owns their rows. That rank adds the partial products in the
    /// order of ranks, so every run gives the same bits.
    MatmulReduceScatter(MatmulArgs)
}

options! { ROW,
    /// Options of [`MatmulReduceScatter`].
    {
        /// Options for at most `m` rows over all ranks, `n` columns and this rank's inner dimension
        /// `k`.
        product(m, n, k);
        variant, dtype, output, wire, epilogue, tile, workgroups, library, uniform_shape,
    }
}

variants! { ROW;
    /// Each rank pushes a tile, as soon as it is finished, to the rank that owns the tile's rows.
    Push,
    /// Whole-matrix GEMM of the library that the options choose, then the reduce-scatter.
    Unfused,
    /// GEMMs of the rows that peers own come first, in a few parts: a copy engine sends each
    /// finished part to its owner while the next part is multiplied. The rows of this rank come
    /// last, and the peers' partial products are added to them. The GEMMs are those of `Unfused`.
    /// The option `tile` sets the number of rows of a part.
    CopyEngine,
    /// One whole-matrix GEMM, on NVIDIA's sm_90. It multiplies the rows that peers own first, and
    /// its epilogue stores them to their owners. It multiplies this rank's own rows last, and adds
    /// the peers' partial products to its own f32 sums, in ascending order of ranks. A plan that names
    /// this variant for another GPU is refused. On the CPU, on a single rank, and for operands that
    /// this GEMM does not support, calls run as a GEMM and then copies by
    /// workgroups.
    Epilogue,
}

pub(crate) const ROW: Row = Row {
    op: Op::MatmulReduceScatter,
    message: Op::ReduceScatter,
    common: Common { n: true, k: false },
    a: Part::All,
    c: Part::Own,
    dims: Dims::product,
    tiles: Tiles::Split,
    in_place: false,
    composed: Composition::ReduceScatter,
    alone: MATMUL,
    forms: &[
        FORMS[0],
        FORMS[0].renamed(op_names::Variant::Unfused, UNFUSED_SCATTER).gemm(GemmStage::Partial),
        Form::push(op_names::Variant::CopyEngine, SCATTER_COPIED, Memory::Copied(1))
            .gemm(GemmStage::Partial),
        Form::push(op_names::Variant::Epilogue, SCATTER_STORED, Memory::Copied(1))
            .gemm(GemmStage::Partial)
            .stores(),
    ],
};

/// Variants of a reduce-scatter, with their programs and memory. They are the same with and without
/// a product before the reduce-scatter.
pub(super) const FORMS: [Form; 1] = [Form::push(
    op_names::Variant::Push,
    &[always(&[kernel(Kernel::ReduceScatter)])],
    Memory::PartialParts,
)];
