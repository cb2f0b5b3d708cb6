//! Symmetric slices, [`SymSlice`]: ranges at the same offset on every rank, without an address.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Bound, RangeBounds};

use crate::dtype::Element;
use crate::error::{Error, Result};

/// Segment of symmetric memory; determines what the memory is for and how a GPU caches it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Segment {
    /// Memory for matrices and messages.
    Data,
    /// Words that peers poll; a separate segment, because a GPU caches it differently.
    Signal,
    /// Imported memory of the caller, with the number of its import.
    Registered(u16),
}

impl fmt::Display for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Segment::Data => f.write_str("data"),
            Segment::Signal => f.write_str("signal"),
            Segment::Registered(n) => write!(f, "registered {n}"),
        }
    }
}

/// Range of `len` elements of `T` at the same offset of the same segment on every rank.
///
/// A slice is a plain value without a lifetime. If a slice is used after its block was freed, or
/// with another heap, the call that resolves the slice returns an error. This holds even if the
/// block has been reallocated.
pub struct SymSlice<T> {
    heap: u64,
    segment: Segment,
    /// Number of the allocation in its segment; distinguishes a reallocated block from the old one.
    serial: u64,
    /// Offset in the segment, in bytes.
    offset: u64,
    len: u64,
    element: PhantomData<fn() -> T>,
}

/// Symmetric slice without an element type: a range of bytes.
pub type RawSlice = SymSlice<u8>;

impl<T> Clone for SymSlice<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for SymSlice<T> {}

impl<T> PartialEq for SymSlice<T> {
    fn eq(&self, other: &Self) -> bool {
        let key = |s: &Self| (s.heap, s.segment, s.serial, s.offset, s.len);
        key(self) == key(other)
    }
}

impl<T> Eq for SymSlice<T> {}

impl<T> fmt::Debug for SymSlice<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SymSlice")
            .field("heap", &format_args!("{:#x}", self.heap))
            .field("segment", &self.segment)
            .field("offset", &self.offset)
            .field("len", &self.len)
            .finish()
    }
}

impl<T> SymSlice<T> {
    pub(crate) fn new(heap: u64, segment: Segment, serial: u64, offset: u64, len: u64) -> Self {
        SymSlice { heap, segment, serial, offset, len, element: PhantomData }
    }

    /// Id of the heap to which the slice belongs.
    pub fn heap(&self) -> u64 {
        self.heap
    }

    /// Segment in which the slice lies.
    pub fn segment(&self) -> Segment {
        self.segment
    }

    /// Offset of the slice in its segment, in bytes.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Number of elements of the slice.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether the slice has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Length of the slice in bytes.
    pub fn bytes(&self) -> u64 {
        self.len * size_of::<T>() as u64
    }

    pub(crate) fn serial(&self) -> u64 {
        self.serial
    }

    /// Returns the slice of the elements in `range`. The range counts elements, not bytes, from the
    /// start of this slice.
    ///
    /// ```
    /// # use iris_heap::{Error, HeapOptions, SymmetricHeap, World};
    /// World::run_threads(2, |world| -> Result<(), Error> {
    ///     let heap = SymmetricHeap::open(&world, HeapOptions::new())?;
    ///     let all = heap.arange::<f32>(6)?;
    ///     let tail = all.slice(4..)?;
    ///     assert_eq!(heap.read(tail)?, [4.0, 5.0]);
    ///     heap.close()
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] if the range reaches past the end or is reversed.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<SymSlice<T>> {
        let start = match range.start_bound() {
            Bound::Included(&s) => s as u64,
            Bound::Excluded(&s) => (s as u64).saturating_add(1),
            Bound::Unbounded => 0,
        };
        let end = match range.end_bound() {
            Bound::Included(&e) => (e as u64).saturating_add(1),
            Bound::Excluded(&e) => e as u64,
            Bound::Unbounded => self.len,
        };
        if start > end || end > self.len {
            return Err(Error::OutOfBounds {
                what: "elements of a symmetric slice".into(),
                start,
                end,
                len: self.len,
            });
        }
        Ok(SymSlice {
            offset: self.offset + start * size_of::<T>() as u64,
            len: end - start,
            ..*self
        })
    }
}

impl<T: Element> SymSlice<T> {
    /// Returns a slice of elements `U` over the same bytes.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the length in bytes or the offset is not a multiple of the size of
    /// `U`.
    pub fn cast<U: Element>(&self) -> Result<SymSlice<U>> {
        let size = size_of::<U>() as u64;
        if !self.bytes().is_multiple_of(size) || !self.offset.is_multiple_of(size) {
            return Err(Error::invalid(
                format!("cast of a slice of {} to {}", T::DTYPE, U::DTYPE),
                format!("{} bytes at offset {}", self.bytes(), self.offset),
                format!("multiples of {size}"),
            ));
        }
        Ok(SymSlice::new(self.heap, self.segment, self.serial, self.offset, self.bytes() / size))
    }

    /// Returns a slice of `u8` over the same bytes.
    pub fn raw(&self) -> RawSlice {
        SymSlice::new(self.heap, self.segment, self.serial, self.offset, self.bytes())
    }
}

/// Device-local words of this rank, such as counters of its workgroups; peers do not access them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DevWords {
    pub(crate) heap: u64,
    pub(crate) serial: u64,
    pub(crate) offset: u64,
    pub(crate) words: u64,
}

impl DevWords {
    /// Offset in bytes from `HeapView::device_words`.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Number of 32-bit words that this range holds.
    pub fn len(&self) -> usize {
        self.words as usize
    }

    /// Whether there are no words.
    pub fn is_empty(&self) -> bool {
        self.words == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(offset: u64, len: u64) -> SymSlice<f32> {
        SymSlice::new(7, Segment::Data, 1, offset, len)
    }

    #[test]
    fn parts_of_parts() {
        let s = slice(1024, 10);
        let p = s.slice(2..8).unwrap().slice(1..=2).unwrap();
        assert_eq!((p.offset(), p.len(), p.bytes()), (1024 + 12, 2, 8));
        assert!(s.slice(10..).unwrap().is_empty());
        #[allow(clippy::reversed_empty_ranges, reason = "the test is of such a range")]
        let reversed = s.slice(4..3);
        assert!(matches!(reversed, Err(Error::OutOfBounds { .. })));
        assert!(matches!(s.slice(4..11), Err(Error::OutOfBounds { .. })));
        assert!(s.slice(..=usize::MAX).is_err());
    }

    #[test]
    fn casts_keep_the_bytes() {
        let s = slice(1024, 10);
        assert_eq!(s.cast::<u8>().unwrap().len(), 40);
        assert_eq!(s.cast::<u64>().unwrap().len(), 5);
        assert!(s.slice(1..).unwrap().cast::<u64>().is_err());
        assert_eq!(s.raw().cast::<f32>().unwrap(), s);
    }
}
