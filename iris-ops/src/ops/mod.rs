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
