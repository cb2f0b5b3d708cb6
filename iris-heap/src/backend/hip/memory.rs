//! Device memory: plain memory, and memory that no cache keeps from other devices for the words that they
//! poll; shared by the handles of `hipIpc` between processes, by peer access between threads.
//!
//! The virtual memory API is not used: nothing here needs it, and on the functional simulator of MI300X
//! that this was tried on, access to such memory was refused after it had been made, mapped and exported.

use std::ffi::c_void;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::api::{self, Address, Handle, check, check_for};
use super::device::Device;
use crate::backend::Purpose;
use crate::backend::gpu::{MemoryDriver, Region, Wanted, check_foreign, warn};
use crate::env;
use crate::error::{Error, Result};
use crate::util::unsupported;

/// Memory is taken in multiples of this: the runtime shares its blocks of this size between small
/// allocations, and a handle of a part would give a peer the whole.
const BLOCK: u64 = 2 << 20;

/// What caches do with memory of a device, from what is fastest to what is surest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Caching {
    /// As `hipMalloc` gives it, which is coarse-grained: each device caches what it accesses, and sees what
    /// others wrote when it acquires it.
    Plain,
    /// Fine-grained: what one device writes others see while kernels run.
    Fine,
    /// No cache has it.
    Uncached,
}

impl Caching {
    const NAMES: [(&str, Caching); 3] =
        [("plain", Caching::Plain), ("fine", Caching::Fine), ("uncached", Caching::Uncached)];

    /// Of memory for this, as the user's variables have it, or else as it is best known: words that peers
    /// poll are uncached, the rest is plain.
    fn of(purpose: Purpose) -> Result<Caching> {
        match purpose {
            Purpose::Data => Caching::told("IRIS_HIP_DATA", Caching::Plain),
            Purpose::Signal => Caching::told("IRIS_HIP_SIGNAL", Caching::Uncached),
            Purpose::DeviceWords => Ok(Caching::Plain),
        }
    }

    fn told(variable: &str, default: Caching) -> Result<Caching> {
        let Some(text) = env::read(variable)? else { return Ok(default) };
        let named = Caching::NAMES.iter().find(|(name, _)| *name == text);
        let expected = "plain, fine or uncached";
        named.map(|&(_, caching)| caching).ok_or_else(|| env::wrong(variable, &text, expected))
    }
}

/// Memory that is given back when this is dropped.
struct HipRegion {
    device: Arc<Device>,
    address: Address,
    bytes: u64,
    kind: Kind,
}

/// Where memory comes from, and so how it is given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Own,
    /// Of another process.
    Opened,
    /// The caller's.
    Foreign,
}

impl MemoryDriver for Device {
    fn allocate(self: Arc<Self>, bytes: u64, wanted: Wanted) -> Result<Arc<dyn Region>> {
        self.check_usable()?;
        let caching = Caching::of(wanted.purpose)?;
        let _bound = self.bind_apart()?;
        let bytes = round(bytes)?;
        let address = self.take(bytes, caching)?;
        Ok(Arc::new(HipRegion { device: self, address, bytes: bytes as u64, kind: Kind::Own }))
    }

    fn import(self: Arc<Self>, _: OwnedFd, _: u64) -> Result<Arc<dyn Region>> {
        let why = "memory of this backend goes by handles of hipIpc";
        Err(unsupported("import of a descriptor", why))
    }

    fn open(self: Arc<Self>, handle: &[u8], bytes: u64) -> Result<Arc<dyn Region>> {
        let Ok(handle) = <[u8; 64]>::try_from(handle) else {
            let expected = "64 bytes, as HIP's are";
            return Err(Error::invalid("handle of memory", format!("{handle:?}"), expected));
        };
        let _bound = self.bind_apart()?;
        let flags = self.runtime.release().lazy_peer_access;
        let mut address = 0;
        // SAFETY: `address` is where the answer goes; the handle is one that a peer was given.
        let code =
            unsafe { (self.runtime.api.hipIpcOpenMemHandle)(&mut address, Handle(handle), flags) };
        check("hipIpcOpenMemHandle", code)?;
        Ok(Arc::new(HipRegion { device: self, address, bytes, kind: Kind::Opened }))
    }

    fn foreign(self: Arc<Self>, address: u64, bytes: u64) -> Result<Arc<dyn Region>> {
        let _bound = self.bind_apart()?;
        let api = &self.runtime.api;
        let attribute = |attribute| {
            let mut value = 0_i32;
            let to = (&raw mut value).cast::<c_void>();
            // SAFETY: of the attributes asked below the answer is one number of 4 bytes.
            let code = unsafe { (api.hipPointerGetAttribute)(to, attribute, address) };
            (code == api::SUCCESS).then_some(value)
        };
        let kind = attribute(api::MEMORY_TYPE);
        let of_a_device = kind == Some(self.runtime.release().of_a_device as i32);
        if !of_a_device {
            self.forget_error();
        }
        let range = || {
            let (mut base, mut size) = (0, 0);
            // SAFETY: the two are where the answers go.
            let code = unsafe { (api.hipMemGetAddressRange)(&mut base, &mut size, address) };
            check("hipMemGetAddressRange", code)?;
            Ok((base, size as u64))
        };
        let owner = || attribute(api::MEMORY_DEVICE);
        check_foreign((address, bytes), self.ordinal, of_a_device, owner, range)?;
        Ok(Arc::new(HipRegion { device: self.clone(), address, bytes, kind: Kind::Foreign }))
    }

    fn can_access(&self, ordinal: i32) -> Result<bool> {
        self.can_access_memory_of(ordinal)
    }

    fn enable_access(&self, ordinal: i32) -> Result<()> {
        self.access_memory_of(ordinal)
    }
}

impl Device {
    /// New memory. Where the release or the device has none that is uncached, fine-grained memory is the
    /// next best; there is nothing below that for words that peers poll.
    fn take(&self, bytes: usize, caching: Caching) -> Result<Address> {
        let api = &self.runtime.api;
        let with = |flags: u32, what: &str| {
            let mut address = 0;
            // SAFETY: `address` is where the answer goes.
            let code = unsafe { (api.hipExtMallocWithFlags)(&mut address, bytes, flags) };
            let what = || format!("of {bytes} bytes of {what} memory");
            check_for("hipExtMallocWithFlags", what, code).map(|()| address)
        };
        match caching {
            Caching::Plain => {
                let mut address = 0;
                // SAFETY: as above.
                let code = unsafe { (api.hipMalloc)(&mut address, bytes) };
                check_for("hipMalloc", || format!("of {bytes} bytes"), code)?;
                Ok(address)
            }
            Caching::Uncached if self.runtime.has_uncached() => {
                const REFUSED: [u32; 2] = [api::INVALID_VALUE, api::NOT_SUPPORTED];
                match with(api::UNCACHED, "uncached") {
                    Err(Error::Device { code, name, .. }) if REFUSED.contains(&code) => {
                        self.forget_error();
                        tracing::debug!(%name, "no uncached memory: fine-grained memory is used instead");
                        with(api::FINE_GRAINED, "fine-grained")
                    }
                    outcome => outcome,
                }
            }
            Caching::Uncached | Caching::Fine => with(api::FINE_GRAINED, "fine-grained"),
        }
    }
}

impl Region for HipRegion {
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
        if self.kind != Kind::Own {
            let why = "it is not this process's own allocation";
            return Err(unsupported("sharing memory with other processes", why));
        }
        let _bound = self.device.bind_apart()?;
        let mut handle = Handle([0; 64]);
        // SAFETY: `handle` is where the answer goes; the memory is this process's.
        let code =
            unsafe { (self.device.runtime.api.hipIpcGetMemHandle)(&mut handle, self.address) };
        check("hipIpcGetMemHandle", code)?;
        Ok(handle.0.to_vec())
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

impl Drop for HipRegion {
    fn drop(&mut self) {
        let bound = self.device.bind_apart();
        if let Err(error) = bound {
            return warn(Err(error));
        }
        let api = &self.device.runtime.api;
        match self.kind {
            Kind::Own => {
                // SAFETY: the memory was allocated by `take`, and whoever uses its addresses holds the
                // region, so nobody is left.
                warn(check("hipFree", unsafe { (api.hipFree)(self.address) }));
            }
            Kind::Opened => {
                // SAFETY: the address was opened by `open`, and nobody uses it any more.
                let code = unsafe { (api.hipIpcCloseMemHandle)(self.address) };
                warn(check("hipIpcCloseMemHandle", code));
            }
            Kind::Foreign => {}
        }
    }
}

/// Whole blocks.
fn round(bytes: u64) -> Result<usize> {
    let size = bytes.max(1).checked_next_multiple_of(BLOCK);
    size.filter(|&s| s <= isize::MAX as u64).map(|s| s as usize).ok_or_else(|| {
        Error::invalid("size of a segment", bytes, format!("at most {} bytes", isize::MAX))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_whole_blocks() {
        assert_eq!(round(0).unwrap(), 2 << 20);
        assert_eq!(round((2 << 20) + 1).unwrap(), 4 << 20);
        assert!(round(u64::MAX - 5).is_err() && round(1 << 63).is_err());
    }

    #[test]
    fn words_that_peers_poll_are_uncached_if_nothing_else_is_said() {
        assert_eq!(Caching::told("IRIS_NOT_SET", Caching::Fine).unwrap(), Caching::Fine);
        assert_eq!(Caching::of(Purpose::DeviceWords).unwrap(), Caching::Plain);
        // The path is set, and is none of the three.
        let error = Caching::told("PATH", Caching::Plain).unwrap_err().to_string();
        assert!(error.contains("plain, fine or uncached"), "{error}");
    }
}
