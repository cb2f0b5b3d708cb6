//! The product of one rank alone, with the same options as the fused ones.

use crate::MatmulArgs;
use crate::facade::operator;
use crate::kind::{Op, Variant};
use crate::options::options;
use crate::programs::MATMUL;
use crate::spec::{Common, Dims, Form, Memory, Part, Row, Tiles, Whole};

operator! {
    /// C (`m` x `n`) = A (`m` x `k`) B (`k` x `n`), plus a bias: nobody else takes part in a call.
    Matmul(MatmulArgs)
}

options! { ROW,
    /// What [`Matmul`] is planned for.
    {
        /// For at most `m` rows, `n` columns and depth `k`, of which the last two are the rank's own.
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
    tiles: Tiles::Whole,
    in_place: false,
    alone: MATMUL,
    forms: &[Form::push(Variant::Local, MATMUL, Memory::None).whole(Whole::All)],
};
