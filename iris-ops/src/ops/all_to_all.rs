//! Each rank has a part for every rank.

use iris_kernels::Kernel;
use iris_kernels::program::{always, kernel};
use iris_kernels::schedule::Collective;

use crate::CollectiveArgs;
use crate::facade::{operator, variants};
use crate::kind::{self, Op};
use crate::options::options;
use crate::programs::LOCAL;
use crate::spec::{Common, Dims, Form, Memory, Part, Row, Tiles};

operator! {
    /// Output: block s is what rank s has for this rank, in block `rank` of its input. Planned by rows,
    /// the blocks of the input are `split(m, size, ..)` rows, and those of the output as many as fall
    /// to this rank. Each rank pushes its blocks to whom they are for.
    AllToAll(CollectiveArgs)
}

options! { ROW,
    /// What [`AllToAll`] is planned for.
    {
        /// For at most `count` elements for each rank; input and output have `size` times as many.
        message();
        variant, dtype, tile, workgroups,
    }
}

variants! { ROW;
    /// Each rank pushes to whom it is for. What `Auto` takes.
    Push,
    /// The same in words that carry their data: for small messages, of at most 2 MiB from one rank to
    /// another.
    Ll,
}

pub(crate) const ROW: Row = Row {
    op: Op::AllToAll,
    message: Op::AllToAll,
    common: Common { n: true, k: true },
    a: Part::All,
    c: Part::Blocks,
    dims: Dims::message,
    tiles: Tiles::Own,
    in_place: false,
    alone: LOCAL,
    forms: &[
        Form::push(kind::Variant::Push, &[always(&[kernel(Kernel::AllToAll)])], Memory::Parts)
            .direct(None),
        Form::push(
            kind::Variant::Ll,
            &[always(&[kernel(Kernel::AllToAllLl)])],
            Memory::Pairs(Collective::AllToAll),
        ),
    ],
};
