//! All-to-all: every rank sends a part of its input to each rank.

use iris_kernels::Kernel;
use iris_kernels::program::{always, kernel};
use iris_kernels::schedule::Collective;

use crate::CollectiveArgs;
use crate::op_names::{self, Op};
use crate::op_row::{Common, Composition, Dims, Form, Memory, Part, Row, Tiles};
use crate::operator_macros::{operator, variants};
use crate::options::options;
use crate::programs::LOCAL;

operator! {
    /// All-to-all. Block s of this rank's output is block `rank` of the input of rank s. Planned by
    /// elements ([`Options::new`]), every block has `count` elements. Planned by rows
    /// ([`Options::rows`]), block r of an input has `split(m, size, r)` rows of N elements, and
    /// every block of a rank's output has as many rows as that rank's share. Each rank pushes its
    /// blocks to their receivers.
    AllToAll(CollectiveArgs)
}

options! { ROW,
    /// Options of [`AllToAll`].
    {
        /// Options for at most `count` elements per block; input and output have `size` times as
        /// many elements.
        message();
        variant, dtype, tile, workgroups,
    }
}

variants! { ROW;
    /// Each rank pushes its blocks to their receivers, with a signal per tile. For messages of any
    /// size.
    Push,
    /// LL protocol (data and a flag in one word), for small messages: at most 2 MiB from one rank
    /// to another.
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
    composed: Composition::AllToAll,
    alone: LOCAL,
    forms: &[
        Form::push(op_names::Variant::Push, &[always(&[kernel(Kernel::AllToAll)])], Memory::Parts)
            .direct(None),
        Form::push(
            op_names::Variant::Ll,
            &[always(&[kernel(Kernel::AllToAllLl)])],
            Memory::Pairs(Collective::AllToAll),
        ),
    ],
};
