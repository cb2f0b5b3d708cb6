//! C = sum over ranks of A B, each rank getting some rows of C: the second half of a
//! sequence-parallel layer.

use iris_kernels::Kernel;
use iris_kernels::program::{always, kernel};

use crate::MatmulArgs;
use crate::facade::{operator, variants};
use crate::kind::{self, Op};
use crate::options::options;
use crate::programs::{MATMUL, SCATTER_COPIED, SCATTER_STORED, UNFUSED_SCATTER};
use crate::spec::{Common, Dims, Form, Memory, Part, Row, Tiles, Whole};

operator! {
    /// C (rows `split(m, size, rank)` x `n`) = those rows of the sum over ranks of A (`m` x `k`)
    /// B (`k` x `n`), plus a bias added once. `k` is the rank's own and may differ between ranks.
    ///
    /// Tiles are pushed to the rank that owns their rows, which adds its own first, then the others
    /// in ascending order: the same bits in every run.
    MatmulReduceScatter(MatmulArgs)
}

options! { ROW,
    /// What [`MatmulReduceScatter`] is planned for.
    {
        /// For at most `m` rows over all ranks, `n` columns and this rank's depth `k`.
        product(m, n, k);
        variant, dtype, output, wire, epilogue, tile, workgroups, library, even,
    }
}

variants! { ROW;
    /// Tiles are pushed as they are finished.
    Push,
    /// The product of whole matrices, by the library that the options say, then the message.
    Unfused,
    /// The rows that others own are multiplied first, in a few parts, and each part goes to its owner by a
    /// copy engine while the next is multiplied; then this rank's own, to which theirs are added. The
    /// products are those of `Unfused`; the rows of a tile are those of a part.
    CopyEngine,
    /// One product of whole matrices, on NVIDIA's sm_90: the rows that others own are multiplied first, and
    /// stored to their owners as they are finished; then this rank's own, to which theirs are added in f32, in
    /// ascending order. Elsewhere, and for operands that it does not take, `Unfused`, with its own messages.
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
    alone: MATMUL,
    forms: &[
        FORMS[0],
        FORMS[0].of(kind::Variant::Unfused, UNFUSED_SCATTER).whole(Whole::Partial),
        Form::push(kind::Variant::CopyEngine, SCATTER_COPIED, Memory::Copied(1))
            .whole(Whole::Partial),
        Form::push(kind::Variant::Epilogue, SCATTER_STORED, Memory::Copied(1))
            .whole(Whole::Partial)
            .stores(),
    ],
};

/// Of all sums of which a rank gets its rows.
pub(super) const FORMS: [Form; 1] = [Form::push(
    kind::Variant::Push,
    &[always(&[kernel(Kernel::ReduceScatter)])],
    Memory::PartialParts,
)];
