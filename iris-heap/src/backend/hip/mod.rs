//! AMD: the HIP runtime, through a table of functions of our own; nothing is linked, and nothing is needed
//! where no heap of this kind is opened. One program runs with ROCm 5, 6 and 7.
//!
//! It has never run on hardware. The calls were held against AMD's headers of several releases, the host's side
//! runs in tests over a runtime of our own, whose devices are the host, and the smoke test was right on a
//! functional simulator of MI300X with HIP 7.2.4.
//!
//! Data is plain memory, the words that peers poll are uncached or fine-grained memory
//! (`IRIS_HIP_DATA` and `IRIS_HIP_SIGNAL` say otherwise). Processes share it by handles of `hipIpc`, threads by
//! peer access. Several ranks may use one device, as on NVIDIA's.
//!
//! Kernels of ranks wait for each other, and behind a kernel that waits nothing begins in the same hardware
//! queue; of these the runtime has 4 by default for all streams of a device. So each stream of a heap is
//! made with a mask of all compute units, which gets it a queue of its own. Where that cannot be had, and for
//! streams of the caller's, set `GPU_MAX_HW_QUEUES=32`. Such streams also wait for the null stream, and it for
//! them: a program that enqueues on the null stream while a rank's kernel waits may wait for ever. The runtime
//! itself does so for copies between the host and memory of another device, which are made otherwise here.
//!
//! Copies by the host are made in pieces of 64 KiB, on a stream of their own. Releases since 7 copy up to
//! 16 KiB by a kernel, which needs room beside those that wait: where ranks share a device, set
//! `GPU_FORCE_BLIT_COPY_SIZE=0`. Where processes cannot open each other's memory, `HSA_ENABLE_IPC_MODE_LEGACY=1`
//! takes the older way.

use super::BackendKind;
use super::gpu::Vendor;

mod api;
mod device;
mod memory;

pub(super) const VENDOR: Vendor = Vendor {
    kind: BackendKind::Hip,
    version: || Ok(api::runtime()?.version()),
    count: device::count,
    get: |ordinal| Ok(device::Device::get(ordinal)?),
};
