//! References to matrices, and the checks of each matrix before a call launches anything.

use iris_heap::{DType, Element, IssueGuard, RawSlice, Segment, SymSlice};
use iris_kernels::args::{self, Matrix};
use iris_kernels::dtype::{Role, has_role};

use crate::error::{Error, InOp, Result};
use crate::op_names::Op;

/// Memory that holds the elements of a matrix.
#[derive(Clone, Copy, Debug)]
enum Place {
    Sym(RawSlice),
    External { address: u64, bytes: u64, writable: bool },
}

/// Reference to a matrix in the symmetric heap or in other memory; by default row-major and
/// contiguous.
///
/// ```text
/// element (r, c) = elements[r * ld + c], or elements[c * ld + r] if transposed
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
    /// Matrix of `rows` x `cols` elements, row-major and contiguous, in a slice of the symmetric
    /// heap.
    ///
    /// The calls that use the matrix check its size: the slice must have at least `rows * cols`
    /// elements.
    pub fn sym<T: Element>(slice: SymSlice<T>, rows: usize, cols: usize) -> Self {
        let place = Place::Sym(slice.raw());
        Self { place, dtype: T::DTYPE, rows, cols, ld: cols, transposed: false }
    }

    /// Matrix with a single row that contains all elements of a slice of the symmetric heap.
    pub fn vector<T: Element>(slice: SymSlice<T>) -> Self {
        Self::sym(slice, 1, slice.len())
    }

    /// Read-only matrix of `rows` x `cols` elements, row-major and contiguous, in memory outside
    /// the heap that the heap's device can address. `len` is the number of elements in that memory.
    /// Use [`MatRef::external_mut`] for outputs; an op refuses to write a read-only matrix.
    /// [`Operand`](crate::Operand)s are a safe alternative, for memory of cudarc and, in a
    /// [`scope`](crate::scope), of the host.
    ///
    /// The table shows which matrices of a call may be external, on the CPU (host memory) and on
    /// GPUs. An empty field is a matrix that the variant does not have. `auto` chooses no variant
    /// that refuses external memory.
    ///
    #[doc = include_str!("external.md")]
    ///
    /// # Safety
    /// The memory must stay mapped for the heap's device until the stream has finished the calls
    /// that use the matrix, and every replay of a graph that captured them. While such a call is
    /// enqueued or runs, no other code may write the memory.
    #[allow(unsafe_code, reason = "the promise is about memory that outlives this value")]
    pub unsafe fn external<T: Element>(
        pointer: *const T,
        len: usize,
        rows: usize,
        cols: usize,
    ) -> Self {
        Self::at(pointer, len, (rows, cols), false)
    }

    /// Writable matrix of `rows` x `cols` elements outside the heap; otherwise like
    /// [`MatRef::external`].
    ///
    /// # Safety
    /// The memory must stay mapped for the heap's device until the stream has finished the calls
    /// that use the matrix, and every replay of a graph that captured them. While such a call is
    /// enqueued or runs, no other code may write the memory. If the matrix is an output, no other code
    /// may read it either.
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

    /// Sets the leading dimension: rows (columns, if transposed) start `ld` elements apart. A call
    /// fails if `ld` is smaller than the length of a row. The memory needs `(rows - 1) * ld + cols`
    /// elements (rows and columns as stored), because the last row may have fewer than `ld`
    /// elements.
    ///
    /// The left half of a matrix of 4 x 6 elements:
    ///
    /// ```
    /// # use iris_heap::{Error, HeapOptions, SymmetricHeap, World};
    /// # use iris_ops::MatRef;
    /// World::run_threads(2, |world| -> Result<(), Error> {
    ///     let heap = SymmetricHeap::open(&world, HeapOptions::new())?;
    ///     let whole = heap.zeros::<f32>(4 * 6)?;
    ///     let left = MatRef::sym(whole, 4, 3).with_ld(6);
    ///     assert_eq!((left.rows(), left.cols()), (4, 3));
    ///     heap.close()
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    #[must_use]
    pub fn with_ld(mut self, ld: usize) -> Self {
        self.ld = ld;
        self
    }

    /// Transposed view of the same memory: rows become columns. No data is moved.
    ///
    /// Use it for a weight stored as `n` x `k` (as in PyTorch's linear layers) where the op expects
    /// B as `k` x `n`:
    ///
    /// ```
    /// use iris_heap::World;
    /// use iris_ops::{HeapReserve, MatRef, Matmul, MatmulArgs, Plan, matmul::Options};
    ///
    /// let results = World::run_threads(1, |world| -> anyhow::Result<Vec<f32>> {
    ///     let (m, n, k) = (1, 2, 3);
    ///     let plan = Options::new(m, n, k).plan(&world)?;
    ///     let heap = Plan::open_heap(&world, &[&plan], HeapReserve::matrices())?;
    ///     let (x, y) = (heap.ones::<f32>(m * k)?, heap.zeros::<f32>(m * n)?);
    ///     let weight = heap.zeros::<f32>(n * k)?;
    ///     heap.write(weight, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])?; // two rows of three
    ///     let b = MatRef::sym(weight, n, k).transposed(); // k x n
    ///     let op = Matmul::new(&heap, &plan)?;
    ///     let stream = heap.stream()?;
    ///     op.run(&MatmulArgs::new(MatRef::sym(x, m, k), b, MatRef::sym(y, m, n)), &stream)?;
    ///     stream.sync()?;
    ///     let y = heap.read(y)?;
    ///     heap.close()?;
    ///     world.close()?;
    ///     Ok(y)
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

    /// Number of rows as an op sees them, after [`MatRef::transposed`].
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns as an op sees them, after [`MatRef::transposed`].
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Type of the matrix's elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Leading dimension: distance between the starts of two rows (columns, if transposed), in
    /// elements.
    pub fn ld(&self) -> usize {
        self.ld
    }

    /// Slice of the heap in which the matrix lies; `None` for other memory.
    pub(crate) fn slice(&self) -> Option<&RawSlice> {
        match &self.place {
            Place::Sym(slice) => Some(slice),
            Place::External { .. } => None,
        }
    }

    /// Byte offset of the matrix in the data segment of the heap; peers find their matrix at the
    /// same offset. `None` if the matrix is not in the heap.
    pub(crate) fn sym_offset(&self) -> Option<u64> {
        match self.place {
            Place::Sym(slice) if slice.segment() == Segment::Data => Some(slice.offset()),
            _ => None,
        }
    }

    /// Whether an op may write the matrix: false for a matrix made by [`MatRef::external`].
    pub(crate) fn is_writable(&self) -> bool {
        !matches!(self.place, Place::External { writable: false, .. })
    }

    /// Returns a reference to the same matrix for use as an input only. An operator refuses to
    /// write such a matrix if its memory lies outside the heap.
    pub(crate) fn read_only(mut self) -> Self {
        if let Place::External { writable, .. } = &mut self.place {
            *writable = false;
        }
        self
    }

    pub(crate) fn is_transposed(&self) -> bool {
        self.transposed
    }

    /// Number of elements; `None` if the matrix has gaps between its rows.
    pub(crate) fn elements(&self) -> Option<usize> {
        let (lines, len) =
            if self.transposed { (self.cols, self.rows) } else { (self.rows, self.cols) };
        if lines > 1 && self.ld != len { None } else { lines.checked_mul(len) }
    }

    /// Returns the same elements as a row-major matrix of `rows` x `cols`. This matrix must be
    /// contiguous.
    pub(crate) fn in_rows(self, rows: usize, cols: usize) -> Self {
        Self { rows, cols, ld: cols, transposed: false, ..self }
    }

    /// Matrix of `rows` x `cols` elements, row-major without gaps, at the start of a memory block
    /// of the heap.
    pub(crate) fn in_block(block: RawSlice, dtype: DType, (rows, cols): (usize, usize)) -> Self {
        Self { place: Place::Sym(block), dtype, rows, cols, ld: cols, transposed: false }
    }

    /// Matrix of `rows` x `cols` elements without memory, for predictions of calls.
    pub(crate) fn nowhere(dtype: DType, (rows, cols): (usize, usize)) -> Self {
        let place = Place::External { address: 0, bytes: u64::MAX, writable: true };
        Self { place, dtype, rows, cols, ld: cols, transposed: false }
    }

    /// Matrix that consists of the rows `rows` of this one, in the same memory.
    pub(crate) fn some_rows(self, rows: std::ops::Range<usize>) -> Self {
        let step = if self.transposed { 1 } else { self.ld };
        let skipped = (rows.start * step * self.dtype.size()) as u64;
        let place = match self.place {
            // If the range begins past the end of the slice, the matrix has no rows. It then starts
            // at the start of the slice.
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

    /// Number of bytes from the first element to the end of the last one, including the gaps
    /// between rows.
    fn extent(&self) -> u64 {
        let (lines, len) =
            if self.transposed { (self.cols, self.rows) } else { (self.rows, self.cols) };
        if lines == 0 || len == 0 {
            return 0;
        }
        let elements = (lines - 1).saturating_mul(self.ld).saturating_add(len);
        (elements as u64).saturating_mul(self.dtype.size() as u64)
    }

    /// Checks leading dimension, size, element type and alignment of the matrix. Returns the kernel
    /// argument for the matrix, with its address on this rank. `name` is the matrix's name in
    /// errors, and `role` (factor, result, ...) determines which element types are allowed.
    pub(crate) fn resolve(
        &self,
        op: Op,
        (name, role): (&'static str, Role),
        issuing: &IssueGuard<'_>,
    ) -> Result<Matrix> {
        let code = args::dtype_code(self.dtype).filter(|_| has_role(self.dtype, role));
        let code = code.ok_or_else(|| {
            let (what, expected) = (format!("element type of {name}"), role.names());
            Error::invalid(op, what, self.dtype, expected)
        })?;
        Ok(Matrix {
            address: self.address(op, name, issuing)?,
            ld: self.ld as u64,
            rows: self.rows as u32,
            cols: self.cols as u32,
            dtype: code,
            transposed: u32::from(self.transposed),
        })
    }

    /// Checks leading dimension, size and alignment of the matrix, and returns its address on this
    /// rank; above 0 if the matrix has no elements. `name` is the matrix's name in errors.
    pub(crate) fn address(
        &self,
        op: Op,
        name: &'static str,
        issuing: &IssueGuard<'_>,
    ) -> Result<u64> {
        let invalid = |what: &str, value: String, expected: String| {
            Error::invalid(op, format!("{what} of {name}"), value, expected)
        };
        let len = if self.transposed { self.rows } else { self.cols };
        if self.ld < len {
            let expected =
                format!("at least {len}, the number of elements of a row (column, if transposed)");
            return Err(invalid("leading dimension", self.ld.to_string(), expected));
        }
        let limit = u32::MAX as usize / 2;
        if self.rows > limit || self.cols > limit {
            let value = format!("{} x {}", self.rows, self.cols);
            return Err(invalid("shape", value, format!("at most {limit} rows and columns")));
        }
        let (address, bytes) = match self.place {
            Place::Sym(slice) => (issuing.resolve(slice).in_op(op)?, slice.bytes()),
            Place::External { address, bytes, .. } => (address, bytes),
        };
        if self.extent() > bytes {
            let expected = format!(
                "at least {} for {} x {} with leading dimension {}",
                self.extent(),
                self.rows,
                self.cols,
                self.ld
            );
            return Err(invalid("bytes", bytes.to_string(), expected));
        }
        if address == 0 && self.extent() > 0 {
            return Err(invalid("address", "0".into(), "the address of its elements".into()));
        }
        if address % self.dtype.size() as u64 != 0 {
            let expected = format!("a multiple of {}, the bytes of an element", self.dtype.size());
            return Err(invalid("address", format!("{address:#x}"), expected));
        }
        Ok(if self.extent() == 0 { address.max(1) } else { address })
    }

    /// Rows of the matrix as stored (columns, if transposed); a matrix without gaps is one line.
    fn lines(&self) -> Lines {
        let (count, len) =
            if self.transposed { (self.cols, self.rows) } else { (self.rows, self.cols) };
        let [len, pitch] = [len, self.ld].map(|it| it as i128 * self.dtype.size() as i128);
        match len == pitch {
            true => Lines { count: 1, bytes: self.extent().into(), pitch },
            false => Lines { count: count as i128, bytes: len, pitch },
        }
    }

    /// Whether two matrices share bytes. `own` and `theirs` are the kernel arguments of `self` and
    /// `other`, with their addresses. The result is exact if both leading dimensions have the same
    /// number of bytes, or if one matrix has no gaps. Otherwise matrices overlap if their ranges
    /// from first to last byte do.
    pub(crate) fn overlaps(&self, own: &Matrix, other: &MatRef, theirs: &Matrix) -> bool {
        if self.extent() == 0 || other.extent() == 0 {
            return false;
        }
        let range = |matrix: &Self| Lines { count: 1, bytes: matrix.extent().into(), pitch: 1 };
        let (a, b) = match (self.lines(), other.lines()) {
            (a, b) if a.count > 1 && b.count > 1 && a.pitch != b.pitch => {
                (range(self), range(other))
            }
            lines => lines,
        };
        let pitch = if a.count > 1 { a.pitch } else { b.pitch };
        let distance = i128::from(theirs.address) - i128::from(own.address);
        // Line i of this matrix and line j of the other one share a byte if (i - j) * pitch is
        // above distance - a.bytes and below distance + b.bytes. The differences i - j range from 1
        // - b.count to a.count - 1.
        let least = (distance - a.bytes).div_euclid(pitch) + 1;
        let most = (distance + b.bytes - 1).div_euclid(pitch);
        least.max(1 - b.count) <= most.min(a.count - 1)
    }
}

/// Rows of a matrix in memory (columns, if transposed): their number, the bytes of each row, and
/// the distance in bytes between the starts of adjacent rows.
struct Lines {
    count: i128,
    bytes: i128,
    pitch: i128,
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use iris_heap::{HeapOptions, SymmetricHeap, World};

    use super::*;
    use crate::all_reduce::Options;
    use crate::{AllReduce, CollectiveArgs};

    /// Makes a matrix at byte `address`, with `lines` lines of `len` four-byte elements whose
    /// starts are `ld` elements apart. Returns the matrix and its kernel argument.
    fn matrix(address: u64, (lines, len): (usize, usize), ld: usize) -> (MatRef, Matrix) {
        let matrix = MatRef::at(address as *const f32, 100, (lines, len), true).with_ld(ld);
        (matrix, Matrix { address, ..Matrix::default() })
    }

    /// Addresses of all bytes of a matrix that [`matrix`] has made.
    fn bytes((matrix, at): &(MatRef, Matrix)) -> BTreeSet<u64> {
        let line = |line: usize| at.address + 4 * (line * matrix.ld) as u64;
        (0..matrix.rows).flat_map(|row| line(row)..line(row) + 4 * matrix.cols as u64).collect()
    }

    /// Tests all small pairs of matrices against the sets of their addresses. With different
    /// leading dimensions, matrices with a common byte must overlap, and matrices whose ranges from
    /// first to last byte are disjoint must not.
    #[test]
    fn matrices_overlap_if_they_share_a_byte() {
        let shapes = |ld| (0..=3).flat_map(move |lines| (0..=ld).map(move |len| (lines, len)));
        for (ld, other) in [1, 2, 3, 5].into_iter().flat_map(|ld| [(ld, ld), (ld, 4)]) {
            for (first, second) in
                shapes(ld).flat_map(|first| shapes(other).map(move |second| (first, second)))
            {
                for offset in 0..4 * 2 * 15 {
                    let (a, b) = (matrix(60, first, ld), matrix(offset, second, other));
                    let [ours, theirs] = [bytes(&a), bytes(&b)];
                    let overlap = a.0.overlaps(&a.1, &b.0, &b.1);
                    let shared = !ours.is_disjoint(&theirs);
                    let disjoint = ours.last() < theirs.first() || theirs.last() < ours.first();
                    let case =
                        || format!("{first:?} at 60 by {ld}, {second:?} at {offset} by {other}");
                    assert_eq!(b.0.overlaps(&b.1, &a.0, &a.1), overlap, "{}", case());
                    assert!(!shared || overlap, "{}", case());
                    assert!(!overlap || shared || ld != other && !disjoint, "{}", case());
                }
            }
        }
    }

    #[test]
    fn a_call_may_write_other_columns_of_the_matrix_that_it_reads() {
        World::run_threads(2, |world| {
            let heap = SymmetricHeap::open(&world, HeapOptions::new().threads(1))?;
            let plan = Options::rows(4, 3).plan(&heap).expect("a plan");
            let op = AllReduce::new(&heap, &plan).expect("an operator");
            let (stream, whole) = (heap.stream()?, heap.arange::<f32>(4 * 6)?);
            let columns =
                |first: usize| MatRef::sym(whole.slice(first..).expect("columns"), 4, 3).with_ld(6);
            let args = CollectiveArgs::new(columns(0), columns(3));
            op.run(&args, &stream).expect("columns 0..3 and 3..6 share no element");
            stream.sync()?;
            let expected = (0..24).map(|at| if at % 6 < 3 { at } else { 2 * (at - 3) } as f32);
            assert_eq!(heap.read(whole)?, expected.collect::<Vec<_>>());
            let args = CollectiveArgs::new(columns(0), columns(2));
            let error = op.run(&args, &stream).expect_err("column 2 is shared").to_string();
            assert!(error.contains("output and input overlap"), "{error}");
            heap.close()
        })
        .expect("every rank");
    }
}
