//! Reduce-scatter: every rank gets its own part of the sum over all ranks' inputs.

use iris_kernels::Kernel;
use iris_kernels::program::{Alternative, always, kernel};
use iris_kernels::schedule::Collective;

use crate::CollectiveArgs;
use crate::op_names::{self, Op};
use crate::op_row::{Common, Composition, Dims, Form, Memory, Part, Row, Tiles};
use crate::operator_macros::{operator, variants};
use crate::ops::matmul_reduce_scatter::FORMS;
use crate::options::options;
use crate::programs::LOCAL;

operator! {
    /// Reduce-scatter. Output = this rank's part of the sum over ranks of the input. Planned by
    /// elements ([`Options::new`]), part r is the elements `r * count..(r + 1) * count`. Planned by
    /// rows ([`Options::rows`]), part r is the rows `split(m, size, r)`. Each rank pushes every
    /// part to the part's owner, which adds the parts of all ranks in
    /// the order of ranks.
    ReduceScatter(CollectiveArgs)
}

options! { ROW,
    /// Options of [`ReduceScatter`].
    {
        /// Options for at most `count` elements of output per rank; the input has `size` times as
        /// many elements.
        message();
        variant, dtype, wire, epilogue, tile, workgroups,
    }
}

impl Options {
    /// Sums weighted parts, like [`all_reduce::Options::combine`](crate::all_reduce::Options::combine):
    /// a row of this rank's message is the sum of `parts` parts of a row of the input, M x (`parts` N),
    /// each times a weight. The matrices that a call adds have this rank's rows of the output.
    #[must_use]
    pub fn combine(mut self, parts: usize) -> Self {
        self.request.row = &COMBINE;
        self.request.k = parts;
        self
    }
}

variants! { ROW;
    /// Each rank pushes part r of its input to rank r, with a signal per tile. For messages of any
    /// size.
    Push,
    /// LL protocol (data and a flag in one word), for small messages: at most 2 MiB from one rank
    /// to another.
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
    composed: Composition::ReduceScatter,
    alone: LOCAL,
    forms: &[
        FORMS[0],
        Form::push(
            op_names::Variant::Ll,
            &[always(&[kernel(Kernel::ReduceScatterLl)])],
            Memory::Pairs(Collective::ReduceScatter),
        ),
    ],
};

/// Row of a reduce-scatter of weighted parts. With one rank its kernel adds without communication.
const COMBINE: Row = Row {
    dims: Dims::parts,
    alone: COMBINE_LL,
    forms: &[Form::push(
        op_names::Variant::Ll,
        COMBINE_LL,
        Memory::Pairs(Collective::ReduceScatter),
    )],
    ..ROW
};

const COMBINE_LL: &[Alternative] = &[always(&[kernel(Kernel::ReduceScatterCombineLl)])];
