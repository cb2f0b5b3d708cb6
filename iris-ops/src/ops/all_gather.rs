//! All-gather: each rank has a part, and all ranks get all parts.

use iris_kernels::Kernel;
use iris_kernels::program::{always, kernel};
use iris_kernels::schedule::Collective;

use crate::CollectiveArgs;
use crate::op_names::{self, Op};
use crate::op_row::{Common, Composition, Dims, Form, Memory, Part, Row, Tiles};
use crate::operator_macros::{beside_method, operator, variants};
use crate::ops::matmul_all_gather::FORMS;
use crate::options::options;
use crate::programs::LOCAL;

operator! {
    /// All-gather. Output (on all ranks): the inputs of all ranks, in the order of ranks. Planned
    /// by elements ([`Options::new`]), every input has `count` elements. Planned by rows
    /// ([`Options::rows`]), the output is M x N, and the rows `split(m, size, r)` of the output are
    /// the input of rank r. Each rank pushes its part to all other ranks.
    AllGather(CollectiveArgs)
}
beside_method!(AllGather(CollectiveArgs));

options! { ROW,
    /// Options of [`AllGather`], from which its plan is made.
    {
        /// Options for at most `count` elements of input per rank; the output has `size` times as
        /// many elements.
        message();
        variant, dtype, tile, workgroups, reserve_sms,
    }
}

variants! { ROW;
    /// Each rank pushes its part to all other ranks, with a signal per tile. For messages of any
    /// size.
    Push,
    /// LL protocol (data and a flag in one word), for small messages: at most 2 MiB from one rank
    /// to another.
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
    composed: Composition::GatherA,
    alone: LOCAL,
    forms: &[
        FORMS[0],
        Form::push(
            op_names::Variant::Ll,
            &[always(&[kernel(Kernel::AllGatherLl)])],
            Memory::Pairs(Collective::AllGather),
        ),
    ],
};
