//! Functions applied to finished sums before the sums are rounded: bias, then GELU, then the
//! residual.

use crate::args::{Matrix, OpArgs, epilogue};
use crate::cpu::view;
use crate::schedule::Tile;

/// Applies bias and then GELU to the sums of `tile` of this rank's result; `ld` is the stride
/// between rows of `sums`. Called once per tile.
pub(crate) fn finish_values(args: &OpArgs, tile: Tile, sums: &mut [f32], ld: usize) {
    let (rows, cols) = (tile.rows as usize, tile.cols as usize);
    if args.bias.address != 0 {
        let row = Tile { row: 0, rows: 1, ..tile };
        let mut bias = vec![0.0; cols];
        view::load(&args.bias, row, &mut bias, cols, false);
        for sums in sums.chunks_mut(ld).take(rows) {
            sums[..cols].iter_mut().zip(&bias).for_each(|(sum, bias)| *sum += bias);
        }
    }
    if args.epilogue & epilogue::GELU != 0 {
        for sums in sums.chunks_mut(ld).take(rows) {
            sums[..cols].iter_mut().for_each(|sum| *sum = gelu(*sum));
        }
    }
}

/// Adds `tile` of a matrix, such as the residual, to the sums, after [`finish_values`], if the call has
/// this matrix.
pub(crate) fn add_matrix(matrix: &Matrix, tile: Tile, sums: &mut [f32], ld: usize) {
    if matrix.address != 0 {
        view::load(matrix, tile, sums, ld, true);
    }
}

fn gelu(x: f32) -> f32 {
    x * 0.5 * (1.0 + libm::erff(x * std::f32::consts::FRAC_1_SQRT_2))
}
