//! What the shared part of the GPU backends asks of a device's driver about memory.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::driver::Driver;
use crate::backend::Purpose;
use crate::error::{Error, Result};

/// Memory that a device has mapped; given back to the driver when this is dropped, which may wait for
/// the device.
pub(crate) trait Region: Send + Sync {
    /// Where it begins.
    fn address(&self) -> u64;

    /// Its length.
    fn bytes(&self) -> u64;

    /// The number of the device that has it, among those that the process sees.
    fn ordinal(&self) -> i32;

    /// The handle by which other processes open it; empty where it goes by a descriptor.
    ///
    /// # Errors
    /// [`crate::Error::Unsupported`] for memory that other processes cannot have; those of the device.
    fn handle(&self) -> Result<Vec<u8>>;

    /// The descriptor by which other processes map it, where it goes by one. Each call opens one.
    fn descriptor(&self) -> Result<Option<OwnedFd>>;

    /// Lets these devices of this process access it, where the owner of memory maps it for others.
    fn grant(&self, ordinals: &[i32]) -> Result<()>;

    /// Whether a device that accesses it asks for that itself: [`MemoryDriver::enable_access`].
    fn asks_for_access(&self) -> bool;
}

/// What memory is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wanted {
    /// What it is for.
    pub(crate) purpose: Purpose,
    /// Whether ranks that are other processes must be able to have it.
    pub(crate) exported: bool,
    /// Plain memory, also where there is virtual memory.
    pub(crate) legacy: bool,
}

/// A device, by its driver's calls about memory. All of them are apart, as [`Driver`] says it.
pub(crate) trait MemoryDriver: Driver {
    /// New memory of at least so many bytes. What it holds is not defined.
    fn allocate(self: Arc<Self>, bytes: u64, wanted: Wanted) -> Result<Arc<dyn Region>>;

    /// Memory of at least so many bytes that a peer, or the caller, gave as a descriptor.
    ///
    /// # Errors
    /// [`crate::Error::Unsupported`] where there are no such descriptors; those of the device.
    fn import(self: Arc<Self>, descriptor: OwnedFd, bytes: u64) -> Result<Arc<dyn Region>>;

    /// Memory of another process, by what [`Region::handle`] gave there.
    fn open(self: Arc<Self>, handle: &[u8], bytes: u64) -> Result<Arc<dyn Region>>;

    /// The caller's memory as it is.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] for memory that is not this device's, or shorter.
    fn foreign(self: Arc<Self>, address: u64, bytes: u64) -> Result<Arc<dyn Region>>;

    /// Whether kernels of this device can access memory of the other.
    fn can_access(&self, ordinal: i32) -> Result<bool>;

    /// Lets kernels of this device access memory of the other that was not mapped for this one by
    /// name. A second time it does nothing.
    fn enable_access(&self, ordinal: i32) -> Result<()>;
}

/// Checks that memory of the caller's is the device's that the heap uses, and as long as it says, by what the
/// driver knows of its address: whether it is a device's, the number of that device, and where the
/// allocation begins and how long it is. What comes later is asked only if all before it is right.
///
/// # Errors
/// [`Error::Invalid`] for other memory; those of the device.
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

#[cfg(test)]
mod tests {
    use super::*;

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
