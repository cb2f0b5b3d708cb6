//! HIP device memory: plain memory for data, and uncached or fine-grained memory for words that
//! peers poll. Memory is shared by `hipIpc` handles between processes and by peer access between
//! threads.
//!
//! The virtual memory API is not used, because it is not needed. When it was tried on a functional
//! simulator of MI300X, memory could be created, mapped and exported, but access to it was refused.

use std::ffi::c_void;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::api::{self, Address, check, check_for};
use super::device::HipDevice;
use crate::backend::Purpose;
use crate::backend::gpu::{
    Driver, MemoryDriver, Origin, PLAIN_BLOCK, PlainRegion, Region, Wanted, check_foreign,
    memory_calls, round,
};
use crate::env;
use crate::error::{Error, Result};
use crate::util::unsupported;

/// Caching of device memory, from the fastest to the most coherent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Caching {
    /// Memory from `hipMalloc`, coarse-grained: each device caches the memory that it accesses, and
    /// sees writes of other devices only after an acquire.
    Plain,
    /// Fine-grained memory: writes of one device are visible to others while kernels run.
    Fine,
    /// Uncached memory: accesses bypass all caches of the device.
    Uncached,
}

impl Caching {
    const NAMES: [(&str, Caching); 3] =
        [("plain", Caching::Plain), ("fine", Caching::Fine), ("uncached", Caching::Uncached)];

    /// Caching of memory for `purpose`, from the environment variables `IRIS_HIP_*`; by default
    /// uncached for words that peers poll, and plain for all other memory.
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

impl MemoryDriver for HipDevice {
    fn allocate(self: Arc<Self>, bytes: u64, wanted: Wanted) -> Result<Arc<dyn Region>> {
        self.check_usable()?;
        let caching = Caching::of(wanted.purpose)?;
        let _bound = self.bind_relaxed()?;
        let bytes = round(bytes, PLAIN_BLOCK)?;
        let address = self.take(bytes, caching)?;
        Ok(PlainRegion::of(self.clone(), (address, bytes as u64), Origin::Own))
    }

    fn import(self: Arc<Self>, _: OwnedFd, _: u64) -> Result<Arc<dyn Region>> {
        let why = "memory of this backend goes by handles of hipIpc";
        Err(unsupported("import of a descriptor", why))
    }

    memory_calls! {
        open("HIP", |this: &HipDevice| this.runtime.release().lazy_peer_access): hipIpcOpenMemHandle,
        close: hipIpcCloseMemHandle,
        free: hipFree,
        handle_of: hipIpcGetMemHandle,
        check_foreign(|this: &HipDevice| this.runtime.release().of_a_device):
            hipPointerGetAttribute, hipMemGetAddressRange,
    }

    fn can_access(&self, ordinal: i32) -> Result<bool> {
        self.can_access_memory_of(ordinal)
    }

    fn enable_access(&self, ordinal: i32) -> Result<()> {
        self.access_memory_of(ordinal)
    }
}

impl HipDevice {
    /// Allocates memory. Falls back from uncached to fine-grained memory if the release or the
    /// device lacks uncached memory; there is no fallback from fine-grained to plain memory,
    /// because peers could not poll words in it.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_that_peers_poll_are_uncached_if_nothing_else_is_said() {
        assert_eq!(Caching::from_env("IRIS_NOT_SET", Caching::Fine).unwrap(), Caching::Fine);
        assert_eq!(Caching::of(Purpose::DeviceWords).unwrap(), Caching::Plain);
        // The test reads the variable `PATH` because it is set and its value is not one of the
        // three names.
        let error = Caching::from_env("PATH", Caching::Plain).unwrap_err().to_string();
        assert!(error.contains("plain, fine or uncached"), "{error}");
    }
}
