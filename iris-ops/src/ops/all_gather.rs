//! Each rank has a part, and all ranks get all parts.

use crate::CollectiveArgs;
use crate::facade::{beside_method, operator};
use crate::kind::Op;
use crate::ops::matmul_all_gather::FORMS;
use crate::options::options;
use crate::spec::{Common, Part, Row, Rule, Tiles};

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
        dtype, tile, workgroups,
    }
}

pub(crate) const ROW: Row = Row {
    op: Op::AllGather,
    common: Common { n: true, k: true },
    a: Part::Own,
    c: Part::All,
    tiles: Tiles::Own,
    in_place: false,
    forms: &FORMS,
    rule: Rule::Only,
};
