//! Options of a rank's heap that the command line sets: backend, GPU and threads.

use std::str::FromStr;

use anyhow::Result;
use iris_heap::env::MAX_THREADS;
use iris_heap::{BackendKind, HeapOptions, World};
use serde::{Deserialize, Serialize};

use crate::errors::usage;

/// Options of a rank's heap, except its size.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct DeviceOptions {
    backend: BackendKind,
    threads: Option<usize>,
    devices: Option<Devices>,
}

impl DeviceOptions {
    /// Checks the options: a backend, the number of threads per rank, and the GPUs to use.
    ///
    /// # Errors
    /// 0 threads or more than [`MAX_THREADS`]; GPUs for a backend without them, or GPUs that do not
    /// exist.
    pub(crate) fn new(
        backend: BackendKind,
        threads: Option<usize>,
        devices: Option<Devices>,
    ) -> Result<DeviceOptions> {
        if let Some(threads) = threads.filter(|threads| !(1..=MAX_THREADS).contains(threads)) {
            return Err(usage("--threads", threads, format!("1 to {MAX_THREADS}")));
        }
        if backend.traits().host_threads {
            if let Some(devices) = devices {
                return Err(usage("--devices", devices, "only with --backend cuda or hip"));
            }
            return Ok(DeviceOptions { backend, threads, devices });
        }
        // Asking for the number of devices reports a missing driver here, once, before any rank is
        // started.
        let visible = backend.device_count()?;
        if let Some(devices) = devices
            && devices.last() >= visible
        {
            let expected = format!("of the {visible} {backend} devices that are visible");
            return Err(usage("--devices", devices, expected));
        }
        Ok(DeviceOptions { backend, threads, devices })
    }

    /// Backend of the heap.
    pub(crate) fn backend(&self) -> BackendKind {
        self.backend
    }

    /// Options for a rank's heap; the ranks of a host are assigned to its GPUs round-robin.
    pub(crate) fn heap(&self, world: &World) -> HeapOptions {
        let mut options = HeapOptions::new().backend(self.backend());
        options.threads = self.threads;
        options.device = self.devices.map(|devices| devices.of(world.local_rank()));
        options
    }
}

/// Set of GPUs of a host that ranks may use, as a bit mask. The command line gives a number of GPUs
/// (`2`: the first two) or a list of indices (`0,2`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Devices(u64);

impl Default for Devices {
    /// All GPUs of the host.
    fn default() -> Devices {
        Devices(u64::MAX)
    }
}

impl Devices {
    /// Set that has only the first GPU of `self`.
    pub(crate) fn first(self) -> Devices {
        Devices(self.0 & self.0.wrapping_neg())
    }

    fn numbers(self) -> impl Iterator<Item = usize> {
        (0..64).filter(move |number| self.0 >> number & 1 == 1)
    }

    fn last(self) -> usize {
        self.numbers().last().unwrap_or(0)
    }

    fn of(self, local_rank: usize) -> usize {
        let turn = local_rank % self.0.count_ones() as usize;
        self.numbers().nth(turn).unwrap_or(0)
    }
}

impl std::fmt::Display for Devices {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let numbers: Vec<_> = self.numbers().map(|number| number.to_string()).collect();
        f.write_str(&numbers.join(","))
    }
}

impl FromStr for Devices {
    type Err = String;

    fn from_str(text: &str) -> Result<Devices, String> {
        let wrong = || "expected how many, 1 to 64, or a list of their numbers: 0,2".to_string();
        let number = |text: &str| text.trim().parse::<u32>().map_err(|_| wrong());
        let bits = match text.split_once(',') {
            None => match number(text)? {
                count @ 1..=64 => u64::MAX >> (64 - count),
                _ => return Err(wrong()),
            },
            Some(_) => text.trim_end_matches(',').split(',').try_fold(0, |bits, one| {
                let bit = 1_u64.checked_shl(number(one)?).ok_or_else(wrong)?;
                if bits & bit == 0 { Ok(bits | bit) } else { Err(wrong()) }
            })?,
        };
        Ok(Devices(bits))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_a_number_or_a_list() {
        let read = |text: &str| text.parse::<Devices>();
        assert_eq!(read("2").unwrap().to_string(), "0,1");
        assert_eq!(read("64").unwrap().last(), 63);
        let some = read("3,1").unwrap();
        assert_eq!((some.to_string().as_str(), some.last()), ("1,3", 3));
        assert_eq!([0, 1, 2].map(|rank| some.of(rank)), [1, 3, 1]);
        assert_eq!((some.first().to_string(), Devices::default().first().0), ("1".into(), 1));
        assert_eq!(read("5,").unwrap().of(7), 5);
        for wrong in ["", "0", "65", "a", "1,1", "64,0", ","] {
            assert!(read(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn devices_are_gpus() {
        let error =
            DeviceOptions::new(BackendKind::Cpu, None, Some(Devices(3))).unwrap_err().to_string();
        assert!(error.contains("--devices is 0,1") && error.contains("cuda"), "{error}");
    }
}
