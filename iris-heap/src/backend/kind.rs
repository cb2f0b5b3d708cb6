//! The kinds of device, and what is different about them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The kinds of device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum BackendKind {
    /// The host's cores and memory.
    #[default]
    Cpu,
    /// NVIDIA.
    Cuda,
    /// AMD.
    Hip,
}

/// What is different about a kind of device, as far as anybody has to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceTraits {
    /// Workgroups are threads of the host, and kernels its own code: nothing is compiled or loaded.
    pub host_threads: bool,
    /// The memory of a heap is the host's.
    pub host_memory: bool,
}

impl BackendKind {
    /// All of them.
    pub const ALL: [BackendKind; 3] = [BackendKind::Cpu, BackendKind::Cuda, BackendKind::Hip];

    /// In the order of the enumeration.
    const TRAITS: [(&str, DeviceTraits); 3] = [
        ("cpu", DeviceTraits { host_threads: true, host_memory: true }),
        ("cuda", DeviceTraits { host_threads: false, host_memory: false }),
        ("hip", DeviceTraits { host_threads: false, host_memory: false }),
    ];

    /// The name that [`FromStr`] reads.
    pub const fn name(self) -> &'static str {
        Self::TRAITS[self as usize].0
    }

    /// What is different about it.
    pub const fn traits(self) -> DeviceTraits {
        Self::TRAITS[self as usize].1
    }
}

impl fmt::Display for BackendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for BackendKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<BackendKind> {
        BackendKind::ALL
            .into_iter()
            .find(|k| k.name() == text)
            .ok_or_else(|| Error::invalid("backend", text, "cpu, cuda or hip"))
    }
}
