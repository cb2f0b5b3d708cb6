//! The devices that there are of each kind: the one file of the crate that asks which kind it is.

use std::sync::Arc;

use super::cpu::CpuBackend;
use super::gpu::{Gpu, Vendor};
use super::{Backend, BackendKind, DeviceInfo, cuda, hip};
use crate::error::Result;
use crate::util::unsupported;
use crate::world::World;

impl BackendKind {
    /// Whose devices are of this kind.
    fn vendor(self) -> Result<&'static Vendor> {
        match self {
            BackendKind::Cpu => Err(unsupported("a GPU of backend cpu", "it has none")),
            BackendKind::Cuda => Ok(&cuda::VENDOR),
            BackendKind::Hip => Ok(&hip::VENDOR),
        }
    }

    /// The GPUs of this kind that this process sees.
    ///
    /// # Errors
    /// [`Error::Library`](crate::Error::Library) without the driver;
    /// [`Error::Device`](crate::Error::Device) if it does not start: without a device, for example;
    /// [`Error::Unsupported`](crate::Error::Unsupported) for a kind without GPUs.
    pub fn devices(self) -> Result<Vec<DeviceInfo>> {
        self.vendor()?.devices()
    }

    /// The GPU that a heap takes for the rank with this number on its host, unless
    /// [`HeapOptions::device`](crate::HeapOptions::device) names another: the ranks of a host take the GPUs in turns.
    /// Asking makes no context on the device.
    ///
    /// # Errors
    /// As [`BackendKind::devices`]; [`Error::Invalid`](crate::Error::Invalid) if there is no GPU.
    pub fn device_of(self, local_rank: usize) -> Result<DeviceInfo> {
        self.vendor()?.device_of(local_rank)
    }

    /// How many GPUs of this kind this process sees, at least one.
    ///
    /// # Errors
    /// As [`BackendKind::devices`]; [`Error::Unsupported`](crate::Error::Unsupported) if there is none.
    pub fn device_count(self) -> Result<usize> {
        self.vendor()?.device_count()
    }

    /// The version of the driver of these GPUs, or its runtime, as a number of the vendor's: 12080 is CUDA
    /// 12.8, 60443484 is HIP 6.4.43484. No device is needed.
    ///
    /// # Errors
    /// [`Error::Library`](crate::Error::Library) without the driver; as [`BackendKind::devices`].
    pub fn driver_version(self) -> Result<u32> {
        (self.vendor()?.version)()
    }

    /// Bytes of memory of GPU `index` that are free, and all of it.
    ///
    /// # Errors
    /// As [`BackendKind::devices`]; [`Error::Invalid`](crate::Error::Invalid) if there is no such device.
    pub fn memory_info(self, index: usize) -> Result<(u64, u64)> {
        self.vendor()?.memory_info(index)
    }

    /// The device of a rank: on a host with so many `threads` for workgroups; on a GPU the `asked` one
    /// or one by the rank's number, with plain memory if it is to be `legacy`.
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
