//! Copies that run concurrently with a stream: they are enqueued on a second stream of the heap,
//! and start after the work that was enqueued on the first stream before them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use super::driver::DeviceCopy;
use super::event::GpuEvent;
use super::stream::{Queue, Shared};
use crate::error::Result;
use crate::util::lock;

/// Streams for copies that run at the same time as other streams: one for calls outside of
/// captures, and one for each capture in progress. One copy stream for all peers is faster than one
/// per peer, because copy engines that run at the same time share bandwidth (all-gather before a
/// GEMM of 8192 x 1280 x 8192, 4 x H200: 426 us with one stream, 689 us with three; 2026-11-22).
#[derive(Default)]
pub(super) struct CopyStreams(Mutex<Vec<Arc<CopyStream>>>);

pub(super) struct CopyStream {
    queue: Arc<Queue>,
    /// Whether this copy stream is used in captures of graphs only, or outside of captures only.
    captured: bool,
    /// Whether copies were enqueued on this copy stream since the last call of `join`.
    forked: AtomicBool,
    begin: GpuEvent,
    end: GpuEvent,
}

impl CopyStreams {
    /// Returns the copy stream to use for copies concurrent with `stream`. A new copy stream is
    /// passed to `keep`, which must keep it alive.
    pub(super) fn of(
        &self,
        shared: &Arc<Shared>,
        stream: &Queue,
        keep: impl FnOnce(Arc<Queue>) -> Result<()>,
    ) -> Result<Arc<CopyStream>> {
        let capture = stream.capture()?;
        let mut all = lock(&self.0);
        for side in all.iter().filter(|side| side.captured == capture.is_some()) {
            // A copy stream for captures can be used if it is not captured now, or if it belongs to
            // the same capture as `stream`. A copy stream for calls outside of captures can always
            // be used.
            let own = if side.captured { side.queue.capture()? } else { None };
            if own.is_none() || own == capture {
                return Ok(side.clone());
            }
        }
        let queue = Queue::create(shared)?;
        keep(queue.clone())?;
        let event = || GpuEvent::new(&shared.device);
        let (begin, end) = (event()?, event()?);
        let forked = AtomicBool::new(false);
        let captured = capture.is_some();
        let side = Arc::new(CopyStream { queue, captured, forked, begin, end });
        all.push(side.clone());
        Ok(side)
    }

    /// Makes work that is enqueued on `stream` after this call wait for all copies that run
    /// concurrently with `stream`.
    pub(super) fn join(&self, stream: &Queue) -> Result<()> {
        let capture = stream.capture()?;
        let all = lock(&self.0);
        for side in all.iter().filter(|side| side.captured == capture.is_some()) {
            // Copy streams of other captures are not joined.
            if capture.is_none() || side.queue.capture()? == capture {
                side.join(stream)?;
            }
        }
        Ok(())
    }
}

impl CopyStream {
    /// Enqueues `copies` on this copy stream, one after the other. They begin when the work
    /// enqueued on `stream` so far has ended.
    ///
    /// # Safety
    /// The memory is mapped, and stays mapped until the copies have ended.
    pub(super) unsafe fn fork(
        &self,
        stream: &Queue,
        copies: impl IntoIterator<Item = DeviceCopy>,
    ) -> Result<()> {
        let device = &stream.shared().device;
        self.begin.record(stream.raw())?;
        self.begin.before(&**device, self.queue.raw())?;
        self.forked.store(true, Ordering::Relaxed);
        let in_order = device.kind().traits().copies_in_order;
        let enqueued = copies.into_iter().try_for_each(|copy| {
            let DeviceCopy { to, from, bytes, lines, strides, signal } = copy;
            if signal && !in_order {
                // Recording an event is a release at system scope: it makes the earlier copies
                // visible to peers before this signal. See PROTOCOL.md (Copy engines).
                self.end.record(self.queue.raw())?;
            }
            if lines == 1 || strides == [bytes; 2] {
                // SAFETY: the caller keeps this function's contract, which is that of the driver
                // call.
                unsafe { device.copy(to, from, bytes * lines, self.queue.raw()) }
            } else {
                // SAFETY: the caller keeps this function's contract, which is that of the driver
                // call.
                unsafe { device.copy_lines(&copy, self.queue.raw()) }
            }
        });
        // Record the event even if a copy failed, so that a join waits for the copies that were
        // enqueued before the failure.
        self.end.record(self.queue.raw()).and(enqueued)
    }

    /// Makes work that is enqueued on `stream` after this call wait for the copies enqueued since
    /// the last join. Does nothing if there were none: the event `end` may then never have been
    /// recorded in this capture, and waiting for an unrecorded event is an error.
    fn join(&self, stream: &Queue) -> Result<()> {
        if !self.forked.swap(false, Ordering::Relaxed) {
            return Ok(());
        }
        self.end.before(&*stream.shared().device, stream.raw())
    }
}
