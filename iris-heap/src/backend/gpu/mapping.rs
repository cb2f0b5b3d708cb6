//! Device memory that a GPU backend has mapped, with its lifetime.

use std::any::Any;
use std::sync::{Arc, Mutex};

use super::memory::Region;
use crate::backend::Mapping;
use crate::error::{Error, Result};
use crate::util::lock;
use crate::util::unsupported;

/// Address of device memory, with the region that backs it until the heap closes. Unmapping may
/// wait for the whole device. So the memory is unmapped in a step that all ranks make together,
/// even if an `Arc` of the mapping is still held.
pub(crate) struct GpuMapping {
    address: u64,
    bytes: u64,
    region: Mutex<Option<Arc<dyn Region>>>,
}

impl GpuMapping {
    /// Makes a mapping of `region`; the memory is unmapped when the last mapping of the region is
    /// released.
    pub(crate) fn new(region: Arc<dyn Region>) -> GpuMapping {
        let (address, bytes) = (region.address(), region.bytes());
        GpuMapping { address, bytes, region: Mutex::new(Some(region)) }
    }

    /// Region that backs the mapping; an error if the mapping has been released.
    pub(crate) fn region(&self) -> Result<Arc<dyn Region>> {
        lock(&self.region).clone().ok_or(Error::Closed { what: "the heap" })
    }

    /// Releases the region; its memory is unmapped when the last mapping of the region releases it.
    pub(crate) fn release(&self) {
        let region = lock(&self.region).take();
        drop(region);
    }

    /// Keeps the memory mapped until the process ends, because enqueued work may still access it.
    pub(crate) fn leak(&self) {
        std::mem::forget(lock(&self.region).take());
    }

    /// Device address of `bytes` bytes from `offset` on; checks the range, and that the mapping has
    /// not been released.
    pub(crate) fn at(&self, offset: u64, bytes: u64) -> Result<u64> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => {}
            end => {
                return Err(Error::OutOfBounds {
                    what: "bytes of a mapping".into(),
                    start: offset,
                    end: end.unwrap_or(u64::MAX),
                    len: self.bytes,
                });
            }
        }
        match &*lock(&self.region) {
            Some(_) => Ok(self.address + offset),
            None => Err(Error::Closed { what: "the heap" }),
        }
    }
}

impl Mapping for GpuMapping {
    fn address(&self) -> u64 {
        self.address
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Downcasts a mapping to device memory; fails if it belongs to another backend.
pub(crate) fn as_gpu(mapping: &dyn Mapping) -> Result<&GpuMapping> {
    let memory = mapping.as_any().downcast_ref::<GpuMapping>();
    memory.ok_or_else(|| unsupported("access by a GPU", "the memory belongs to another device"))
}
