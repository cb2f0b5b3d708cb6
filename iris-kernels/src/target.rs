//! Compilation target of kernels. This is the only file of the crate that distinguishes kinds of
//! device (CUDA, HIP, CPU).

use std::sync::{Arc, OnceLock};

use iris_heap::{BackendKind, DeviceInfo, Error, Result};

use crate::rtc::Vendor;
use crate::vendor::{self, Blas, Dialect, Prepared};

/// Compilation target of a device: the compiler's vendor, and the architecture.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Target {
    /// Vendor of the compiler.
    pub vendor: Vendor,
    /// Architecture as the compiler expects it: `sm_90a`, `gfx942`.
    pub arch: String,
}

impl Target {
    /// Returns the target for a device.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for the CPU, whose kernels are host code.
    pub fn of(device: &DeviceInfo) -> Result<Target> {
        Self::new(device.kind, &device.arch)
    }

    /// Returns the target for an architecture as the driver names it: `sm_90`, `gfx942`.
    ///
    /// # Errors
    /// Errors of [`Target::of`].
    pub fn new(kind: BackendKind, arch: &str) -> Result<Target> {
        match kind {
            BackendKind::Cuda => Ok(Target::nvidia(arch)),
            BackendKind::Hip => Ok(Target { vendor: Vendor::Amd, arch: arch.into() }),
            other => Err(Error::Unsupported {
                what: format!("compiled kernels on {other}"),
                why: "kernels of this device are host code".into(),
            }),
        }
    }

    /// Returns the target for an architecture of NVIDIA. From `sm_90` on, the target includes the
    /// architecture-specific features: `sm_90a`.
    pub fn nvidia(arch: &str) -> Target {
        let number = arch.strip_prefix("sm_").and_then(|number| number.parse::<u32>().ok());
        let only = if number.is_some_and(|number| number >= 90) { "a" } else { "" };
        Target { vendor: Vendor::Nvidia, arch: format!("{arch}{only}") }
    }
}

/// Description of the vendor's GEMM library for a kind of device (names and numbers); `None` for
/// the CPU.
pub(crate) fn dialect(kind: BackendKind) -> Option<&'static Dialect> {
    match kind {
        BackendKind::Cuda => Some(&Dialect::CUBLASLT),
        BackendKind::Hip => Some(&Dialect::HIPBLASLT),
        _ => None,
    }
}

impl Blas {
    /// Returns the vendor's GEMM library of this machine for a kind of device. It is loaded at the
    /// first call, from the path in its environment variable (`IRIS_CUBLASLT`, `IRIS_HIPBLASLT`),
    /// otherwise from its usual folders.
    ///
    /// # Errors
    /// [`vendor::Error::NotFound`] with the places that were searched.
    pub fn get(kind: BackendKind) -> vendor::Result<Arc<Blas>> {
        static LOADED: [OnceLock<vendor::Result<Arc<Blas>>>; 2] = [const { OnceLock::new() }; 2];
        let dialect = dialect(kind).ok_or(vendor::Error::None { kind })?;
        let loaded = &LOADED[usize::from(dialect.name == Dialect::HIPBLASLT.name)];
        loaded.get_or_init(|| Blas::load(dialect, &[]).map(Arc::new)).clone()
    }
}

/// Bytes of workspace that the vendor's BLAS library needs; `None` if no library is used on this
/// kind of device.
pub(crate) fn library_workspace(kind: BackendKind) -> Option<u64> {
    dialect(kind).map(|_| Prepared::WORKSPACE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_architectures_of_nvidia_are_taken_with_what_only_they_have() {
        let names = ["sm_80", "sm_89", "sm_90", "sm_100"].map(|arch| Target::nvidia(arch).arch);
        assert_eq!(names, ["sm_80", "sm_89", "sm_90a", "sm_100a"]);
    }
}
