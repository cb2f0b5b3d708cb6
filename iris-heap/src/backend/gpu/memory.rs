//! Driver calls for device memory that the vendor-independent part of the GPU backends needs: the
//! traits [`MemoryDriver`] and [`Region`].

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::driver::{Current, Driver, warn};
use crate::backend::Purpose;
use crate::error::{Error, Result};
use crate::util::unsupported;

/// Memory that a device has mapped. Dropping it returns the memory to the driver, which may wait
/// for the device.
pub(crate) trait Region: Send + Sync {
    /// Start address in the device's address space.
    fn address(&self) -> u64;

    /// Length of the memory region in bytes.
    fn bytes(&self) -> u64;

    /// Index of the device that owns the memory, among those visible to the process.
    fn ordinal(&self) -> i32;

    /// Handle by which other processes open the memory; empty if a descriptor is used instead.
    ///
    /// # Errors
    /// [`crate::Error::Unsupported`] for memory that cannot be shared with other processes; errors
    /// of the device.
    fn handle(&self) -> Result<Vec<u8>>;

    /// Whether the memory belongs to another process and was opened by its handle. The owner must
    /// not free the memory before this process has closed it.
    fn is_opened(&self) -> bool {
        false
    }

    /// Opens a new descriptor by which other processes map the memory; `None` if the memory is
    /// shared by a handle.
    fn descriptor(&self) -> Result<Option<OwnedFd>>;

    /// Maps the memory for the devices `ordinals` of this process; does nothing for memory to which
    /// each device enables access itself.
    fn grant(&self, ordinals: &[i32]) -> Result<()>;

    /// Whether a device that accesses this memory must call [`MemoryDriver::enable_access`] first.
    fn asks_for_access(&self) -> bool;
}

/// Properties of requested memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wanted {
    /// Use of the requested memory.
    pub(crate) purpose: Purpose,
    /// Whether other processes must be able to map the memory.
    pub(crate) exported: bool,
    /// Whether to use plain memory even if the device has virtual memory management.
    pub(crate) legacy: bool,
}

/// Driver calls for the memory of one device. None affects graph captures (see [`Driver`]).
pub(crate) trait MemoryDriver: Driver {
    /// Allocates at least `bytes` bytes with undefined contents.
    fn allocate(self: Arc<Self>, bytes: u64, wanted: Wanted) -> Result<Arc<dyn Region>>;

    /// Maps memory of at least `bytes` bytes that a peer or the caller passed as a descriptor.
    ///
    /// # Errors
    /// [`crate::Error::Unsupported`] if the device has no such descriptors; errors of the device.
    fn import(self: Arc<Self>, descriptor: OwnedFd, bytes: u64) -> Result<Arc<dyn Region>>;

    /// Opens plain memory of another process, by the bytes that [`Region::handle`] returned in that
    /// process, and returns the memory's address.
    fn open(&self, handle: &[u8]) -> Result<u64>;

    /// Closes memory that [`MemoryDriver::open`] returned; the device is current.
    ///
    /// # Safety
    /// Nobody uses the memory.
    unsafe fn close(&self, address: u64) -> Result<()>;

    /// Frees plain memory that this process allocated; the device is current.
    ///
    /// # Safety
    /// Nobody uses the memory.
    unsafe fn free(&self, address: u64) -> Result<()>;

    /// Handle by which other processes open plain memory that this process allocated.
    fn handle_of(&self, address: u64) -> Result<Vec<u8>>;

    /// Checks that memory of the caller belongs to this device.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] for memory of another device, or shorter than `bytes`.
    fn check_foreign(&self, address: u64, bytes: u64) -> Result<()>;

    /// Whether kernels of this device can access memory of device `ordinal`.
    fn can_access(&self, ordinal: i32) -> Result<bool>;

    /// Lets kernels of this device access memory of device `ordinal` that its owner has not mapped
    /// for this device. Repeated calls have no effect.
    fn enable_access(&self, ordinal: i32) -> Result<()>;
}

/// Plain memory: any memory but virtual memory, for example of `cuMemAlloc` or `hipMalloc`. It is
/// shared by IPC handles (processes) or peer access (threads). Dropping the region frees memory
/// that this process allocated.
pub(crate) struct PlainRegion {
    device: Arc<dyn MemoryDriver>,
    address: u64,
    bytes: u64,
    origin: Origin,
}

/// Origin of plain memory, which determines how it is shared and freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Memory that this process allocated.
    Own,
    /// Memory of another process, opened by its handle.
    Opened,
    /// Memory of the caller; dropping the region does not free the memory.
    Foreign,
}

impl PlainRegion {
    /// Makes a region of the `bytes` bytes at `address`, which the device has mapped.
    pub(crate) fn of(
        device: Arc<dyn MemoryDriver>,
        (address, bytes): (u64, u64),
        origin: Origin,
    ) -> Arc<dyn Region> {
        Arc::new(PlainRegion { device, address, bytes, origin })
    }
}

impl Region for PlainRegion {
    fn address(&self) -> u64 {
        self.address
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn ordinal(&self) -> i32 {
        self.device.ordinal()
    }

    fn handle(&self) -> Result<Vec<u8>> {
        if self.origin != Origin::Own {
            let why = "this process did not allocate the memory";
            return Err(unsupported("sharing memory with other processes", why));
        }
        self.device.handle_of(self.address)
    }

    fn is_opened(&self) -> bool {
        self.origin == Origin::Opened
    }

    fn descriptor(&self) -> Result<Option<OwnedFd>> {
        Ok(None)
    }

    fn grant(&self, _: &[i32]) -> Result<()> {
        Ok(())
    }

    fn asks_for_access(&self) -> bool {
        true
    }
}

impl Drop for PlainRegion {
    fn drop(&mut self) {
        let bound = Current::new(&*self.device, true);
        warn(bound.and_then(|_bound| match self.origin {
            // SAFETY: every user of the memory's addresses holds the region, so this process has no
            // user left. If the heap was closed, no other process has the memory open. If it was
            // dropped without a close, another process may have it open; the vendors do not
            // document what happens then (docs/limits.md).
            Origin::Own => unsafe { self.device.free(self.address) },
            // SAFETY: every user of the memory's addresses holds the region, so no user is left
            // here.
            Origin::Opened => unsafe { self.device.close(self.address) },
            Origin::Foreign => Ok(()),
        }));
    }
}

/// Checks that memory of the caller belongs to the heap's device and is long enough. The closures
/// ask the driver about the address: whether it is device memory, the index of its device, and
/// start and length of its allocation. Each closure is called only if the earlier checks succeeded.
///
/// # Errors
/// [`Error::Invalid`] for other memory; errors of the device.
pub(crate) fn check_foreign(
    (address, bytes): (u64, u64),
    ordinal: i32,
    of_a_device: bool,
    owner: impl FnOnce() -> Option<i32>,
    range: impl FnOnce() -> Result<(u64, u64)>,
) -> Result<()> {
    let invalid = |value: String, expected: &str| {
        Err(Error::invalid(format!("imported memory at {address:#x}"), value, expected))
    };
    if !of_a_device {
        return invalid("not of a device".into(), "an address of device memory");
    }
    let owner = owner();
    if owner != Some(ordinal) {
        let expected = format!("of device {ordinal}, which the heap uses");
        return invalid(format!("of device {}", owner.unwrap_or(-1)), &expected);
    }
    let (base, size) = range()?;
    let there = size - (address - base);
    if bytes > there {
        return invalid(format!("{there} bytes long"), &format!("at least {bytes}"));
    }
    Ok(())
}

/// Granularity in bytes of memory that peers open by IPC handles. Drivers place several small
/// allocations into one block of this size, and an IPC handle of a small allocation would give the
/// peer access to the whole block.
pub(crate) const PLAIN_BLOCK: usize = 2 << 20;

/// Rounds a size in bytes up to a multiple of `granularity`, at least one.
pub(crate) fn round(bytes: u64, granularity: usize) -> Result<usize> {
    let size = bytes.max(1).checked_next_multiple_of(granularity.max(1) as u64);
    size.filter(|&s| s <= isize::MAX as u64).map(|s| s as usize).ok_or_else(|| {
        Error::invalid("size of a segment", bytes, format!("at most {} bytes", isize::MAX))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_whole_blocks() {
        assert_eq!(round(0, 2 << 20).unwrap(), 2 << 20);
        assert_eq!(round((2 << 20) + 1, 2 << 20).unwrap(), 4 << 20);
        assert!(round(u64::MAX - 5, 2 << 20).is_err() && round(1 << 63, 4096).is_err());
    }

    #[test]
    fn memory_of_the_callers_must_be_of_the_device_and_long_enough() {
        let check = |bytes, of_a_device, owner: Option<i32>| {
            let checked =
                check_foreign((0x1100, bytes), 1, of_a_device, || owner, || Ok((0x1000, 0x300)));
            checked.map_err(|error| error.to_string())
        };
        assert_eq!(check(0x200, true, Some(1)), Ok(()));
        for (bytes, of_a_device, owner, said) in [
            (0x200, false, Some(1), "not of a device"),
            (0x200, true, Some(0), "of device 0"),
            (0x200, true, None, "of device -1"),
            (0x201, true, Some(1), "512 bytes long"),
        ] {
            let error = check(bytes, of_a_device, owner).unwrap_err();
            assert!(error.contains(said) && error.contains("0x1100"), "{error}");
        }
    }
}
