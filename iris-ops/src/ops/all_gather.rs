//! Each rank has a part, and all ranks get all parts.

use iris_kernels::Kernel;
use iris_kernels::program::{always, kernel};
use iris_kernels::schedule::Collective;

use crate::CollectiveArgs;
use crate::facade::{beside_method, operator, variants};
use crate::kind::{self, Op};
use crate::ops::matmul_all_gather::FORMS;
use crate::options::options;
use crate::programs::LOCAL;
use crate::spec::{Common, Dims, Form, Memory, Part, Row, Tiles};

operator! {
    /// Output (on all ranks): every rank's input, by rank. Planned by rows, its rows
    /// `split(m, size, rank)` are that rank's input. Each rank pushes its part to all.
    AllGather(CollectiveArgs)
}
beside_method!(AllGather(CollectiveArgs));

options! { ROW,
    /// What [`AllGather`] is planned for.
    {
        /// For at most `count` elements of each rank; the output has `size` times as many.
        message();
        variant, dtype, tile, workgroups, beside,
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
    op: Op::AllGather,
    message: Op::AllGather,
    common: Common { n: true, k: true },
    a: Part::Own,
    c: Part::All,
    dims: Dims::message,
    tiles: Tiles::Own,
    in_place: false,
    alone: LOCAL,
    forms: &[
        FORMS[0],
        Form::push(
            kind::Variant::Ll,
            &[always(&[kernel(Kernel::AllGatherLl)])],
            Memory::Pairs(Collective::AllGather),
        ),
    ],
};
