//! Rows that are weighted sums of parts, such as the results of the experts of a token with the
//! router's weights. A row of A has the parts of one row of the message, one after the other.

use crate::args::OpArgs;
use crate::cpu::view;
use crate::dtype::values;

/// Element (`row`, `col`) of the message: the sum over the parts of weight times part, in f32 and in
/// the order of the parts.
pub(super) fn element(args: &OpArgs, row: u32, col: u32) -> f32 {
    let OpArgs { a, factors, n, .. } = args;
    // The sum starts from -0.0, the neutral element: starting from 0.0 would turn a sum of -0.0 into
    // 0.0.
    (0..factors.cols).fold(-0.0, |sum, part| {
        let value = (values(a.dtype).to_f32)(view::bits(a, row, part * n + col));
        f32::from_bits(view::bits(factors, row, part)).mul_add(value, sum)
    })
}
