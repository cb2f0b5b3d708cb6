//! What the root has, on all ranks.

use iris_kernels::Kernel;
use iris_kernels::args::arrival;
use iris_kernels::program::{always, kernel};
use iris_kernels::schedule::Collective;

use crate::CollectiveArgs;
use crate::facade::{beside_method, operator, variants};
use crate::kind::{self, Op};
use crate::options::options;
use crate::programs::LOCAL;
use crate::spec::{Common, Dims, Form, Memory, Part, Row, Tiles};

operator! {
    /// Output (on all ranks) = input of the root. The other ranks have no input; on the root the output
    /// may be the input itself.
    Broadcast(CollectiveArgs)
}
beside_method!(Broadcast(CollectiveArgs));

options! { ROW,
    /// What [`Broadcast`] is planned for.
    {
        /// For at most `count` elements.
        message();
        variant, root, dtype, tile, workgroups, beside,
    }
}

variants! { ROW;
    /// The root pushes all of it to each of the others.
    Push,
    /// The root pushes each tile to one of the others, which passes it on to the rest as soon as it has
    /// come: a scatter and an all-gather in one launch, for large messages of more than two ranks.
    TwoShot,
    /// As `Push`, in words that carry their data: for small messages, of at most 2 MiB from one rank to
    /// another.
    Ll,
}

pub(crate) const ROW: Row = Row {
    op: Op::Broadcast,
    message: Op::Broadcast,
    common: Common { n: true, k: true },
    a: Part::Root,
    c: Part::All,
    dims: Dims::message,
    tiles: Tiles::Whole,
    in_place: true,
    alone: LOCAL,
    forms: &[
        Form::push(kind::Variant::Push, &[always(&[kernel(Kernel::Broadcast)])], Memory::OneSource)
            .sends_all()
            .direct(Some(arrival::ROOT)),
        Form::push(kind::Variant::TwoShot, &[always(&[kernel(Kernel::Relay)])], Memory::OneSource)
            .direct(Some(arrival::RELAYS)),
        Form::push(
            kind::Variant::Ll,
            &[always(&[kernel(Kernel::BroadcastLl)])],
            Memory::Pairs(Collective::Broadcast { root: 0 }),
        )
        .sends_all(),
    ],
};
