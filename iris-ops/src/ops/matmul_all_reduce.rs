//! Product, then the sum over ranks, which all ranks get: used for row-parallel linear layers.

use iris_kernels::Kernel;
use iris_kernels::args::arrival;
use iris_kernels::program::{always, kernel};
use iris_kernels::schedule::Collective;

use crate::MatmulArgs;
use crate::op_names::{self, Op};
use crate::op_row::{Common, Composition, Dims, Form, GemmStage, Memory, Norm, Part, Row, Tiles};
use crate::operator_macros::{beside_method, operator, variants};
use crate::options::options;
use crate::programs::{
    ADD_ATOMIC, ADD_LOCKED, MATMUL, SUM_COPIED, SUM_STORED, UNFUSED, UNFUSED_LL, UNFUSED_ONE_SHOT,
    UNFUSED_TWO_SHOT_LL,
};

operator! {
    /// C (`m` x `n`, on all ranks) = sum over ranks of A (`m` x `k`) B (`k` x `n`), plus a bias
    /// that is added once. `k` may differ between ranks.
    MatmulAllReduce(MatmulArgs)
}
beside_method!(MatmulAllReduce(MatmulArgs));

options! { ROW,
    /// Options of [`MatmulAllReduce`].
    {
        /// Options for at most `m` rows, `n` columns and this rank's inner dimension `k`.
        product(m, n, k);
        variant, dtype, output, wire, epilogue, rms_norm, tile, workgroups, reserve_sms, library,
        uniform_shape,
    }
}

variants! { ROW;
    /// Each rank pushes its partial product of every tile to all ranks, and each rank adds all
    /// partial products in the order of ranks, so all ranks get the same bits. Best for small
    /// results.
    OneShot,
    /// One rank, the owner of a tile, adds up the partial products of all ranks in the order of
    /// ranks, and sends the sum to all ranks.
    TwoShot,
    /// Ranks add their partial products to an f32 sum at the tile's owner while they hold a
    /// spinlock. The order of additions varies between runs, so the last bits of the result vary
    /// too.
    Spinlock,
    /// Ranks add their partial products to an f32 sum at the tile's owner by atomic additions. The
    /// order of additions varies between runs, so the last bits of the result vary too.
    Atomic,
    /// Whole-matrix GEMM of the library that the options choose, then an all-reduce of its result
    /// by the protocol of `TwoShot`.
    Unfused,
    /// Whole-matrix GEMM, then an all-reduce of its result by the protocol of `OneShot`.
    UnfusedOneShot,
    /// Whole-matrix GEMM, then an all-reduce of its result by the LL protocol. The result has the
    /// same bits as that of `UnfusedOneShot`. Only for results of at most 2 MiB.
    UnfusedLl,
    /// Whole-matrix GEMM, then an all-reduce of its result in two hops by the LL protocol. The result
    /// has the same bits as that of `UnfusedOneShot`. `wire` must be the type of C.
    UnfusedTwoShotLl,
    /// Variant `copy_engine` of [`MatmulReduceScatter`](crate::MatmulReduceScatter), followed by
    /// copies: a copy engine sends each part of the sums to all ranks while the next part is
    /// multiplied. The rows of C are split over the ranks, and the owner of a row adds the
    /// partial products in the order of ranks.
    CopyEngine,
    /// Variant `epilogue` of [`MatmulReduceScatter`](crate::MatmulReduceScatter), in which the same
    /// GEMM also stores each tile of the sums to all ranks.
    Epilogue,
}

pub(crate) const ROW: Row = Row {
    op: Op::MatmulAllReduce,
    message: Op::AllReduce,
    common: Common { n: true, k: false },
    a: Part::All,
    c: Part::All,
    dims: Dims::product,
    tiles: Tiles::All,
    in_place: false,
    composed: Composition::AllReduce { scatter: Op::MatmulReduceScatter },
    alone: MATMUL,
    forms: &[
        FORMS[0],
        FORMS[1],
        FORMS[2],
        FORMS[3],
        FORMS[1]
            .renamed(op_names::Variant::Unfused, UNFUSED)
            .gemm(GemmStage::Partial)
            .norms(Norm::Last),
        FORMS[0]
            .renamed(op_names::Variant::UnfusedOneShot, UNFUSED_ONE_SHOT)
            .gemm(GemmStage::Partial)
            .norms(Norm::Last),
        LL.renamed(op_names::Variant::UnfusedLl, UNFUSED_LL)
            .gemm(GemmStage::Partial)
            .norms(Norm::Within),
        TWO_SHOT_LL
            .renamed(op_names::Variant::UnfusedTwoShotLl, UNFUSED_TWO_SHOT_LL)
            .gemm(GemmStage::Partial),
        Form::push(op_names::Variant::CopyEngine, SUM_COPIED, Memory::Copied(2))
            .gemm(GemmStage::Partial)
            .norms(Norm::Last),
        Form::push(op_names::Variant::Epilogue, SUM_STORED, Memory::Copied(2))
            .gemm(GemmStage::Partial)
            .direct(None)
            .stores()
            .norms(Norm::Last),
    ],
};

/// Variants of an all-reduce, with their programs and memory. They are the same with and without a
/// product before the all-reduce.
pub(super) const FORMS: [Form; 4] = [
    Form::push(op_names::Variant::OneShot, &[always(&[kernel(Kernel::OneShot)])], Memory::AllTiles)
        .sends_all(),
    Form::push(
        op_names::Variant::TwoShot,
        &[always(&[kernel(Kernel::TwoShot)])],
        Memory::OwnedAndResults,
    )
    .direct(Some(arrival::RESULTS)),
    Form::push(op_names::Variant::Spinlock, ADD_LOCKED, Memory::Sums { locks: true }),
    Form::push(op_names::Variant::Atomic, ADD_ATOMIC, Memory::Sums { locks: false }),
];

/// Variant of an all-reduce by the LL protocol, for small messages, with its program and memory.
pub(super) const LL: Form = Form::push(
    op_names::Variant::Ll,
    &[always(&[kernel(Kernel::OneShotLl)])],
    Memory::Pairs(Collective::AllReduce),
)
.sends_all();

/// Variant of an all-reduce in two hops by the LL protocol, with its program and memory.
pub(super) const TWO_SHOT_LL: Form = Form::push(
    op_names::Variant::TwoShotLl,
    &[always(&[kernel(Kernel::TwoShotLl)])],
    Memory::Pairs(Collective::TwoShot { root: None }),
);
