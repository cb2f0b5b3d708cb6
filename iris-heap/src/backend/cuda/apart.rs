//! Copies by the host: on a stream of their own, done when they return, in the way of no capture.

use std::sync::Arc;

use super::api::check;
use super::device::{Device, warn};
use super::memory::CudaMapping;
use crate::backend::Mapping;
use crate::backend::gpu::RawStream;
use crate::error::Result;

/// A stream of the backend's own, and copies that are done when they return.
pub(super) struct Apart {
    device: Arc<Device>,
    stream: RawStream,
}

impl Apart {
    pub(super) fn new(device: Arc<Device>) -> Result<Apart> {
        let stream = device.new_stream()?;
        Ok(Apart { device, stream })
    }

    /// Waits until what `code` tells of is done, if it was enqueued.
    fn done(&self, api: &'static str, code: u32) -> Result<()> {
        // Also after a failure: part of the work may have been enqueued.
        // SAFETY: the stream is alive.
        let waited = unsafe { (self.device.driver.cuStreamSynchronize)(self.stream) };
        check(api, code)?;
        check("cuStreamSynchronize", waited)
    }

    pub(super) fn write(&self, to: u64, data: &[u8]) -> Result<()> {
        if data.is_empty() {
            return Ok(());
        }
        let _bound = self.device.bind_apart()?;
        let (from, bytes) = (data.as_ptr().cast(), data.len());
        // SAFETY: the caller checked the target; `data` outlives the copy, which `done` waits for.
        let code =
            unsafe { (self.device.driver.cuMemcpyHtoDAsync_v2)(to, from, bytes, self.stream) };
        self.done("cuMemcpyHtoDAsync", code)
    }

    pub(super) fn read(&self, from: u64, data: &mut [u8]) -> Result<()> {
        if data.is_empty() {
            return Ok(());
        }
        let _bound = self.device.bind_apart()?;
        let (to, bytes) = (data.as_mut_ptr().cast(), data.len());
        // SAFETY: as in `write`, the other way round.
        let code =
            unsafe { (self.device.driver.cuMemcpyDtoHAsync_v2)(to, from, bytes, self.stream) };
        self.done("cuMemcpyDtoHAsync", code)
    }

    /// Sets all of new memory to zero.
    pub(super) fn clear(&self, memory: &CudaMapping) -> Result<()> {
        let bytes = memory.bytes();
        let to = memory.at(0, bytes)?;
        let _bound = self.device.bind_apart()?;
        // SAFETY: `at` checked that the bytes lie in the mapping.
        let code =
            unsafe { (self.device.driver.cuMemsetD8Async)(to, 0, bytes as usize, self.stream) };
        self.done("cuMemsetD8Async", code)
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        match self.device.bind_apart() {
            Err(error) => warn(Err(error)),
            Ok(_bound) => {
                // SAFETY: the stream is this one's; nothing is enqueued on it.
                let code = unsafe { (self.device.driver.cuStreamDestroy_v2)(self.stream) };
                warn(check("cuStreamDestroy", code));
            }
        }
    }
}
