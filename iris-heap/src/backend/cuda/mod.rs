//! CUDA backend: the CUDA driver API through a table of functions. Nothing is linked, and no CUDA
//! driver is needed unless a CUDA heap is opened.
//!
//! Memory that ranks share is virtual memory, exported as POSIX descriptors to ranks in other
//! processes and mapped for the devices of all ranks. If a device lacks virtual memory, plain
//! memory is used, with IPC handles (processes) or peer access (threads). Several ranks may use one
//! device: as threads they share its primary context and divide the co-resident workgroups; as
//! processes they are time-sliced, which is correct but slow.
//!
//! Calls that may wait for the whole device (mapping, unmapping, loading modules) are made only in
//! collective steps. Otherwise a rank could wait in such a call for another rank's kernel, while
//! that kernel waits for this rank.
//!
//! If ranks are threads on one device, a stream of one rank must not wait for a kernel of another
//! rank. The driver adds such a wait in two situations, which this backend avoids:
//!
//! - At the first use of a stream. So this backend uses each stream once when it is made or passed
//!   to the heap, one stream at a time.
//! - If one stream frees memory of a pool and another stream reuses it. So this backend disables
//!   such reuse on a device that ranks share.

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
    get: |ordinal| Ok(device::CudaDevice::get(ordinal)?),
};
