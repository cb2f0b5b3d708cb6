//! Where a slice is: translation to addresses, copies, device-local words.

use std::sync::Arc;

use super::{SymmetricHeap, not_allocated};
use crate::abi::SliceView;
use crate::backend::Mapping;
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::slice::{DevWords, RawSlice, Segment, SymSlice};
use crate::stream::{PendingRead, Stream};
use crate::util::lock;

impl SymmetricHeap {
    /// The address of a slice on `rank`, as this rank sees it.
    ///
    /// The pointer is valid for `slice.len()` elements while the block is allocated and the heap,
    /// one of its streams or [`SymmetricHeap::memory`] is held. Other ranks access the same
    /// bytes: order the accesses by signals, and make no reference. On the CPU, [`crate::atomic_copy`]
    /// is for accesses that nothing orders; [`SymmetricHeap::read`] and its like use it.
    ///
    /// # Errors
    /// [`Error::ForeignSlice`], [`Error::NotAllocated`], [`Error::Closed`], and
    /// [`Error::OutOfBounds`] for a rank that does not exist.
    pub fn resolve<T: Element>(&self, slice: SymSlice<T>, rank: usize) -> Result<*mut T> {
        let (mapping, offset) = self.locate(&slice.raw(), rank)?;
        Ok((mapping.address() + offset) as *mut T)
    }

    /// A slice of the data segment as kernels are given it.
    ///
    /// # Errors
    /// As [`SymmetricHeap::resolve`]; [`Error::Invalid`] for another segment.
    pub fn slice_view<T: Element>(&self, slice: SymSlice<T>) -> Result<SliceView> {
        self.locate(&slice.raw(), self.rank())?;
        if slice.segment() != Segment::Data {
            return Err(Error::invalid("segment of a slice", slice.segment(), "data"));
        }
        Ok(SliceView { offset: slice.offset(), len: slice.len() as u64 })
    }

    /// Copies `data` into this rank's part of a slice of the same length.
    ///
    /// Sync the stream of a kernel that accesses these bytes first. Otherwise the kernel sees old or
    /// new words. On the CPU the copy waits for an operator's launch that is running and accesses
    /// them; enqueued work is not waited for.
    ///
    /// # Errors
    /// As [`SymmetricHeap::resolve`]; [`Error::Invalid`] if the lengths differ.
    pub fn write<T: Element>(&self, slice: SymSlice<T>, data: &[T]) -> Result<()> {
        same_length(&slice, data.len())?;
        let (mapping, offset) = self.locate(&slice.raw(), self.rank())?;
        self.backend.write(&*mapping, offset, bytemuck::cast_slice(data))
    }

    /// This rank's part of a slice, as [`SymmetricHeap::read_from`] this rank.
    ///
    /// # Errors
    /// As [`SymmetricHeap::resolve`].
    pub fn read<T: Element>(&self, slice: SymSlice<T>) -> Result<Vec<T>> {
        self.read_from(slice, self.rank())
    }

    /// The part of `rank`.
    ///
    /// Sync the stream of a kernel that writes these bytes first, on all ranks that write them.
    /// Otherwise words are old or new. On the CPU the copy waits for an operator's launch of this
    /// process that is running and writes them; enqueued work is not waited for.
    ///
    /// # Errors
    /// As [`SymmetricHeap::resolve`].
    pub fn read_from<T: Element>(&self, slice: SymSlice<T>, rank: usize) -> Result<Vec<T>> {
        let (mapping, offset) = self.locate(&slice.raw(), rank)?;
        let mut data = vec![T::zeroed(); slice.len()];
        self.backend.read(&*mapping, offset, bytemuck::cast_slice_mut(&mut data))?;
        Ok(data)
    }

    /// Enqueues a copy of `data` into this rank's part of a slice.
    ///
    /// # Errors
    /// As [`SymmetricHeap::write`] and [`SymmetricHeap::check_stream`].
    pub fn write_on<T: Element>(
        &self,
        stream: &Stream,
        slice: SymSlice<T>,
        data: &[T],
    ) -> Result<()> {
        same_length(&slice, data.len())?;
        self.check_stream("a copy", stream)?;
        let to = self.locate(&slice.raw(), self.rank())?;
        stream.backend().write(to, bytemuck::cast_slice(data).to_vec())
    }

    /// Enqueues a copy of this rank's part of a slice to the host. The host waits when it asks for the elements, and not
    /// before; so a server may read the last tokens while the next are computed.
    ///
    /// ```
    /// # use iris_heap::{HeapOptions, SymmetricHeap, World};
    /// # World::run_threads(1, |world| {
    /// # let heap = SymmetricHeap::open(&world, HeapOptions::new())?;
    /// # let (stream, x) = (heap.stream()?, heap.zeros::<u32>(3)?);
    /// heap.write_on(&stream, x, &[1, 2, 3])?;
    /// let read = heap.read_on(&stream, x)?;
    /// heap.write_on(&stream, x, &[4, 5, 6])?; // behind the copy
    /// assert_eq!(read.wait()?, [1, 2, 3]);
    /// # Ok::<_, iris_heap::Error>(())
    /// # })?;
    /// # Ok::<_, iris_heap::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`SymmetricHeap::resolve`] and [`SymmetricHeap::check_stream`]; [`Error::Unsupported`] while the stream is captured
    /// into a graph.
    pub fn read_on<T: Element>(
        &self,
        stream: &Stream,
        slice: SymSlice<T>,
    ) -> Result<PendingRead<T>> {
        self.check_stream("a copy", stream)?;
        let from = self.locate(&slice.raw(), self.rank())?;
        Ok(PendingRead::new(stream.backend().read(from, slice.bytes())?, stream))
    }

    /// Enqueues a copy from one rank's part of a slice to another's, of the same length.
    ///
    /// # Errors
    /// As [`SymmetricHeap::write`] and [`SymmetricHeap::check_stream`].
    pub fn copy_on<T: Element>(
        &self,
        stream: &Stream,
        (to, to_rank): (SymSlice<T>, usize),
        (from, from_rank): (SymSlice<T>, usize),
    ) -> Result<()> {
        same_length(&to, from.len())?;
        self.check_stream("a copy", stream)?;
        let target = self.locate(&to.raw(), to_rank)?;
        let source = self.locate(&from.raw(), from_rank)?;
        stream.backend().copy(target, source, to.bytes())
    }

    /// Enqueues copies of device-local words in the order of the heap's ops: (to, from), counted from
    /// the first of all. For a kernel beside an op, which must know which call it is.
    ///
    /// # Errors
    /// As [`SymmetricHeap::check_stream`]; [`Error::OutOfBounds`]; [`Error::Closed`]; those of the
    /// device.
    pub fn copy_words(&self, stream: &Stream, copies: &[(u32, u32)]) -> Result<()> {
        self.check_stream("a copy of words", stream)?;
        stream.backend().copy_words(copies)
    }

    /// `words` words that only this rank's device touches, all zero. Not collective.
    ///
    /// # Errors
    /// [`Error::OutOfHeap`]; [`Error::Closed`].
    pub fn alloc_device_words(&self, words: usize) -> Result<DevWords> {
        drop(self.open_state()?);
        self.backend.check_no_capture("allocation of device-local words")?;
        let bytes = (words as u64).saturating_mul(4);
        let block = lock(&self.device_words).alloc(bytes).map_err(|full| Error::OutOfHeap {
            what: "alloc_device_words".into(),
            name: format!("{words} words"),
            segment: "device-local".into(),
            rank: self.rank(),
            asked: full.asked,
            free: full.free,
            largest: full.largest,
            total: full.asked,
        })?;
        let (heap, serial, offset) = (self.id, block.serial, block.offset);
        let cleared = self.backend.fill(&*self.memory.device_words, offset, block.bytes, 0);
        if let Err(error) = cleared {
            lock(&self.device_words).free(offset, serial);
            return Err(error);
        }
        Ok(DevWords { heap, serial, offset, words: words as u64 })
    }

    /// Gives device-local words back. Not collective; the work that uses them has finished.
    ///
    /// # Errors
    /// [`Error::NotAllocated`]; [`Error::ForeignSlice`].
    pub fn free_device_words(&self, words: DevWords) -> Result<()> {
        self.check_heap(words.heap)?;
        let freed = lock(&self.device_words).free(words.offset, words.serial);
        freed.map(drop).ok_or_else(|| no_words(&words))
    }

    /// The address of device-local words.
    ///
    /// # Errors
    /// [`Error::NotAllocated`]; [`Error::ForeignSlice`].
    pub fn resolve_device_words(&self, words: DevWords) -> Result<*mut i32> {
        self.check_heap(words.heap)?;
        match lock(&self.device_words).find(words.offset, 4 * words.words) {
            Some(block) if block.serial == words.serial => {
                Ok((self.memory.device_words.address() + words.offset) as *mut i32)
            }
            _ => Err(no_words(&words)),
        }
    }

    /// Copies into device-local words; returns when it is done.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] if the lengths differ; [`Error::NotAllocated`].
    pub fn write_device_words(&self, words: DevWords, data: &[i32]) -> Result<()> {
        self.resolve_device_words(words)?;
        same_words(&words, data.len())?;
        self.backend.write(&*self.memory.device_words, words.offset, bytemuck::cast_slice(data))
    }

    /// Copies device-local words out.
    ///
    /// # Errors
    /// [`Error::NotAllocated`]; [`Error::ForeignSlice`].
    pub fn read_device_words(&self, words: DevWords) -> Result<Vec<i32>> {
        self.resolve_device_words(words)?;
        let mut data = vec![0; words.len()];
        let bytes = bytemuck::cast_slice_mut(&mut data);
        self.backend.read(&*self.memory.device_words, words.offset, bytes)?;
        Ok(data)
    }

    /// The mapping that holds a slice on `rank`, and where.
    pub(super) fn locate(&self, slice: &RawSlice, rank: usize) -> Result<(Arc<dyn Mapping>, u64)> {
        self.check_heap(slice.heap())?;
        if rank >= self.size() {
            let (start, len) = (rank as u64, self.size() as u64);
            let what = "rank of a symmetric slice".into();
            return Err(Error::OutOfBounds { what, start, end: start.saturating_add(1), len });
        }
        let state = self.open_state()?;
        let (layout, mappings) = match slice.segment() {
            Segment::Data => (&state.data, &self.memory.data),
            Segment::Signal => (&state.signal, &self.memory.signal),
            Segment::Registered(_) => {
                let imported = self.imported(slice).ok_or_else(|| not_allocated(slice))?;
                return Ok((imported.mappings[rank].clone(), slice.offset()));
            }
        };
        match layout.find(slice.offset(), slice.bytes()) {
            Some(block) if block.serial == slice.serial() => {
                Ok((mappings[rank].clone(), slice.offset()))
            }
            _ => Err(not_allocated(slice)),
        }
    }
}

fn same_length<T: Element>(slice: &SymSlice<T>, len: usize) -> Result<()> {
    if slice.len() == len {
        return Ok(());
    }
    Err(Error::invalid("length of the data", len, format!("{}, as the slice", slice.len())))
}

fn no_words(words: &DevWords) -> Error {
    Error::NotAllocated {
        segment: "device-local".into(),
        offset: words.offset,
        end: words.offset + 4 * words.words,
    }
}

fn same_words(words: &DevWords, len: usize) -> Result<()> {
    if words.len() == len {
        return Ok(());
    }
    let (end, len) = (len as u64, words.words);
    Err(Error::OutOfBounds { what: "device-local words".into(), start: 0, end, len })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Purpose;
    use crate::{HeapOptions, World};

    #[test]
    fn device_words_that_cannot_be_cleared_are_given_back() {
        let world = World::threads(1).unwrap().remove(0);
        let options = HeapOptions::new().data_bytes(4096).device_words(1 << 14);
        let mut heap = SymmetricHeap::open(&world, options).unwrap();
        let open = Arc::get_mut(&mut heap).unwrap();
        // One page, of which the layout knows nothing.
        let page = open.backend.allocate(Purpose::DeviceWords, 1).unwrap();
        let whole = std::mem::replace(&mut open.memory.device_words, page);
        let error = open.alloc_device_words(1 << 14).unwrap_err();
        assert!(matches!(error, Error::OutOfBounds { .. }), "{error}");
        open.memory.device_words = whole;
        assert_eq!(open.alloc_device_words(1 << 14).unwrap().len(), 1 << 14);
        heap.close().unwrap();
    }
}
