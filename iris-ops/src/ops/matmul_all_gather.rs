//! Each rank multiplies its rows, and all ranks get all rows.

use iris_kernels::Kernel;
use iris_kernels::args::arrival;
use iris_kernels::program::{always, kernel};

use crate::MatmulArgs;
use crate::facade::{beside_method, operator, variants};
use crate::kind::{self, Op};
use crate::options::options;
use crate::programs::{MATMUL, ROWS_COPIED, ROWS_STORED, UNFUSED_ROWS};
use crate::spec::{Common, Dims, Form, Memory, Part, Row, Tiles, Whole};

operator! {
    /// C (`m` x `n`, on all ranks): its rows `split(m, size, rank)` are A (those rows x `k`) B
    /// (`k` x `n`) of that rank, plus a bias. Each rank pushes its finished tiles to all.
    MatmulAllGather(MatmulArgs)
}
beside_method!(MatmulAllGather(MatmulArgs));

options! { ROW,
    /// What [`MatmulAllGather`] is planned for.
    {
        /// For at most `m` rows over all ranks, `n` columns and depth `k`.
        product(m, n, k);
        variant, dtype, output, epilogue, tile, workgroups, beside, library,
    }
}

variants! { ROW;
    /// Tiles are pushed as they are finished.
    Push,
    /// The product of whole matrices, by the library that the options say, then the message.
    Unfused,
    /// The product of whole matrices in a few parts, each of which goes to all by a copy engine while the
    /// next is multiplied. The rows of a tile are those of a part.
    CopyEngine,
    /// One product of whole matrices, on NVIDIA's sm_90, which stores each tile to all when it is finished.
    /// Elsewhere, and for operands that it does not take, `Unfused`, with its own messages.
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
    alone: MATMUL,
    forms: &[
        FORMS[0],
        FORMS[0].of(kind::Variant::Unfused, UNFUSED_ROWS).whole(Whole::Rows),
        Form::push(kind::Variant::CopyEngine, ROWS_COPIED, Memory::Copied(1)).whole(Whole::Rows),
        Form::push(kind::Variant::Epilogue, ROWS_STORED, Memory::Copied(1))
            .whole(Whole::Rows)
            .direct(None)
            .stores(),
    ],
};

/// Of all that is gathered from every rank's rows.
pub(super) const FORMS: [Form; 1] =
    [Form::push(kind::Variant::Push, &[always(&[kernel(Kernel::AllGather)])], Memory::Parts)
        .direct(Some(arrival::PARTS))];
