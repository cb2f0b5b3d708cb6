//! Copies beside what a stream does: on a stream of the heap's own, from a point of the other on.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use super::driver::DeviceCopy;
use super::event::GpuEvent;
use super::stream::{Queue, Shared};
use crate::error::Result;
use crate::util::lock;

/// The streams that such copies have: one for calls that run, one for each capture that is under way. One
/// for each peer was slower: on 4 x H200 (2026-11-22) a gather ahead of 8192 x 1280 x 8192 took 689 us with
/// three and 426 with one, since engines that copy at the same time get less than one alone.
#[derive(Default)]
pub(super) struct Sides(Mutex<Vec<Arc<Side>>>);

pub(super) struct Side {
    queue: Arc<Queue>,
    /// Whether it is for captures.
    captured: bool,
    /// Whether there are copies since the last join.
    forked: AtomicBool,
    begin: GpuEvent,
    end: GpuEvent,
}

impl Sides {
    /// The one for copies beside `stream`; a new one is given to `keep`.
    pub(super) fn of(
        &self,
        shared: &Arc<Shared>,
        stream: &Queue,
        keep: impl FnOnce(Arc<Queue>) -> Result<()>,
    ) -> Result<Arc<Side>> {
        let capture = stream.capture()?;
        let mut all = lock(&self.0);
        for side in all.iter().filter(|side| side.captured == capture.is_some()) {
            // One whose capture has ended is free again; that of calls that run has none.
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
        let side = Arc::new(Side { queue, captured, forked, begin, end });
        all.push(side.clone());
        Ok(side)
    }

    /// Lets what is enqueued on `stream` next begin when all copies beside it are over.
    pub(super) fn join(&self, stream: &Queue) -> Result<()> {
        let capture = stream.capture()?;
        let all = lock(&self.0);
        for side in all.iter().filter(|side| side.captured == capture.is_some()) {
            // Those of another capture are its own.
            if capture.is_none() || side.queue.capture()? == capture {
                side.join(stream)?;
            }
        }
        Ok(())
    }
}

impl Side {
    /// Enqueues these copies, one behind the other; they begin when what is enqueued on `stream` is over.
    ///
    /// # Safety
    /// The memory is mapped, and stays so until the copies are over.
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
            let DeviceCopy { to, from, bytes, lines, apart, signal } = copy;
            if signal && !in_order {
                // A release at system scope, which PROTOCOL.md (Copy engines) says more of.
                self.end.record(self.queue.raw())?;
            }
            if lines == 1 || apart == [bytes; 2] {
                // SAFETY: as the caller says.
                unsafe { device.copy(to, from, bytes * lines, self.queue.raw()) }
            } else {
                // SAFETY: as above.
                unsafe { device.copy_lines(&copy, self.queue.raw()) }
            }
        });
        // Also behind those of before one that failed.
        self.end.record(self.queue.raw()).and(enqueued)
    }

    /// Lets what is enqueued on `stream` next begin when the copies are over, if there are any: an event
    /// that no capture has recorded is nothing for it to wait for.
    fn join(&self, stream: &Queue) -> Result<()> {
        if !self.forked.swap(false, Ordering::Relaxed) {
            return Ok(());
        }
        self.end.before(&*stream.shared().device, stream.raw())
    }
}
