//! Events that mark points in GPU streams.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::driver::{Driver, RawEvent, RawStream, warn};
use crate::backend::EventBackend;
use crate::error::Result;

/// Event of a GPU stream, done when the work enqueued before it is done.
pub(super) struct GpuEvent {
    device: Arc<dyn Driver>,
    raw: RawEvent,
    /// Whether the last attempt to record the event succeeded; if not, the event's state is
    /// unknown.
    recorded: AtomicBool,
}

impl GpuEvent {
    pub(super) fn new(device: &Arc<dyn Driver>) -> Result<GpuEvent> {
        let raw = device.create_event()?;
        Ok(GpuEvent { device: device.clone(), raw, recorded: AtomicBool::new(false) })
    }

    /// Records the event after the work enqueued on `stream` so far.
    pub(super) fn record(&self, stream: RawStream) -> Result<()> {
        self.recorded.store(false, Ordering::Relaxed);
        // SAFETY: event and stream are alive and belong to one context.
        unsafe { self.device.record(self.raw, stream) }?;
        self.recorded.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Makes work that is enqueued after this call on `stream`, a stream of `device`, wait for the
    /// event.
    pub(super) fn before(&self, device: &dyn Driver, stream: RawStream) -> Result<()> {
        // SAFETY: event and stream are alive; they may belong to different devices.
        unsafe { device.wait_for(self.raw, stream) }
    }
}

impl EventBackend for GpuEvent {
    fn is_done(&self) -> bool {
        // An event that was never recorded successfully has an unknown state and counts as pending.
        let recorded = self.recorded.load(Ordering::Relaxed);
        // SAFETY: the event is alive, because this object owns it.
        recorded && unsafe { self.device.event_is_done(self.raw) }
    }

    fn sync(&self) -> Result<()> {
        // SAFETY: the event is alive, because this object owns it.
        unsafe { self.device.sync_event(self.raw) }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for GpuEvent {
    fn drop(&mut self) {
        // SAFETY: the event belongs to this object; enqueued waits for it stay valid.
        warn(unsafe { self.device.destroy_event(self.raw) });
    }
}
