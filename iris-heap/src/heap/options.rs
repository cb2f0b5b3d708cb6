//! How large a heap is, and of which device.

use crate::abi::SIGNAL_RESERVED;
use crate::backend::BackendKind;
use crate::bytes::Bytes;
use crate::env::MAX_THREADS;
use crate::error::{Error, Result};
use crate::world::World;

/// What a heap is opened with. All but `threads` and `device` must be the same on all ranks.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct HeapOptions {
    /// Bytes of the data segment of each rank; 256 MiB. On the CPU pages are taken when they are
    /// first touched, so that a large number costs nothing by itself.
    pub data_bytes: u64,
    /// Bytes of the signal segment of each rank, of which the first 4096 are reserved; 64 MiB, and
    /// at most 16 GiB. On the CPU it costs nothing by itself, either. Small messages travel in it.
    pub signal_bytes: u64,
    /// Device-local words of each rank; 262,144, and at most 2^32.
    pub device_words: u64,
    /// The kind of device.
    pub backend: BackendKind,
    /// Number of the device among those that the process sees; by default the rank's number on its
    /// host, modulo their count. Several ranks may have one.
    pub device: Option<usize>,
    /// On a GPU: plain memory, with legacy handles between processes, also where there is virtual
    /// memory. It is the fallback of older devices, which tests ask for.
    pub legacy_memory: bool,
    /// Threads of this rank for workgroups, on the CPU; by default `IRIS_THREADS`, or cores by
    /// ranks of this host, at least 1.
    pub threads: Option<usize>,
    /// Name and value of what else all ranks must have alike.
    pub(super) agreed: Vec<(String, String)>,
}

impl Default for HeapOptions {
    fn default() -> Self {
        HeapOptions {
            data_bytes: 256 << 20,
            signal_bytes: 64 << 20,
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
    /// The defaults.
    pub fn new() -> HeapOptions {
        HeapOptions::default()
    }

    /// Sets the size of the data segment, with its unit: `data(Bytes::gib(2))`.
    pub fn data(self, size: Bytes) -> HeapOptions {
        self.data_bytes(size.get())
    }

    /// Sets the bytes of the data segment.
    pub fn data_bytes(mut self, bytes: u64) -> HeapOptions {
        self.data_bytes = bytes;
        self
    }

    /// Sets the bytes of the signal segment.
    pub fn signal_bytes(mut self, bytes: u64) -> HeapOptions {
        self.signal_bytes = bytes;
        self
    }

    /// Sets the number of device-local words.
    pub fn device_words(mut self, words: u64) -> HeapOptions {
        self.device_words = words;
        self
    }

    /// Sets the kind of device.
    pub fn backend(mut self, backend: BackendKind) -> HeapOptions {
        self.backend = backend;
        self
    }

    /// Sets the device of this rank, by its number among those that the process sees.
    pub fn device(mut self, index: usize) -> HeapOptions {
        self.device = Some(index);
        self
    }

    /// Asks for plain memory.
    pub fn legacy_memory(mut self, legacy: bool) -> HeapOptions {
        self.legacy_memory = legacy;
        self
    }

    /// Sets the threads of this rank.
    pub fn threads(mut self, threads: usize) -> HeapOptions {
        self.threads = Some(threads);
        self
    }

    /// Adds names and values that all ranks must have alike. They are compared before the sizes, which may follow
    /// from them, so that an error names what a program was told and not what came of it.
    pub fn agreed(mut self, items: impl IntoIterator<Item = (String, String)>) -> HeapOptions {
        self.agreed.extend(items);
        self
    }

    /// Whether there can be segments of this size: kernels number words by 32 bits.
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

    /// The threads of this rank, with the defaults resolved.
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
