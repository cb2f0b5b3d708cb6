//! Matrix product on one rank, with the options of the fused operators.

use crate::MatmulArgs;
use crate::op_names::Op;
use crate::op_row::{Common, Composition, Dims, Form, Part, Row, Tiles};
use crate::operator_macros::operator;
use crate::options::options;
use crate::programs::MATMUL;

operator! {
    /// C (`m` x `n`) = A (`m` x `k`) B (`k` x `n`), plus a bias. Calls involve this rank only: each
    /// rank issues as many as it likes, between any calls of other operators. `new` and `free` are
    /// collective.
    Matmul(MatmulArgs)
}

options! { ROW,
    /// Options of [`Matmul`].
    {
        /// Options for at most `m` rows, `n` columns and inner dimension `k`; `n` and `k` may
        /// differ between ranks.
        product(m, n, k);
        dtype, output, epilogue, tile, workgroups, library,
    }
}

pub(crate) const ROW: Row = Row {
    op: Op::Matmul,
    message: Op::Matmul,
    common: Common { n: false, k: false },
    a: Part::All,
    c: Part::All,
    dims: Dims::product,
    tiles: Tiles::All,
    in_place: false,
    composed: Composition::Alone,
    alone: MATMUL,
    forms: &[Form::PRODUCT],
};
