//! CUDA device memory: virtual memory that peers map, plain memory as the fallback, and memory of
//! the caller.

use std::ffi::c_void;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use super::api::{self, Access, Address, LegacyHandle, Location, Physical, Properties};
use super::api::{check, check_for};
use super::device::Device;
use crate::backend::Purpose;
use crate::backend::gpu::{
    Driver, MemoryDriver, PLAIN_BLOCK, Region, Wanted, check_foreign, round, warn,
};
use crate::error::{Error, Result};
use crate::segment::duplicate;
use crate::util::unsupported;

/// Region of device memory, freed on drop.
struct CudaRegion {
    device: Arc<Device>,
    address: Address,
    bytes: u64,
    kind: Kind,
}

/// Origin of the memory, which determines how it is shared and freed.
enum Kind {
    /// Virtual memory: its handle, and the descriptor from which the memory was imported, if a peer
    /// or the caller passed one.
    Virtual { handle: Physical, descriptor: Option<OwnedFd> },
    /// Plain memory that this process allocated.
    Plain,
    /// Plain memory of another process, opened by its IPC handle.
    Legacy,
    /// Memory of the caller, which dropping the region does not free.
    Foreign,
}

impl MemoryDriver for Device {
    /// Allocates virtual memory if the device supports it and can share it with the ranks that need
    /// it, else plain memory.
    fn allocate(self: Arc<Self>, bytes: u64, wanted: Wanted) -> Result<Arc<dyn Region>> {
        const REFUSED: [u32; 2] = [api::NOT_PERMITTED, api::NOT_SUPPORTED];
        let Wanted { purpose, exported, legacy } = wanted;
        let can = self.virtual_memory && (self.descriptors || !exported);
        if purpose != Purpose::DeviceWords && can && !legacy {
            // The memory is exportable whenever the device supports that, even for ranks that are
            // threads: a collectives library that registers the memory as a window exports it
            // itself.
            match CudaRegion::create(&self, bytes, self.descriptors) {
                Err(Error::Device { code, ref name, .. }) if REFUSED.contains(&code) => {
                    tracing::warn!(%name, "no virtual memory: plain memory is used instead");
                }
                outcome => return Ok(Arc::new(outcome?)),
            }
        }
        Ok(Arc::new(CudaRegion::plain(&self, bytes)?))
    }

    fn import(self: Arc<Self>, descriptor: OwnedFd, bytes: u64) -> Result<Arc<dyn Region>> {
        if !(self.virtual_memory && self.descriptors) {
            let why = "the device has no virtual memory with descriptors";
            return Err(unsupported("import of a descriptor", why));
        }
        Ok(Arc::new(CudaRegion::import(&self, descriptor, bytes)?))
    }

    fn open(self: Arc<Self>, handle: &[u8], bytes: u64) -> Result<Arc<dyn Region>> {
        let Ok(handle) = <[u8; 64]>::try_from(handle) else {
            let expected = "64 bytes, as CUDA's are";
            return Err(Error::invalid("handle of memory", format!("{handle:?}"), expected));
        };
        Ok(Arc::new(CudaRegion::open_legacy(&self, handle, bytes)?))
    }

    fn foreign(self: Arc<Self>, address: u64, bytes: u64) -> Result<Arc<dyn Region>> {
        Ok(Arc::new(CudaRegion::foreign(&self, address, bytes)?))
    }

    fn can_access(&self, ordinal: i32) -> Result<bool> {
        self.can_access_memory_of(&*Device::get(ordinal as usize)?)
    }

    fn enable_access(&self, ordinal: i32) -> Result<()> {
        self.access_memory_of(&*Device::get(ordinal as usize)?)
    }
}

impl Region for CudaRegion {
    fn address(&self) -> u64 {
        self.address
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn ordinal(&self) -> i32 {
        self.device.ordinal
    }

    fn handle(&self) -> Result<Vec<u8>> {
        match self.kind {
            Kind::Virtual { .. } => Ok(Vec::new()),
            Kind::Plain => Ok(self.legacy_handle()?.to_vec()),
            Kind::Legacy | Kind::Foreign => {
                let why = "this process did not allocate the memory";
                Err(unsupported("sharing memory with other processes", why))
            }
        }
    }

    fn is_opened(&self) -> bool {
        matches!(self.kind, Kind::Legacy)
    }

    fn descriptor(&self) -> Result<Option<OwnedFd>> {
        match &self.kind {
            Kind::Virtual { handle, descriptor: None } => self.export(*handle).map(Some),
            Kind::Virtual { descriptor: Some(known), .. } => duplicate(known.as_fd()).map(Some),
            _ => Ok(None),
        }
    }

    fn grant(&self, ordinals: &[i32]) -> Result<()> {
        match self.kind {
            Kind::Virtual { .. } => self.map_for(ordinals),
            _ => Ok(()),
        }
    }

    fn asks_for_access(&self) -> bool {
        !matches!(self.kind, Kind::Virtual { .. })
    }
}

impl CudaRegion {
    /// Allocates virtual memory of this device, not zeroed. If `exported`, other processes can map
    /// it.
    fn create(device: &Arc<Device>, bytes: u64, exported: bool) -> Result<CudaRegion> {
        let _bound = device.bind_relaxed()?;
        let driver = device.driver;
        let properties = properties(device, exported);
        let size = round(bytes, granularity(device, &properties)?)?;
        let mut handle = 0;
        // SAFETY: `handle` receives the answer, `properties` is complete, the flags are zero.
        let code = unsafe { (driver.cuMemCreate)(&mut handle, size, &properties, 0) };
        check_for("cuMemCreate", || format!("of {size} bytes"), code)?;
        CudaRegion::map(device, handle, size as u64, None)
    }

    /// Maps virtual memory received as a descriptor, at least `bytes` bytes.
    fn import(device: &Arc<Device>, descriptor: OwnedFd, bytes: u64) -> Result<CudaRegion> {
        let _bound = device.bind_relaxed()?;
        let driver = device.driver;
        let size = round(bytes, granularity(device, &properties(device, true))?)?;
        let mut handle = 0;
        let number = descriptor.as_raw_fd() as usize as *mut c_void;
        // SAFETY: `handle` receives the answer; for this handle type the pointer argument is the
        // descriptor's number, and the driver duplicates the descriptor.
        let code = unsafe {
            (driver.cuMemImportFromShareableHandle)(&mut handle, number, api::HANDLE_DESCRIPTOR)
        };
        check("cuMemImportFromShareableHandle", code)?;
        CudaRegion::map(device, handle, size as u64, Some(descriptor))
    }

    /// Maps a handle for this device; releases the handle on failure.
    fn map(
        device: &Arc<Device>,
        handle: Physical,
        size: u64,
        descriptor: Option<OwnedFd>,
    ) -> Result<CudaRegion> {
        let driver = device.driver;
        let mut address = 0;
        // SAFETY: `address` receives the answer; alignment, requested address and flags are zero,
        // so the driver chooses.
        let code = unsafe { (driver.cuMemAddressReserve)(&mut address, size as usize, 0, 0, 0) };
        let reserved = check_for("cuMemAddressReserve", || format!("of {size} bytes"), code);
        let mapped = reserved.and_then(|()| {
            // SAFETY: the range was reserved just now with this size; nothing is mapped in it.
            let code = unsafe { (driver.cuMemMap)(address, size as usize, 0, handle, 0) };
            check_for("cuMemMap", || format!("of {size} bytes"), code).inspect_err(|_| {
                // SAFETY: the range was just reserved with this size and is not used elsewhere.
                let code = unsafe { (driver.cuMemAddressFree)(address, size as usize) };
                warn(check("cuMemAddressFree", code));
            })
        });
        if let Err(error) = mapped {
            // SAFETY: this function owns the handle, and nothing is mapped from it.
            warn(check("cuMemRelease", unsafe { (driver.cuMemRelease)(handle) }));
            return Err(error);
        }
        let kind = Kind::Virtual { handle, descriptor };
        // From here on, dropping `region` unmaps the memory and releases the handle.
        let region = CudaRegion { device: device.clone(), address, bytes: size, kind };
        region.map_for(&[device.ordinal])?;
        Ok(region)
    }

    /// Allocates plain memory of this device, not zeroed.
    fn plain(device: &Arc<Device>, bytes: u64) -> Result<CudaRegion> {
        let _bound = device.bind_relaxed()?;
        let size = round(bytes, PLAIN_BLOCK)?;
        let mut address = 0;
        // SAFETY: `address` receives the answer.
        let code = unsafe { (device.driver.cuMemAlloc_v2)(&mut address, size) };
        check_for("cuMemAlloc", || format!("of {size} bytes"), code)?;
        Ok(CudaRegion { device: device.clone(), address, bytes: size as u64, kind: Kind::Plain })
    }

    /// Opens plain memory of another process by its IPC handle.
    fn open_legacy(device: &Arc<Device>, handle: [u8; 64], bytes: u64) -> Result<CudaRegion> {
        const LAZY_PEER_ACCESS: u32 = 1;
        let _bound = device.bind_relaxed()?;
        let handle = LegacyHandle(handle);
        let mut address = 0;
        // SAFETY: `address` receives the answer; the driver of the peer that owns the memory made
        // `handle`.
        let code = unsafe {
            (device.driver.cuIpcOpenMemHandle_v2)(&mut address, handle, LAZY_PEER_ACCESS)
        };
        check("cuIpcOpenMemHandle", code)?;
        Ok(CudaRegion { device: device.clone(), address, bytes, kind: Kind::Legacy })
    }

    /// Makes a region of the caller's memory; fails if the memory does not belong to this device.
    fn foreign(device: &Arc<Device>, address: u64, bytes: u64) -> Result<CudaRegion> {
        let _bound = device.bind_relaxed()?;
        let driver = device.driver;
        let attribute = |attribute| {
            let mut value = 0_i32;
            let to = (&raw mut value).cast::<c_void>();
            // SAFETY: the values of all attributes that are queried below are 4-byte integers.
            let code = unsafe { (driver.cuPointerGetAttribute)(to, attribute, address) };
            (code == api::SUCCESS).then_some(value)
        };
        let of_a_device = attribute(api::MEMORY_TYPE) == Some(api::OF_A_DEVICE as i32);
        let range = || {
            let (mut base, mut size) = (0, 0);
            // SAFETY: `base` and `size` receive the answers.
            let code = unsafe { (driver.cuMemGetAddressRange_v2)(&mut base, &mut size, address) };
            check("cuMemGetAddressRange", code)?;
            Ok((base, size as u64))
        };
        let owner = || attribute(api::MEMORY_DEVICE);
        check_foreign((address, bytes), device.ordinal, of_a_device, owner, range)?;
        Ok(CudaRegion { device: device.clone(), address, bytes, kind: Kind::Foreign })
    }

    /// Maps virtual memory, readable and writable, for the devices `ordinals` of this process.
    fn map_for(&self, ordinals: &[i32]) -> Result<()> {
        let _bound = self.device.bind_relaxed()?;
        let access = |&id: &i32| Access { location: location(id), flags: api::ACCESS_READ_WRITE };
        let access: Vec<_> = ordinals.iter().map(access).collect();
        // SAFETY: all bytes of the region are mapped, and the list has the length that is passed.
        let code = unsafe {
            (self.device.driver.cuMemSetAccess)(
                self.address,
                self.bytes as usize,
                access.as_ptr(),
                access.len(),
            )
        };
        check_for("cuMemSetAccess", || format!("for devices {ordinals:?}"), code)
    }

    /// Exports the physical memory as a new descriptor, which a peer can import.
    fn export(&self, handle: Physical) -> Result<OwnedFd> {
        let _bound = self.device.bind_relaxed()?;
        let mut number: RawFd = -1;
        let to = (&raw mut number).cast::<c_void>();
        // SAFETY: for this handle type the driver writes a descriptor's number, which fits
        // `number`.
        let code = unsafe {
            (self.device.driver.cuMemExportToShareableHandle)(to, handle, api::HANDLE_DESCRIPTOR, 0)
        };
        check("cuMemExportToShareableHandle", code)?;
        // SAFETY: the driver opened the descriptor for the caller, so nothing else closes it.
        Ok(unsafe { OwnedFd::from_raw_fd(number) })
    }

    /// IPC handle by which another process opens this plain memory.
    fn legacy_handle(&self) -> Result<[u8; 64]> {
        let _bound = self.device.bind_relaxed()?;
        let mut handle = LegacyHandle([0; 64]);
        // SAFETY: `handle` receives the answer; the memory is plain memory that this process
        // allocated.
        let code = unsafe { (self.device.driver.cuIpcGetMemHandle)(&mut handle, self.address) };
        check("cuIpcGetMemHandle", code)?;
        Ok(handle.0)
    }
}

impl Drop for CudaRegion {
    fn drop(&mut self) {
        let bound = self.device.bind_relaxed();
        if let Err(error) = bound {
            return warn(Err(error));
        }
        let driver = self.device.driver;
        match &self.kind {
            Kind::Virtual { handle, .. } => {
                let size = self.bytes as usize;
                // SAFETY: `map` mapped the whole range, and every user of its addresses holds the
                // region, so no user is left.
                warn(check("cuMemUnmap", unsafe { (driver.cuMemUnmap)(self.address, size) }));
                // SAFETY: the range was reserved by `map` with this size.
                let code = unsafe { (driver.cuMemAddressFree)(self.address, size) };
                warn(check("cuMemAddressFree", code));
                // SAFETY: the region owns `handle`, and its memory is unmapped.
                warn(check("cuMemRelease", unsafe { (driver.cuMemRelease)(*handle) }));
            }
            Kind::Plain => {
                // SAFETY: this process allocated the memory, and every user of its addresses holds
                // the region, so no user is left here. After a close no process has it open; after a
                // drop without close one may, for which the vendor promises nothing
                // (docs/limits.md).
                warn(check("cuMemFree", unsafe { (driver.cuMemFree_v2)(self.address) }));
            }
            Kind::Legacy => {
                // SAFETY: `open_legacy` opened the address, and no user is left.
                let code = unsafe { (driver.cuIpcCloseMemHandle)(self.address) };
                warn(check("cuIpcCloseMemHandle", code));
            }
            Kind::Foreign => {}
        }
    }
}

fn location(ordinal: i32) -> Location {
    Location { kind: api::LOCATION_DEVICE, id: ordinal }
}

fn properties(device: &Device, exported: bool) -> Properties {
    Properties {
        kind: api::ALLOCATION_PINNED,
        handles: if exported { api::HANDLE_DESCRIPTOR } else { 0 },
        location: location(device.ordinal),
        meta: std::ptr::null_mut(),
        flags: [0; 8],
    }
}

fn granularity(device: &Device, properties: &Properties) -> Result<usize> {
    let mut granularity = 0;
    // SAFETY: `granularity` receives the answer, and `properties` is complete.
    let code = unsafe {
        (device.driver.cuMemGetAllocationGranularity)(
            &mut granularity,
            properties,
            api::GRANULARITY_MINIMUM,
        )
    };
    check("cuMemGetAllocationGranularity", code)?;
    Ok(granularity)
}
