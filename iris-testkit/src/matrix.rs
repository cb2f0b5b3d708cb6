//! Matrices in the heap whose elements are written and read as f64.

use anyhow::Result;
use iris_heap::{ALIGNMENT, DType, Element, SymSlice, SymmetricHeap};
use iris_ops::MatRef;

/// Byte with which unwritten memory is filled: every element type reads it as NaN.
pub const POISON: u8 = 0xff;

/// Evaluates `$call` with `$type` as the Rust type of the element type `$dtype`; returns an error
/// for a type with which kernels do not compute.
macro_rules! with_type {
    ($dtype:expr, $type:ident => $call:expr) => {
        iris_kernels::with_type!($dtype, $type => $call, {
            let expected = iris_kernels::dtype::Role::Result.names();
            anyhow::bail!("element type of a matrix is {}: expected {expected}", $dtype)
        })
    };
}
pub(crate) use with_type;

/// Number of bytes that a matrix of `elements` elements takes in the heap.
pub fn room(dtype: DType, elements: usize) -> u64 {
    let bytes = (elements.max(1) as u64).saturating_mul(dtype.size() as u64);
    bytes.checked_next_multiple_of(ALIGNMENT).unwrap_or(u64::MAX)
}

/// Encodes f64 values as elements of type `dtype`, rounded to that type.
///
/// # Errors
/// Kernels do not compute with `dtype`.
pub fn bytes(dtype: DType, values: impl Iterator<Item = f64>) -> Result<Vec<u8>> {
    Ok(with_type!(dtype, T => {
        let elements: Vec<T> = values.map(T::from_f64).collect();
        bytemuck::cast_slice(&elements).to_vec()
    }))
}

/// Decodes elements of type `dtype` to f64.
///
/// # Errors
/// Kernels do not compute with `dtype`.
pub fn values(dtype: DType, bytes: &[u8]) -> Result<Vec<f64>> {
    Ok(with_type!(dtype, T => {
        let elements = bytes.chunks_exact(size_of::<T>());
        elements.map(|element| bytemuck::pod_read_unaligned::<T>(element).to_f64()).collect()
    }))
}

/// Creates a reference to a row-major, contiguous matrix at the start of `slice`.
///
/// # Errors
/// Kernels do not compute with `dtype`, or `slice` is not aligned to it.
pub fn matrix(slice: SymSlice<u8>, dtype: DType, (rows, cols): (usize, usize)) -> Result<MatRef> {
    Ok(with_type!(dtype, T => MatRef::sym(slice.cast::<T>()?, rows, cols)))
}

/// This rank's matrix of `rows` x `cols`, row-major and contiguous, in a symmetric allocation.
pub struct Matrix {
    slice: SymSlice<u8>,
    dtype: DType,
    rows: usize,
    cols: usize,
}

impl Matrix {
    /// Allocates room for `most` elements, the same number on all ranks. Collective.
    ///
    /// # Errors
    /// Errors of [`SymmetricHeap::alloc`].
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

    /// Sets each element to `value(row, col)`, rounded to the element type.
    ///
    /// # Errors
    /// Errors of [`SymmetricHeap::write`]; the element type is an integer type.
    pub fn fill(&self, heap: &SymmetricHeap, value: impl Fn(usize, usize) -> f64) -> Result<()> {
        for row in 0..self.rows {
            let bytes = bytes(self.dtype, (0..self.cols).map(|col| value(row, col)))?;
            heap.write(self.line(row)?, &bytes)?;
        }
        Ok(())
    }

    /// Fills the matrix with NaN, so that elements that are not written are found.
    ///
    /// # Errors
    /// Errors of [`SymmetricHeap::write`].
    pub fn poison(&self, heap: &SymmetricHeap) -> Result<()> {
        let bytes = vec![POISON; self.cols * self.dtype.size()];
        (0..self.rows).try_for_each(|row| Ok(heap.write(self.line(row)?, &bytes)?))
    }

    /// Reads the bytes of row `row` of `rank`'s matrix. The caller must know that `rank` has
    /// written the row.
    ///
    /// # Errors
    /// Errors of [`SymmetricHeap::read_from`].
    pub fn row_of(&self, heap: &SymmetricHeap, rank: usize, row: usize) -> Result<Vec<u8>> {
        Ok(heap.read_from(self.line(row)?, rank)?)
    }

    /// Reads all elements of this rank's matrix, row-major.
    ///
    /// # Errors
    /// Errors of [`SymmetricHeap::read`]; the element type is an integer type.
    pub fn read(&self, heap: &SymmetricHeap) -> Result<Vec<f64>> {
        let bytes = self.rows * self.cols * self.dtype.size();
        values(self.dtype, &heap.read(self.slice.slice(..bytes)?)?)
    }

    /// Reference to the matrix, as operators take it.
    ///
    /// # Errors
    /// The element type is an integer type.
    pub fn matrix(&self) -> Result<MatRef> {
        matrix(self.slice, self.dtype, (self.rows, self.cols))
    }

    /// Frees the matrix's memory. Collective.
    ///
    /// # Errors
    /// Errors of [`SymmetricHeap::free`].
    #[track_caller]
    pub fn free(self, heap: &SymmetricHeap) -> Result<()> {
        Ok(heap.free(self.slice)?)
    }

    /// Rows and columns of this rank's matrix.
    pub fn shape(&self) -> (usize, usize) {
        (self.rows, self.cols)
    }
}
