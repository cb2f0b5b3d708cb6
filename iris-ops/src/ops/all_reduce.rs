//! All-reduce: every rank gets the sum over all ranks' inputs.

use crate::CollectiveArgs;
use crate::op_names::Op;
use crate::op_row::{Common, Composition, Dims, Norm, Part, Row, Tiles};
use crate::operator_macros::{beside_method, operator, variants};
use crate::ops::matmul_all_reduce::{FORMS, LL, TWO_SHOT_LL};
use crate::options::options;
use crate::programs::LOCAL;

operator! {
    /// All-reduce. Output (on all ranks) = sum over ranks of the input. The call may run in place:
    /// the output may be the input.
    AllReduce(CollectiveArgs)
}
beside_method!(AllReduce(CollectiveArgs));

options! { ROW,
    /// Options of [`AllReduce`].
    {
        /// Options for at most `count` elements.
        message();
        variant, dtype, wire, epilogue, rms_norm, tile, workgroups, reserve_sms,
    }
}

variants! { ROW;
    /// Each rank pushes its input to all ranks, and each rank adds all inputs in the order of
    /// ranks, so all ranks get the same bits. Best for small messages.
    OneShot,
    /// One rank, the owner of a tile, adds up the tile's data of all ranks in the order of ranks
    /// and sends the sum to all ranks, with the same bits as `OneShot`.
    TwoShot,
    /// LL protocol (data and a flag in one word); each rank adds all inputs in the same order as
    /// `OneShot`. Only for messages of at most 2 MiB.
    Ll,
    /// Each rank owns a part of the message: it adds up this part of all inputs in the order of
    /// ranks and sends the sum to all ranks, by the LL protocol, with the same bits as `OneShot`.
    /// `wire` must be the type of C. For messages that are too large for `Ll`.
    TwoShotLl,
    /// Ranks add their inputs to an f32 sum at the tile's owner while they hold a spinlock. The
    /// order of additions varies between runs, so the last bits of the result vary too.
    Spinlock,
    /// Ranks add their inputs to an f32 sum at the tile's owner by atomic additions. The order of
    /// additions varies between runs, so the last bits of the result vary too.
    Atomic,
}

pub(crate) const ROW: Row = Row {
    op: Op::AllReduce,
    message: Op::AllReduce,
    common: Common { n: true, k: true },
    a: Part::All,
    c: Part::All,
    dims: Dims::message,
    tiles: Tiles::All,
    in_place: true,
    composed: Composition::AllReduce { scatter: Op::ReduceScatter },
    alone: LOCAL,
    forms: &[
        FORMS[0].norms(Norm::Last),
        FORMS[1].norms(Norm::Last),
        FORMS[2],
        FORMS[3],
        LL.norms(Norm::Within),
        TWO_SHOT_LL,
    ],
};
