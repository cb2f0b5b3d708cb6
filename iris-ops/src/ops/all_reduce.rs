//! The sum over ranks, on all ranks.

use crate::CollectiveArgs;
use crate::facade::{beside_method, operator, variants};
use crate::kind::Op;
use crate::ops::matmul_all_reduce::{FORMS, LL};
use crate::options::options;
use crate::programs::LOCAL;
use crate::spec::{Common, Dims, Norm, Part, Row, Tiles};

operator! {
    /// Output (on all ranks) = sum over ranks of input. The output may be the input itself.
    AllReduce(CollectiveArgs)
}
beside_method!(AllReduce(CollectiveArgs));

options! { ROW,
    /// What [`AllReduce`] is planned for.
    {
        /// For at most `count` elements.
        message();
        variant, dtype, wire, epilogue, rms_norm, tile, workgroups, beside,
    }
}

variants! { ROW;
    /// Each rank pushes its input to all; each adds up all of them, in the order of ranks: the same
    /// bits everywhere. For small messages.
    OneShot,
    /// The owner of a tile adds it up, its own part first, and sends the result to all: the same
    /// bits everywhere.
    TwoShot,
    /// As `OneShot`, in words that carry their data: for at most 2 MiB.
    Ll,
    /// Ranks add into the owner's f32 tile under a lock. The order, and so the last bits, vary.
    Spinlock,
    /// Ranks add into the owner's f32 tile atomically. The order, and so the last bits, vary.
    Atomic,
}

pub(crate) const ROW: Row = Row {
    op: Op::AllReduce,
    message: Op::AllReduce,
    common: Common { n: true, k: true },
    a: Part::All,
    c: Part::All,
    dims: Dims::message,
    tiles: Tiles::Whole,
    in_place: true,
    alone: LOCAL,
    forms: &[
        FORMS[0].norms(Norm::Last),
        FORMS[1].norms(Norm::Last),
        FORMS[2],
        FORMS[3],
        LL.norms(Norm::Within),
    ],
};
