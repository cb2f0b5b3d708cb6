//! Broadcast: every rank gets a copy of the root's data.

use iris_kernels::Kernel;
use iris_kernels::args::arrival;
use iris_kernels::program::{always, kernel};
use iris_kernels::schedule::Collective;

use crate::CollectiveArgs;
use crate::op_names::{self, Op};
use crate::op_row::{Common, Composition, Dims, Form, Memory, Part, Row, Tiles};
use crate::operator_macros::{beside_method, operator, variants};
use crate::options::options;
use crate::programs::LOCAL;

operator! {
    /// Broadcast. Output (on all ranks) = input of the root. Other ranks have no input. On the root
    /// the call may run in place: the output may be the input.
    Broadcast(CollectiveArgs)
}
beside_method!(Broadcast(CollectiveArgs));

options! { ROW,
    /// Options of [`Broadcast`].
    {
        /// Options for at most `count` elements.
        message();
        variant, root, dtype, tile, workgroups, reserve_sms,
    }
}

variants! { ROW;
    /// The root pushes all of its data to every other rank.
    Push,
    /// The root pushes each tile to one of the other ranks, which forwards the tile to the
    /// remaining ranks as soon as it has arrived: a scatter and an all-gather in one launch. Best
    /// for large messages with more than two ranks.
    TwoShot,
    /// LL protocol (data and a flag in one word), for small messages: at most 2 MiB.
    Ll,
    /// The message is cut into one part for each rank. The root sends its own part to all ranks,
    /// and each other part to its rank, which passes it on; by the LL protocol. For messages that
    /// are too large for `Ll`, with more than two ranks.
    TwoShotLl,
}

pub(crate) const ROW: Row = Row {
    op: Op::Broadcast,
    message: Op::Broadcast,
    common: Common { n: true, k: true },
    a: Part::Root,
    c: Part::All,
    dims: Dims::message,
    tiles: Tiles::All,
    in_place: true,
    composed: Composition::Broadcast,
    alone: LOCAL,
    forms: &[
        Form::push(
            op_names::Variant::Push,
            &[always(&[kernel(Kernel::Broadcast)])],
            Memory::OneSource,
        )
        .sends_all()
        .direct(Some(arrival::ROOT)),
        Form::push(
            op_names::Variant::TwoShot,
            &[always(&[kernel(Kernel::Relay)])],
            Memory::OneSource,
        )
        .direct(Some(arrival::RELAYS)),
        Form::push(
            op_names::Variant::Ll,
            &[always(&[kernel(Kernel::BroadcastLl)])],
            Memory::Pairs(Collective::Broadcast { root: 0 }),
        )
        .sends_all(),
        Form::push(
            op_names::Variant::TwoShotLl,
            &[always(&[kernel(Kernel::RelayLl)])],
            Memory::Pairs(Collective::TwoShot { root: Some(0) }),
        ),
    ],
};
