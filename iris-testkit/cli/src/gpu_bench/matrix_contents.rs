//! Input values of the benchmark's matrices, and the rows of a result that are compared.

use anyhow::Result;
use iris_heap::{DType, SymSlice, SymmetricHeap, random_unit};
use iris_testkit::matrix::{POISON, bytes, values};
use iris_testkit::numeric::frobenius;

/// Pool of random elements, repeated to fill a matrix, because drawing every element would take too
/// long.
pub(super) struct Noise {
    bytes: Vec<u8>,
}

impl Noise {
    /// Number of random elements in the pool.
    const POOL: usize = 1 << 20;

    pub(super) fn new(dtype: DType, seed: u64, rank: usize) -> Result<Noise> {
        let bytes = bytes(dtype, (0..Self::POOL).map(|at| random_unit(seed, rank, at)))?;
        Ok(Noise { bytes })
    }

    /// Fills the slice with repeated parts of the pool. Each part starts at another place in the
    /// pool, so that rows do not repeat soon.
    pub(super) fn fill(&self, heap: &SymmetricHeap, slice: SymSlice<u8>) -> Result<()> {
        let (len, mut at, mut turn) = (slice.len(), 0, 0);
        while at < len {
            let first = turn * 40_504 % (self.bytes.len() / 2);
            let count = (self.bytes.len() - first).min(len - at);
            heap.write(slice.slice(at..at + count)?, &self.bytes[first..first + count])?;
            (at, turn) = (at + count, turn + 1);
        }
        Ok(())
    }
}

/// Rows of a result that are compared between the op and its baseline.
pub(super) struct Sampled {
    rows: Vec<usize>,
    line: usize,
    dtype: DType,
}

impl Sampled {
    const ROWS: usize = 16;

    pub(super) fn of((rows, cols): (usize, usize), dtype: DType) -> Sampled {
        let count = rows.min(Self::ROWS);
        let rows = (0..count).map(|i| if i + 1 == count { rows - 1 } else { i * rows / count });
        Sampled { rows: rows.collect(), line: cols * dtype.size(), dtype }
    }

    /// Fills the compared rows with NaN before a call, so that elements that the call does not
    /// write are found.
    pub(super) fn poison(&self, heap: &SymmetricHeap, slice: SymSlice<u8>) -> Result<()> {
        let bytes = vec![POISON; self.line];
        for row in &self.rows {
            heap.write(slice.slice(row * self.line..(row + 1) * self.line)?, &bytes)?;
        }
        Ok(())
    }

    pub(super) fn read(&self, heap: &SymmetricHeap, slice: SymSlice<u8>) -> Result<Vec<f64>> {
        let mut all = Vec::new();
        for row in &self.rows {
            let bytes = heap.read(slice.slice(row * self.line..(row + 1) * self.line)?)?;
            all.extend(values(self.dtype, &bytes)?);
        }
        Ok(all)
    }
}

/// Relative difference of two lists, `|a - b| / |b|` by Frobenius norms; 0 if they are empty or
/// equal.
pub(super) fn relative(a: &[f64], b: &[f64]) -> f64 {
    let base = frobenius(b.iter().copied());
    let apart = frobenius(a.iter().zip(b).map(|(a, b)| a - b));
    if a.is_empty() || apart == 0.0 { 0.0 } else { apart / base }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unwritten_element_shows_in_the_error() {
        assert_eq!(relative(&[1.0, 2.0], &[1.0, 2.0]), 0.0);
        assert!((relative(&[1.0, 2.0], &[1.0, 1.0]) - 0.5f64.sqrt()).abs() < 1e-12);
        assert!(relative(&[1.0, f64::NAN], &[1.0, 1.0]).is_nan());
    }
}
