//! Tuning data: built-in measurements and limits, one file in `tuning/` for each kind of device.

use std::ops::Range;
use std::sync::LazyLock;

use iris_heap::BackendKind;
use iris_kernels::VendorBits;
use serde::{Deserialize, Serialize};

use crate::cost::machine::CostParameters;
use crate::device::Device;
use crate::op_names::{Op, Variant};

/// Content of a tuning file; the file `tuning/sm90.toml` documents the tables and fields.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Tuning {
    /// Word in the product name of the measured device, such as `H200`. If the name of a device
    /// does not contain this word, the data counts as measured on another device.
    pub(crate) of: String,
    /// Architecture of the measured device.
    arch: String,
    /// Origin of the machine parameters: device, commits, date.
    #[allow(dead_code, reason = "kept with the data, for the reader")]
    provenance: String,
    pub(crate) machine: CostParameters,
    #[serde(default)]
    pub(crate) launches: Launches,
    ran: Vec<Ran>,
    #[serde(default)]
    pub(super) row: Vec<Row>,
    /// Products for which the vendor's library has the bits of the built-in products.
    #[serde(default)]
    pub(crate) vendor_bits: Vec<VendorBits>,
    /// Path and digest of this machine's own tuning file; `None` if no such file was merged in.
    #[serde(skip)]
    pub(crate) file: Option<String>,
    /// Number of entries in `row` that come from this machine's own file. They precede the built-in
    /// entries.
    #[serde(skip)]
    pub(super) own_rows: usize,
}

impl PartialEq for Tuning {
    /// Compares addresses. Equal tuning data is always the same object, because a process reads
    /// each file only once.
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Eq for Tuning {}

/// Numbers of workgroups, and of threads per workgroup, by which messages are launched.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Launches {
    /// Maximum number of workgroups of a message. It is set if fewer workgroups than
    /// multiprocessors saturate the links. It is odd: consecutive tiles are owned by different
    /// ranks in turn, and with an odd number every workgroup gets tiles of all ranks. `None` for
    /// the largest odd number of at most one workgroup per multiprocessor, which is faster on H200
    /// (128 MiB reduce_scatter, 2 x H200: 241 us with 131 workgroups, 289 with 65; 2026-11-22).
    pub(super) message_groups: Option<u32>,
    /// Maximum number of workgroups of a broadcast by relays (ranks that forward tiles of the
    /// root); `None` for as many as in other messages.
    pub(super) relay_groups: Option<u32>,
    /// Maximum number of elements of a message that is summed in small tiles, in which only every
    /// other thread has a vector of elements to add.
    pub(super) spread_sums: usize,
    /// Threads of a workgroup of a message by the LL protocol: pairs of maximum number of items and
    /// threads, ascending. Larger messages use the number for which the kernel is built.
    pub(super) threads_of_words: Vec<(usize, u32)>,
    /// Smallest number of items per peer with which a message by the LL protocol consists of packs
    /// (units of 48 bytes); `None` for never.
    pub(super) packs_from: Option<u32>,
    /// Threads of a workgroup of a message that consists of packs: pairs of maximum number of packs
    /// and threads, as in `threads_of_words`.
    pub(super) threads_of_packs: Vec<(usize, u32)>,
    /// Threads of a workgroup of a message that is summed in tiles: pairs of maximum number of
    /// bytes and threads, ascending. Larger messages use the number for which the kernel is built.
    pub(super) threads_of_sums: Vec<(usize, u32)>,
    /// Shares of workgroups that only send, for messages between two ranks: in all-reduces, in
    /// reduce-scatters, and in messages that are not summed.
    pub(super) senders_to_all: Option<Senders>,
    pub(super) senders_to_owners: Option<Senders>,
    pub(super) senders_of_parts: Option<Senders>,
}

/// Share of workgroups that only send, in eighths, for messages whose number of bytes is in
/// `from..below`.
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

/// Kind of built-in GEMM that does more than a product.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum GemmKind {
    /// GEMM that waits for parts of A that copy engines deliver.
    Gated,
    /// GEMM of few rows that also does the all-reduce.
    Exchanging,
}

/// List of variants and GEMMs with which the test suite and the stress test have run.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Ran {
    #[serde(default)]
    variants: Vec<Variant>,
    #[serde(default)]
    gemms: Vec<GemmKind>,
    /// Whether messages by the LL protocol in packs (48-byte units) have run.
    #[serde(default)]
    packs: bool,
    /// Numbers of ranks with which the variants and GEMMs ran, on the architecture of the file.
    /// `None`: the list is valid for any number of ranks and any architecture.
    worlds: Option<Vec<usize>>,
    #[allow(dead_code, reason = "kept with the data, for the reader")]
    provenance: String,
}

/// Row of a tuning file: the variant and tile that were measured as fastest for a range of calls.
/// The first row that fits a call is used.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Row {
    pub(super) op: Op,
    pub(super) world: usize,
    pub(super) dtype: String,
    pub(super) m: [usize; 2],
    pub(super) n: usize,
    pub(super) k: Option<usize>,
    /// Whether the row is for calls in which ranks pass columns of A; otherwise they pass rows.
    #[serde(default)]
    pub(super) columns: bool,
    /// Whether the row applies only to calls planned with the option `uniform_shape`, in which all
    /// ranks have the N and K of the row.
    #[serde(rename = "even", default)]
    pub(super) uniform_shape: bool,
    pub(super) variant: Option<Variant>,
    pub(super) tile: Option<[usize; 2]>,
    /// Origin of the row: device, commit, date.
    #[allow(dead_code, reason = "kept with the data, for the reader")]
    provenance: String,
}

impl Row {
    /// Whether two rows apply to the same calls.
    pub(super) fn is_for_calls_of(&self, other: &Row) -> bool {
        let calls = |row: &Row| {
            let Row { op, world, ref dtype, m, n, k, columns, uniform_shape, .. } = *row;
            (op, world, dtype.clone(), m, n, k, columns, uniform_shape)
        };
        calls(self) == calls(other)
    }
}

impl Tuning {
    /// Built-in tuning data for a device. Each backend has one file, which was measured or
    /// estimated for one architecture.
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

    /// Built-in tuning data for a device, with which no message is sent in packs (48-byte units of
    /// the LL protocol).
    pub(crate) fn without_packs(device: Device) -> &'static Tuning {
        static CUDA_PAIRS: LazyLock<Tuning> = LazyLock::new(|| {
            let mut tuning: Tuning = toml::from_str(CUDA).expect("a test parses every file");
            tuning.launches.packs_from = None;
            tuning
        });
        if device.backend == BackendKind::Cuda { &CUDA_PAIRS } else { Self::of(device) }
    }

    /// Returns a copy of the data with the machine parameters and the rows of this machine's own
    /// file. Rows of the own file come first.
    pub(crate) fn with_file(
        &self,
        file: String,
        machine: Option<CostParameters>,
        rows: Vec<Row>,
        vendor_bits: Vec<VendorBits>,
    ) -> Self {
        let (own_rows, more) = (rows.len(), self.row.iter().cloned());
        let row = rows.into_iter().chain(more).collect();
        let newest = |built_in: VendorBits| vendor_bits.iter().fold(built_in, VendorBits::without);
        let built_in: Vec<_> = self.vendor_bits.iter().cloned().map(newest).collect();
        let vendor_bits = [vendor_bits, built_in].concat();
        let machine = machine.unwrap_or(self.machine);
        Self { machine, row, vendor_bits, file: Some(file), own_rows, ..self.clone() }
    }

    /// Whether the data was measured on another GPU and is used because this device has no data.
    pub(super) fn stands_in_for(&self, device: Device) -> bool {
        let own = device.backend.traits().host_threads || self.file.is_some();
        !own && device.name.split_whitespace().all(|word| word != self.of)
    }

    /// Whether any variant or GEMM has run in tests with this number of ranks on such a device.
    pub(crate) fn has_run_any(&self, device: Device, world: usize) -> bool {
        device.backend.traits().host_threads
            || self.ran(device, world).any(|ran| ran.worlds.is_some())
    }

    /// Whether `auto` may choose a variant: it has run with this number of ranks on such a device,
    /// or nothing in it depends on the device or on the number of ranks.
    pub(crate) fn allows(&self, variant: Variant, device: Device, world: usize) -> bool {
        self.ran(device, world).any(|ran| ran.variants.contains(&variant))
    }

    /// Whether a GEMM of this kind has run with this number of ranks on such a device.
    pub(super) fn has_run_gemm(&self, kind: GemmKind, device: Device, world: usize) -> bool {
        self.ran(device, world).any(|ran| ran.gemms.contains(&kind))
    }

    /// Smallest number of items per peer with which messages by the LL protocol consist of packs.
    /// `None` if they never do, because such messages have not run with this number of ranks on
    /// such a device.
    pub(crate) fn packs_from(&self, device: Device, world: usize) -> Option<u32> {
        let ran = self.ran(device, world).any(|ran| ran.packs);
        self.launches.packs_from.filter(|_| ran)
    }

    fn ran(&self, device: Device, world: usize) -> impl Iterator<Item = &Ran> {
        let here = move |worlds: &Vec<usize>| device.arch == self.arch && worlds.contains(&world);
        self.ran.iter().filter(move |ran| ran.worlds.as_ref().is_none_or(here))
    }
}

impl CostParameters {
    /// Parameters by which times on a device are predicted: those of the device, or of a similar
    /// device.
    pub fn of(device: Device) -> CostParameters {
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
        let ran = |variant, device| [2, 3, 4].map(|world| tuning.allows(variant, device, world));
        assert_eq!(ran(Variant::Epilogue, h200), [true, false, true]);
        assert_eq!(ran(Variant::CopyEngine, a100), [false; 3]);
        assert_eq!(ran(Variant::TwoShot, a100), [true; 3]);
        let any = |device| [2, 3, 9].map(|world| Tuning::of(device).has_run_any(device, world));
        assert_eq!(any(h200), [true, true, false]);
        assert_eq!(any(a100), [false; 3]);
        assert_eq!(any(Device::named("mi300x").unwrap()), [false; 3]);
        assert_eq!(any(Device::host()), [true; 3]);
        assert!(!tuning.stands_in_for(h200) && tuning.stands_in_for(a100));
        assert!(!Tuning::of(Device::host()).stands_in_for(Device::host()));
    }
}
