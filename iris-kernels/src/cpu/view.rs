//! Rectangles of matrices in memory that kernels address: load, store, copy, multiply. The only
//! place of the CPU kernels, beside the words, that touches raw memory.
//!
//! Accesses are plain, since a GEMM library's and vectorised conversions are no atomics: the protocols
//! order kernels, and [`iris_heap::plain_access`] keeps copies by the host away.
//!
//! All functions take a [`Matrix`] whose address, rows and columns were checked on the host when
//! the op was run, and assert that the rectangle lies inside.

use bytemuck::Pod;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::args::{Matrix, element_bytes};
use crate::schedule::Tile;

/// Columns of A that are converted at a time.
const DEPTH: usize = 512;

/// Buffers that a workgroup keeps between tiles.
#[derive(Default)]
pub(crate) struct Scratch {
    left: Vec<f32>,
    right: Vec<f32>,
}

fn grow<T: Pod>(buffer: &mut Vec<T>, len: usize) -> &mut [T] {
    if buffer.len() < len {
        buffer.resize(len, T::zeroed());
    }
    &mut buffer[..len]
}

fn check(matrix: &Matrix, tile: Tile) {
    assert!(
        tile.row + tile.rows <= matrix.rows && tile.col + tile.cols <= matrix.cols,
        "{tile:?} of a matrix of {} x {}",
        matrix.rows,
        matrix.cols
    );
    assert!(matrix.address != 0, "a matrix without address");
}

/// Address of an element.
fn at(matrix: &Matrix, row: u32, col: u32) -> *mut u8 {
    let (row, col) = (u64::from(row), u64::from(col));
    let index = if matrix.transposed == 1 { col * matrix.ld + row } else { row * matrix.ld + col };
    (matrix.address + index * element_bytes(matrix.dtype) as u64) as *mut u8
}

/// A contiguous run of `len` elements that starts at an address.
///
/// # Safety
/// The run must be mapped, aligned for `T`, and not written by anybody while the slice lives.
unsafe fn run<'a, T>(address: *mut u8, len: usize) -> &'a [T] {
    // SAFETY: as this function's own contract says.
    unsafe { std::slice::from_raw_parts(address.cast::<T>(), len) }
}

/// As [`run`], to write.
///
/// # Safety
/// As for [`run`], and nobody else may read either.
unsafe fn run_mut<'a, T>(address: *mut u8, len: usize) -> &'a mut [T] {
    // SAFETY: as this function's own contract says.
    unsafe { std::slice::from_raw_parts_mut(address.cast::<T>(), len) }
}

/// The runs of a rectangle: (first row, first column, length), along the dimension that is
/// contiguous, and how far apart two elements of a run lie in a buffer of row length `ld`.
fn runs(
    matrix: &Matrix,
    tile: Tile,
    ld: usize,
) -> (impl Iterator<Item = (u32, u32, usize)>, usize) {
    let across = matrix.transposed == 1;
    let (count, len) = if across { (tile.cols, tile.rows) } else { (tile.rows, tile.cols) };
    let runs = (0..count).map(move |i| {
        let (row, col) = if across { (0, i) } else { (i, 0) };
        (row, col, len as usize)
    });
    (runs, if across { ld } else { 1 })
}

fn widen(dtype: u32, address: *mut u8, len: usize, out: &mut [f32]) {
    match dtype {
        // SAFETY: the run is part of a checked matrix of f32; the protocols order its writers
        // before this reader.
        0 => out.copy_from_slice(unsafe { run::<f32>(address, len) }),
        // SAFETY: as above, of f16.
        1 => unsafe { run::<f16>(address, len) }.convert_to_f32_slice(out),
        // SAFETY: as above, of bf16.
        _ => unsafe { run::<bf16>(address, len) }.convert_to_f32_slice(out),
    }
}

fn narrow(dtype: u32, values: &[f32], address: *mut u8) {
    let len = values.len();
    match dtype {
        // SAFETY: the run is part of a checked matrix of f32 that this workgroup alone writes now.
        0 => unsafe { run_mut::<f32>(address, len) }.copy_from_slice(values),
        // SAFETY: as above, of f16.
        1 => unsafe { run_mut::<f16>(address, len) }.convert_from_f32_slice(values),
        // SAFETY: as above, of bf16.
        _ => unsafe { run_mut::<bf16>(address, len) }.convert_from_f32_slice(values),
    }
}

/// Load a rectangle into `out`, rows `ld` apart, as f32; with `add`, add it to what is there.
pub(crate) fn load(matrix: &Matrix, tile: Tile, out: &mut [f32], ld: usize, add: bool) {
    if tile.rows == 0 || tile.cols == 0 {
        return;
    }
    check(matrix, tile);
    let mut buffer = [0f32; 256];
    let (runs, step) = runs(matrix, tile, ld);
    for (row, col, len) in runs {
        let mut place = row as usize * ld + col as usize;
        let mut address = at(matrix, tile.row + row, tile.col + col);
        if step == 1 && !add {
            widen(matrix.dtype, address, len, &mut out[place..place + len]);
            continue;
        }
        for begin in (0..len).step_by(buffer.len()) {
            let part = &mut buffer[..(len - begin).min(256)];
            widen(matrix.dtype, address, part.len(), part);
            address = address.wrapping_add(part.len() * element_bytes(matrix.dtype));
            if step == 1 {
                // Only with `add`; a loop of its own, since it vectorises.
                let sums = &mut out[place..place + part.len()];
                sums.iter_mut().zip(part.iter()).for_each(|(sum, value)| *sum += value);
                place += part.len();
                continue;
            }
            for value in part {
                out[place] = if add { out[place] + *value } else { *value };
                place += step;
            }
        }
    }
}

/// Store a rectangle from `values`, rows `ld` apart, rounding to the matrix's type.
pub(crate) fn store(matrix: &Matrix, tile: Tile, values: &[f32], ld: usize) {
    if tile.rows == 0 || tile.cols == 0 {
        return;
    }
    check(matrix, tile);
    let mut buffer = [0f32; 256];
    let (runs, step) = runs(matrix, tile, ld);
    for (row, col, len) in runs {
        let mut place = row as usize * ld + col as usize;
        let mut address = at(matrix, tile.row + row, tile.col + col);
        if step == 1 {
            narrow(matrix.dtype, &values[place..place + len], address);
            continue;
        }
        for begin in (0..len).step_by(buffer.len()) {
            let part = &mut buffer[..(len - begin).min(256)];
            for value in part.iter_mut() {
                *value = values[place];
                place += step;
            }
            narrow(matrix.dtype, part, address);
            address = address.wrapping_add(part.len() * element_bytes(matrix.dtype));
        }
    }
}

/// The bits of an element.
pub(crate) fn bits(matrix: &Matrix, row: u32, col: u32) -> u32 {
    check(matrix, Tile { row, col, rows: 1, cols: 1 });
    let address = at(matrix, row, col);
    match element_bytes(matrix.dtype) {
        // SAFETY: one element of a checked matrix; the protocols order its writers before this.
        4 => unsafe { address.cast::<u32>().read() },
        // SAFETY: as above, of 16 bits.
        _ => u32::from(unsafe { address.cast::<u16>().read() }),
    }
}

/// Set the bits of an element.
pub(crate) fn set_bits(matrix: &Matrix, row: u32, col: u32, bits: u32) {
    check(matrix, Tile { row, col, rows: 1, cols: 1 });
    let address = at(matrix, row, col);
    match element_bytes(matrix.dtype) {
        // SAFETY: one element of a checked matrix that this workgroup alone writes now.
        4 => unsafe { address.cast::<u32>().write(bits) },
        // SAFETY: as above, of 16 bits.
        _ => unsafe { address.cast::<u16>().write(bits as u16) },
    }
}

/// A value in the bits of an element type, rounded.
pub(crate) fn to_bits(dtype: u32, value: f32) -> u32 {
    match dtype {
        0 => value.to_bits(),
        1 => u32::from(f16::from_f32(value).to_bits()),
        _ => u32::from(bf16::from_f32(value).to_bits()),
    }
}

/// The value of such bits.
pub(crate) fn from_bits(dtype: u32, bits: u32) -> f32 {
    match dtype {
        0 => f32::from_bits(bits),
        1 => f16::from_bits(bits as u16).to_f32(),
        _ => bf16::from_bits(bits as u16).to_f32(),
    }
}

/// Round values to an element type.
pub(crate) fn round(dtype: u32, values: &mut [f32]) {
    match dtype {
        0 => {}
        1 => values.iter_mut().for_each(|value| *value = f16::from_f32(*value).to_f32()),
        _ => values.iter_mut().for_each(|value| *value = bf16::from_f32(*value).to_f32()),
    }
}

/// Copy a rectangle from one matrix to another of the same type, `from` and `to` being its places.
pub(crate) fn copy(
    source: &Matrix,
    from: Tile,
    target: &Matrix,
    to: Tile,
    scratch: &mut Scratch,
) -> u64 {
    assert_eq!((source.dtype, from.rows, from.cols), (target.dtype, to.rows, to.cols), "a copy");
    if from.rows == 0 || from.cols == 0 {
        return 0;
    }
    check(source, from);
    check(target, to);
    let layout = |matrix: &Matrix| (matrix.ld, matrix.transposed);
    if layout(source) == layout(target)
        && at(source, from.row, from.col) == at(target, to.row, to.col)
    {
        // In place: it is there already, as the rows of a whole or as a matrix of their own.
        return 0;
    }
    let size = element_bytes(source.dtype);
    let bytes = u64::from(from.rows) * u64::from(from.cols) * size as u64;
    if source.transposed == target.transposed {
        let (runs, _) = runs(source, from, 0);
        for (row, col, len) in runs {
            let source = at(source, from.row + row, from.col + col);
            let target = at(target, to.row + row, to.col + col);
            // SAFETY: both runs lie in checked matrices, one is not part of the other (the host
            // refused overlaps), and the protocols order the writers.
            unsafe { std::ptr::copy_nonoverlapping(source, target, len * size) };
        }
        return bytes;
    }
    // Every short value is exact in f32.
    let (rows, cols) = (from.rows as usize, from.cols as usize);
    let buffer = grow(&mut scratch.left, rows * cols);
    load(source, from, buffer, cols, false);
    store(target, to, buffer, cols);
    bytes
}

/// Add `values` to a rectangle of f32, element by element, atomically.
pub(crate) fn add_atomic(matrix: &Matrix, tile: Tile, values: &[f32], ld: usize) {
    use std::sync::atomic::{AtomicU32, Ordering};
    if tile.rows == 0 || tile.cols == 0 {
        return;
    }
    check(matrix, tile);
    assert_eq!(matrix.dtype, 0, "atomic adds are to f32");
    for row in 0..tile.rows {
        let address = at(matrix, tile.row + row, tile.col);
        // SAFETY: a run of a checked matrix of f32, which ranks touch only atomically until the
        // barrier that follows.
        let words = unsafe { run::<AtomicU32>(address, tile.cols as usize) };
        let values = &values[row as usize * ld..][..tile.cols as usize];
        for (word, value) in words.iter().zip(values) {
            let mut old = word.load(Ordering::Relaxed);
            loop {
                let new = (f32::from_bits(old) + value).to_bits();
                match word.compare_exchange_weak(old, new, Ordering::Relaxed, Ordering::Relaxed) {
                    Ok(_) => break,
                    Err(seen) => old = seen,
                }
            }
        }
    }
}

/// Add the product of a rectangle of A (`left`) and one of B (`right`) to `sum`, rows `ld` apart;
/// with `first`, to zero. Sums are f32.
pub(crate) fn multiply(
    (a, left): (&Matrix, Tile),
    (b, right): (&Matrix, Tile),
    sum: &mut [f32],
    ld: usize,
    first: bool,
    scratch: &mut Scratch,
) {
    assert_eq!(left.cols, right.rows, "depth of a product");
    let (rows, cols, depth) = (left.rows as usize, right.cols as usize, left.cols as usize);
    if rows == 0 || cols == 0 {
        return;
    }
    if depth == 0 {
        if first {
            sum.chunks_mut(ld).take(rows).for_each(|row| row[..cols].fill(0.0));
        }
        return;
    }
    check(a, left);
    check(b, right);
    assert!(sum.len() >= (rows - 1) * ld + cols, "room for {rows} x {cols}, rows {ld} apart");
    let step = if a.dtype == 0 && b.dtype == 0 { depth } else { DEPTH };
    for begin in (0..depth).step_by(step) {
        let part = (depth - begin).min(step);
        let strides = |m: &Matrix| if m.transposed == 1 { (1, m.ld) } else { (m.ld, 1) };
        let left = Tile { col: left.col + begin as u32, cols: part as u32, ..left };
        let right = Tile { row: right.row + begin as u32, rows: part as u32, ..right };
        let (lhs, (lhs_rs, lhs_cs)) = if a.dtype == 0 {
            (at(a, left.row, left.col).cast::<f32>().cast_const(), strides(a))
        } else {
            let panel = grow(&mut scratch.left, rows * part);
            load(a, left, panel, part, false);
            (panel.as_ptr(), (part as u64, 1))
        };
        let (rhs, (rhs_rs, rhs_cs)) = if b.dtype == 0 {
            (at(b, right.row, right.col).cast::<f32>().cast_const(), strides(b))
        } else {
            let panel = grow(&mut scratch.right, part * cols);
            load(b, right, panel, cols, false);
            (panel.as_ptr(), (cols as u64, 1))
        };
        // SAFETY: the rectangles were checked against their matrices, or are panels filled just
        // above; `sum` was checked to have the room; the protocols order the writers of A and B.
        unsafe {
            gemm::gemm(
                rows,
                cols,
                part,
                sum.as_mut_ptr(),
                1,
                ld as isize,
                !(first && begin == 0),
                lhs,
                lhs_cs as isize,
                lhs_rs as isize,
                rhs,
                rhs_cs as isize,
                rhs_rs as isize,
                1.0,
                1.0,
                false,
                false,
                false,
                gemm::Parallelism::None,
            );
        }
    }
}
