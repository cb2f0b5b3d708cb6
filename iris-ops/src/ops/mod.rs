//! Operators, one file for each: its documentation, its options, and its row of the operator table.

/// Calls the macro `$then` with the module and the type of every operator. Other tables of
/// operators use the same order.
macro_rules! each_operator {
    ($then:ident) => {
        $then! {
            matmul_all_reduce: MatmulAllReduce,
            matmul_reduce_scatter: MatmulReduceScatter,
            all_gather_matmul: AllGatherMatmul,
            matmul_all_gather: MatmulAllGather,
            matmul: Matmul,
            all_reduce: AllReduce,
            all_gather: AllGather,
            reduce_scatter: ReduceScatter,
            all_to_all: AllToAll,
            broadcast: Broadcast,
            barrier: Barrier,
        }
    };
}

pub mod all_gather;
pub mod all_gather_matmul;
pub mod all_reduce;
pub mod all_to_all;
pub mod barrier;
pub mod broadcast;
pub mod matmul;
pub mod matmul_all_gather;
pub mod matmul_all_reduce;
pub mod matmul_reduce_scatter;
pub mod reduce_scatter;
#[cfg(test)]
mod tests;

use crate::op_names::Op;
use crate::op_row::Row;

/// Re-exports the operators' types, and defines `row` and `options`, which look up an operator's
/// table row and options.
macro_rules! rows {
    ($($module:ident: $op:ident,)*) => {
        $(pub use $module::$op;)*

        /// Row of the operator table that describes `op`.
        pub(crate) fn row(op: Op) -> &'static Row {
            match op { $(Op::$op => &$module::ROW,)* }
        }

        /// Names of the options that an operator reads.
        pub(crate) fn options(op: Op) -> &'static [&'static str] {
            match op { $(Op::$op => $module::READS,)* }
        }
    };
}

each_operator!(rows);
