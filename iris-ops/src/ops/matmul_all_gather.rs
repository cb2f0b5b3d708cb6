//! Product of each rank's rows, then an all-gather of C.

use iris_kernels::Kernel;
use iris_kernels::args::arrival;
use iris_kernels::program::{always, kernel};

use crate::MatmulArgs;
use crate::op_names::{self, Op};
use crate::op_row::{Common, Composition, Dims, Form, GemmStage, Memory, Part, Row, Tiles};
use crate::operator_macros::{beside_method, operator, variants};
use crate::options::options;
use crate::programs::{MATMUL, ROWS_COPIED, ROWS_STORED, UNFUSED_ROWS};

operator! {
    /// C (`m` x `n`, on all ranks): the rows `split(m, size, r)` are the product A B (plus a bias)
    /// of rank r, whose A has these rows and `k` columns; B is `k` x `n`. Each rank sends its
    /// finished tiles to all other ranks.
    MatmulAllGather(MatmulArgs)
}
beside_method!(MatmulAllGather(MatmulArgs));

options! { ROW,
    /// Options of [`MatmulAllGather`].
    {
        /// Options for at most `m` rows over all ranks, `n` columns and inner dimension `k`.
        product(m, n, k);
        variant, dtype, output, epilogue, tile, workgroups, reserve_sms, library,
    }
}

variants! { ROW;
    /// Each rank pushes a tile to all other ranks as soon as the tile is finished.
    Push,
    /// Whole-matrix GEMM of the library that the options choose, then the all-gather.
    Unfused,
    /// Whole-matrix GEMM that is cut into a few parts of rows: a copy engine sends each finished
    /// part to all ranks while the next part is multiplied. The option `tile` sets the number of
    /// rows of a part.
    CopyEngine,
    /// One whole-matrix GEMM whose epilogue stores each tile to all ranks; only on NVIDIA's sm_90.
    /// A plan that names this variant for another GPU is refused. On the CPU, on a single rank, and
    /// for operands that this GEMM does not support, calls run as a GEMM and then copies by
    /// workgroups.
    Epilogue,
}

pub(crate) const ROW: Row = Row {
    op: Op::MatmulAllGather,
    message: Op::AllGather,
    common: Common { n: true, k: true },
    a: Part::Own,
    c: Part::All,
    dims: Dims::product,
    tiles: Tiles::Own,
    in_place: false,
    composed: Composition::GatherC,
    alone: MATMUL,
    forms: &[
        FORMS[0],
        FORMS[0].renamed(op_names::Variant::Unfused, UNFUSED_ROWS).gemm(GemmStage::Rows),
        Form::push(op_names::Variant::CopyEngine, ROWS_COPIED, Memory::Copied(1))
            .gemm(GemmStage::Rows),
        Form::push(op_names::Variant::Epilogue, ROWS_STORED, Memory::Copied(1))
            .gemm(GemmStage::Rows)
            .direct(None)
            .stores(),
    ],
};

/// Variants of an all-gather of each rank's rows, with their programs and memory. They are the same
/// with and without a product before the all-gather.
pub(super) const FORMS: [Form; 1] =
    [Form::push(op_names::Variant::Push, &[always(&[kernel(Kernel::AllGather)])], Memory::Parts)
        .direct(Some(arrival::PARTS))];
