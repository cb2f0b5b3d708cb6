//! Names and numbers in which cuBLASLt and hipBLASLt differ; otherwise the interfaces of the two
//! libraries are equal.

#![allow(unsafe_code, reason = "functions of a C library")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::PathBuf;

use iris_heap::DType;
use libloading::Library;

use super::library;
use crate::dtype;

/// Opaque pointer: a handle of the library, or a stream of the driver.
pub(super) type Handle = *mut c_void;

/// Names and numbers of a vendor's GEMM library. The functions of cuBLASLt and hipBLASLt take the
/// same arguments, listed in `blas.rs`; their names differ only in the prefix.
#[derive(Clone, Copy)]
pub struct Dialect {
    /// Name of the library.
    pub name: &'static str,
    /// Name of the library with its file, for error messages.
    pub(super) what: &'static str,
    /// Environment variable that gives the library's path.
    pub(super) variable: &'static str,
    /// Prefix of the library's file names. The field `bare` has the bare names by which the
    /// system's loader may find it.
    pub(super) file: &'static str,
    pub(super) bare: &'static [&'static str],
    /// Returns the folders in which the library is usually installed.
    pub(super) folders: fn() -> Vec<PathBuf>,
    pub(super) version_api: fn(Library) -> Result<VersionApi, String>,
    /// Oldest release of the library to which the names and numbers here apply.
    pub(super) oldest: Version,
    pub(super) prefix: &'static str,
    /// Number of 64-bit words in an algorithm of this library.
    pub algorithm_words: usize,
    /// Whether a call of the library fails if its algorithm does not fit. If so, an algorithm that
    /// was chosen for more rows may be tried.
    pub refuses: bool,
    /// Number of the compute type with sums in f32.
    pub compute_f32: c_int,
    /// Returns the number of an element type; `None` for a type that iris does not use with the
    /// library.
    pub kind: fn(DType) -> Option<c_int>,
    /// Number of the operation that transposes a factor.
    pub transpose: c_int,
    /// Numbers of the descriptor attributes for the operation on the left and on the right factor.
    pub desc_transposes: [c_int; 2],
    /// Number of the descriptor attribute for the epilogue.
    pub desc_epilogue: c_int,
    /// Number of the descriptor attribute for the address of the bias.
    pub desc_bias: c_int,
    /// Number of the descriptor attribute for the type of the bias. It is set only for a library
    /// whose releases have different defaults.
    pub desc_bias_type: Option<c_int>,
    /// Number of the epilogue that adds a bias.
    pub epilogue_bias: c_int,
    /// Number of the preference attribute for the bytes of workspace.
    pub pref_workspace: c_int,
    /// Number and value of the preference attribute that limits how the heuristic may split K. The
    /// value allows either no split, or partial sums that are added in the compute type.
    pub pref_reduction: Option<(c_int, u32)>,
    /// Numbers of the preference attributes for the alignments of A, B, C and D; `None` if the
    /// library has no such attributes.
    pub pref_alignment: Option<[c_int; 4]>,
    /// Status code of a call for an unsupported product.
    pub not_supported: c_int,
    /// Status code of the heuristic if the library has no kernels for the device.
    pub no_kernels: Option<c_int>,
}

impl Dialect {
    /// cuBLASLt, with the numbers of `cublasLt.h` and `library_types.h` in CUDA 12 and 13.
    pub const CUBLASLT: Dialect = Dialect {
        name: "cuBLASLt",
        what: "cuBLASLt (libcublasLt.so)",
        variable: "IRIS_CUBLASLT",
        file: "libcublasLt.so",
        bare: &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"],
        folders: || {
            super::cuda_folders(&["nvidia/cu13/lib", "nvidia/cublas/lib", "nvidia/cu12/lib"])
        },
        version_api: |library| Ok(VersionApi::Global(CublasLt::of(library, "cublasLt")?)),
        oldest: Version([0; 3]),
        prefix: "cublasLt",
        algorithm_words: 8,
        refuses: true,
        compute_f32: 68,
        kind: dtype::blas,
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

    /// hipBLASLt, with the numbers of `hipblaslt.h`, `hipblas-common.h` and HIP's `library_types.h`
    /// in ROCm 6 and 7. Earlier releases have other numbers for element types.
    ///
    /// hipBLASLt has no preference for alignment, and its header requires alignment only for the
    /// workspace; that unaligned products are correct has not been verified on a device. It has no
    /// preference for how parts of a split K are added either: its kernels for gfx942 add them in
    /// the compute type, in the workspace (ROCm 6.2). A call does not check that its algorithm
    /// fits; an unsuitable algorithm would compute wrong results or read out of bounds.
    pub const HIPBLASLT: Dialect = Dialect {
        name: "hipBLASLt",
        what: "hipBLASLt (libhipblaslt.so)",
        variable: "IRIS_HIPBLASLT",
        file: "libhipblaslt.so",
        bare: &["libhipblaslt.so.1", "libhipblaslt.so.0", "libhipblaslt.so"],
        folders: super::hip_folders,
        version_api: |library| Ok(VersionApi::ByHandle(HipblasLt::of(library, "hipblasLt")?)),
        oldest: Version([0, 6, 0]),
        prefix: "hipblasLt",
        algorithm_words: 3,
        refuses: false,
        compute_f32: 2,
        kind: dtype::blas,
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
        // The status is INVALID_VALUE; Debian's release 1.2.2 returns it on gfx942.
        no_kernels: Some(3),
    };
}

library! { CublasLt,
    GetVersion() -> usize;
    GetStatusName(c_int) -> *const c_char;
}

impl CublasLt {
    pub(super) fn version(&self) -> Version {
        // SAFETY: the function has no parameters.
        let version = unsafe { (self.GetVersion)() };
        // cuBLASLt encodes version 13.1.2 as 130102.
        Version([version / 10_000, version / 100 % 100, version % 100])
    }
}

library! { HipblasLt,
    GetVersion(Handle, *mut c_int) -> c_int;
}

/// Functions that return the library's version and the names of its status codes. These functions
/// differ between the libraries.
pub(super) enum VersionApi {
    /// cuBLASLt: both functions need no handle.
    Global(CublasLt),
    /// hipBLASLt: the version needs a handle of a device; there are no status names.
    ByHandle(HipblasLt),
}

/// Names of the status codes in `hipblas-common.h`, from 0 on.
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

impl VersionApi {
    /// Name of the status code `code`.
    pub(super) fn name_of(&self, code: c_int) -> String {
        match self {
            VersionApi::Global(table) => {
                // SAFETY: `GetStatusName` has no preconditions; it accepts any number.
                let name = unsafe { (table.GetStatusName)(code) };
                if name.is_null() {
                    return "unknown".into();
                }
                // SAFETY: the library returns a string that lives as long as the library.
                unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
            }
            VersionApi::ByHandle(_) => {
                let name = usize::try_from(code).ok().and_then(|at| HIPBLAS_STATUS.get(at));
                name.map_or_else(|| "unknown".into(), |name| format!("HIPBLAS_STATUS_{name}"))
            }
        }
    }

    /// Version of the library that made `handle`. Returns the status code on failure.
    pub(super) fn version(&self, handle: Handle) -> Result<Version, c_int> {
        match self {
            VersionApi::Global(table) => Ok(table.version()),
            VersionApi::ByHandle(table) => {
                let mut version = 0;
                // SAFETY: the handle is alive; `version` receives the answer.
                let code = unsafe { (table.GetVersion)(handle, &mut version) };
                let version = usize::try_from(version).unwrap_or_default();
                // hipBLASLt encodes version 1.2.3 as 100203.
                let parts = [version / 100_000, version / 100 % 1000, version % 100];
                if code == 0 { Ok(Version(parts)) } else { Err(code) }
            }
        }
    }
}

/// Release of a library: major, minor, patch.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Version(pub(super) [usize; 3]);

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [major, minor, patch] = self.0;
        write!(f, "{major}.{minor}.{patch}")
    }
}
