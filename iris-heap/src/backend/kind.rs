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
    /// A copy on a stream is visible to peers before the next copy on that stream is, so a signal may be copied
    /// right behind its data. Otherwise an event is recorded between the two.
    pub copies_in_order: bool,
}

impl BackendKind {
    /// All of them.
    pub const ALL: [BackendKind; 3] = [BackendKind::Cpu, BackendKind::Cuda, BackendKind::Hip];

    /// The name that [`FromStr`] reads.
    pub const fn name(self) -> &'static str {
        match self {
            BackendKind::Cpu => "cpu",
            BackendKind::Cuda => "cuda",
            BackendKind::Hip => "hip",
        }
    }

    /// Properties in which kinds of device differ.
    pub const fn traits(self) -> DeviceTraits {
        let cpu = matches!(self, BackendKind::Cpu);
        DeviceTraits {
            host_threads: cpu,
            host_memory: cpu,
            // AMD's runtime copies between devices by kernels. Those of a 2D copy release at agent scope only, and
            // leave lines in L2 that a later copy's kernel, which releases at system scope, may overtake.
            copies_in_order: !matches!(self, BackendKind::Hip),
        }
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
