//! Kinds of device (CPU, CUDA, HIP), and the properties in which they differ.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Kind of device that computes and holds the heap's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum BackendKind {
    /// The host's cores and memory.
    #[default]
    Cpu,
    /// NVIDIA GPUs, through the CUDA driver.
    Cuda,
    /// AMD GPUs, through the HIP runtime.
    Hip,
}

/// Differences between kinds of device on which code outside the backends depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceTraits {
    /// Whether workgroups are host threads and kernels are host code, so that nothing is compiled
    /// or loaded.
    pub host_threads: bool,
    /// Whether the heap lies in host memory.
    pub host_memory: bool,
    /// Whether copies on a stream become visible to peers in the order of the stream. If so, a
    /// signal may be copied directly after its data; if not, an event must be recorded between the
    /// two.
    pub copies_in_order: bool,
}

impl BackendKind {
    /// All kinds of device.
    pub const ALL: [BackendKind; 3] = [BackendKind::Cpu, BackendKind::Cuda, BackendKind::Hip];

    /// Name of the kind, as [`FromStr`] parses it.
    pub const fn name(self) -> &'static str {
        match self {
            BackendKind::Cpu => "cpu",
            BackendKind::Cuda => "cuda",
            BackendKind::Hip => "hip",
        }
    }

    /// Properties of this kind of device.
    pub const fn traits(self) -> DeviceTraits {
        let cpu = matches!(self, BackendKind::Cpu);
        DeviceTraits {
            host_threads: cpu,
            host_memory: cpu,
            // AMD's runtime copies between devices by kernels. The kernel of a 2D copy releases at
            // agent scope only, so its data may remain in L2. A later copy, whose kernel releases
            // at system scope, can then become visible to peers before that data.
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
