//! What is known of a kind of device, as data: a file of `tuning/` each.

use std::ops::Range;
use std::sync::LazyLock;

use iris_heap::BackendKind;
use serde::{Deserialize, Serialize};

use crate::cost::Machine;
use crate::device::Device;
use crate::kind::{Op, Variant};

/// One file; `tuning/sm90.toml` says what its tables are.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Tuning {
    /// Word in the name of the device that was measured, which tells it from others that it stands in for.
    pub(crate) of: String,
    /// Its architecture.
    arch: String,
    /// Where the machine was measured: device, commits, date.
    #[allow(dead_code, reason = "kept with the data, for the reader")]
    provenance: String,
    pub(crate) machine: Machine,
    #[serde(default)]
    pub(crate) launches: Launches,
    ran: Vec<Ran>,
    #[serde(default)]
    pub(super) row: Vec<Row>,
    /// The file of this machine's that is part of it, with its digest.
    #[serde(skip)]
    pub(crate) file: Option<String>,
    /// How many rows are of that file, the first ones.
    #[serde(skip)]
    pub(super) own_rows: usize,
}

impl PartialEq for Tuning {
    /// Whether it is the same one, of those that a process has read.
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Eq for Tuning {}

/// Numbers of workgroups and threads.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Launches {
    /// Most workgroups of a message, if fewer fill the links than there are multiprocessors; odd, so that tiles whose
    /// owners take turns fall to all workgroups alike. `None` for one workgroup on each multiprocessor: on 2 x H200 a
    /// reduce-scatter of 128 MiB took 241 us on 131 workgroups and 289 on 65 (2026-11-22).
    pub(super) message_groups: Option<u32>,
    /// Elements of a sum up to which its tiles have a vector for every other thread.
    pub(super) spread_sums: usize,
    /// Threads of a workgroup of an LL message of so many items and fewer, the fewest items first; of more there are as
    /// many as the kernel is built for.
    pub(super) threads_of_words: Vec<(usize, u32)>,
    /// Threads of a workgroup of a message that is reduced in tiles, likewise by its bytes.
    pub(super) threads_of_sums: Vec<(usize, u32)>,
    /// Workgroups that only send, of messages between two ranks: of sums that go to all, of sums that stay with owners,
    /// and of messages that are not summed.
    pub(super) senders_to_all: Option<Senders>,
    pub(super) senders_to_owners: Option<Senders>,
    pub(super) senders_of_parts: Option<Senders>,
}

/// Eighths of the workgroups that only send, in messages of so many bytes.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Senders {
    from: usize,
    #[serde(default = "no_limit")]
    below: usize,
    pub(super) eighths: u32,
}

fn no_limit() -> usize {
    usize::MAX
}

impl Senders {
    pub(super) fn bytes(&self) -> Range<usize> {
        self.from..self.below
    }
}

/// A GEMM that is more than a product.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum GemmKind {
    /// It waits for the parts of A that engines bring.
    Gated,
    /// It does the message of few rows.
    Exchanging,
}

/// Programs, and GEMMs that take part in them, that the suite and the stress test have run.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Ran {
    #[serde(default)]
    variants: Vec<Variant>,
    #[serde(default)]
    gemms: Vec<GemmKind>,
    /// Numbers of ranks; any, also on other architectures, if there are none.
    worlds: Option<Vec<usize>>,
    #[allow(dead_code, reason = "kept with the data, for the reader")]
    provenance: String,
}

/// A row: the first that fits is taken.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Row {
    pub(super) op: Op,
    pub(super) world: usize,
    pub(super) dtype: String,
    pub(super) m: [usize; 2],
    pub(super) n: usize,
    pub(super) k: Option<usize>,
    /// Whether A is split by columns.
    #[serde(default)]
    pub(super) columns: bool,
    /// Whether it is of calls whose N and K are those of the row on all ranks, and told to be.
    #[serde(default)]
    pub(super) even: bool,
    pub(super) variant: Option<Variant>,
    pub(super) tile: Option<[usize; 2]>,
    /// Where the row was measured: device, commit, date.
    #[allow(dead_code, reason = "kept with the data, for the reader")]
    provenance: String,
}

impl Row {
    /// Whether it is for the calls of another row.
    pub(super) fn is_for_calls_of(&self, other: &Row) -> bool {
        let calls = |row: &Row| {
            let Row { op, world, ref dtype, m, n, k, columns, even, .. } = *row;
            (op, world, dtype.clone(), m, n, k, columns, even)
        };
        calls(self) == calls(other)
    }
}

impl Tuning {
    /// The file for a device: that of its backend, of the one architecture that was measured or reckoned.
    pub(crate) fn of(device: Device) -> &'static Tuning {
        static FILES: LazyLock<[Tuning; 3]> = LazyLock::new(|| {
            [CPU, CUDA, HIP].map(|text| toml::from_str(text).expect("a test parses every file"))
        });
        let [cpu, cuda, hip] = &*FILES;
        match device.backend {
            BackendKind::Cuda => cuda,
            BackendKind::Hip => hip,
            _ => cpu,
        }
    }

    /// It with what a file of this machine's has.
    pub(crate) fn with_file(&self, file: String, machine: Option<Machine>, rows: Vec<Row>) -> Self {
        let (own_rows, more) = (rows.len(), self.row.iter().cloned());
        let row = rows.into_iter().chain(more).collect();
        let machine = machine.unwrap_or(self.machine);
        Self { machine, row, file: Some(file), own_rows, ..self.clone() }
    }

    /// Whether it is of another GPU and stands in for this device, which nobody has measured.
    pub(super) fn stands_in_for(&self, device: Device) -> bool {
        let own = device.backend.traits().host_threads || self.file.is_some();
        !own && device.name.split_whitespace().all(|word| word != self.of)
    }

    /// Whether a program has run among so many ranks on such a device, so that `auto` may take it.
    pub(crate) fn has_run(&self, variant: Variant, device: Device, world: usize) -> bool {
        self.ran(device, world).any(|ran| ran.variants.contains(&variant))
    }

    /// Whether such a GEMM has run so.
    pub(super) fn has_run_gemm(&self, kind: GemmKind, device: Device, world: usize) -> bool {
        self.ran(device, world).any(|ran| ran.gemms.contains(&kind))
    }

    fn ran(&self, device: Device, world: usize) -> impl Iterator<Item = &Ran> {
        let here = move |worlds: &Vec<usize>| device.arch == self.arch && worlds.contains(&world);
        self.ran.iter().filter(move |ran| ran.worlds.as_ref().is_none_or(here))
    }
}

impl Machine {
    /// The machine that predictions for a device go by: its own, or that of the device that stands in for it.
    pub fn of(device: Device) -> Machine {
        Tuning::of(device).machine
    }
}

const CPU: &str = include_str!("../../tuning/cpu.toml");
const CUDA: &str = include_str!("../../tuning/sm90.toml");
const HIP: &str = include_str!("../../tuning/gfx942.toml");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_is_understood() {
        for text in [CPU, CUDA, HIP] {
            let tuning: Tuning = toml::from_str(text).unwrap_or_else(|error| panic!("{error}"));
            assert!(tuning.machine.values().iter().all(|value| value.is_finite() && *value >= 0.0));
        }
    }

    #[test]
    fn a_program_is_taken_where_it_has_run() {
        let [h200, a100] = ["h200", "a100"].map(|name| Device::named(name).unwrap());
        let tuning = Tuning::of(h200);
        let ran = |variant, device| [2, 3, 4].map(|world| tuning.has_run(variant, device, world));
        assert_eq!(ran(Variant::Epilogue, h200), [true, false, false]);
        assert_eq!(ran(Variant::CopyEngine, a100), [false; 3]);
        assert_eq!(ran(Variant::TwoShot, a100), [true; 3]);
        assert!(!tuning.stands_in_for(h200) && tuning.stands_in_for(a100));
        assert!(!Tuning::of(Device::host()).stands_in_for(Device::host()));
    }
}
