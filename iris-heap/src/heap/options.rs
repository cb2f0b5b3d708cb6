//! Options of a heap: sizes and device.

use crate::abi::SIGNAL_RESERVED;
use crate::backend::BackendKind;
use crate::bytes::Bytes;
use crate::env::MAX_THREADS;
use crate::error::{Error, Result};
use crate::host_memory;
use crate::world::World;

/// Options for opening a heap. All except `threads` and `device` must be equal on all ranks.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct HeapOptions {
    /// Size of each rank's data segment in bytes; default 256 MiB. On the CPU pages are taken at
    /// their first touch, so a large size by itself costs nothing.
    pub data_bytes: u64,
    /// Size of each rank's signal segment in bytes, of which the first 4096 are reserved; default
    /// 256 MiB, at most 16 GiB. Small messages are written into this segment. On the CPU pages are
    /// taken at their first touch.
    pub signal_bytes: u64,
    /// Number of device-local words of each rank; default 262,144, at most 2^32.
    pub device_words: u64,
    /// Kind of device that the heap uses.
    pub backend: BackendKind,
    /// Index of the device among the devices visible to the process; default: the rank's number on
    /// its host, modulo the number of devices. Several ranks may use one device.
    pub device: Option<usize>,
    /// Whether to use plain device memory (`cuMemAlloc`) with legacy IPC handles even if the GPU
    /// supports virtual memory management. Older devices use it as fallback; tests set it.
    pub legacy_memory: bool,
    /// Number of this rank's workgroup threads on the CPU; default: `IRIS_THREADS`, or the number
    /// of cores divided by the number of ranks of this host, at least 1.
    pub threads: Option<usize>,
    /// Names and values of further settings that must be equal on all ranks; see
    /// [`HeapOptions::agreed`].
    pub(super) agreed: Vec<(String, String)>,
}

impl Default for HeapOptions {
    fn default() -> Self {
        HeapOptions {
            data_bytes: 256 << 20,
            signal_bytes: 256 << 20,
            device_words: 1 << 18,
            backend: BackendKind::Cpu,
            device: None,
            legacy_memory: false,
            threads: None,
            agreed: Vec::new(),
        }
    }
}

impl HeapOptions {
    /// Makes options with the defaults.
    pub fn new() -> HeapOptions {
        HeapOptions::default()
    }

    /// Sets the size of each rank's data segment, with its unit: `data(Bytes::gib(2))`. Default:
    /// 256 MiB.
    pub fn data(self, size: Bytes) -> HeapOptions {
        self.data_bytes(size.get())
    }

    /// Sets the size of each rank's data segment in bytes. Default: 256 MiB.
    pub fn data_bytes(mut self, bytes: u64) -> HeapOptions {
        self.data_bytes = bytes;
        self
    }

    /// Sets the size of each rank's signal segment in bytes: 4096 reserved bytes, and the memory
    /// into which small messages are written. Default: 256 MiB; at most 16 GiB.
    pub fn signal_bytes(mut self, bytes: u64) -> HeapOptions {
        self.signal_bytes = bytes;
        self
    }

    /// Sets the number of device-local words of each rank, 4 bytes each. Default: 262,144; at most
    /// 2^32.
    pub fn device_words(mut self, words: u64) -> HeapOptions {
        self.device_words = words;
        self
    }

    /// Sets the kind of device. Default: the CPU.
    pub fn backend(mut self, backend: BackendKind) -> HeapOptions {
        self.backend = backend;
        self
    }

    /// Sets the device of this rank, by its index among the devices visible to the process.
    /// Default: the rank's number on its host, modulo the number of devices.
    pub fn device(mut self, index: usize) -> HeapOptions {
        self.device = Some(index);
        self
    }

    /// Sets whether to use plain device memory (`cuMemAlloc`) even if the GPU supports virtual
    /// memory management. Default: false.
    pub fn legacy_memory(mut self, legacy: bool) -> HeapOptions {
        self.legacy_memory = legacy;
        self
    }

    /// Sets the number of this rank's workgroup threads on the CPU. Default: `IRIS_THREADS`, or the
    /// number of cores divided by the number of ranks of this host, at least 1.
    pub fn threads(mut self, threads: usize) -> HeapOptions {
        self.threads = Some(threads);
        self
    }

    /// Adds names and values that must be equal on all ranks. The ranks compare these values before
    /// sizes, so that if a size is derived from a value that differs, the error names the value and
    /// not the size.
    pub fn agreed(mut self, items: impl IntoIterator<Item = (String, String)>) -> HeapOptions {
        self.agreed.extend(items);
        self
    }

    /// Checks that the sizes fit 32-bit word numbers, which kernels use.
    pub(super) fn check(&self) -> Result<()> {
        const WORDS: u64 = 1 << 32;
        let (least, most) = (SIGNAL_RESERVED, 4 * WORDS);
        if !(least..=most).contains(&self.signal_bytes) {
            let expected = format!("at least {least} and at most {most}, words of 32-bit numbers");
            return Err(Error::invalid("signal_bytes", self.signal_bytes, expected));
        }
        if self.device_words > WORDS {
            let expected = format!("at most {WORDS}, words of 32-bit numbers");
            return Err(Error::invalid("device_words", self.device_words, expected));
        }
        Ok(())
    }

    /// Checks that the heap of an epoch after the first fits into the memory that the host can still
    /// give, where heaps of the epochs before may still have theirs. All pages count, because a process that
    /// touches one too many is killed in the middle of a recovery.
    pub(super) fn check_fits(&self, world: &World) -> Result<()> {
        let Some(epoch @ 1..) = world.epoch() else { return Ok(()) };
        let segments = self.data_bytes.saturating_add(self.signal_bytes);
        let bytes = segments.saturating_add(4 * self.device_words);
        let ranks = world.local_size();
        match host_memory::available() {
            Some(available) if bytes.saturating_mul(ranks as u64) > available => {
                Err(Error::OutOfMemory { bytes, ranks, epoch, available })
            }
            _ => Ok(()),
        }
    }

    /// Number of this rank's workgroup threads; without an explicit number, the default.
    pub(super) fn resolve_threads(&self, world: &World) -> Result<u32> {
        let cores = || std::thread::available_parallelism().map_or(1, usize::from);
        let asked = self.threads.or(world.settings().threads);
        let threads = asked.unwrap_or_else(|| (cores() / world.local_size()).max(1));
        match threads {
            1..=MAX_THREADS => Ok(threads as u32),
            _ => Err(Error::invalid("threads of a heap", threads, format!("1 to {MAX_THREADS}"))),
        }
    }
}
