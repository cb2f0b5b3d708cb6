//! Synchronous copies between host and device, on a separate stream; they invalidate no graph
//! capture.

use std::sync::Arc;

use super::driver::{Driver, RawStream, warn};
use super::mapping::GpuMapping;
use crate::backend::Mapping;
use crate::error::Result;

/// Stream for copies between host and device; each copy has ended when its function returns.
pub(crate) struct HostCopies {
    device: Arc<dyn Driver>,
    stream: RawStream,
}

impl HostCopies {
    pub(crate) fn new(device: Arc<dyn Driver>) -> Result<HostCopies> {
        let stream = device.create_stream()?;
        Ok(HostCopies { device, stream })
    }

    /// Waits until the work on the stream has ended, even if `enqueued` is an error, because a part
    /// of the work may have been enqueued.
    fn done(&self, enqueued: Result<()>) -> Result<()> {
        // SAFETY: the stream is alive, because this object owns it.
        let waited = unsafe { self.device.sync_stream(self.stream) };
        enqueued.and(waited)
    }

    pub(crate) fn write(&self, to: u64, data: &[u8]) -> Result<()> {
        if data.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller checked the target range; `data` outlives the copy, because `done`
        // waits for it.
        self.done(unsafe { self.device.write(to, data.as_ptr(), data.len(), self.stream) })
    }

    pub(crate) fn read(&self, from: u64, data: &mut [u8]) -> Result<()> {
        if data.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller checked the source range; `data` outlives the copy, because `done`
        // waits for it.
        self.done(unsafe { self.device.read(data.as_mut_ptr(), from, data.len(), self.stream) })
    }

    /// Sets all bytes of a new mapping to zero.
    pub(crate) fn clear(&self, memory: &GpuMapping) -> Result<()> {
        let bytes = memory.bytes();
        let to = memory.at(0, bytes)?;
        // SAFETY: `at` checked that the bytes lie in the mapping.
        self.done(unsafe { self.device.fill(to, bytes, 0, self.stream) })
    }
}

impl Drop for HostCopies {
    fn drop(&mut self) {
        // SAFETY: this object owns the stream, and all work on it has ended.
        warn(unsafe { self.device.destroy_stream(self.stream) });
    }
}
