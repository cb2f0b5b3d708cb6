//! HIP device memory: plain memory for data, and uncached or fine-grained memory for words that
//! peers poll. Shared by `hipIpc` handles between processes and by peer access between threads.
//!
//! The virtual memory API is not used, because it is not needed. When it was tried on a functional
//! simulator of MI300X, memory could be created, mapped and exported, but access to it was refused.

use std::ffi::c_void;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::api::{self, Address, Handle, check, check_for};
use super::device::Device;
use crate::backend::Purpose;
use crate::backend::gpu::{
    Driver, MemoryDriver, PLAIN_BLOCK, Region, Wanted, check_foreign, round, warn,
};
use crate::env;
use crate::error::{Error, Result};
use crate::util::unsupported;

/// Caching of device memory, from the fastest to the most coherent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Caching {
    /// Memory from `hipMalloc`, coarse-grained: each device caches what it accesses, and sees
    /// writes of others only after an acquire.
    Plain,
    /// Fine-grained memory: writes of one device are visible to others while kernels run.
    Fine,
    /// Uncached memory: accesses bypass all caches of the device.
    Uncached,
}

impl Caching {
    const NAMES: [(&str, Caching); 3] =
        [("plain", Caching::Plain), ("fine", Caching::Fine), ("uncached", Caching::Uncached)];

    /// Caching of memory for `purpose`: as the environment variables `IRIS_HIP_*` say, else
    /// uncached for words that peers poll and plain for all other memory.
    fn of(purpose: Purpose) -> Result<Caching> {
        match purpose {
            Purpose::Data => Caching::from_env("IRIS_HIP_DATA", Caching::Plain),
            Purpose::Signal => Caching::from_env("IRIS_HIP_SIGNAL", Caching::Uncached),
            Purpose::DeviceWords => Ok(Caching::Plain),
        }
    }

    fn from_env(variable: &str, default: Caching) -> Result<Caching> {
        let Some(text) = env::read(variable)? else { return Ok(default) };
        let named = Caching::NAMES.iter().find(|(name, _)| *name == text);
        let expected = "plain, fine or uncached";
        named.map(|&(_, caching)| caching).ok_or_else(|| env::wrong(variable, &text, expected))
    }
}

/// Region of device memory, freed on drop.
struct HipRegion {
    device: Arc<Device>,
    address: Address,
    bytes: u64,
    kind: Kind,
}

/// Origin of the memory, which determines how it is freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Own,
    /// Memory of another process, opened by its IPC handle.
    Opened,
    /// Memory of the caller, which dropping the region does not free.
    Foreign,
}

impl MemoryDriver for Device {
    fn allocate(self: Arc<Self>, bytes: u64, wanted: Wanted) -> Result<Arc<dyn Region>> {
        self.check_usable()?;
        let caching = Caching::of(wanted.purpose)?;
        let _bound = self.bind_relaxed()?;
        let bytes = round(bytes, PLAIN_BLOCK)?;
        let address = self.take(bytes, caching)?;
        Ok(Arc::new(HipRegion {
            device: self.clone(),
            address,
            bytes: bytes as u64,
            kind: Kind::Own,
        }))
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
        let _bound = self.bind_relaxed()?;
        let flags = self.runtime.release().lazy_peer_access;
        let mut address = 0;
        // SAFETY: `address` receives the answer; the runtime of the peer that owns the memory made
        // `handle`.
        let code = unsafe { (self.api().hipIpcOpenMemHandle)(&mut address, Handle(handle), flags) };
        check("hipIpcOpenMemHandle", code)?;
        Ok(Arc::new(HipRegion { device: self.clone(), address, bytes, kind: Kind::Opened }))
    }

    fn foreign(self: Arc<Self>, address: u64, bytes: u64) -> Result<Arc<dyn Region>> {
        let _bound = self.bind_relaxed()?;
        let api = self.api();
        let attribute = |attribute| {
            let mut value = 0_i32;
            let to = (&raw mut value).cast::<c_void>();
            // SAFETY: the values of all attributes that are queried below are 4-byte integers.
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
            // SAFETY: `base` and `size` receive the answers.
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
    /// Allocates memory. Falls back from uncached to fine-grained memory if the release or the
    /// device lacks uncached memory; for words that peers poll there is no further fallback.
    fn take(&self, bytes: usize, caching: Caching) -> Result<Address> {
        let api = self.api();
        let with = |flags: u32, what: &str| {
            let mut address = 0;
            // SAFETY: `address` receives the answer.
            let code = unsafe { (api.hipExtMallocWithFlags)(&mut address, bytes, flags) };
            let what = || format!("of {bytes} bytes of {what} memory");
            check_for("hipExtMallocWithFlags", what, code).map(|()| address)
        };
        match caching {
            Caching::Plain => {
                let mut address = 0;
                // SAFETY: `address` receives the answer.
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
            let why = "this process did not allocate the memory";
            return Err(unsupported("sharing memory with other processes", why));
        }
        let _bound = self.device.bind_relaxed()?;
        let mut handle = Handle([0; 64]);
        // SAFETY: `handle` receives the answer; the memory belongs to this process.
        let code = unsafe { (self.device.api().hipIpcGetMemHandle)(&mut handle, self.address) };
        check("hipIpcGetMemHandle", code)?;
        Ok(handle.0.to_vec())
    }

    fn is_opened(&self) -> bool {
        self.kind == Kind::Opened
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
        let bound = self.device.bind_relaxed();
        if let Err(error) = bound {
            return warn(Err(error));
        }
        let api = self.device.api();
        match self.kind {
            Kind::Own => {
                // SAFETY: this process allocated the memory, and every user of its addresses holds
                // the region, so no user is left here. After a close no process has it open; after a
                // drop without close one may, for which the vendor promises nothing
                // (docs/limits.md).
                warn(check("hipFree", unsafe { (api.hipFree)(self.address) }));
            }
            Kind::Opened => {
                // SAFETY: `open` opened the address, and no user is left.
                let code = unsafe { (api.hipIpcCloseMemHandle)(self.address) };
                warn(check("hipIpcCloseMemHandle", code));
            }
            Kind::Foreign => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_that_peers_poll_are_uncached_if_nothing_else_is_said() {
        assert_eq!(Caching::from_env("IRIS_NOT_SET", Caching::Fine).unwrap(), Caching::Fine);
        assert_eq!(Caching::of(Purpose::DeviceWords).unwrap(), Caching::Plain);
        // The test reads the variable `PATH`, which is set and whose value is none of the three
        // names.
        let error = Caching::from_env("PATH", Caching::Plain).unwrap_err().to_string();
        assert!(error.contains("plain, fine or uncached"), "{error}");
    }
}
