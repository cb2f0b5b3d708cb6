//! The operators, a file each: its documentation, its options, and its row.

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

use crate::kind::{Op, each_operator};
use crate::spec::Row;

/// The types of the operators, their rows and what they read.
macro_rules! rows {
    ($($module:ident: $op:ident,)*) => {
        $(pub use $module::$op;)*

        /// What an operator is.
        pub(crate) fn row(op: Op) -> &'static Row {
            match op { $(Op::$op => &$module::ROW,)* }
        }

        /// The options that an operator reads, by name.
        pub(crate) fn options(op: Op) -> &'static [&'static str] {
            match op { $(Op::$op => $module::READS,)* }
        }
    };
}

each_operator!(rows);
