//! Points in the streams of a CUDA device.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::api::{CAPTURED, NOT_READY, check};
use super::device::{Device, warn};
use super::stream::Queue;
use crate::backend::gpu::RawEvent;
use crate::error::Result;
use crate::stream::EventBackend;

/// A point in a stream.
pub(super) struct CudaEvent {
    device: Arc<Device>,
    raw: RawEvent,
    /// Whether the last attempt to record it worked: if not, nobody knows what is done.
    recorded: AtomicBool,
}

impl CudaEvent {
    pub(super) fn new(device: &Arc<Device>) -> Result<CudaEvent> {
        const NO_TIMING: u32 = 2;
        let _bound = device.bind_apart()?;
        let mut raw = RawEvent::default();
        // SAFETY: `raw` is where the answer goes.
        let code = unsafe { (device.driver.cuEventCreate)(&mut raw, NO_TIMING) };
        check("cuEventCreate", code)?;
        Ok(CudaEvent { device: device.clone(), raw, recorded: AtomicBool::new(false) })
    }

    /// Puts the event behind what is enqueued.
    pub(super) fn record(&self, queue: &Queue) -> Result<()> {
        self.recorded.store(false, Ordering::Relaxed);
        let _bound = self.device.bind()?;
        // SAFETY: event and stream are alive and of one context.
        let code = unsafe { (self.device.driver.cuEventRecord)(self.raw, queue.raw()) };
        check("cuEventRecord", code)?;
        self.recorded.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Lets what is enqueued next begin after the event.
    pub(super) fn before(&self, queue: &Queue) -> Result<()> {
        let _bound = queue.shared().device.bind()?;
        // SAFETY: event and stream are alive; they may be of different devices.
        let code = unsafe { (self.device.driver.cuStreamWaitEvent)(queue.raw(), self.raw, 0) };
        check("cuStreamWaitEvent", code)
    }
}

impl EventBackend for CudaEvent {
    fn is_done(&self) -> bool {
        // Where nothing was recorded, or nobody can ask, nobody knows.
        if !self.recorded.load(Ordering::Relaxed) {
            return false;
        }
        let Ok(_bound) = self.device.bind_apart() else {
            return false;
        };
        // SAFETY: the event is alive.
        let code = unsafe { (self.device.driver.cuEventQuery)(self.raw) };
        // An error of the device ends everything on it. What is captured has not begun.
        ![NOT_READY, CAPTURED].contains(&code)
    }

    fn sync(&self) -> Result<()> {
        let _bound = self.device.bind_apart()?;
        // SAFETY: the event is alive.
        check("cuEventSynchronize", unsafe { (self.device.driver.cuEventSynchronize)(self.raw) })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        match self.device.bind_apart() {
            Err(error) => warn(Err(error)),
            Ok(_bound) => {
                // SAFETY: the event is this one's; a wait for it that is enqueued stays valid.
                let code = unsafe { (self.device.driver.cuEventDestroy_v2)(self.raw) };
                warn(check("cuEventDestroy", code));
            }
        }
    }
}
