//! Access to the GPUs of one vendor that this process sees.

use std::sync::{Arc, Mutex};

use super::driver::Driver;
use super::memory::MemoryDriver;
use crate::backend::{BackendKind, DeviceInfo};
use crate::error::{Error, Result};
use crate::util::{lock, unsupported};
use crate::world::PeerAccess;

/// Driver of a vendor, loaded at its first use.
pub(crate) struct Vendor {
    pub(crate) kind: BackendKind,
    /// Returns the version of the driver, in the vendor's encoding.
    pub(crate) version: fn() -> Result<u32>,
    /// Returns the number of devices that the process sees.
    pub(crate) count: fn() -> Result<usize>,
    /// Returns the device with this index among those that the process sees.
    pub(crate) get: fn(usize) -> Result<Arc<dyn MemoryDriver>>,
}

impl Vendor {
    pub(crate) fn devices(&self) -> Result<Vec<DeviceInfo>> {
        let device = |index| Ok(unshared(&*(self.get)(index)?));
        (0..(self.count)()?).map(device).collect()
    }

    /// Describes the device that [`Vendor::choose`] returns for a rank that asks for no particular
    /// device.
    pub(crate) fn device_of(&self, local_rank: usize) -> Result<DeviceInfo> {
        Ok(unshared(&*self.choose(local_rank, None)?))
    }

    /// Number of devices that this process sees; an error if there is none.
    pub(crate) fn device_count(&self) -> Result<usize> {
        match (self.count)()? {
            0 => Err(unsupported(&format!("backend {}", self.kind), "no device is visible")),
            count => Ok(count),
        }
    }

    /// Returns the visible devices whose memory device `index` cannot access. If the driver returns
    /// an error for a pair of devices, the memory counts as accessible, and mapping it reports the
    /// error later.
    pub(crate) fn peer_access(&self, index: usize) -> Result<PeerAccess> {
        let device = (self.get)(index)?;
        let mut denied = Vec::new();
        for other in (0..(self.count)()?).filter(|&other| other != index) {
            let Ok(peer) = (self.get)(other) else { continue };
            if let Ok(false) = device.can_access(peer.ordinal()) {
                denied.push(peer.uuid());
            }
        }
        Ok(PeerAccess { device: device.uuid(), index, denied })
    }

    pub(crate) fn memory_info(&self, index: usize) -> Result<(u64, u64)> {
        (self.get)(index)?.memory_info()
    }

    /// Returns the device of a rank: the device with index `asked`; if `asked` is `None`, the
    /// devices are assigned to local ranks round-robin.
    pub(crate) fn choose(
        &self,
        local_rank: usize,
        asked: Option<usize>,
    ) -> Result<Arc<dyn MemoryDriver>> {
        let count = (self.count)()?;
        if count == 0 {
            let what = format!("number of {} devices", self.kind);
            return Err(Error::invalid(what, 0, "at least 1 that is visible"));
        }
        (self.get)(asked.unwrap_or(local_rank % count))
    }
}

/// Describes a device that one rank uses alone, so that all multiprocessors are available to that
/// rank.
fn unshared(device: &dyn MemoryDriver) -> DeviceInfo {
    info(device, device.multiprocessors())
}

/// Describes a device of which a rank may use `workgroups` workgroups at a time.
pub(super) fn info(device: &dyn MemoryDriver, workgroups: u32) -> DeviceInfo {
    DeviceInfo {
        kind: device.kind(),
        index: device.ordinal() as usize,
        name: device.title(),
        arch: device.arch(),
        uuid: device.uuid(),
        workgroups,
        multiprocessors: device.multiprocessors(),
    }
}

/// Devices of a vendor that this process has opened, by index. Devices stay open until the process
/// ends, so that objects of other libraries in their contexts are not destroyed.
pub(crate) struct Opened<D>(Mutex<Vec<Option<Arc<D>>>>);

impl<D: Driver> Opened<D> {
    pub(crate) const fn new() -> Opened<D> {
        Opened(Mutex::new(Vec::new()))
    }

    /// Returns the device with index `ordinal` among `count`; calls `open` at its first use only.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there is no such device; errors of `open`.
    pub(crate) fn get(
        &self,
        kind: BackendKind,
        (ordinal, count): (usize, usize),
        open: impl FnOnce(i32) -> Result<D>,
    ) -> Result<Arc<D>> {
        if ordinal >= count {
            let expected = match count {
                1 => format!("0: one {kind} device is visible"),
                _ => format!("below {count}, the number of {kind} devices that are visible"),
            };
            return Err(Error::invalid("device", ordinal, expected));
        }
        let mut devices = lock(&self.0);
        if devices.len() < count {
            devices.resize(count, None);
        }
        if let Some(device) = &devices[ordinal] {
            return Ok(device.clone());
        }
        let device = Arc::new(open(ordinal as i32)?);
        devices[ordinal] = Some(device.clone());
        Ok(device)
    }
}
