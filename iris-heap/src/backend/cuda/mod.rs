//! NVIDIA: the driver API, through a table of functions of our own; nothing is linked, and nothing is
//! needed where no heap of this kind is opened.
//!
//! Memory that ranks share is virtual memory, exported as POSIX descriptors to ranks that are other
//! processes and mapped for the devices of all ranks; where a device has no such memory, plain
//! memory with legacy handles (processes) or peer access (threads). Several ranks may use one
//! device: as threads they share its primary context and divide what is resident; as processes
//! they are time-sliced, right but slow.
//!
//! Calls that may wait for the whole device (mapping, unmapping, loading modules) are made in
//! collective steps only, so that no rank waits in one for a kernel that waits for that rank.
//!
//! Where ranks are threads of one device, the driver must not let a stream of one rank wait for a
//! kernel of another. It does at the first use of streams, so each is used once when it is made or
//! given to the heap, one at a time; and where memory of its pool that one stream gave back goes to
//! another, which is switched off for a device that ranks share.

use super::BackendKind;
use super::gpu::Vendor;

mod api;
#[cfg(feature = "cudarc-0-19")]
mod cudarc;
mod device;
mod memory;

pub(super) const VENDOR: Vendor = Vendor {
    kind: BackendKind::Cuda,
    version: device::driver_version,
    count: device::count,
    get: |ordinal| Ok(device::Device::get(ordinal)?),
};
