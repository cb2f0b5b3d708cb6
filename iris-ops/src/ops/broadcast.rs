//! What the root has, on all ranks.

use iris_kernels::Kernel;
use iris_kernels::args::arrival;

use crate::CollectiveArgs;
use crate::facade::{beside_method, operator};
use crate::kind::{Op, Variant};
use crate::options::options;
use crate::spec::{Common, Form, Memory, Part, Row, Rule, Step, Tiles};

operator! {
    /// Output (on all ranks) = input of the root, which pushes it to all. The other ranks have no
    /// input; on the root the output may be the input itself.
    Broadcast(CollectiveArgs)
}
beside_method!(Broadcast(CollectiveArgs));

options! { ROW,
    /// What [`Broadcast`] is planned for.
    {
        /// For at most `count` elements.
        message();
        root, dtype, tile, workgroups,
    }
}

pub(crate) const ROW: Row = Row {
    op: Op::Broadcast,
    common: Common { n: true, k: true },
    a: Part::Root,
    c: Part::All,
    tiles: Tiles::Whole,
    in_place: true,
    forms: &[Form::push(Variant::Push, &[Step::Tiles(Kernel::Broadcast)], Memory::OneSource)
        .sends_all()
        .direct(Some(arrival::ROOT))],
    rule: Rule::Only,
};
