//! Test matrices in the heap, surrounded by gaps that ops must not write.

#![allow(unsafe_code, reason = "ops are given the addresses of memory in the heap")]

use std::sync::Arc;

use iris_heap::{DType, Element, RawSlice, SymmetricHeap};
use iris_ops::MatRef;

use crate::matrix::{POISON, with_type};
use crate::oracle::Dense;

/// Memory layout of a test matrix in its block.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Layout {
    /// Whether the matrix is column-major.
    pub transposed: bool,
    /// Number of elements between the end of a row and the start of the next row.
    pub pad: usize,
    /// Minimum number of elements of a row. A shorter row is padded to it; `pad` elements follow.
    pub line: usize,
    /// Number of elements between the start of the block and the first element.
    pub before: usize,
    /// Whether rank r's gap before the first element is larger by r elements, so that the matrix's
    /// offset differs between ranks.
    pub skewed: bool,
    /// Whether the op gets the matrix's address (external memory) instead of the symmetric slice.
    pub external: bool,
    /// Whether ranks with odd numbers pass external memory, and ranks with even numbers the
    /// symmetric slice.
    pub external_on_odd: bool,
}

/// Block of the heap, at the same offset on all ranks, that holds a matrix with its gaps.
pub(super) struct Buffer {
    slice: RawSlice,
    dtype: DType,
    layout: Layout,
}

impl Layout {
    /// Number of elements that suffice for a matrix of `rows` x `cols` with this layout on each of
    /// `size` ranks.
    pub(super) fn room(&self, (rows, cols): (usize, usize), size: usize) -> usize {
        let (lines, len) = if self.transposed { (cols, rows) } else { (rows, cols) };
        let gaps = 2 * self.before + self.pad + if self.skewed { size } else { 0 };
        (lines * (len.max(self.line) + self.pad) + gaps).max(1)
    }

    fn first(&self, rank: usize) -> usize {
        self.before + if self.skewed { rank } else { 0 }
    }

    fn ld(&self, (rows, cols): (usize, usize)) -> usize {
        let len = if self.transposed { rows } else { cols };
        len.max(self.line) + self.pad
    }

    /// Index in the block of the element at `row` and `col` of a matrix of `shape` on `rank`.
    fn place(&self, rank: usize, shape: (usize, usize), row: usize, col: usize) -> usize {
        let (line, at) = if self.transposed { (col, row) } else { (row, col) };
        self.first(rank) + line * self.ld(shape) + at
    }
}

impl Buffer {
    /// Uses `slice` as the block of a matrix.
    pub(super) fn new(slice: RawSlice, dtype: DType, layout: Layout) -> Self {
        Self { slice, dtype, layout }
    }

    /// Fills the whole block with [`POISON`], then writes `values` as the elements of the matrix.
    pub(super) fn fill(&self, heap: &SymmetricHeap, values: Option<&Dense>) -> anyhow::Result<()> {
        let mut bytes = vec![POISON; self.slice.len()];
        if let Some(values) = values {
            let shape = (values.rows, values.cols);
            let size = self.dtype.size();
            for row in 0..values.rows {
                for col in 0..values.cols {
                    let at = self.layout.place(heap.rank(), shape, row, col) * size;
                    let value = values.at(row, col);
                    with_type!(self.dtype, T => {
                        let value = T::from_f64(value);
                        bytes[at..at + size].copy_from_slice(bytemuck::bytes_of(&value));
                    });
                }
            }
        }
        Ok(heap.write(self.slice, &bytes)?)
    }

    /// Reads the matrix of this shape; returns its values and their bytes.
    ///
    /// # Errors
    /// If a byte outside the matrix has been written.
    pub(super) fn read(
        &self,
        heap: &SymmetricHeap,
        shape: (usize, usize),
    ) -> anyhow::Result<(Dense, Vec<u8>)> {
        let bytes = heap.read(self.slice)?;
        let size = self.dtype.size();
        let mut own = vec![false; bytes.len() / size];
        let mut values = Dense { rows: shape.0, cols: shape.1, data: Vec::new() };
        let mut bits = Vec::new();
        for row in 0..shape.0 {
            for col in 0..shape.1 {
                let at = self.layout.place(heap.rank(), shape, row, col);
                own[at] = true;
                let element = &bytes[at * size..][..size];
                bits.extend_from_slice(element);
                with_type!(self.dtype, T => {
                    values.data.push(bytemuck::pod_read_unaligned::<T>(element).to_f64());
                });
            }
        }
        for (at, element) in bytes.chunks_exact(size).enumerate() {
            anyhow::ensure!(
                own[at] || element.iter().all(|&byte| byte == POISON),
                "element {at} of {} was written, which lies outside the {} x {} of {:?}",
                own.len(),
                shape.0,
                shape.1,
                self.layout
            );
        }
        Ok((values, bits))
    }

    /// Reference to the matrix of this shape in the buffer, as ops take it.
    pub(super) fn matrix(
        &self,
        heap: &Arc<SymmetricHeap>,
        shape: (usize, usize),
    ) -> anyhow::Result<MatRef> {
        let layout = self.layout;
        let (rows, cols) = if layout.transposed { (shape.1, shape.0) } else { shape };
        let matrix = with_type!(self.dtype, T => {
            let whole = self.slice.cast::<T>()?;
            let slice = whole.slice(layout.first(heap.rank())..)?;
            if layout.external || layout.external_on_odd && heap.rank() % 2 == 1 {
                let address = heap.resolve(slice, heap.rank())?;
                // SAFETY: the memory belongs to the heap and is freed only after the calls have
                // ended.
                unsafe { MatRef::external_mut(address, slice.len(), rows, cols) }
            } else {
                MatRef::sym(slice, rows, cols)
            }
        });
        let matrix = matrix.with_ld(layout.ld(shape));
        Ok(if layout.transposed { matrix.transposed() } else { matrix })
    }
}
