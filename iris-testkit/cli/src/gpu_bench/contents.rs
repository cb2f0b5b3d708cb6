//! What matrices are filled with, and what of a result is compared.

use anyhow::{Result, bail};
use half::{bf16, f16};
use iris_heap::{DType, SymSlice, SymmetricHeap, random_unit};
use iris_ops::MatRef;

use crate::matrices::values;

/// The bytes of a random message, repeated: random numbers take longer than what they are for.
pub(super) struct Noise {
    bytes: Vec<u8>,
}

impl Noise {
    /// Elements that are drawn.
    const POOL: usize = 1 << 20;

    pub(super) fn new(dtype: DType, seed: u64, rank: usize) -> Result<Noise> {
        let value = |at: usize| random_unit(seed, rank, at);
        let bytes = match dtype {
            DType::F32 => (0..Self::POOL).flat_map(|at| (value(at) as f32).to_ne_bytes()).collect(),
            DType::F16 => {
                let half = |at| f16::from_f64(value(at)).to_ne_bytes();
                (0..Self::POOL).flat_map(half).collect()
            }
            DType::BF16 => {
                let half = |at| bf16::from_f64(value(at)).to_ne_bytes();
                (0..Self::POOL).flat_map(half).collect()
            }
            other => bail!("{other} is not timed"),
        };
        Ok(Noise { bytes })
    }

    /// Fills the slice. Each stretch begins elsewhere in the pool, so that no two lines of a matrix
    /// are the same soon.
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

/// The lines of a result that are compared.
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

    /// What nobody writes shows as NaN.
    pub(super) fn poison(&self, heap: &SymmetricHeap, slice: SymSlice<u8>) -> Result<()> {
        let bytes = vec![0xff; self.line];
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

/// `|a - b| / |b|`; 0 of nothing.
pub(super) fn relative(a: &[f64], b: &[f64]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let base = norm(&mut b.iter().copied());
    let apart = norm(&mut a.iter().zip(b).map(|(a, b)| a - b));
    if a.is_empty() || apart == 0.0 { 0.0 } else { apart / base }
}

pub(super) fn matrix(
    slice: SymSlice<u8>,
    dtype: DType,
    (rows, cols): (usize, usize),
) -> Result<MatRef> {
    Ok(match dtype {
        DType::F32 => MatRef::sym(slice.cast::<f32>()?, rows, cols),
        DType::F16 => MatRef::sym(slice.cast::<f16>()?, rows, cols),
        DType::BF16 => MatRef::sym(slice.cast::<bf16>()?, rows, cols),
        other => bail!("no matrices of {other}"),
    })
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
