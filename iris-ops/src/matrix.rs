//! References to matrices, and the checks that every call makes on them before anything is launched.

use iris_heap::{DType, Element, RawSlice, Segment, SymSlice, SymmetricHeap};
use iris_kernels::args::{self, Matrix};

use crate::error::{Error, InOp, Result};
use crate::kind::Op;

/// Where the elements of a matrix are.
#[derive(Clone, Copy, Debug)]
enum Place {
    Sym(RawSlice),
    External { address: u64, bytes: u64, writable: bool },
}

/// A matrix in symmetric or other memory: by default row by row without gaps.
///
/// ```text
/// element (r, c) = elements[r * ld + c], or elements[c * ld + r] of a transposed one
/// ```
#[derive(Clone, Copy, Debug)]
pub struct MatRef {
    place: Place,
    dtype: DType,
    rows: usize,
    cols: usize,
    ld: usize,
    transposed: bool,
}

impl MatRef {
    /// A matrix of `rows` x `cols` in a slice of the symmetric heap.
    pub fn sym<T: Element>(slice: SymSlice<T>, rows: usize, cols: usize) -> Self {
        let place = Place::Sym(slice.raw());
        Self { place, dtype: T::DTYPE, rows, cols, ld: cols, transposed: false }
    }

    /// All elements of a slice, as one row.
    pub fn vector<T: Element>(slice: SymSlice<T>) -> Self {
        Self::sym(slice, 1, slice.len())
    }

    /// An input of `rows` x `cols` in memory that the device of the heap can address, with room for `len`
    /// elements. As an output it is refused: [`MatRef::external_mut`].
    ///
    /// # Safety
    /// The memory must be mapped for the heap's device and stay so, written by nobody, until the stream has
    /// finished the calls that use it.
    #[allow(unsafe_code, reason = "the promise is about memory that outlives this value")]
    pub unsafe fn external<T: Element>(
        pointer: *const T,
        len: usize,
        rows: usize,
        cols: usize,
    ) -> Self {
        Self::at(pointer, len, (rows, cols), false)
    }

    /// Same as [`MatRef::external`], for a matrix that may be an output.
    ///
    /// # Safety
    /// As for [`MatRef::external`]; as an output, the memory is neither written nor read by others until then.
    #[allow(unsafe_code, reason = "the promise is about memory that outlives this value")]
    pub unsafe fn external_mut<T: Element>(
        pointer: *mut T,
        len: usize,
        rows: usize,
        cols: usize,
    ) -> Self {
        Self::at(pointer, len, (rows, cols), true)
    }

    fn at<T: Element>(
        pointer: *const T,
        len: usize,
        (rows, cols): (usize, usize),
        writable: bool,
    ) -> Self {
        let bytes = (len as u64).saturating_mul(size_of::<T>() as u64);
        let place = Place::External { address: pointer as u64, bytes, writable };
        Self { place, dtype: T::DTYPE, rows, cols, ld: cols, transposed: false }
    }

    /// The same matrix with rows (columns, if transposed) `ld` elements apart.
    #[must_use]
    pub fn with_ld(mut self, ld: usize) -> Self {
        self.ld = ld;
        self
    }

    /// The matrix whose rows are this one's columns: the same memory, read the other way.
    ///
    /// B of a weight that is stored as `n` x `k`, as linear layers of PyTorch have it:
    /// ```
    /// use iris_heap::{HeapOptions, SymmetricHeap, World};
    /// use iris_ops::{MatRef, Matmul, MatmulArgs, matmul::Options};
    ///
    /// let results = World::run_threads(1, |world| -> anyhow::Result<Vec<f32>> {
    ///     let heap = SymmetricHeap::open(&world, HeapOptions::new())?;
    ///     let (m, n, k) = (1, 2, 3);
    ///     let (x, y) = (heap.ones::<f32>(m * k)?, heap.zeros::<f32>(m * n)?);
    ///     let weight = heap.zeros::<f32>(n * k)?;
    ///     heap.write(weight, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])?; // two rows of three
    ///     let b = MatRef::sym(weight, n, k).transposed(); // k x n
    ///     let op = Matmul::new(&heap, &Options::new(m, n, k).plan(&heap)?)?;
    ///     let stream = heap.stream()?;
    ///     op.run(&MatmulArgs::new(MatRef::sym(x, m, k), b, MatRef::sym(y, m, n)), &stream)?;
    ///     stream.sync()?;
    ///     Ok(heap.read(y)?)
    /// })?;
    /// assert_eq!(results, [[6.0, 15.0]]); // x W^T
    /// # anyhow::Ok(())
    /// ```
    #[must_use]
    pub fn transposed(mut self) -> Self {
        (self.rows, self.cols) = (self.cols, self.rows);
        self.transposed = !self.transposed;
        self
    }

    /// Rows as an op sees them.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns as an op sees them.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Leading dimension, in elements.
    pub fn ld(&self) -> usize {
        self.ld
    }

    /// Its offset in the data segment, if it lies there: where peers find theirs.
    pub(crate) fn sym_offset(&self) -> Option<u64> {
        match self.place {
            Place::Sym(slice) if slice.segment() == Segment::Data => Some(slice.offset()),
            _ => None,
        }
    }

    /// Whether an op may write it.
    pub(crate) fn is_writable(&self) -> bool {
        !matches!(self.place, Place::External { writable: false, .. })
    }

    pub(crate) fn is_transposed(&self) -> bool {
        self.transposed
    }

    /// How many elements it has, if they lie one behind the other.
    pub(crate) fn elements(&self) -> Option<usize> {
        let (lines, len) =
            if self.transposed { (self.cols, self.rows) } else { (self.rows, self.cols) };
        if lines > 1 && self.ld != len { None } else { lines.checked_mul(len) }
    }

    /// The same elements, which lie one behind the other, as `rows` rows.
    pub(crate) fn in_rows(self, rows: usize, cols: usize) -> Self {
        Self { rows, cols, ld: cols, transposed: false, ..self }
    }

    /// A matrix of `rows` x `cols` without gaps at the start of a block of the heap.
    pub(crate) fn in_block(block: RawSlice, dtype: DType, (rows, cols): (usize, usize)) -> Self {
        Self { place: Place::Sym(block), dtype, rows, cols, ld: cols, transposed: false }
    }

    /// Some of its rows.
    pub(crate) fn some_rows(self, rows: std::ops::Range<usize>) -> Self {
        let step = if self.transposed { 1 } else { self.ld };
        let skipped = (rows.start * step * self.dtype.size()) as u64;
        let place = match self.place {
            // Of no rows, or no columns, the start is as good as any place.
            Place::Sym(slice) => {
                let from = usize::try_from(skipped.min(slice.bytes())).unwrap_or(usize::MAX);
                Place::Sym(slice.slice(from..).unwrap_or(slice))
            }
            Place::External { address, bytes, writable } => {
                let skipped = skipped.min(bytes);
                Place::External { address: address + skipped, bytes: bytes - skipped, writable }
            }
        };
        Self { place, rows: rows.len(), ..self }
    }

    /// Bytes from the first element to the end of the last.
    fn extent(&self) -> u64 {
        let (lines, len) =
            if self.transposed { (self.cols, self.rows) } else { (self.rows, self.cols) };
        if lines == 0 || len == 0 {
            return 0;
        }
        let elements = (lines - 1).saturating_mul(self.ld).saturating_add(len);
        (elements as u64).saturating_mul(self.dtype.size() as u64)
    }

    /// Check this matrix and give its address on this rank.
    pub(crate) fn resolve(
        &self,
        op: Op,
        name: &'static str,
        heap: &SymmetricHeap,
    ) -> Result<Matrix> {
        let invalid = |what: &str, value: String, expected: String| Error::Invalid {
            op,
            what: format!("{what} of {name}"),
            value,
            expected,
        };
        let len = if self.transposed { self.rows } else { self.cols };
        if self.ld < len {
            let expected = format!("at least {len}, the length of a line");
            return Err(invalid("leading dimension", self.ld.to_string(), expected));
        }
        let limit = u32::MAX as usize / 2;
        if self.rows > limit || self.cols > limit {
            let value = format!("{} x {}", self.rows, self.cols);
            return Err(invalid("shape", value, format!("at most {limit} either way")));
        }
        let code = args::dtype_code(self.dtype).ok_or_else(|| {
            invalid("element type", self.dtype.to_string(), "f32, f16 or bf16".into())
        })?;
        let (address, bytes) = match self.place {
            Place::Sym(slice) => {
                (heap.resolve(slice, heap.rank()).in_op(op)? as u64, slice.bytes())
            }
            Place::External { address, bytes, .. } => (address, bytes),
        };
        if self.extent() > bytes {
            let expected = format!(
                "at least {} for {} x {}, lines {} apart",
                self.extent(),
                self.rows,
                self.cols,
                self.ld
            );
            return Err(invalid("bytes", bytes.to_string(), expected));
        }
        if address % self.dtype.size() as u64 != 0 {
            let expected = format!("a multiple of {}", self.dtype.size());
            return Err(invalid("address", format!("{address:#x}"), expected));
        }
        Ok(Matrix {
            address: if self.extent() == 0 { address.max(1) } else { address },
            ld: self.ld as u64,
            rows: self.rows as u32,
            cols: self.cols as u32,
            dtype: code,
            transposed: u32::from(self.transposed),
        })
    }

    /// Whether the memory of two matrices has bytes in common.
    pub(crate) fn overlaps(&self, own: &Matrix, other: &MatRef, theirs: &Matrix) -> bool {
        let (a, b) = (own.address, theirs.address);
        let before = |first: u64, matrix: &Self, second: u64| {
            first.saturating_add(matrix.extent()) <= second
        };
        let empty = self.extent() == 0 || other.extent() == 0;
        !empty && !before(a, self, b) && !before(b, other, a)
    }
}
