//! C = sum over ranks of A B, each rank getting some rows of C: the second half of a
//! sequence-parallel layer.

use iris_kernels::Kernel;

use crate::MatmulArgs;
use crate::facade::operator;
use crate::kind::{Op, Variant};
use crate::options::options;
use crate::spec::{Common, Form, Memory, Part, Row, Rule, Step, Tiles};

operator! {
    /// C (rows `split(m, size, rank)` x `n`) = those rows of the sum over ranks of A (`m` x `k`)
    /// B (`k` x `n`), plus a bias added once. `k` is the rank's own and may differ between ranks.
    ///
    /// Tiles are pushed to the rank that owns their rows, which adds its own first, then the others
    /// in ascending order: the same bits in every run.
    MatmulReduceScatter(MatmulArgs)
}

options! { ROW,
    /// What [`MatmulReduceScatter`] is planned for.
    {
        /// For at most `m` rows over all ranks, `n` columns and this rank's depth `k`.
        product(m, n, k);
        dtype, output, wire, epilogue, tile, workgroups,
    }
}

pub(crate) const ROW: Row = Row {
    op: Op::MatmulReduceScatter,
    common: Common { n: true, k: false },
    a: Part::All,
    c: Part::Own,
    tiles: Tiles::Split,
    in_place: false,
    forms: FORMS,
    rule: Rule::Only,
};

/// Of all sums of which a rank gets its rows.
pub(super) const FORMS: &[Form] =
    &[Form::push(Variant::Push, &[Step::Tiles(Kernel::ReduceScatter)], Memory::PartialParts)];
