//! Access to slices: translation to addresses, copies by the host, device-local words.

#![allow(unsafe_code, reason = "enqueued copies of words, whose life the caller vouches for")]

use std::sync::{Arc, MutexGuard};

use super::{State, SymmetricHeap, not_allocated};
use crate::abi::SliceView;
use crate::backend::Mapping;
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::layout::Layout;
use crate::slice::{DevWords, RawSlice, Segment, SymSlice};
use crate::stream::{PendingRead, Stream};
use crate::util::lock;

impl SymmetricHeap {
    /// Returns the address, valid in this process, of the slice's memory on `rank`: a rank of this
    /// node, numbered in the whole world.
    ///
    /// The pointer is valid for `slice.len()` elements while the block is allocated and the heap,
    /// one of its streams or a [`SymmetricHeap::memory`] is held. Other ranks access the same
    /// bytes, so order the accesses by signals, and make no Rust reference to the memory. On the
    /// CPU use [`crate::atomic_copy`] for unordered accesses, as [`SymmetricHeap::read`] and
    /// [`SymmetricHeap::write`] do.
    ///
    /// # Errors
    /// [`Error::ForeignSlice`], [`Error::NotAllocated`], [`Error::Closed`], and [`Error::Invalid`] for
    /// a rank that is not of this node ([`SymmetricHeap::node_ranks`]).
    pub fn resolve<T: Element>(&self, slice: SymSlice<T>, rank: usize) -> Result<*mut T> {
        let rank = self.on_this_node("resolve", rank)?;
        let (mapping, offset) = self.locate(&slice.raw(), rank)?;
        Ok((mapping.address() + offset) as *mut T)
    }

    /// Converts a slice of the data segment to the form that kernels receive.
    ///
    /// # Errors
    /// Errors of [`SymmetricHeap::resolve`]; [`Error::Invalid`] for a slice of another segment.
    pub fn slice_view<T: Element>(&self, slice: SymSlice<T>) -> Result<SliceView> {
        self.locate(&slice.raw(), self.local_rank())?;
        if slice.segment() != Segment::Data {
            return Err(Error::invalid("segment of slice_view", slice.segment(), "data"));
        }
        Ok(SliceView { offset: slice.offset(), len: slice.len() as u64 })
    }

    /// Copies `data` into this rank's part of a slice; both must have the same length.
    ///
    /// First sync the streams whose kernels access these bytes; otherwise such a kernel may see old
    /// and new words mixed. On the CPU the copy waits for a running operator launch that accesses
    /// these bytes, but not for enqueued work that has not begun.
    ///
    /// # Errors
    /// Errors of [`SymmetricHeap::resolve`]; [`Error::Invalid`] if the lengths differ.
    pub fn write<T: Element>(&self, slice: SymSlice<T>, data: &[T]) -> Result<()> {
        same_length("write", &slice, data.len())?;
        let (mapping, offset) = self.locate(&slice.raw(), self.local_rank())?;
        self.backend.write(&*mapping, offset, bytemuck::cast_slice(data))
    }

    /// Reads this rank's part of a slice; see [`SymmetricHeap::read_from`].
    ///
    /// # Errors
    /// Errors of [`SymmetricHeap::resolve`].
    pub fn read<T: Element>(&self, slice: SymSlice<T>) -> Result<Vec<T>> {
        self.read_from(slice, self.rank())
    }

    /// Reads the part of a slice that lies on `rank`: a rank of this node, numbered in the whole
    /// world.
    ///
    /// First sync the streams of the kernels that write these bytes, on all ranks that write them;
    /// otherwise each word is old or new. On the CPU the copy waits for a running operator launch
    /// of this process that writes these bytes, but not for enqueued work that has not begun.
    ///
    /// # Errors
    /// Errors of [`SymmetricHeap::resolve`].
    pub fn read_from<T: Element>(&self, slice: SymSlice<T>, rank: usize) -> Result<Vec<T>> {
        let rank = self.on_this_node("read_from", rank)?;
        let (mapping, offset) = self.locate(&slice.raw(), rank)?;
        let mut data = vec![T::zeroed(); slice.len()];
        self.backend.read(&*mapping, offset, bytemuck::cast_slice_mut(&mut data))?;
        Ok(data)
    }

    /// Enqueues a copy of `data` into this rank's part of a slice.
    ///
    /// # Errors
    /// Errors of [`SymmetricHeap::write`] and [`SymmetricHeap::check_stream`].
    pub fn write_on<T: Element>(
        &self,
        stream: &Stream,
        slice: SymSlice<T>,
        data: &[T],
    ) -> Result<()> {
        same_length("write_on", &slice, data.len())?;
        self.check_stream("a copy", stream)?;
        let state = self.open_state()?;
        let to = self.locate_for_work(&state, &slice.raw(), self.local_rank())?;
        stream.backend().write(to, bytemuck::cast_slice(data).to_vec())
    }

    /// Enqueues a copy of this rank's part of a slice to the host. The host waits only in
    /// [`PendingRead::wait`](crate::PendingRead::wait), so a server can read tokens while the
    /// device computes the next ones.
    ///
    /// ```
    /// # use iris_heap::{HeapOptions, SymmetricHeap, World};
    /// # World::run_threads(1, |world| {
    /// # let heap = SymmetricHeap::open(&world, HeapOptions::new())?;
    /// # let (stream, x) = (heap.stream()?, heap.zeros::<u32>(3)?);
    /// heap.write_on(&stream, x, &[1, 2, 3])?;
    /// let read = heap.read_on(&stream, x)?;
    /// heap.write_on(&stream, x, &[4, 5, 6])?; // queued after the copy
    /// assert_eq!(read.wait()?, [1, 2, 3]);
    /// # Ok::<_, iris_heap::Error>(())
    /// # })?;
    /// # Ok::<_, iris_heap::Error>(())
    /// ```
    ///
    /// # Errors
    /// Errors of [`SymmetricHeap::resolve`] and [`SymmetricHeap::check_stream`];
    /// [`Error::Unsupported`] while the stream is captured into a graph.
    pub fn read_on<T: Element>(
        &self,
        stream: &Stream,
        slice: SymSlice<T>,
    ) -> Result<PendingRead<T>> {
        self.check_stream("a copy", stream)?;
        let state = self.open_state()?;
        let from = self.locate_for_work(&state, &slice.raw(), self.local_rank())?;
        Ok(PendingRead::new(stream.backend().read(from, slice.bytes())?, stream))
    }

    /// Enqueues a copy from one rank's part of a slice to another's; both slices must have the same
    /// length. Both ranks are ranks of this node, numbered in the whole world.
    ///
    /// # Errors
    /// Errors of [`SymmetricHeap::resolve`], [`SymmetricHeap::write`] and
    /// [`SymmetricHeap::check_stream`].
    pub fn copy_on<T: Element>(
        &self,
        stream: &Stream,
        (to, to_rank): (SymSlice<T>, usize),
        (from, from_rank): (SymSlice<T>, usize),
    ) -> Result<()> {
        same_length("copy_on", &to, from.len())?;
        let to_rank = self.on_this_node("copy_on", to_rank)?;
        let from_rank = self.on_this_node("copy_on", from_rank)?;
        self.check_stream("a copy", stream)?;
        let state = self.open_state()?;
        let target = self.locate_for_work(&state, &to.raw(), to_rank)?;
        let source = self.locate_for_work(&state, &from.raw(), from_rank)?;
        if to_rank != self.local_rank() {
            // A peer's copy to this rank shows nowhere else than in this rank's copy to a peer.
            self.note_peer_writes(&to.raw());
        }
        stream.backend().copy(target, source, to.bytes())
    }

    /// Enqueues copies of device-local words into `to`, ordered with the heap's ops. Each pair is
    /// (target, source): an index in `to`, and an index from the heap's first device-local word.
    /// For example, a user's kernel that runs concurrently with an op gets the number of the op's
    /// call by such a copy.
    ///
    /// # Errors
    /// Errors of [`SymmetricHeap::check_stream`] and [`SymmetricHeap::write_device_words`];
    /// [`Error::Closed`]; errors of the device.
    ///
    /// # Safety
    /// `to` is not freed before the copies, and all replays of a graph that captured them, have
    /// ended; otherwise a copy could overwrite words that an op has allocated since.
    pub unsafe fn copy_words(
        &self,
        stream: &Stream,
        to: DevWords,
        copies: &[(usize, u32)],
    ) -> Result<()> {
        self.check_stream("a copy of words", stream)?;
        let _live = self.own_words("target of a copy of words", &to)?;
        let pair = |&(index, from): &(usize, u32)| match index < to.len() {
            true => Ok(((to.offset / 4) as u32 + index as u32, from)),
            false => Err(outside(&to, index, index + 1)),
        };
        let copies = copies.iter().map(pair).collect::<Result<Vec<_>>>()?;
        stream.backend().copy_words(&copies)
    }

    /// Allocates `words` device-local words, zeroed, which only this rank's device accesses. Not
    /// collective.
    ///
    /// # Errors
    /// [`Error::OutOfHeap`]; [`Error::Closed`].
    pub fn alloc_device_words(&self, words: usize) -> Result<DevWords> {
        drop(self.open_state()?);
        self.backend.check_no_capture("allocation of device-local words")?;
        let bytes = (words as u64).saturating_mul(4);
        let mut layout = lock(&self.device_words);
        let size = layout.capacity();
        let block = layout.alloc(bytes).map_err(|full| Error::OutOfHeap {
            what: "alloc_device_words".into(),
            name: format!("{words} words"),
            segment: "device-local".into(),
            rank: self.rank(),
            asked: full.asked,
            free: full.free,
            size,
            largest: full.largest,
            total: full.asked,
        })?;
        drop(layout);
        let (heap, serial, offset) = (self.id, block.serial, block.offset);
        let cleared = self.backend.fill(&*self.memory.device_words, offset, block.bytes, 0);
        if let Err(error) = cleared {
            lock(&self.device_words).free(offset, serial);
            return Err(error);
        }
        Ok(DevWords { heap, serial, offset, words: words as u64 })
    }

    /// Frees device-local words. Not collective; the work that uses them must have finished.
    ///
    /// # Errors
    /// [`Error::NotAllocated`]; [`Error::ForeignSlice`]; [`Error::Invalid`] for the word of
    /// [`SymmetricHeap::sequence_word`].
    pub fn free_device_words(&self, words: DevWords) -> Result<()> {
        let mut live = self.own_words("device-local words to free", &words)?;
        live.free(words.offset, words.serial).map(drop).ok_or_else(|| no_words(&words))
    }

    /// Checks that `words` are allocated, and locks the allocator of device-local words, so that
    /// they stay allocated until the guard is dropped.
    fn live_words(&self, words: &DevWords) -> Result<MutexGuard<'_, Layout>> {
        self.check_heap(words.heap)?;
        let live = lock(&self.device_words);
        match live.find(words.offset, 4 * words.words) {
            Some(block) if block.serial == words.serial => Ok(live),
            _ => Err(no_words(words)),
        }
    }

    /// Does [`SymmetricHeap::live_words`] for words that the caller changes or frees. Refuses the
    /// word of [`SymmetricHeap::sequence_word`], which only ops may change.
    fn own_words(&self, what: &str, words: &DevWords) -> Result<MutexGuard<'_, Layout>> {
        let live = self.live_words(words)?;
        if self.sequence.get() != Some(words) {
            return Ok(live);
        }
        let (start, end) = (words.offset, words.offset + 4 * words.words);
        let value = format!("bytes {start} to {end}, the word that counts the calls of the heap");
        Err(Error::invalid(what, value, "words of alloc_device_words, which no op uses"))
    }

    /// Returns the device address of device-local words.
    ///
    /// # Errors
    /// [`Error::NotAllocated`]; [`Error::ForeignSlice`].
    pub fn resolve_device_words(&self, words: DevWords) -> Result<*mut i32> {
        drop(self.live_words(&words)?);
        Ok((self.memory.device_words.address() + words.offset) as *mut i32)
    }

    /// Copies `data` into device-local words; synchronous.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] if the lengths differ; [`Error::NotAllocated`];
    /// [`Error::ForeignSlice`]; [`Error::Invalid`] for the word of [`SymmetricHeap::sequence_word`].
    pub fn write_device_words(&self, words: DevWords, data: &[i32]) -> Result<()> {
        let _live = self.own_words("device-local words to write", &words)?;
        if words.len() != data.len() {
            return Err(outside(&words, 0, data.len()));
        }
        self.backend.write(&*self.memory.device_words, words.offset, bytemuck::cast_slice(data))
    }

    /// Reads device-local words, and waits until they are read.
    ///
    /// # Errors
    /// [`Error::NotAllocated`]; [`Error::ForeignSlice`].
    pub fn read_device_words(&self, words: DevWords) -> Result<Vec<i32>> {
        drop(self.live_words(&words)?);
        let mut data = vec![0; words.len()];
        let bytes = bytemuck::cast_slice_mut(&mut data);
        self.backend.read(&*self.memory.device_words, words.offset, bytes)?;
        Ok(data)
    }

    /// Checks that `rank` is a rank of this node, and returns its number within the node. `call` is
    /// the name of the calling function, for the error.
    fn on_this_node(&self, call: &str, rank: usize) -> Result<usize> {
        let own = self.node_ranks();
        if own.contains(&rank) {
            return Ok(rank - own.start);
        }
        let what = format!("rank of {call}");
        let (last, world) = (own.end - 1, self.whole_world());
        let expected = match world.host_of(rank) {
            Ok(host) if world.nodes() > 1 => format!(
                "{} to {last}, the ranks of this node, whose memory it maps; that rank is on {host}: \
                 move its data by an operator, such as all_gather, or by allgather of whole_world",
                own.start
            ),
            _ => format!("{} to {last}", own.start),
        };
        Err(Error::invalid(what, rank, expected))
    }

    /// Returns the mapping that holds `slice` on `rank`, numbered within this node, and the slice's
    /// byte offset in the mapping.
    pub(super) fn locate(&self, slice: &RawSlice, rank: usize) -> Result<(Arc<dyn Mapping>, u64)> {
        self.located(&*self.open_state()?, slice, rank)
    }

    /// Locates a slice like [`SymmetricHeap::locate`], for work that the caller enqueues. Until the
    /// work is enqueued, the caller holds the lock of `state` or the guard of
    /// [`SymmetricHeap::issue`], because a thread that frees the slice waits for these locks.
    pub(super) fn locate_for_work(
        &self,
        state: &State,
        slice: &RawSlice,
        rank: usize,
    ) -> Result<(Arc<dyn Mapping>, u64)> {
        match state.ending.contains(&(slice.segment(), slice.serial())) {
            true => Err(not_allocated(slice)),
            false => self.located(state, slice, rank),
        }
    }

    pub(super) fn located(
        &self,
        state: &State,
        slice: &RawSlice,
        rank: usize,
    ) -> Result<(Arc<dyn Mapping>, u64)> {
        self.check_heap(slice.heap())?;
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

fn same_length<T: Element>(call: &str, slice: &SymSlice<T>, len: usize) -> Result<()> {
    if slice.len() == len {
        return Ok(());
    }
    Err(Error::invalid(
        format!("length of the data of {call}"),
        len,
        format!("{}, as the slice", slice.len()),
    ))
}

fn no_words(words: &DevWords) -> Error {
    Error::NotAllocated {
        segment: "device-local".into(),
        offset: words.offset,
        end: words.offset + 4 * words.words,
    }
}

fn outside(words: &DevWords, start: usize, end: usize) -> Error {
    let (start, end, len) = (start as u64, end as u64, words.words);
    Error::OutOfBounds { what: "device-local words".into(), start, end, len }
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
        // A single page replaces the memory, but the layout still has the old size, so clearing the
        // allocated words fails.
        let page = open.backend.allocate(Purpose::DeviceWords, 1).unwrap();
        let whole = std::mem::replace(&mut open.memory.device_words, page);
        let error = open.alloc_device_words(1 << 14).unwrap_err();
        assert!(matches!(error, Error::OutOfBounds { .. }), "{error}");
        open.memory.device_words = whole;
        assert_eq!(open.alloc_device_words(1 << 14).unwrap().len(), 1 << 14);
        heap.close().unwrap();
    }

    /// Tests that a program can change only device-local words that it has allocated; the word that
    /// counts the calls of all ops, freed words and words of another heap are refused.
    #[test]
    fn words_of_ops_are_not_changed() {
        World::run_threads(1, |world| {
            let open = || SymmetricHeap::open(&world, HeapOptions::new().data_bytes(4096));
            let (heap, other) = (open()?, open()?);
            let (sequence, own) = (heap.sequence_word()?, heap.alloc_device_words(2)?);
            let [freed, foreign] = [heap.alloc_device_words(1)?, other.alloc_device_words(1)?];
            heap.free_device_words(freed)?;
            let stream = heap.stream()?;
            heap.write_device_words(own, &[7, 8])?;
            for (words, text) in [
                (sequence, "bytes 0 to 4, the word that counts the calls of the heap"),
                (freed, "not allocated"),
                (foreign, "belongs to heap"),
            ] {
                let refused = [
                    heap.write_device_words(words, &[9]),
                    heap.free_device_words(words),
                    // SAFETY: words that are not freed later.
                    unsafe { heap.copy_words(&stream, words, &[(0, own.offset() as u32 / 4)]) },
                ];
                for (index, outcome) in refused.into_iter().enumerate() {
                    let error =
                        outcome.expect_err(&format!("function {index}: {text}")).to_string();
                    assert!(error.contains(text), "function {index}: {error}");
                }
            }
            // SAFETY: the stream is synced before any word is freed.
            let outside = unsafe { heap.copy_words(&stream, own, &[(2, 0)]) };
            assert!(matches!(outside, Err(Error::OutOfBounds { start: 2, end: 3, len: 2, .. })));
            // SAFETY: the stream is synced before any word is freed.
            unsafe { heap.copy_words(&stream, own, &[(1, own.offset() as u32 / 4)]) }?;
            stream.sync()?;
            assert_eq!(heap.read_device_words(own)?, [7, 7]);
            assert_eq!(heap.read_device_words(sequence)?, [0]);
            other.close()?;
            heap.close()
        })
        .unwrap();
    }
}
