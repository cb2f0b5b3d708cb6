//! A is split over the ranks, and every rank multiplies all of it: the first half of a
//! sequence-parallel layer.

use iris_kernels::Kernel;
use iris_kernels::program::{always, kernel};

use crate::MatmulArgs;
use crate::facade::{operator, variants};
use crate::kind::{self, Op};
pub use crate::options::Staged;
use crate::options::options;
use crate::programs::{GATHER, GATHER_COPIED, MATMUL, UNFUSED_GATHER};
use crate::spec::{Common, Dims, Form, Memory, Part, Row, Tiles, Whole};

operator! {
    /// C (`m` x `n`, each rank its own) = A (`m` x `k`, gathered) B (`k` x `n`, each rank its own),
    /// plus a bias. `n` may differ between ranks.
    ///
    /// A rank has the rows `split(m, size, rank)` of A, or with [`Shard::Columns`](crate::Shard::Columns)
    /// the columns `split(k, size, rank)`. In the variants that pull, A has the same offset on all
    /// ranks, its rows have no gaps or are equally far apart on all ranks, and the call ends on the
    /// stream only when all peers have read it.
    AllGatherMatmul(MatmulArgs)
}

options! { ROW,
    /// What [`AllGatherMatmul`] is planned for.
    {
        /// For at most `m` rows over all ranks, this rank's `n` columns and the whole depth `k`.
        product(m, n, k);
        variant, shard, dtype, output, epilogue, tile, workgroups, library, even,
    }
}

variants! { ROW;
    /// Push the shards to all, barrier, multiply. Takes A in any memory.
    Baseline,
    /// Multiply straight from the peers' shards; A must be symmetric.
    Pull,
    /// Some workgroups fetch remote parts of A into a buffer and raise a flag for each, the others
    /// multiply and wait for the part they need; A must be symmetric.
    Staged(Staged => staged),
    /// Gather A as [`AllGather`](crate::AllGather) does, then the product of whole matrices, by the
    /// library that the options say. Takes A in any memory; the tile is of A.
    Unfused,
    /// Push the shards to all by copy engines (on AMD by kernels of the runtime:
    /// [`Variant::CopyEngine`](crate::Variant::CopyEngine)), in a few parts, and multiply each part when it has come,
    /// this rank's own rows first; A that is split by columns is gathered, then multiplied. The products
    /// are those of `Unfused`. Takes A in any memory; the tile is of A, and its rows are those of a part.
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
    alone: MATMUL,
    forms: &[
        Form::push(kind::Variant::Baseline, GATHER, Memory::Gathered),
        Form::push(kind::Variant::Pull, &[always(&[kernel(Kernel::Pull)])], Memory::None).pulls(),
        Form {
            fetches: true,
            ..Form::push(
                kind::Variant::Staged,
                &[always(&[kernel(Kernel::Staged)])],
                Memory::Staged,
            )
            .pulls()
        },
        Form::push(kind::Variant::Unfused, UNFUSED_GATHER, Memory::Signals).whole(Whole::Gathered),
        Form::push(kind::Variant::CopyEngine, GATHER_COPIED, Memory::Copied(1))
            .whole(Whole::Gathered),
    ],
};
