//! Selection of devices by kind; the only file of the crate that selects a backend by kind.

use std::sync::Arc;

use super::cpu::CpuBackend;
use super::gpu::{Gpu, Vendor};
use super::{Backend, BackendKind, DeviceInfo, cuda, hip};
use crate::error::Result;
use crate::util::unsupported;
use crate::world::{PeerAccess, World};

impl BackendKind {
    /// Driver of the vendor of this kind of GPU; an error for the CPU.
    fn vendor(self) -> Result<&'static Vendor> {
        match self {
            BackendKind::Cpu => Err(unsupported("a GPU of backend cpu", "it has none")),
            BackendKind::Cuda => Ok(&cuda::VENDOR),
            BackendKind::Hip => Ok(&hip::VENDOR),
        }
    }

    /// Describes the GPUs of this kind that the process sees.
    ///
    /// # Errors
    /// [`Error::Library`](crate::Error::Library) if the driver is missing;
    /// [`Error::Device`](crate::Error::Device) if it does not start, for example without a device;
    /// [`Error::Unsupported`](crate::Error::Unsupported) for the CPU.
    pub fn devices(self) -> Result<Vec<DeviceInfo>> {
        self.vendor()?.devices()
    }

    /// Describes the GPU that a heap uses by default for the rank with number `local_rank` on its
    /// host; the ranks of a host use the GPUs round-robin.
    /// [`HeapOptions::device`](crate::HeapOptions::device) overrides this default. Creates no
    /// context on the device.
    ///
    /// # Errors
    /// Errors of [`BackendKind::devices`]; [`Error::Invalid`](crate::Error::Invalid) if there is no
    /// GPU.
    pub fn device_of(self, local_rank: usize) -> Result<DeviceInfo> {
        self.vendor()?.device_of(local_rank)
    }

    /// Number of GPUs of this kind that the process sees, at least one.
    ///
    /// # Errors
    /// Errors of [`BackendKind::devices`]; [`Error::Unsupported`](crate::Error::Unsupported) if
    /// there is none.
    pub fn device_count(self) -> Result<usize> {
        self.vendor()?.device_count()
    }

    /// Version of the CUDA driver or of the HIP runtime, in the vendor's encoding: 12080 is CUDA
    /// 12.8, 60443484 is HIP 6.4.43484. Needs no device.
    ///
    /// # Errors
    /// [`Error::Library`](crate::Error::Library) if the driver is missing; errors of
    /// [`BackendKind::devices`].
    pub fn driver_version(self) -> Result<u32> {
        (self.vendor()?.version)()
    }

    /// Free and total memory of GPU `index`, in bytes.
    ///
    /// # Errors
    /// Errors of [`BackendKind::devices`]; [`Error::Invalid`](crate::Error::Invalid) if there is no
    /// such device.
    pub fn memory_info(self, index: usize) -> Result<(u64, u64)> {
        self.vendor()?.memory_info(index)
    }

    /// Returns the visible devices whose memory device `index` cannot access. For the CPU returns
    /// the default, because its ranks share memory.
    pub(crate) fn peer_access(self, index: usize) -> Result<PeerAccess> {
        match self.traits().host_threads {
            true => Ok(PeerAccess::default()),
            false => self.vendor()?.peer_access(index),
        }
    }

    /// Opens the device of a rank: for the CPU with `threads` workgroup threads; for a GPU the
    /// device with index `asked`, or, if that is `None`, a device chosen by the rank's number on
    /// its host. If `legacy`, GPU memory is plain memory (not virtual memory).
    pub(crate) fn open(
        self,
        world: &World,
        threads: impl FnOnce() -> Result<u32>,
        (asked, legacy): (Option<usize>, bool),
    ) -> Result<Arc<dyn Backend>> {
        if self.traits().host_threads {
            return Ok(Arc::new(CpuBackend::new(world.rank(), threads()?)?));
        }
        let device = self.vendor()?.choose(world.local_rank(), asked)?;
        Ok(Arc::new(Gpu::new(device, world.same_process(), legacy)?))
    }
}
