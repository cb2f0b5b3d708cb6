//! CUDA device memory: virtual memory that peers map, plain memory as the fallback, and memory of
//! the caller.

use std::ffi::c_void;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use super::api::{self, Access, Address, Location, Physical, Properties};
use super::api::{check, check_for};
use super::device::CudaDevice;
use crate::backend::Purpose;
use crate::backend::gpu::{
    Driver, MemoryDriver, Origin, PLAIN_BLOCK, PlainRegion, Region, Wanted, check_foreign,
    memory_calls, round, warn,
};
use crate::error::{Error, Result};
use crate::segment::duplicate;
use crate::util::unsupported;

/// Flag for opening an IPC handle (`CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`): peer access is enabled
/// when it is needed.
const LAZY_PEER_ACCESS: u32 = 1;

/// Virtual memory, unmapped on drop. Other processes map it by descriptors.
struct VirtualRegion {
    device: Arc<CudaDevice>,
    address: Address,
    bytes: u64,
    handle: Physical,
    /// Descriptor from which the memory was imported; `None` for memory that this process
    /// allocated.
    descriptor: Option<OwnedFd>,
}

impl MemoryDriver for CudaDevice {
    /// Allocates virtual memory if the device supports it and can share it with all ranks that must
    /// map it; otherwise plain memory.
    fn allocate(self: Arc<Self>, bytes: u64, wanted: Wanted) -> Result<Arc<dyn Region>> {
        const REFUSED: [u32; 2] = [api::NOT_PERMITTED, api::NOT_SUPPORTED];
        let Wanted { purpose, exported, legacy } = wanted;
        let can = self.virtual_memory && (self.descriptors || !exported);
        if purpose != Purpose::DeviceWords && can && !legacy {
            // The memory is exportable whenever the device supports that, even if the ranks are
            // threads, because a collectives library such as NCCL exports memory that it registers
            // as a window.
            match VirtualRegion::create(&self, bytes, self.descriptors) {
                Err(Error::Device { code, ref name, .. }) if REFUSED.contains(&code) => {
                    tracing::warn!(%name, "no virtual memory: plain memory is used instead");
                }
                outcome => return Ok(Arc::new(outcome?)),
            }
        }
        let _bound = self.bind_relaxed()?;
        let size = round(bytes, PLAIN_BLOCK)?;
        let mut address = 0;
        // SAFETY: `address` receives the answer.
        let code = unsafe { (self.driver.cuMemAlloc_v2)(&mut address, size) };
        check_for("cuMemAlloc", || format!("of {size} bytes"), code)?;
        let memory = (address, size as u64);
        Ok(PlainRegion::of(self.clone(), memory, Origin::Own))
    }

    fn import(self: Arc<Self>, descriptor: OwnedFd, bytes: u64) -> Result<Arc<dyn Region>> {
        if !(self.virtual_memory && self.descriptors) {
            let why = "the device has no virtual memory with descriptors";
            return Err(unsupported("import of a descriptor", why));
        }
        Ok(Arc::new(VirtualRegion::import(&self, descriptor, bytes)?))
    }

    memory_calls! {
        open("CUDA", |_| LAZY_PEER_ACCESS): cuIpcOpenMemHandle_v2,
        close: cuIpcCloseMemHandle,
        free: cuMemFree_v2,
        handle_of: cuIpcGetMemHandle,
        check_foreign(|_| api::OF_A_DEVICE): cuPointerGetAttribute, cuMemGetAddressRange_v2,
    }

    fn can_access(&self, ordinal: i32) -> Result<bool> {
        self.can_access_memory_of(&*CudaDevice::get(ordinal as usize)?)
    }

    fn enable_access(&self, ordinal: i32) -> Result<()> {
        self.access_memory_of(&*CudaDevice::get(ordinal as usize)?)
    }
}

impl Region for VirtualRegion {
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
        Ok(Vec::new())
    }

    fn descriptor(&self) -> Result<Option<OwnedFd>> {
        match &self.descriptor {
            Some(known) => duplicate(known.as_fd()).map(Some),
            None => self.export().map(Some),
        }
    }

    fn grant(&self, ordinals: &[i32]) -> Result<()> {
        self.map_for(ordinals)
    }

    fn asks_for_access(&self) -> bool {
        false
    }
}

impl VirtualRegion {
    /// Allocates virtual memory of this device, not zeroed. If `exported`, other processes can map
    /// it.
    fn create(device: &Arc<CudaDevice>, bytes: u64, exported: bool) -> Result<VirtualRegion> {
        let _bound = device.bind_relaxed()?;
        let driver = device.driver;
        let properties = properties(device, exported);
        let size = round(bytes, granularity(device, &properties)?)?;
        let mut handle = 0;
        // SAFETY: `handle` receives the answer, `properties` is complete, the flags are zero.
        let code = unsafe { (driver.cuMemCreate)(&mut handle, size, &properties, 0) };
        check_for("cuMemCreate", || format!("of {size} bytes"), code)?;
        VirtualRegion::map(device, handle, size as u64, None)
    }

    /// Maps virtual memory received as a descriptor, at least `bytes` bytes.
    fn import(device: &Arc<CudaDevice>, descriptor: OwnedFd, bytes: u64) -> Result<VirtualRegion> {
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
        VirtualRegion::map(device, handle, size as u64, Some(descriptor))
    }

    /// Maps the physical memory `handle` for this device; on failure releases the handle.
    fn map(
        device: &Arc<CudaDevice>,
        handle: Physical,
        size: u64,
        descriptor: Option<OwnedFd>,
    ) -> Result<VirtualRegion> {
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
        // From here on, dropping `region` unmaps the memory and releases the handle.
        let device = device.clone();
        let region = VirtualRegion { device, address, bytes: size, handle, descriptor };
        region.map_for(&[region.device.ordinal])?;
        Ok(region)
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
    fn export(&self) -> Result<OwnedFd> {
        let _bound = self.device.bind_relaxed()?;
        let mut number: RawFd = -1;
        let to = (&raw mut number).cast::<c_void>();
        // SAFETY: for this handle type the driver writes a descriptor's number, which fits
        // `number`.
        let code = unsafe {
            (self.device.driver.cuMemExportToShareableHandle)(
                to,
                self.handle,
                api::HANDLE_DESCRIPTOR,
                0,
            )
        };
        check("cuMemExportToShareableHandle", code)?;
        // SAFETY: the driver opened the descriptor for the caller, so nothing else closes it.
        Ok(unsafe { OwnedFd::from_raw_fd(number) })
    }
}

impl Drop for VirtualRegion {
    fn drop(&mut self) {
        let bound = self.device.bind_relaxed();
        if let Err(error) = bound {
            return warn(Err(error));
        }
        let driver = self.device.driver;
        let size = self.bytes as usize;
        // SAFETY: `map` mapped the whole range, and every user of its addresses holds the region, so
        // no user is left.
        warn(check("cuMemUnmap", unsafe { (driver.cuMemUnmap)(self.address, size) }));
        // SAFETY: the range was reserved by `map` with this size.
        warn(check("cuMemAddressFree", unsafe { (driver.cuMemAddressFree)(self.address, size) }));
        // SAFETY: the region owns `handle`, and its memory is unmapped.
        warn(check("cuMemRelease", unsafe { (driver.cuMemRelease)(self.handle) }));
    }
}

fn location(ordinal: i32) -> Location {
    Location { kind: api::LOCATION_DEVICE, id: ordinal }
}

fn properties(device: &CudaDevice, exported: bool) -> Properties {
    Properties {
        kind: api::ALLOCATION_PINNED,
        handles: if exported { api::HANDLE_DESCRIPTOR } else { 0 },
        location: location(device.ordinal),
        meta: std::ptr::null_mut(),
        flags: [0; 8],
    }
}

fn granularity(device: &CudaDevice, properties: &Properties) -> Result<usize> {
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
