//! Device memory as a backend handed it out.

use std::any::Any;
use std::sync::{Arc, Mutex};

use super::memory::Region;
use crate::backend::Mapping;
use crate::error::{Error, Result};
use crate::util::lock;
use crate::util::unsupported;

/// An address, and what it belongs to until the heap closes. Unmapping may wait for the whole device,
/// so it takes place in the collective steps that end a mapping's use, whoever holds an `Arc` of it
/// still.
pub(crate) struct GpuMapping {
    address: u64,
    bytes: u64,
    region: Mutex<Option<Arc<dyn Region>>>,
}

impl GpuMapping {
    /// Memory that is unmapped when the last mapping of `region` lets it go.
    pub(crate) fn new(region: Arc<dyn Region>) -> GpuMapping {
        let (address, bytes) = (region.address(), region.bytes());
        GpuMapping { address, bytes, region: Mutex::new(Some(region)) }
    }

    /// What it belongs to.
    pub(crate) fn region(&self) -> Result<Arc<dyn Region>> {
        lock(&self.region).clone().ok_or(Error::Closed { what: "the heap" })
    }

    /// Lets the memory go. The last mapping of it unmaps it.
    pub(crate) fn release(&self) {
        let region = lock(&self.region).take();
        drop(region);
    }

    /// Keeps the memory for good: something may still run on it.
    pub(crate) fn leak(&self) {
        std::mem::forget(lock(&self.region).take());
    }

    /// The address of `bytes` bytes from `offset` on, which are in it and mapped.
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

/// The mapping as a GPU's.
pub(crate) fn as_gpu(mapping: &dyn Mapping) -> Result<&GpuMapping> {
    let memory = mapping.as_any().downcast_ref::<GpuMapping>();
    memory.ok_or_else(|| unsupported("access by a GPU", "it is memory of another device"))
}
