//! Vendor-independent part of the GPU backends: device of a rank, streams, events, order of ops,
//! kernels, pinned memory, and memory sharing between ranks. A vendor's backend implements two
//! traits of driver calls, [`Driver`] and [`MemoryDriver`], and the table of its driver's
//! functions.

mod backend;
mod beside;
mod calls;
mod copies;
mod driver;
mod event;
#[cfg(test)]
mod fake;
mod library;
mod mapping;
mod memory;
mod module;
mod order;
mod pinned;
mod sharing;
mod stream;
mod table;
mod vendor;

pub use backend::{DeviceHandle, Gpu};
pub(super) use calls::{common_calls, memory_calls};
pub(crate) use driver::Current;
pub use driver::DeviceCopy;
pub(super) use driver::{Driver, RawEvent, RawFunction, RawModule, RawStream, warn};
pub(super) use memory::{
    MemoryDriver, Origin, PLAIN_BLOCK, PlainRegion, Region, Wanted, check_foreign, round,
};
pub(crate) use module::{GpuFunction, GpuModule};
#[cfg(feature = "cudarc-0-19")]
pub(super) use stream::Queue;
pub(super) use table::{load, outcome, results, table};
pub(super) use vendor::{Opened, Vendor};
