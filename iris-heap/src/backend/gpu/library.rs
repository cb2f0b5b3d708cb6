//! Work of libraries on streams of a heap, and copies that run concurrently with a stream. Only
//! this file of the backend uses [`Stream`], which wraps the backend's streams.

use std::sync::Arc;

use super::Gpu;
use super::driver::{Current, DeviceCopy};
use super::stream::{GpuStream, Queue};
use crate::error::Result;
use crate::stream::Stream;

impl Gpu {
    /// Lets `enqueue` put a library's work on a stream of the heap. The work waits for the heap's
    /// last op, on whichever stream that op is, and the next op waits for the work. `enqueue`
    /// receives the driver's stream (`CUstream`, `hipStream_t`) as a number; the device is current.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for a stream of another heap;
    /// [`Error::Closed`](crate::Error::Closed); errors of `enqueue`.
    pub fn enqueue(&self, stream: &Stream, enqueue: impl FnOnce(u64) -> Result<()>) -> Result<()> {
        stream.check_of(Arc::as_ptr(&self.shared.control), "work of a library")?;
        let queue = GpuStream::of(stream.backend())?;
        let _current = Current::new(&*self.device, false)?;
        queue.in_order(|| enqueue(queue.raw().0))
    }

    /// Whether copies that run concurrently with `stream` ([`Gpu::copy_concurrent`]) can carry
    /// signals ([`DeviceCopy::signal`]). On some devices an event must be recorded before a signal.
    /// On these devices the result is false if `stream` is captured, because recording an event
    /// adds no node to a graph.
    ///
    /// # Errors
    /// Errors of [`Gpu::copy_concurrent`].
    pub fn copies_signal(&self, stream: &Stream) -> Result<bool> {
        let queue = self.beside(stream)?;
        Ok(self.kind().traits().copies_in_order || queue.capture()?.is_none())
    }

    /// Enqueues copies, one after the other, in the order of the heap's ops but on another stream
    /// than `stream`. Work that is enqueued on `stream` later waits for the copies only after
    /// [`Gpu::join_copies`], which must follow. If `stream` is captured, the copies are captured,
    /// too.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for a stream of another heap;
    /// [`Error::Closed`](crate::Error::Closed); [`Error::Device`](crate::Error::Device).
    ///
    /// # Safety
    /// The device has the memory mapped. The memory lives until the copies have ended, and until
    /// every replay of a graph that captured the copies has ended.
    pub unsafe fn copy_concurrent(
        &self,
        stream: &Stream,
        copies: impl IntoIterator<Item = DeviceCopy>,
    ) -> Result<()> {
        let queue = self.beside(stream)?;
        let side = self.copy_streams.of(&self.shared, queue, |side| self.keep(side).map(drop))?;
        // SAFETY: the caller keeps this function's contract, which equals that of `fork`.
        queue.in_order(|| unsafe { side.fork(queue, copies) })
    }

    /// Makes work that is enqueued on `stream` after this call wait for the copies that
    /// [`Gpu::copy_concurrent`] has enqueued.
    ///
    /// # Errors
    /// Errors of [`Gpu::copy_concurrent`].
    pub fn join_copies(&self, stream: &Stream) -> Result<()> {
        let queue = self.beside(stream)?;
        queue.in_order(|| self.copy_streams.join(queue))
    }

    /// Checks that a stream belongs to this heap, and returns its queue.
    fn beside<'a>(&self, stream: &'a Stream) -> Result<&'a Arc<Queue>> {
        stream.check_of(Arc::as_ptr(&self.shared.control), "copies beside a stream")?;
        GpuStream::of(stream.backend())
    }
}
