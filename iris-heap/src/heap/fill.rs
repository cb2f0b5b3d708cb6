//! Allocation with initial values: zeros, ones, full, arange, rand.

use super::SymmetricHeap;
use crate::dtype::Element;
use crate::error::Result;
use crate::slice::SymSlice;

/// Number of elements that [`SymmetricHeap::fill_with`] writes at a time.
const CHUNK: usize = 1 << 16;

impl SymmetricHeap {
    /// Allocates `len` zeros on every rank. Collective; all ranks have written when the call
    /// returns.
    ///
    /// # Errors
    /// Errors of [`SymmetricHeap::alloc`].
    #[track_caller]
    pub fn zeros<T: Element>(&self, len: usize) -> Result<SymSlice<T>> {
        self.full(len, T::zeroed())
    }

    /// Allocates `len` ones on every rank. Collective; all ranks have written when the call
    /// returns.
    ///
    /// # Errors
    /// Errors of [`SymmetricHeap::alloc`].
    #[track_caller]
    pub fn ones<T: Element>(&self, len: usize) -> Result<SymSlice<T>> {
        self.full(len, T::from_f64(1.0))
    }

    /// Allocates `len` elements on every rank, all equal to `value`, which may differ between
    /// ranks. Collective; all ranks have written when the call returns.
    ///
    /// # Errors
    /// Errors of [`SymmetricHeap::alloc`].
    #[track_caller]
    pub fn full<T: Element>(&self, len: usize, value: T) -> Result<SymSlice<T>> {
        let slice = self.alloc(len)?;
        let written = self.fill_with(slice, |_| value);
        self.world.all_ok("fill", written.map(|()| slice))
    }

    /// Allocates the elements 0, 1, 2, ... on every rank, rounded to `T`. Collective; all ranks
    /// have written when the call returns.
    ///
    /// # Errors
    /// Errors of [`SymmetricHeap::alloc`].
    #[track_caller]
    pub fn arange<T: Element>(&self, len: usize) -> Result<SymSlice<T>> {
        let slice = self.alloc(len)?;
        let written = self.fill_with(slice, |i| T::from_f64(i as f64));
        self.world.all_ok("fill", written.map(|()| slice))
    }

    /// Allocates `len` random elements that depend on `seed`, [`SymmetricHeap::rank`] and index
    /// only: floats uniform in [-1, 1), signed integers in -8..=8, unsigned integers in 0..=8 (see
    /// [`random_unit`]). Collective; all ranks have written when the call returns.
    ///
    /// # Errors
    /// Errors of [`SymmetricHeap::alloc`].
    #[track_caller]
    pub fn rand<T: Element>(&self, len: usize, seed: u64) -> Result<SymSlice<T>> {
        let slice = self.alloc(len)?;
        let rank = self.rank();
        let written = self.fill_with(slice, |i| {
            let u = random_unit(seed, rank, i);
            T::from_f64(match (T::DTYPE.is_float(), T::DTYPE.is_signed()) {
                (true, _) => u,
                (false, true) => (u * 8.5).round().clamp(-8.0, 8.0),
                (false, false) => ((u + 1.0) * 4.5).floor(),
            })
        });
        self.world.all_ok("fill", written.map(|()| slice))
    }

    /// Writes `value(index)` to each element of this rank's part of `slice`. Not collective.
    ///
    /// # Errors
    /// Errors of [`SymmetricHeap::write`].
    pub fn fill_with<T: Element>(
        &self,
        slice: SymSlice<T>,
        value: impl Fn(usize) -> T,
    ) -> Result<()> {
        let mut chunk = Vec::with_capacity(CHUNK.min(slice.len()));
        for start in (0..slice.len()).step_by(CHUNK) {
            let end = (start + CHUNK).min(slice.len());
            chunk.clear();
            chunk.extend((start..end).map(&value));
            self.write(slice.slice(start..end)?, &chunk)?;
        }
        Ok(())
    }
}

/// Uniform random number in [-1, 1) for element `index` of `rank`, as [`SymmetricHeap::rand`] uses
/// it: the high 53 bits of splitmix64 over seed, rank and index. The number is the same on every
/// machine.
pub fn random_unit(seed: u64, rank: usize, index: usize) -> f64 {
    let stream = mix(seed.wrapping_add(mix(rank as u64 + 1)));
    let bits = mix(stream.wrapping_add((index as u64).wrapping_mul(0x9e3779b97f4a7c15))) >> 11;
    bits as f64 / (1u64 << 52) as f64 - 1.0
}

/// Output function of splitmix64 (Steele, Lea, Flood 2014).
fn mix(state: u64) -> u64 {
    let mut z = state.wrapping_add(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d049bb133111eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_numbers_are_uniform_and_differ() {
        let n = 100_000;
        let mean = |rank| (0..n).map(|i| random_unit(7, rank, i)).sum::<f64>() / n as f64;
        // The bound is more than five standard errors of the mean, each 1 / sqrt(3 n) = 0.0018.
        assert!(mean(0).abs() < 0.01 && mean(1).abs() < 0.01);
        let equal = (0..n).filter(|&i| random_unit(7, 0, i) == random_unit(7, 1, i)).count();
        assert_eq!(equal, 0);
        assert!((0..n).all(|i| (-1.0..1.0).contains(&random_unit(7, 0, i))));
        assert_eq!(mix(0), 0xe220a8397b1dcdaf, "first output of splitmix64 from state 0");
    }
}
