//! C = sum over ranks of A B, and the same C on all ranks: row-parallel linear layers.

use iris_kernels::Kernel;
use iris_kernels::args::arrival;
use iris_kernels::program::{always, kernel};
use iris_kernels::schedule::Collective;

use crate::MatmulArgs;
use crate::facade::{beside_method, operator, variants};
use crate::kind::{self, Op};
use crate::options::options;
use crate::programs::{
    ADD_ATOMIC, ADD_LOCKED, MATMUL, SUM_COPIED, SUM_STORED, UNFUSED, UNFUSED_LL, UNFUSED_ONE_SHOT,
};
use crate::spec::{Common, Dims, Form, Memory, Norm, Part, Row, Tiles, Whole};

operator! {
    /// C (`m` x `n`, on all ranks) = sum over ranks of A (`m` x `k`) B (`k` x `n`), plus a bias added
    /// once. `k` is the rank's own and may differ between ranks.
    MatmulAllReduce(MatmulArgs)
}
beside_method!(MatmulAllReduce(MatmulArgs));

options! { ROW,
    /// What [`MatmulAllReduce`] is planned for.
    {
        /// For at most `m` rows, `n` columns and this rank's depth `k`.
        product(m, n, k);
        variant, dtype, output, wire, epilogue, rms_norm, tile, workgroups, beside, library, even,
    }
}

variants! { ROW;
    /// Each rank pushes its partial of every tile to all; each adds up all of them, in the order
    /// of ranks: the same bits everywhere. For small results.
    OneShot,
    /// The owner of a tile adds it up, its own partial first, and sends the result to all: the
    /// same bits everywhere.
    TwoShot,
    /// Ranks add into the owner's f32 tile under a lock. The order, and so the last bits, vary.
    Spinlock,
    /// Ranks add into the owner's f32 tile atomically. The order, and so the last bits, vary.
    Atomic,
    /// The product of whole matrices, by the library that the options say, then `two_shot` of it.
    Unfused,
    /// The product of whole matrices, then `one_shot` of it.
    UnfusedOneShot,
    /// The same bits as `UnfusedOneShot`, in words that carry their data: for at most 2 MiB.
    UnfusedLl,
    /// As that of [`MatmulReduceScatter`](crate::MatmulReduceScatter), and each part of the sums goes to all
    /// by a copy engine while the next is multiplied. The rows of C are split over the ranks: a rank adds
    /// its own partial first, and all have the same bits.
    CopyEngine,
    /// As that of [`MatmulReduceScatter`](crate::MatmulReduceScatter), and the same product stores each tile
    /// of the sums to all when it is added up.
    Epilogue,
}

pub(crate) const ROW: Row = Row {
    op: Op::MatmulAllReduce,
    message: Op::AllReduce,
    common: Common { n: true, k: false },
    a: Part::All,
    c: Part::All,
    dims: Dims::product,
    tiles: Tiles::Whole,
    in_place: false,
    alone: MATMUL,
    forms: &[
        FORMS[0],
        FORMS[1],
        FORMS[2],
        FORMS[3],
        FORMS[1].of(kind::Variant::Unfused, UNFUSED).whole(Whole::Partial).norms(Norm::Last),
        FORMS[0]
            .of(kind::Variant::UnfusedOneShot, UNFUSED_ONE_SHOT)
            .whole(Whole::Partial)
            .norms(Norm::Last),
        LL.of(kind::Variant::UnfusedLl, UNFUSED_LL).whole(Whole::Partial).norms(Norm::Within),
        Form::push(kind::Variant::CopyEngine, SUM_COPIED, Memory::Copied(2))
            .whole(Whole::Partial)
            .norms(Norm::Last),
        Form::push(kind::Variant::Epilogue, SUM_STORED, Memory::Copied(2))
            .whole(Whole::Partial)
            .direct(None)
            .stores()
            .norms(Norm::Last),
    ],
};

/// Of all sums that all ranks get.
pub(super) const FORMS: [Form; 4] = [
    Form::push(kind::Variant::OneShot, &[always(&[kernel(Kernel::OneShot)])], Memory::AllTiles)
        .sends_all(),
    Form::push(
        kind::Variant::TwoShot,
        &[always(&[kernel(Kernel::TwoShot)])],
        Memory::OwnedAndResults,
    )
    .direct(Some(arrival::RESULTS)),
    Form::push(kind::Variant::Spinlock, ADD_LOCKED, Memory::Sums { locks: true }),
    Form::push(kind::Variant::Atomic, ADD_ATOMIC, Memory::Sums { locks: false }),
];

/// The same for small ones.
pub(super) const LL: Form = Form::push(
    kind::Variant::Ll,
    &[always(&[kernel(Kernel::OneShotLl)])],
    Memory::Pairs(Collective::AllReduce),
)
.sends_all();
