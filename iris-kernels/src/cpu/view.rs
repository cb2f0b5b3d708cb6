//! Rectangles of matrices in memory: load, store, copy, multiply. All accesses of the CPU kernels
//! to raw memory are in this file, except those to synchronisation words.
//!
//! Accesses are plain, because GEMM libraries and vectorised conversions cannot use atomics. The
//! protocols order the kernels' accesses. [`iris_heap::plain_access`] makes host copies of the same
//! bytes wait.
//!
//! All functions take a [`Matrix`] whose address, rows and columns the host checked when the op was
//! called. They assert that the rectangle lies inside the matrix.

use bytemuck::Pod;

use crate::args::Matrix;
use crate::dtype::{self, element_bytes, values};
use crate::schedule::Tile;

/// Number of columns of A that are converted to f32 at once; this bounds the size of the buffer.
const DEPTH: usize = 512;

/// Buffers for elements converted to f32; a workgroup reuses them from tile to tile.
#[derive(Default)]
pub(crate) struct Scratch {
    /// Whether products are padded, so that the crate `gemm-f32` multiplies all of them by the same
    /// instructions. By default it has others for few rows, for few elements and for a deep K.
    padded: bool,
    left: Vec<f32>,
    right: Vec<f32>,
    product: Vec<f32>,
}

/// Multiples to which the rows and columns of a padded product are rounded up: no dimension is then
/// 1, and there are more than 256 elements.
const PADDED_ROWS: usize = 8;
const PADDED_COLS: usize = 64;

impl Scratch {
    pub(crate) fn new(padded: bool) -> Self {
        Self { padded, ..Self::default() }
    }
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
        "{tile:?} is outside of a matrix of {} x {}",
        matrix.rows,
        matrix.cols
    );
    assert!(matrix.address != 0, "the matrix has no address");
}

/// Address of element (`row`, `col`) of the matrix, in its row-major or column-major storage.
fn at(matrix: &Matrix, row: u32, col: u32) -> *mut u8 {
    let (row, col) = (u64::from(row), u64::from(col));
    let index = if matrix.transposed == 1 { col * matrix.ld + row } else { row * matrix.ld + col };
    (matrix.address + index * element_bytes(matrix.dtype) as u64) as *mut u8
}

/// Returns the `len` contiguous elements at `address` as a slice.
///
/// # Safety
/// The elements are mapped, aligned for `T`, and not written while the slice lives.
unsafe fn run<'a, T>(address: *mut u8, len: usize) -> &'a [T] {
    // SAFETY: the caller keeps the contract of this function, which includes the contract
    // of `from_raw_parts`.
    unsafe { std::slice::from_raw_parts(address.cast::<T>(), len) }
}

/// Returns the `len` contiguous elements at `address` as a mutable slice.
///
/// # Safety
/// The contract of [`run`] holds. In addition, no other code reads the elements while the slice
/// lives.
unsafe fn run_mut<'a, T>(address: *mut u8, len: usize) -> &'a mut [T] {
    // SAFETY: the caller keeps the contract of this function, which includes the contract
    // of `from_raw_parts_mut`.
    unsafe { std::slice::from_raw_parts_mut(address.cast::<T>(), len) }
}

/// Splits a rectangle into contiguous runs, along rows or, if `transposed`, along columns. Returns
/// an iterator of (row, column, length), counted from the rectangle's corner, and the stride
/// between the elements of a run in a row-major buffer of row length `ld`.
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

fn widen(dtype: u32, address: *mut u8, out: &mut [f32]) {
    // SAFETY: the run is part of a checked matrix of this type; the protocols order its writers
    // before this reader.
    let elements = unsafe { run::<u8>(address, out.len() * element_bytes(dtype)) };
    (values(dtype).widen)(elements, out);
}

fn narrow(dtype: u32, from: &[f32], address: *mut u8) {
    // SAFETY: the run is part of a checked matrix of this type that only this workgroup writes now.
    let elements = unsafe { run_mut::<u8>(address, from.len() * element_bytes(dtype)) };
    (values(dtype).narrow)(from, elements);
}

/// Loads rectangle `tile` of `matrix` as f32 into `out`, row-major with row stride `ld`; if `add`,
/// adds the elements to the values in `out`.
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
            widen(matrix.dtype, address, &mut out[place..place + len]);
            continue;
        }
        for begin in (0..len).step_by(buffer.len()) {
            let part = &mut buffer[..(len - begin).min(256)];
            widen(matrix.dtype, address, part);
            address = address.wrapping_add(part.len() * element_bytes(matrix.dtype));
            if step == 1 {
                // Contiguous addition has a separate loop, because the compiler vectorises that
                // loop.
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

/// Stores `values`, row-major with row stride `ld`, into rectangle `tile`, rounded to the matrix's
/// type.
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

/// Bit pattern of element (`row`, `col`) of a matrix.
pub(crate) fn bits(matrix: &Matrix, row: u32, col: u32) -> u32 {
    check(matrix, Tile { row, col, rows: 1, cols: 1 });
    // SAFETY: the address is that of an element of a checked matrix; the protocols order its
    // writers before this reader.
    let element = unsafe { run::<u8>(at(matrix, row, col), element_bytes(matrix.dtype)) };
    (values(matrix.dtype).load)(element)
}

/// Stores the bit pattern `bits` in element (`row`, `col`) of a matrix.
pub(crate) fn set_bits(matrix: &Matrix, row: u32, col: u32, bits: u32) {
    check(matrix, Tile { row, col, rows: 1, cols: 1 });
    // SAFETY: the address is that of an element of a checked matrix, which only this workgroup
    // writes now.
    let element = unsafe { run_mut::<u8>(at(matrix, row, col), element_bytes(matrix.dtype)) };
    (values(matrix.dtype).store)(bits, element);
}

/// Loads up to 8 bytes as the low bytes of a word; the other bytes are 0.
pub(crate) fn load_bytes(address: u64, len: usize) -> u64 {
    let mut word = [0; 8];
    // SAFETY: the bytes are part of a row of a checked tensor; the protocols order its writers
    // before this reader.
    word[..len].copy_from_slice(unsafe { run::<u8>(address as *mut u8, len) });
    u64::from_le_bytes(word)
}

/// Stores the low `len` bytes of `word`, at most 8.
pub(crate) fn store_bytes(address: u64, len: usize, word: u64) {
    // SAFETY: the bytes are part of a row of a checked tensor that only this workgroup writes now.
    unsafe { run_mut::<u8>(address as *mut u8, len) }.copy_from_slice(&word.to_le_bytes()[..len]);
}

/// Copies rectangle `from` of `source` to rectangle `to` of `target`; both matrices have the same
/// element type. Returns the number of bytes copied.
pub(crate) fn copy(
    source: &Matrix,
    from: Tile,
    target: &Matrix,
    to: Tile,
    scratch: &mut Scratch,
) -> u64 {
    assert_eq!(
        (source.dtype, from.rows, from.cols),
        (target.dtype, to.rows, to.cols),
        "type and shape of source and target of a copy"
    );
    if from.rows == 0 || from.cols == 0 {
        return 0;
    }
    check(source, from);
    check(target, to);
    let layout = |matrix: &Matrix| (matrix.ld, matrix.transposed);
    if layout(source) == layout(target)
        && at(source, from.row, from.col) == at(target, to.row, to.col)
    {
        // Nothing has to be copied, because source and target are the same elements in memory.
        return 0;
    }
    let size = element_bytes(source.dtype);
    let bytes = u64::from(from.rows) * u64::from(from.cols) * size as u64;
    if source.transposed == target.transposed {
        let (runs, _) = runs(source, from, 0);
        for (row, col, len) in runs {
            let source = at(source, from.row + row, from.col + col);
            let target = at(target, to.row + row, to.col + col);
            // SAFETY: both runs lie in checked matrices; they do not overlap, because the host
            // refuses overlapping matrices; the protocols order their writers.
            unsafe { std::ptr::copy_nonoverlapping(source, target, len * size) };
        }
        return bytes;
    }
    // The matrices have different storage orders, so the elements are copied through an f32 buffer,
    // in which every 16-bit value is exact.
    let (rows, cols) = (from.rows as usize, from.cols as usize);
    let buffer = grow(&mut scratch.left, rows * cols);
    load(source, from, buffer, cols, false);
    store(target, to, buffer, cols);
    bytes
}

/// Adds `values`, row-major with row stride `ld`, to rectangle `tile` of an f32 matrix, each
/// element atomically.
pub(crate) fn add_atomic(matrix: &Matrix, tile: Tile, values: &[f32], ld: usize) {
    use std::sync::atomic::{AtomicU32, Ordering};
    if tile.rows == 0 || tile.cols == 0 {
        return;
    }
    check(matrix, tile);
    assert_eq!(matrix.dtype, 0, "atomic adds are to f32");
    for row in 0..tile.rows {
        let address = at(matrix, tile.row + row, tile.col);
        // SAFETY: the run is part of a checked f32 matrix, which ranks access only atomically until
        // the next barrier.
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

/// Adds the product of rectangle `left` of A and rectangle `right` of B to `sum`, a row-major f32
/// buffer with row stride `ld`; if `first`, overwrites `sum`.
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
    let Scratch { padded, left: lefts, right: rights, product } = scratch;
    let padded = *padded;
    let in_place = |matrix: &Matrix| matrix.dtype == dtype::SUM && !padded;
    let (to, all_rows, all_cols) = match padded {
        true => {
            let all = (rows.next_multiple_of(PADDED_ROWS), cols.next_multiple_of(PADDED_COLS));
            (grow(product, all.0 * all.1), all.0, all.1)
        }
        false => (&mut *sum, rows, cols),
    };
    let to_ld = if padded { all_cols } else { ld };
    let step = if in_place(a) && in_place(b) { depth } else { DEPTH };
    for begin in (0..depth).step_by(step) {
        let part = (depth - begin).min(step);
        let strides = |m: &Matrix| if m.transposed == 1 { (1, m.ld) } else { (m.ld, 1) };
        let left = Tile { col: left.col + begin as u32, cols: part as u32, ..left };
        let right = Tile { row: right.row + begin as u32, rows: part as u32, ..right };
        let (lhs, (lhs_rs, lhs_cs)) = if in_place(a) {
            (at(a, left.row, left.col).cast::<f32>().cast_const(), strides(a))
        } else {
            let panel = grow(lefts, all_rows * part);
            panel[rows * part..].fill(0.0);
            load(a, left, panel, part, false);
            (panel.as_ptr(), (part as u64, 1))
        };
        let (rhs, (rhs_rs, rhs_cs)) = if in_place(b) {
            (at(b, right.row, right.col).cast::<f32>().cast_const(), strides(b))
        } else {
            let panel = grow(rights, part * all_cols);
            panel.chunks_mut(all_cols).for_each(|row| row[cols..].fill(0.0));
            load(b, right, panel, all_cols, false);
            (panel.as_ptr(), (all_cols as u64, 1))
        };
        // SAFETY: the rectangles were checked against their matrices, or are panels filled just
        // above; `sum` was checked to be large enough, and the padded product is as large as it
        // was made; the protocols order the writers of A and B.
        unsafe {
            // The function computes the transpose, because it prefers a column-major result.
            gemm_f32::gemm::f32::get_gemm_fn()(
                all_cols,
                all_rows,
                part,
                to.as_mut_ptr(),
                to_ld as isize,
                1,
                begin > 0 || !first && !padded,
                rhs,
                rhs_rs as isize,
                rhs_cs as isize,
                lhs,
                lhs_rs as isize,
                lhs_cs as isize,
                1.0,
                1.0,
                false,
                false,
                false,
                gemm_common::Parallelism::None,
            );
        }
    }
    if padded {
        for (sums, values) in sum.chunks_mut(ld).zip(product.chunks(all_cols)).take(rows) {
            match first {
                true => sums[..cols].copy_from_slice(&values[..cols]),
                false => sums.iter_mut().zip(&values[..cols]).for_each(|(sum, it)| *sum += it),
            }
        }
    }
}
