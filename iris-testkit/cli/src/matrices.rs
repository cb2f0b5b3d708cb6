//! Matrices in the heap whose elements are given and read as doubles.

use anyhow::{Result, bail};
use half::{bf16, f16};
use iris_heap::{ALIGNMENT, DType, Element, SymSlice, SymmetricHeap};
use iris_ops::MatRef;

/// Every byte of what no op has written: all element types read it as NaN.
const POISON: u8 = 0xff;

/// This rank's matrix of `rows` x `cols`, row by row, in a block that all ranks have.
pub(crate) struct Matrix {
    slice: SymSlice<u8>,
    dtype: DType,
    rows: usize,
    cols: usize,
}

/// Bytes of the heap that a matrix of so many elements takes.
pub(crate) fn room(dtype: DType, elements: usize) -> u64 {
    let bytes = (elements.max(1) as u64).saturating_mul(dtype.size() as u64);
    bytes.checked_next_multiple_of(ALIGNMENT).unwrap_or(u64::MAX)
}

impl Matrix {
    /// Takes room for `most` elements, the same on all ranks: collective.
    #[track_caller]
    pub(crate) fn new(
        heap: &SymmetricHeap,
        dtype: DType,
        most: usize,
        (rows, cols): (usize, usize),
    ) -> Result<Matrix> {
        Ok(Matrix { slice: heap.alloc(most.max(1) * dtype.size())?, dtype, rows, cols })
    }

    /// Writes `value(row, col)` everywhere, rounded.
    pub(crate) fn fill(
        &self,
        heap: &SymmetricHeap,
        value: impl Fn(usize, usize) -> f64,
    ) -> Result<()> {
        let line = self.cols * self.dtype.size();
        let mut bytes = Vec::with_capacity(line);
        for row in 0..self.rows {
            bytes.clear();
            for col in 0..self.cols {
                push(self.dtype, value(row, col), &mut bytes)?;
            }
            heap.write(self.slice.slice(row * line..(row + 1) * line)?, &bytes)?;
        }
        Ok(())
    }

    /// Fills it with NaN, so that what nobody writes shows.
    pub(crate) fn poison(&self, heap: &SymmetricHeap) -> Result<()> {
        let line = self.cols * self.dtype.size();
        let bytes = vec![POISON; line];
        for row in 0..self.rows {
            heap.write(self.slice.slice(row * line..(row + 1) * line)?, &bytes)?;
        }
        Ok(())
    }

    /// The bytes of a row that `rank` has. When its owner has written it is for the caller to know.
    pub(crate) fn row_of(&self, heap: &SymmetricHeap, rank: usize, row: usize) -> Result<Vec<u8>> {
        let line = self.cols * self.dtype.size();
        Ok(heap.read_from(self.slice.slice(row * line..(row + 1) * line)?, rank)?)
    }

    /// All elements of this rank.
    pub(crate) fn read(&self, heap: &SymmetricHeap) -> Result<Vec<f64>> {
        let bytes = self.rows * self.cols * self.dtype.size();
        values(self.dtype, &heap.read(self.slice.slice(..bytes)?)?)
    }

    /// The matrix as ops take it.
    pub(crate) fn matrix(&self) -> Result<MatRef> {
        let (rows, cols) = (self.rows, self.cols);
        Ok(match self.dtype {
            DType::F32 => MatRef::sym(self.slice.cast::<f32>()?, rows, cols),
            DType::F16 => MatRef::sym(self.slice.cast::<f16>()?, rows, cols),
            DType::BF16 => MatRef::sym(self.slice.cast::<bf16>()?, rows, cols),
            other => bail!("no matrices of {other}"),
        })
    }

    /// Gives the room back: collective.
    #[track_caller]
    pub(crate) fn free(self, heap: &SymmetricHeap) -> Result<()> {
        Ok(heap.free(self.slice)?)
    }

    /// Rows and columns of this rank.
    pub(crate) fn shape(&self) -> (usize, usize) {
        (self.rows, self.cols)
    }
}

fn push(dtype: DType, value: f64, bytes: &mut Vec<u8>) -> Result<()> {
    match dtype {
        DType::F32 => bytes.extend(f32::from_f64(value).to_ne_bytes()),
        DType::F16 => bytes.extend(f16::from_f64(value).to_ne_bytes()),
        DType::BF16 => bytes.extend(bf16::from_f64(value).to_ne_bytes()),
        other => bail!("no matrices of {other}"),
    }
    Ok(())
}

/// The elements that these bytes are.
pub(crate) fn values(dtype: DType, bytes: &[u8]) -> Result<Vec<f64>> {
    fn all<T: Element>(bytes: &[u8]) -> Vec<f64> {
        let elements = bytes.chunks_exact(size_of::<T>());
        elements.map(|element| bytemuck::pod_read_unaligned::<T>(element).to_f64()).collect()
    }
    Ok(match dtype {
        DType::F32 => all::<f32>(bytes),
        DType::F16 => all::<f16>(bytes),
        DType::BF16 => all::<bf16>(bytes),
        other => bail!("no matrices of {other}"),
    })
}
