//! The order of the ops of a heap over several streams.

use std::sync::Arc;

use super::{Owner, Queue, Shared};
use crate::backend::gpu::driver::Driver;
use crate::backend::gpu::event::GpuEvent;
use crate::error::{Error, Result};
use crate::util::lock;
use crate::util::unsupported;

/// Which op was issued last: the next one on another stream waits for it.
pub(super) struct Order {
    /// Ops that run.
    live: Option<Last>,
    /// Ops that are captured, and the number of the capture: they run when their graph does, so
    /// that they are ordered among themselves only.
    captured: Option<(u64, u64)>,
    /// Whether ops are issued on more than one stream: from then on each leaves an event.
    several: bool,
    live_event: GpuEvent,
    captured_event: GpuEvent,
}

enum Last {
    /// Of this stream, which is alive; nothing is recorded behind the op yet.
    Unrecorded(Arc<Queue>),
    /// Of the stream of this number; the event is recorded behind it.
    Recorded(u64),
}

impl Order {
    pub(super) fn new(device: &Arc<dyn Driver>) -> Result<Order> {
        Ok(Order {
            live: None,
            captured: None,
            several: false,
            live_event: GpuEvent::new(device)?,
            captured_event: GpuEvent::new(device)?,
        })
    }
}

impl Shared {
    /// No op waits for an earlier one any more: the heap is going, and keeps no stream.
    pub(crate) fn forget_order(&self) {
        let last = lock(&self.order).live.take();
        let kept = std::mem::take(&mut *lock(&self.kept));
        drop((last, kept));
    }
}

impl Queue {
    /// Enqueues an op by `f` behind the last op of the heap, on whatever stream that was.
    ///
    /// Ops of a capture are ordered among themselves; how their graph is ordered with other work of
    /// the heap is for the caller to see to, who launches it.
    pub(crate) fn in_order(self: &Arc<Self>, f: impl FnOnce() -> Result<()>) -> Result<()> {
        let _open = self.shared.open()?;
        let mut order = lock(&self.shared.order);
        let capture = self.capture()?;
        self.behind_last(&mut order, capture)?;
        f()?;
        if let Some(id) = capture {
            // In a capture this enqueues nothing.
            order.captured_event.record(self.raw)?;
            order.captured = Some((id, self.number));
            return Ok(());
        }
        let alive = !matches!(self.owner, Owner::Caller { .. });
        if alive {
            order.live = Some(Last::Unrecorded(self.clone()));
        }
        // If this fails, the next op tries again.
        if !alive || order.several {
            order.live_event.record(self.raw)?;
            order.live = Some(Last::Recorded(self.number));
        }
        Ok(())
    }

    /// Enqueues what `f` does behind the last op of the heap, on a stream other than that op's. The
    /// next op does not wait for it.
    pub(crate) fn beside(self: &Arc<Self>, f: impl FnOnce() -> Result<()>) -> Result<()> {
        let _open = self.shared.open()?;
        let mut order = lock(&self.shared.order);
        let capture = self.capture()?;
        let last = match (&order.live, order.captured) {
            (_, Some((id, number))) if capture == Some(id) => Some(number),
            _ if capture.is_some() => None,
            (Some(Last::Unrecorded(last)), _) => Some(last.number),
            (Some(Last::Recorded(number)), _) => Some(*number),
            (None, _) => None,
        };
        if last == Some(self.number) {
            let expected = "another: the next op there would wait for the kernel";
            return Err(Error::invalid("stream of a kernel beside ops", "that of an op", expected));
        }
        self.behind_last(&mut order, capture)?;
        f()
    }

    /// Lets what is enqueued here next begin after the last op of the heap.
    fn behind_last(&self, order: &mut Order, capture: Option<u64>) -> Result<()> {
        if let Some(id) = capture {
            return match order.captured {
                Some((capture, last)) if capture == id && last != self.number => {
                    order.captured_event.before(&*self.shared.device, self.raw)
                }
                _ => Ok(()),
            };
        }
        match &order.live {
            None => {}
            Some(Last::Unrecorded(last)) if last.number == self.number => {}
            Some(Last::Recorded(last)) if *last == self.number => {}
            Some(Last::Recorded(_)) => order.live_event.before(&*self.shared.device, self.raw)?,
            Some(Last::Unrecorded(last)) => {
                if last.capture()?.is_some() {
                    return Err(unsupported(
                        "an op on a second stream of the heap",
                        "the stream of the op before is being captured, so that this one cannot \
                         be ordered behind it: end the capture first",
                    ));
                }
                order.live_event.record(last.raw)?;
                order.live_event.before(&*self.shared.device, self.raw)?;
                order.several = true;
            }
        }
        Ok(())
    }
}
