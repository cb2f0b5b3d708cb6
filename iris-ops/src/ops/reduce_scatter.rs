//! The sum over ranks, each rank getting a part of it.

use crate::CollectiveArgs;
use crate::facade::operator;
use crate::kind::Op;
use crate::ops::matmul_reduce_scatter::FORMS;
use crate::options::options;
use crate::spec::{Common, Part, Row, Rule, Tiles};

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
        dtype, wire, epilogue, tile, workgroups,
    }
}

pub(crate) const ROW: Row = Row {
    op: Op::ReduceScatter,
    common: Common { n: true, k: true },
    a: Part::All,
    c: Part::Own,
    tiles: Tiles::Split,
    in_place: false,
    forms: &FORMS,
    rule: Rule::Only,
};
