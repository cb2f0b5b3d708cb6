//! RMSNorm of rows, each by one workgroup. The RMSNorm waits for no other rank, because the rows
//! are in this rank's own memory and no peer writes there before this rank has entered the next
//! call. Squares are added up in a fixed order, so that equal rows get equal bits on all ranks, in
//! every run and in every variant.

use crate::args::OpArgs;
use crate::cpu::view;
use crate::schedule::Tile;

/// Number of partial sums of the squares. Square i is added to partial sum i mod SUMS: each sum
/// then has fewer roundings, and the loop can be vectorised.
const SUMS: usize = 32;

/// Normalises all rows of C, distributed round-robin over the workgroups.
pub(crate) fn run(args: &OpArgs, index: u32, count: u32) {
    for row in (index..args.m).step_by(count as usize) {
        norm_row(args, row);
    }
}

/// Normalises one row of C that this workgroup, or an earlier launch, has written.
pub(crate) fn norm_row(args: &OpArgs, row: u32) {
    let cols = args.n as usize;
    let (mut weight, mut values) = (vec![0.0; cols], vec![0.0; cols]);
    let at = Tile { row, col: 0, rows: 1, cols: args.n };
    view::load(&args.weight, Tile { row: 0, ..at }, &mut weight, cols, false);
    view::load(&args.c, at, &mut values, cols, false);
    let mut sums = [0.0f32; SUMS];
    for values in values.chunks(SUMS) {
        sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value * value);
    }
    let mean = sums.iter().sum::<f32>() / cols as f32;
    let scale = 1.0 / (mean + args.epsilon).sqrt();
    values.iter_mut().zip(&weight).for_each(|(value, weight)| *value = *value * scale * weight);
    view::store(&args.normed, at, &values, cols);
}
