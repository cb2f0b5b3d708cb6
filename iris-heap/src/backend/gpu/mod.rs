//! What the backends of GPUs share: streams, events, the order of ops, kernels, pinned memory, over a
//! trait of driver calls. What a vendor's backend has of its own is the trait, and memory.

mod copies;
mod driver;
mod event;
#[cfg(test)]
mod fake;
mod mapping;
mod module;
pub(super) mod pinned;
mod stream;

pub(super) use copies::HostCopies;
pub use driver::LaunchShape;
pub(super) use driver::{Driver, RawContext, RawEvent, RawFunction, RawModule, RawStream, warn};
pub(super) use mapping::{GpuMapping, as_gpu};
pub use module::{Function, Module};
pub(super) use stream::{GpuStream, Queue, Shared};
