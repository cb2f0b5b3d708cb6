//! AMD backend: the HIP runtime through a table of functions. Nothing is linked, and no HIP runtime
//! is needed unless a HIP heap is opened. The same program runs with ROCm 5, 6 and 7.
//!
//! This backend has never run on hardware. Its calls were compared with AMD's headers of several
//! releases. Tests run the host code on a fake runtime that emulates devices on the host. The smoke
//! test passed on a functional simulator of MI300X with HIP 7.2.4.
//!
//! Data is plain memory; words that peers poll are uncached or fine-grained memory (`IRIS_HIP_DATA`
//! and `IRIS_HIP_SIGNAL` override this). Processes share memory by `hipIpc` handles, threads by
//! peer access. Several ranks may use one device, as on NVIDIA GPUs.
//!
//! Kernels of different ranks wait for each other, and work queued after a waiting kernel in the
//! same hardware queue does not begin. By default the runtime shares 4 hardware queues among all
//! streams of a device. So each stream of a heap is made with a mask of all compute units, which
//! gives the stream its own hardware queue. If that fails, or if the program passes its own
//! streams, set `GPU_MAX_HW_QUEUES=32`. Streams with a mask and the null stream wait for each
//! other: a program that enqueues on the null stream while a rank's kernel waits may deadlock. The
//! runtime itself uses the null stream for copies between the host and memory of another device;
//! this backend makes such copies on a stream of the memory's own device.
//!
//! Copies by the host are made in pieces of 64 KiB, on a separate stream. Since release 7 the
//! runtime makes copies of up to 16 KiB by a kernel, which needs compute units that waiting kernels
//! may not leave free. So if ranks share a device, set `GPU_FORCE_BLIT_COPY_SIZE=0`. If processes
//! cannot open each other's memory, set `HSA_ENABLE_IPC_MODE_LEGACY=1`, which selects the older IPC
//! mechanism.

use super::BackendKind;
use super::gpu::Vendor;

mod api;
mod device;
mod memory;

pub(super) const VENDOR: Vendor = Vendor {
    kind: BackendKind::Hip,
    version: || Ok(api::runtime()?.version()),
    count: device::count,
    get: |ordinal| Ok(device::HipDevice::get(ordinal)?),
};
