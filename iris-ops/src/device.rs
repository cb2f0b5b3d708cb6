//! Device for which plans are made: the properties on which the choices of a plan depend.
//!
//! **Problem.** A plan is made before a heap is open, sometimes on a host without GPUs. But the GPU
//! determines which variants exist and which tiles fill it.
//!
//! **Solution.** A [`Device`] comes from a heap, from the driver, or from a name. If none of them
//! is available, a usual device is assumed, and every plan says so.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use iris_heap::{BackendKind, DeviceInfo, SymmetricHeap};
use iris_kernels::Target;
use iris_kernels::gemm::Gemm;

use crate::op_names::UnknownName;

/// Device of a rank: the properties on which plans depend.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Device {
    /// Backend: cpu, cuda or hip.
    pub backend: BackendKind,
    /// Product name, such as `NVIDIA H200`; for a host, its architecture.
    pub name: &'static str,
    /// Architecture as the vendor's tools name it, without feature suffixes: `sm_90`, `gfx942`;
    /// `x86_64` for a host.
    pub arch: &'static str,
    /// Number of multiprocessors (NVIDIA) or compute units (AMD) of the whole device, even if ranks
    /// share it; 0 for a host.
    pub multiprocessors: u32,
    /// Driver version in the vendor's encoding; 0 for a host and for a device made by name.
    pub driver: u32,
    /// Number of ranks that use the device, including this one. `None` for a host, and if no heap
    /// is open, because the number is then unknown.
    pub sharing: Option<u32>,
    /// Whether the device is assumed, because no heap, driver or name described it.
    pub assumed: bool,
}

/// Devices that [`Device::named`] knows, each as one GPU. The entry for MI250X is one of its two
/// dies, because the driver reports each die as a GPU.
const NAMED: [(&str, Device); 8] = {
    use BackendKind::{Cuda, Hip};
    [
        ("a100", Device::gpu(Cuda, "NVIDIA A100", "sm_80", 108)),
        // The SXM board has 132 multiprocessors; H100 PCIe has 114.
        ("h100", Device::gpu(Cuda, "NVIDIA H100", "sm_90", 132)),
        ("h200", H200),
        ("b200", Device::gpu(Cuda, "NVIDIA B200", "sm_100", 148)),
        ("mi250x", Device::gpu(Hip, "AMD Instinct MI250X", "gfx90a", 110)),
        ("mi300x", MI300X),
        ("mi325x", Device::gpu(Hip, "AMD Instinct MI325X", "gfx942", 304)),
        ("mi355x", Device::gpu(Hip, "AMD Instinct MI355X", "gfx950", 256)),
    ]
};

const H200: Device = Device::gpu(BackendKind::Cuda, "NVIDIA H200", "sm_90", 132);
const MI300X: Device = Device::gpu(BackendKind::Hip, "AMD Instinct MI300X", "gfx942", 304);

impl Device {
    const fn gpu(
        backend: BackendKind,
        name: &'static str,
        arch: &'static str,
        multiprocessors: u32,
    ) -> Self {
        Self { backend, name, arch, multiprocessors, driver: 0, sharing: None, assumed: false }
    }

    /// Host CPU as a device: the kernels of the ranks run on its cores.
    pub const fn host() -> Self {
        Self::gpu(BackendKind::Cpu, std::env::consts::ARCH, std::env::consts::ARCH, 0)
    }

    /// Device with this name, for plans without hardware: `cpu`, `a100`, `h100` (SXM), `h200`,
    /// `b200`, `mi250x` (one die), `mi300x`, `mi325x` or `mi355x`, in upper or lower case.
    ///
    /// ```
    /// use iris_ops::{Device, Topology, matmul_all_reduce::Options};
    /// let ranks = Topology::new(0, 2).on_device(Device::named("a100")?);
    /// println!("{}", Options::new(4096, 8192, 3584).plan(ranks)?);
    /// # Ok::<(), iris_ops::OpError>(())
    /// ```
    ///
    /// # Errors
    /// [`UnknownName`] lists the names.
    pub fn named(name: &str) -> Result<Self, UnknownName> {
        let wanted = name.to_ascii_lowercase();
        let host = [("cpu", Self::host())];
        let mut all = host.into_iter().chain(NAMED);
        all.find(|(known, _)| *known == wanted).map(|(_, device)| device).ok_or_else(|| {
            let names = NAMED.map(|(known, _)| known);
            UnknownName {
                what: "device",
                value: name.into(),
                expected: format!("cpu, {}", names.join(", ")),
            }
        })
    }

    /// Device that a heap uses for the rank with this number on its host, as the driver describes
    /// the device. [`HeapOptions::device`](iris_heap::HeapOptions::device) can name another device.
    ///
    /// # Errors
    /// Errors of [`BackendKind::device_of`], such as a missing driver or device.
    pub fn of_rank(backend: BackendKind, local_rank: usize) -> iris_heap::Result<Self> {
        if backend.traits().host_threads {
            return Ok(Self::host());
        }
        Ok(Self::from(&backend.device_of(local_rank)?))
    }

    /// Device that is assumed for a backend if its driver cannot be asked: an H200 for CUDA, an
    /// MI300X for HIP.
    pub fn assumed(backend: BackendKind) -> Self {
        let usual = match backend {
            BackendKind::Cuda => H200,
            BackendKind::Hip => MI300X,
            _ => return Self::host(),
        };
        Self { assumed: true, ..usual }
    }

    /// Whether GEMMs on the device can wait for peers and store to them. True on sm_90. Also true
    /// on a host, whose kernels give the same results without such a GEMM.
    pub(crate) fn stores_to_peers(&self) -> bool {
        self.backend.traits().host_threads || self.has_wgmma()
    }

    /// Whether the built-in whole-matrix GEMM, which needs wgmma instructions, runs on the device.
    pub(crate) fn has_wgmma(&self) -> bool {
        let target = Target::new(self.backend, self.arch);
        target.is_ok_and(|target| Gemm::is_there_for_any(&target))
    }

    /// Properties on which a plan depends, as text that ranks compare: backend, architecture and
    /// number of multiprocessors. The text omits the product name and the number of ranks that
    /// share the device.
    pub(crate) fn deciding(&self) -> String {
        let Self { backend, arch, .. } = self;
        match self.multiprocessors {
            0 => backend.to_string(),
            _ => format!("{backend}, {arch}, {}", self.units()),
        }
    }

    fn units(&self) -> String {
        let amd = self.backend == BackendKind::Hip;
        let units = if amd { "compute units" } else { "multiprocessors" };
        format!("{} {units}", self.multiprocessors)
    }
}

impl From<&DeviceInfo> for Device {
    /// Makes a device from the driver's description. `sharing` is `None`, because no heap is open.
    fn from(info: &DeviceInfo) -> Self {
        if info.kind.traits().host_threads {
            return Self::host();
        }
        // Two suffixes are removed here: the architecture at the end of the driver's device name,
        // and features after a colon in AMD's architecture names.
        let name = info.name.strip_suffix(&info.arch).unwrap_or(&info.name).trim_end();
        let arch = info.arch.split(':').next().unwrap_or_default();
        let driver = info.kind.driver_version().unwrap_or(0);
        Self {
            driver,
            ..Self::gpu(info.kind, interned(name), interned(arch), info.multiprocessors)
        }
    }
}

impl From<&SymmetricHeap> for Device {
    /// Device of the heap, with the number of ranks that share it.
    fn from(heap: &SymmetricHeap) -> Self {
        let device = Self::from(heap.device());
        let sharing = (device.multiprocessors > 0).then(|| heap.ranks_on_device());
        Self { sharing, ..device }
    }
}

impl fmt::Display for Device {
    /// One line: `cpu`; `cuda (NVIDIA A100, sm_80, 108 multiprocessors)`; or `cuda (device not
    /// known, taken for NVIDIA H200, sm_90, 132 multiprocessors)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { backend, name, arch, sharing, assumed, .. } = self;
        write!(f, "{backend}")?;
        if self.multiprocessors == 0 {
            return Ok(());
        }
        let taken = if *assumed { "device not known, taken for " } else { "" };
        write!(f, " ({taken}{name}, {arch}, {}", self.units())?;
        match sharing {
            Some(ranks @ 2..) => write!(f, ", shared by {ranks} ranks)"),
            _ => f.write_str(")"),
        }
    }
}

/// Stores a text until the process ends, and returns it. The set of texts stays small: one name and
/// one architecture per kind of GPU.
fn interned(text: &str) -> &'static str {
    static INTERNED: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    let mut all = INTERNED.lock().unwrap_or_else(PoisonError::into_inner);
    match all.get(text) {
        Some(known) => known,
        None => {
            let text: &'static str = Box::leak(text.into());
            all.insert(text);
            text
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use iris_heap::{HeapOptions, World};

    #[test]
    fn a_device_is_found_by_its_name() {
        for (name, device) in NAMED {
            assert_eq!(Device::named(name), Ok(device));
            assert_eq!(Device::named(&name.to_uppercase()), Ok(device));
        }
        assert_eq!(Device::named("cpu"), Ok(Device::host()));
        assert_eq!(
            Device::named("h300").unwrap_err().to_string(),
            "device h300: expected one of cpu, a100, h100, h200, b200, mi250x, mi300x, mi325x, mi355x"
        );
    }

    #[test]
    fn a_device_says_what_it_is_in_a_line() {
        let said = |device: Device| device.to_string();
        assert_eq!(said(Device::host()), "cpu");
        let a100 = Device::named("a100").unwrap();
        assert_eq!(said(a100), "cuda (NVIDIA A100, sm_80, 108 multiprocessors)");
        assert_eq!(
            said(Device { sharing: Some(4), ..MI300X }),
            "hip (AMD Instinct MI300X, gfx942, 304 compute units, shared by 4 ranks)"
        );
        assert_eq!(
            said(Device::assumed(BackendKind::Cuda)),
            "cuda (device not known, taken for NVIDIA H200, sm_90, 132 multiprocessors)"
        );
        assert_eq!(Device::assumed(BackendKind::Cpu), Device::host());
    }

    #[test]
    fn the_host_is_the_device_of_a_rank_and_of_a_heap_on_the_cpu() {
        assert_eq!(Device::of_rank(BackendKind::Cpu, 3).unwrap(), Device::host());
        let world = World::threads(1).unwrap().remove(0);
        let heap = SymmetricHeap::open(&world, HeapOptions::new()).unwrap();
        assert_eq!(Device::from(&*heap), Device::host());
        heap.close().unwrap();
        world.close().unwrap();
    }

    #[test]
    fn fused_stores_are_of_sm_90_and_of_the_host() {
        let able = |name| Device::named(name).unwrap().stores_to_peers();
        let [yes, no] = [["cpu", "h100", "h200"], ["a100", "b200", "mi300x"]];
        assert!(yes.into_iter().all(able) && !no.into_iter().any(able));
        assert!(!Device::host().has_wgmma());
    }

    #[test]
    fn ranks_compare_neither_names_nor_guesses() {
        let h100 = Device::named("h100").unwrap();
        assert_eq!(h100.deciding(), "cuda, sm_90, 132 multiprocessors");
        assert_eq!(h100.deciding(), Device::assumed(BackendKind::Cuda).deciding());
        assert_ne!(h100.deciding(), Device::named("a100").unwrap().deciding());
        assert_ne!(h100.deciding(), Device { multiprocessors: 114, ..h100 }.deciding());
    }

    #[test]
    fn texts_are_interned_once() {
        let [one, two] = ["some GPU", "some GPU"].map(|text| interned(text).as_ptr());
        assert_eq!(one, two);
    }
}
