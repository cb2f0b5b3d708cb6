//! Import of memory that the caller has allocated, as symmetric slices, and of streams that the
//! caller has made.

#![allow(unsafe_code, reason = "the caller's memory, whose life the caller vouches for")]

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::{SymmetricHeap, share};
use crate::backend::{Imported, Mapping};
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::slice::{Segment, SymSlice};
use crate::stream::Stream;
use crate::util::lock;
use crate::util::unsupported;

impl SymmetricHeap {
    /// Wraps the caller's stream, given as the device's handle (`CUstream` or `hipStream_t` as a
    /// number); any library may have made it. The wrapped stream is ordered with the heap's work
    /// like the heap's own streams. For cudarc's streams, `Gpu::stream_of` (feature `cudarc-0-19`)
    /// is safe and keeps the stream alive.
    ///
    /// # Errors
    /// [`Error::Unsupported`] on the CPU; [`Error::Invalid`] for a stream of another device;
    /// [`Error::Closed`].
    ///
    /// # Safety
    /// `raw` is a live stream, and stays one until the last clone of the returned stream is
    /// dropped.
    pub unsafe fn stream_from_raw(&self, raw: u64) -> Result<Stream> {
        // SAFETY: the caller guarantees that the stream is alive, as `wrap_stream` requires.
        unsafe { self.backend.wrap_stream(raw) }.map(Stream::from_backend)
    }

    /// Enqueues a copy of `bytes` bytes between two addresses that the heap's device can access:
    /// addresses from [`SymmetricHeap::resolve`], or addresses in the caller's own memory. Copies
    /// on one stream run in order.
    ///
    /// # Errors
    /// Errors of [`SymmetricHeap::check_stream`]; [`Error::Closed`]; errors of the device.
    ///
    /// # Safety
    /// Until the stream has done the copy, both ranges stay mapped for the heap's device. In this
    /// time nothing else writes the source, and nothing else accesses the target.
    pub unsafe fn copy_raw_on(
        &self,
        stream: &Stream,
        to: u64,
        from: u64,
        bytes: u64,
    ) -> Result<()> {
        self.check_stream("a copy", stream)?;
        // SAFETY: the caller keeps this function's contract, which equals that of `copy_raw`.
        unsafe { stream.backend().copy_raw(to, from, bytes) }
    }

    /// Registers `len` elements of the caller's memory on each rank as a symmetric slice:
    /// collective. On a GPU the pointer is a device pointer (a `CUdeviceptr` or the like) of the
    /// heap's device, and any library may have allocated it. The ranks must be threads of one
    /// process; for processes use [`SymmetricHeap::import_descriptor`]. [`SymmetricHeap::free`]
    /// ends the import.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for processes; [`Error::Disagreement`] if the lengths differ;
    /// [`Error::Invalid`] for a pointer that is null or not aligned; [`Error::PeerFailed`]; errors
    /// of [`World::barrier`](crate::World::barrier).
    ///
    /// # Safety
    /// Until the slice is freed, or the heap is closed and dropped on all ranks, the memory stays
    /// valid for reads and writes by any thread. [`SymmetricHeap::free`] waits for work that was
    /// enqueued before it, but not for other threads: if they still read, write or enqueue work on
    /// the slice, the memory stays valid until they have ended. The memory is accessed only through
    /// the heap, or by the caller at times that the caller orders with the accesses of other ranks.
    #[track_caller]
    pub unsafe fn import<T: Element>(&self, pointer: *mut T, len: usize) -> Result<SymSlice<T>> {
        let _step = self.step("import of memory")?;
        self.check_before_step()?;
        if !self.world.same_process() {
            return Err(unsupported(
                "import of memory by address",
                "the ranks are processes, which cannot map each other's private memory: give the \
                 memory's descriptor to import_descriptor",
            ));
        }
        let bytes = (len as u64).saturating_mul(size_of::<T>() as u64);
        self.take_in::<T>("import", len, bytes, || match pointer.is_aligned() {
            // SAFETY: the caller keeps this function's contract, which covers that of `register`.
            true => unsafe { self.backend.register(pointer as u64, bytes) },
            false => {
                let value = format!("{pointer:p}");
                Err(Error::invalid(
                    "imported pointer",
                    value,
                    format!("an address aligned to {} bytes", align_of::<T>()),
                ))
            }
        })
    }

    /// Registers `len` elements of the memory behind a descriptor on each rank as a symmetric
    /// slice: collective. On the CPU the descriptor must be a memfd of at least that size, rounded
    /// up to whole pages, with the seal `F_SEAL_SHRINK`; on a GPU it must be a descriptor that the
    /// driver exports for the memory (`cuMemExportToShareableHandle`). The driver exports none for
    /// memory of `cuMemAlloc` and of memory pools, such as cudarc's. [`SymmetricHeap::free`] ends
    /// the import.
    ///
    /// # Errors
    /// [`Error::Disagreement`] if the lengths differ; [`Error::Invalid`] for a descriptor that is
    /// too short or may shrink; [`Error::PeerFailed`]; errors of
    /// [`World::barrier`](crate::World::barrier).
    #[track_caller]
    pub fn import_descriptor<T: Element>(
        &self,
        descriptor: OwnedFd,
        len: usize,
    ) -> Result<SymSlice<T>> {
        let _step = self.step("import of memory")?;
        self.check_before_step()?;
        let bytes = (len as u64).saturating_mul(size_of::<T>() as u64);
        self.take_in::<T>("import_descriptor", len, bytes, || self.backend.adopt(descriptor, bytes))
    }

    #[track_caller]
    fn take_in<T: Element>(
        &self,
        what: &str,
        len: usize,
        bytes: u64,
        make: impl FnOnce() -> Result<Arc<dyn Mapping>>,
    ) -> Result<SymSlice<T>> {
        let items = [("elements", format!("{} x {len}", T::DTYPE))];
        self.world.agree(what, &items).map_err(|e| self.after_fault(e))?;
        let made = self.backend.check_no_capture(what).and_then(|()| make());
        let mapping = self.world.all_ok(what, made)?;
        let shared = share(&*self.backend, &self.world, mapping);
        let mappings = self.world.all_ok(what, shared)?;
        let mut state = self.state_mut();
        let mut registered = lock(&self.memory.registered);
        let free = registered.iter().position(Option::is_none);
        let number = free.unwrap_or(registered.len());
        let Ok(name) = u16::try_from(number) else {
            return Err(Error::invalid("number of imports", number, "at most 65536"));
        };
        if free.is_none() {
            registered.push(None);
        }
        state.imports += 1;
        let serial = state.imports;
        registered[number] = Some(Imported { mappings, bytes, serial });
        Ok(SymSlice::new(self.id, Segment::Registered(name), serial, 0, len as u64))
    }
}
