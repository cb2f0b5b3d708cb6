//! All-gather of A before a matrix product: the first half of a sequence-parallel layer.

use iris_kernels::Kernel;
use iris_kernels::program::{always, kernel};

use crate::MatmulArgs;
use crate::op_names::{self, Op};
use crate::op_row::{Common, Composition, Dims, Form, GemmStage, Memory, Part, Row, Tiles};
use crate::operator_macros::{operator, variants};
pub use crate::options::Staged;
use crate::options::options;
use crate::programs::{GATHER, GATHER_COPIED, MATMUL, UNFUSED_GATHER};

operator! {
    /// C (`m` x `n`, each rank its own) = A (`m` x `k`, gathered from all ranks) B (`k` x `n`, each
    /// rank its own), plus a bias. `n` may differ between ranks.
    ///
    /// A rank passes the rows `split(m, size, rank)` of A, or with
    /// [`Shard::Columns`](crate::Shard::Columns) the columns `split(k, size, rank)`. In the
    /// variants `pull` and `staged`, peers read A in place. A must then have the same offset on all
    /// ranks, and be contiguous on all, or have one leading dimension on all, which must be larger
    /// than the number of columns of the widest shard. The call ends on
    /// the stream only after all peers have read A.
    AllGatherMatmul(MatmulArgs)
}

options! { ROW,
    /// Options of [`AllGatherMatmul`].
    {
        /// Options for at most `m` rows over all ranks, `n` columns of this rank's C, and inner
        /// dimension `k` over all ranks.
        product(m, n, k);
        variant, shard, dtype, output, epilogue, tile, workgroups, library, uniform_shape,
    }
}

variants! { ROW;
    /// Shards of A are pushed to all ranks; then a barrier, then the product. A may be in any
    /// memory.
    Baseline,
    /// The kernel of the product reads the peers' shards of A directly from their memory. A must be
    /// in the symmetric heap.
    Pull,
    /// Some workgroups fetch the peers' shards of A into a staging buffer and raise a flag for each
    /// unit of A (block of rows and columns that is fetched at once). The other workgroups
    /// multiply, and wait for the units that they need. A must be in the symmetric heap.
    Staged(Staged => staged),
    /// All-gather of A by the variant `push` of [`AllGather`](crate::AllGather), then a GEMM of the
    /// library that the options choose. A may be in any memory. The option `tile` is a tile of A.
    Unfused,
    /// Copy engines push the shards to all ranks in a few parts (on AMD, kernels of the runtime do;
    /// see [`Variant::CopyEngine`](crate::Variant::CopyEngine)). This rank's own rows are
    /// multiplied first, and each part of the peers' rows when it has arrived. If A is split by
    /// columns, one GEMM on sm_90 starts with this rank's columns and waits for each part; elsewhere
    /// the product starts when all of A has arrived. The GEMMs are those of `Unfused`. A may be in any
    /// memory. The option `tile` is a tile of A; its rows are the rows of a part.
    CopyEngine,
}

pub(crate) const ROW: Row = Row {
    op: Op::AllGatherMatmul,
    message: Op::AllGather,
    common: Common { n: false, k: true },
    a: Part::Shard,
    c: Part::All,
    dims: Dims::product,
    tiles: Tiles::Split,
    in_place: false,
    composed: Composition::GatherA,
    alone: MATMUL,
    forms: &[
        Form::push(op_names::Variant::Baseline, GATHER, Memory::Gathered),
        Form::push(op_names::Variant::Pull, &[always(&[kernel(Kernel::Pull)])], Memory::None)
            .pulls(),
        Form {
            fetches: true,
            ..Form::push(
                op_names::Variant::Staged,
                &[always(&[kernel(Kernel::Staged)])],
                Memory::Staged,
            )
            .pulls()
        },
        Form::push(op_names::Variant::Unfused, UNFUSED_GATHER, Memory::Signals)
            .gemm(GemmStage::Gathered),
        Form::push(op_names::Variant::CopyEngine, GATHER_COPIED, Memory::Copied(1))
            .gemm(GemmStage::Gathered),
    ],
};
