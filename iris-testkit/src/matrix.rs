//! Matrices in the heap whose elements are given and read as doubles.

use anyhow::Result;
use iris_heap::{ALIGNMENT, DType, Element, SymSlice, SymmetricHeap};
use iris_ops::MatRef;

/// Every byte of an element that nobody has written: all element types read it as NaN.
pub const POISON: u8 = 0xff;

/// `$call` with `$type` as the type of `$dtype`; an error for a type that no matrix has.
macro_rules! with_type {
    ($dtype:expr, $type:ident => $call:expr) => {
        match $dtype {
            iris_heap::DType::F32 => {
                type $type = f32;
                $call
            }
            iris_heap::DType::F16 => {
                type $type = half::f16;
                $call
            }
            iris_heap::DType::BF16 => {
                type $type = half::bf16;
                $call
            }
            other => anyhow::bail!("no matrices of {other}"),
        }
    };
}
pub(crate) use with_type;

/// Bytes of the heap that a matrix of so many elements takes.
pub fn room(dtype: DType, elements: usize) -> u64 {
    let bytes = (elements.max(1) as u64).saturating_mul(dtype.size() as u64);
    bytes.checked_next_multiple_of(ALIGNMENT).unwrap_or(u64::MAX)
}

/// Elements of a type, rounded from doubles, as bytes.
///
/// # Errors
/// A type other than f32, f16 and bf16.
pub fn bytes(dtype: DType, values: impl Iterator<Item = f64>) -> Result<Vec<u8>> {
    Ok(with_type!(dtype, T => {
        values.flat_map(|value| bytemuck::bytes_of(&T::from_f64(value)).to_vec()).collect()
    }))
}

/// Elements of a type as doubles.
///
/// # Errors
/// A type other than f32, f16 and bf16.
pub fn values(dtype: DType, bytes: &[u8]) -> Result<Vec<f64>> {
    Ok(with_type!(dtype, T => {
        let elements = bytes.chunks_exact(size_of::<T>());
        elements.map(|element| bytemuck::pod_read_unaligned::<T>(element).to_f64()).collect()
    }))
}

/// Row-major matrix at the start of a block, contiguous, as operators take it.
///
/// # Errors
/// A type other than f32, f16 and bf16; a block that is not aligned to it.
pub fn matrix(slice: SymSlice<u8>, dtype: DType, (rows, cols): (usize, usize)) -> Result<MatRef> {
    Ok(with_type!(dtype, T => MatRef::sym(slice.cast::<T>()?, rows, cols)))
}

/// This rank's matrix of `rows` x `cols`, row-major and contiguous, in a block that all ranks have.
pub struct Matrix {
    slice: SymSlice<u8>,
    dtype: DType,
    rows: usize,
    cols: usize,
}

impl Matrix {
    /// Takes room for `most` elements, the same on all ranks: collective.
    ///
    /// # Errors
    /// Those of [`SymmetricHeap::alloc`].
    #[track_caller]
    pub fn new(
        heap: &SymmetricHeap,
        dtype: DType,
        most: usize,
        (rows, cols): (usize, usize),
    ) -> Result<Matrix> {
        Ok(Matrix { slice: heap.alloc(most.max(1) * dtype.size())?, dtype, rows, cols })
    }

    fn line(&self, row: usize) -> Result<SymSlice<u8>> {
        let line = self.cols * self.dtype.size();
        Ok(self.slice.slice(row * line..(row + 1) * line)?)
    }

    /// Writes `value(row, col)` everywhere, rounded.
    ///
    /// # Errors
    /// Those of [`SymmetricHeap::write`]; a type that no matrix has.
    pub fn fill(&self, heap: &SymmetricHeap, value: impl Fn(usize, usize) -> f64) -> Result<()> {
        for row in 0..self.rows {
            let bytes = bytes(self.dtype, (0..self.cols).map(|col| value(row, col)))?;
            heap.write(self.line(row)?, &bytes)?;
        }
        Ok(())
    }

    /// Fills it with NaN, so that what nobody writes shows.
    ///
    /// # Errors
    /// Those of [`SymmetricHeap::write`].
    pub fn poison(&self, heap: &SymmetricHeap) -> Result<()> {
        let bytes = vec![POISON; self.cols * self.dtype.size()];
        (0..self.rows).try_for_each(|row| Ok(heap.write(self.line(row)?, &bytes)?))
    }

    /// Bytes of a row of `rank`'s. The caller knows that its owner has written it.
    ///
    /// # Errors
    /// Those of [`SymmetricHeap::read_from`].
    pub fn row_of(&self, heap: &SymmetricHeap, rank: usize, row: usize) -> Result<Vec<u8>> {
        Ok(heap.read_from(self.line(row)?, rank)?)
    }

    /// All elements of this rank, row-major.
    ///
    /// # Errors
    /// Those of [`SymmetricHeap::read`]; a type that no matrix has.
    pub fn read(&self, heap: &SymmetricHeap) -> Result<Vec<f64>> {
        let bytes = self.rows * self.cols * self.dtype.size();
        values(self.dtype, &heap.read(self.slice.slice(..bytes)?)?)
    }

    /// The matrix as operators take it.
    ///
    /// # Errors
    /// A type that no matrix has.
    pub fn matrix(&self) -> Result<MatRef> {
        matrix(self.slice, self.dtype, (self.rows, self.cols))
    }

    /// Gives the room back: collective.
    ///
    /// # Errors
    /// Those of [`SymmetricHeap::free`].
    #[track_caller]
    pub fn free(self, heap: &SymmetricHeap) -> Result<()> {
        Ok(heap.free(self.slice)?)
    }

    /// Rows and columns of this rank.
    pub fn shape(&self) -> (usize, usize) {
        (self.rows, self.cols)
    }
}
