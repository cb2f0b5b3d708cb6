//! Each rank has a part for every rank.

use iris_kernels::Kernel;

use crate::CollectiveArgs;
use crate::facade::operator;
use crate::kind::{Op, Variant};
use crate::options::options;
use crate::spec::{Common, Form, Memory, Part, Row, Rule, Step, Tiles};

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
        dtype, tile, workgroups,
    }
}

pub(crate) const ROW: Row = Row {
    op: Op::AllToAll,
    common: Common { n: true, k: true },
    a: Part::All,
    c: Part::Blocks,
    tiles: Tiles::Own,
    in_place: false,
    forms: &[
        Form::push(Variant::Push, &[Step::Tiles(Kernel::AllToAll)], Memory::Parts).direct(None)
    ],
    rule: Rule::Only,
};
