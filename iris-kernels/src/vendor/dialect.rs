//! What vendors call the functions and numbers of their libraries of products, which are otherwise alike.

#![allow(unsafe_code, reason = "functions of a C library")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::PathBuf;

use iris_heap::DType;
use libloading::Library;

use super::library;

/// What the library calls an object of its, or the driver a stream.
pub(super) type Handle = *mut c_void;

/// The names and numbers of a vendor's library. Functions are named alike but for what comes first, and
/// take the same arguments, as far as they stand in the one table of `blas.rs`.
#[derive(Clone, Copy)]
pub struct Dialect {
    /// The library.
    pub name: &'static str,
    /// The same for whoever misses it.
    pub(super) what: &'static str,
    /// Says where it is.
    pub(super) variable: &'static str,
    /// What names of its file begin with, and those that the loader may know.
    pub(super) file: &'static str,
    pub(super) bare: &'static [&'static str],
    /// Where it usually lies.
    pub(super) folders: fn() -> Vec<PathBuf>,
    pub(super) tells: fn(Library) -> Result<Tells, String>,
    /// The oldest release that has these numbers.
    pub(super) oldest: Version,
    pub(super) prefix: &'static str,
    /// Words of an algorithm.
    pub algorithm_words: usize,
    /// Whether a call looks if its algorithm fits it, and refuses it otherwise, so that one which was named
    /// for more rows may be tried.
    pub refuses: bool,
    /// Sums in f32.
    pub compute_f32: c_int,
    /// Types of elements.
    pub f32: c_int,
    /// The same.
    pub f16: c_int,
    /// The same.
    pub bf16: c_int,
    /// What is done to a factor that is the transpose of what is stored.
    pub transpose: c_int,
    /// Attributes of a description: what is done to the left and the right factor.
    pub desc_transposes: [c_int; 2],
    /// What is done to results.
    pub desc_epilogue: c_int,
    /// The address of a bias.
    pub desc_bias: c_int,
    /// Its type, of a library whose releases do not agree what it is otherwise.
    pub desc_bias_type: Option<c_int>,
    /// A bias is added.
    pub epilogue_bias: c_int,
    /// Attributes of a preference: bytes of workspace.
    pub pref_workspace: c_int,
    /// How parts of a split depth may be added up, and the value for: not, or in the type of sums.
    pub pref_reduction: Option<(c_int, u32)>,
    /// Alignment of A, B, C and D.
    pub pref_alignment: Option<[c_int; 4]>,
    /// The outcome of a call for a product that the library does not do.
    pub not_supported: c_int,
    /// The outcome of the heuristic for any product, of a library that has no kernels for the device.
    pub no_kernels: Option<c_int>,
}

impl Dialect {
    /// NVIDIA's: the numbers are those of `cublasLt.h` and `library_types.h` of CUDA 12 and 13.
    pub const CUBLASLT: Dialect = Dialect {
        name: "cuBLASLt",
        what: "cuBLASLt (libcublasLt.so)",
        variable: "IRIS_CUBLASLT",
        file: "libcublasLt.so",
        bare: &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"],
        folders: || {
            super::cuda_folders(&["nvidia/cu13/lib", "nvidia/cublas/lib", "nvidia/cu12/lib"])
        },
        tells: |library| Ok(Tells::Itself(CublasLt::of(library, "cublasLt")?)),
        oldest: Version([0; 3]),
        prefix: "cublasLt",
        algorithm_words: 8,
        refuses: true,
        compute_f32: 68,
        f32: 0,
        f16: 2,
        bf16: 14,
        transpose: 1,
        desc_transposes: [3, 4],
        desc_epilogue: 7,
        desc_bias: 8,
        desc_bias_type: None,
        epilogue_bias: 4,
        pref_workspace: 1,
        pref_reduction: Some((3, 2)),
        pref_alignment: Some([5, 6, 7, 8]),
        not_supported: 15,
        no_kernels: None,
    };

    /// AMD's: the numbers are those of `hipblaslt.h`, `hipblas-common.h` and HIP's `library_types.h` of
    /// ROCm 6 and 7. Before them types of elements had other numbers.
    ///
    /// It has no preference for alignment, and its header asks for none but the workspace's; that products are
    /// right whatever it is, no device has shown. Nor has it one for how parts of a split depth are added up:
    /// its kernels for gfx942 do that in the type of sums, in the workspace (ROCm 6.2). A call does not look
    /// whether its algorithm fits, and would compute something else, or read elsewhere.
    pub const HIPBLASLT: Dialect = Dialect {
        name: "hipBLASLt",
        what: "hipBLASLt (libhipblaslt.so)",
        variable: "IRIS_HIPBLASLT",
        file: "libhipblaslt.so",
        bare: &["libhipblaslt.so.1", "libhipblaslt.so.0", "libhipblaslt.so"],
        folders: super::hip_folders,
        tells: |library| Ok(Tells::ByHandle(HipblasLt::of(library, "hipblasLt")?)),
        oldest: Version([0, 6, 0]),
        prefix: "hipblasLt",
        algorithm_words: 3,
        refuses: false,
        compute_f32: 2,
        f32: 0,
        f16: 2,
        bf16: 14,
        transpose: 112,
        desc_transposes: [0, 1],
        desc_epilogue: 2,
        desc_bias: 3,
        desc_bias_type: Some(4),
        epilogue_bias: 4,
        pref_workspace: 1,
        pref_reduction: None,
        pref_alignment: None,
        not_supported: 7,
        // INVALID_VALUE, as 1.2.2 of Debian answers on gfx942.
        no_kernels: Some(3),
    };

    /// The library's number of an element type, of those that it is asked for.
    pub(super) fn kind(&self, dtype: DType) -> Option<c_int> {
        match dtype {
            DType::F32 => Some(self.f32),
            DType::F16 => Some(self.f16),
            DType::BF16 => Some(self.bf16),
            _ => None,
        }
    }
}

library! { CublasLt,
    GetVersion() -> usize;
    GetStatusName(c_int) -> *const c_char;
}

impl CublasLt {
    pub(super) fn version(&self) -> Version {
        // SAFETY: a function without arguments.
        let version = unsafe { (self.GetVersion)() };
        // 13.1.2 is 130102.
        Version([version / 10_000, version / 100 % 100, version % 100])
    }
}

library! { HipblasLt,
    GetVersion(Handle, *mut c_int) -> c_int;
}

/// What a library tells of itself, where they differ.
pub(super) enum Tells {
    /// By itself.
    Itself(CublasLt),
    /// With a handle of a device. It has no names of outcomes.
    ByHandle(HipblasLt),
}

/// The names of outcomes in `hipblas-common.h`, from 0 on.
const HIPBLAS_STATUS: [&str; 12] = [
    "SUCCESS",
    "NOT_INITIALIZED",
    "ALLOC_FAILED",
    "INVALID_VALUE",
    "MAPPING_ERROR",
    "EXECUTION_FAILED",
    "INTERNAL_ERROR",
    "NOT_SUPPORTED",
    "ARCH_MISMATCH",
    "HANDLE_IS_NULLPTR",
    "INVALID_ENUM",
    "UNKNOWN",
];

impl Tells {
    /// The name of an outcome.
    pub(super) fn name_of(&self, code: c_int) -> String {
        match self {
            Tells::Itself(table) => {
                // SAFETY: takes any number.
                let name = unsafe { (table.GetStatusName)(code) };
                if name.is_null() {
                    return "unknown".into();
                }
                // SAFETY: a string of the library's own, which lives as long as the library.
                unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
            }
            Tells::ByHandle(_) => {
                let name = usize::try_from(code).ok().and_then(|at| HIPBLAS_STATUS.get(at));
                name.map_or_else(|| "unknown".into(), |name| format!("HIPBLAS_STATUS_{name}"))
            }
        }
    }

    /// The version, of a library that has made this handle; else the outcome of asking.
    pub(super) fn version(&self, handle: Handle) -> Result<Version, c_int> {
        match self {
            Tells::Itself(table) => Ok(table.version()),
            Tells::ByHandle(table) => {
                let mut version = 0;
                // SAFETY: the handle is alive; `version` is where the answer goes.
                let code = unsafe { (table.GetVersion)(handle, &mut version) };
                let version = usize::try_from(version).unwrap_or_default();
                // 1.2.3 is 100203.
                let parts = [version / 100_000, version / 100 % 1000, version % 100];
                if code == 0 { Ok(Version(parts)) } else { Err(code) }
            }
        }
    }
}

/// A release of a library.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Version(pub(super) [usize; 3]);

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [major, minor, patch] = self.0;
        write!(f, "{major}.{minor}.{patch}")
    }
}
