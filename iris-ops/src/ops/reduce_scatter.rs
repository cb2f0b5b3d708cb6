//! The sum over ranks, each rank getting a part of it.

use iris_kernels::Kernel;
use iris_kernels::program::{always, kernel};
use iris_kernels::schedule::Collective;

use crate::CollectiveArgs;
use crate::facade::{operator, variants};
use crate::kind::{self, Op};
use crate::ops::matmul_reduce_scatter::FORMS;
use crate::options::options;
use crate::programs::LOCAL;
use crate::spec::{Common, Dims, Form, Memory, Part, Row, Tiles};

operator! {
    /// Output = this rank's part of the sum over ranks of input. Planned by rows, it is the rows
    /// `split(m, size, rank)`. Each part is pushed to its owner, who adds its own first, then the
    /// others in ascending order.
    ReduceScatter(CollectiveArgs)
}

options! { ROW,
    /// What [`ReduceScatter`] is planned for.
    {
        /// For at most `count` elements that each rank gets; the input has `size` times as many.
        message();
        variant, dtype, wire, epilogue, tile, workgroups,
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
    op: Op::ReduceScatter,
    message: Op::ReduceScatter,
    common: Common { n: true, k: true },
    a: Part::All,
    c: Part::Own,
    dims: Dims::message,
    tiles: Tiles::Split,
    in_place: false,
    alone: LOCAL,
    forms: &[
        FORMS[0],
        Form::push(
            kind::Variant::Ll,
            &[always(&[kernel(Kernel::ReduceScatterLl)])],
            Memory::Pairs(Collective::ReduceScatter),
        ),
    ],
};
