//! Table of the HIP runtime's functions, filled before the first call.
//!
//! Handles are 64-bit numbers and results 32-bit numbers, so this crate depends on no HIP binding
//! and links nothing: one program runs with ROCm 5, 6 and 7. [`Release`] holds what differs between
//! releases. With the feature `hip`, the compiler checks this table against the crate
//! hip-runtime-sys, and a test checks it against the headers of the machine.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use crate::backend::gpu::{RawEvent, RawFunction, RawModule, RawStream, load, results, table};
use crate::error::{Error, Result};

/// Calls macro `$take` with the list of runtime functions, so that one list defines several items.
macro_rules! functions {
    ($take:ident) => {
        $take! {
            {
                hipRuntimeGetVersion(*mut c_int);
                hipGetErrorName(u32) -> *const c_char;
                hipGetLastError();
                hipGetDeviceCount(*mut c_int);
                hipGetDevice(*mut c_int);
                hipSetDevice(c_int);
                hipDeviceGetName(*mut c_char, c_int, c_int);
                hipDeviceGetUuid(*mut [u8; 16], c_int);
                hipDeviceGetPCIBusId(*mut c_char, c_int, c_int);
                hipDeviceGetAttribute(*mut c_int, c_uint, c_int);
                hipGetDeviceProperties(*mut c_void, c_int);
                hipDeviceCanAccessPeer(*mut c_int, c_int, c_int);
                hipDeviceEnablePeerAccess(c_int, c_uint);
                hipThreadExchangeStreamCaptureMode(*mut c_uint);
                hipExtStreamCreateWithCUMask(*mut RawStream, u32, *const u32);
                hipStreamCreateWithFlags(*mut RawStream, c_uint);
                hipStreamDestroy(RawStream);
                hipStreamSynchronize(RawStream);
                hipStreamQuery(RawStream);
                hipStreamWaitEvent(RawStream, RawEvent, c_uint);
                hipStreamGetCaptureInfo_v2(
                    RawStream,
                    *mut c_uint,
                    *mut u64,
                    *mut u64,
                    *mut u64,
                    *mut usize,
                );
                hipEventCreateWithFlags(*mut RawEvent, c_uint);
                hipEventRecord(RawEvent, RawStream);
                hipEventQuery(RawEvent);
                hipEventSynchronize(RawEvent);
                hipEventDestroy(RawEvent);
                hipMemcpyAsync(Address, Address, usize, c_uint, RawStream);
                hipMemcpy2DAsync(
                    Address,
                    usize,
                    Address,
                    usize,
                    usize,
                    usize,
                    c_uint,
                    RawStream,
                );
                hipMemcpyHtoDAsync(Address, *const c_void, usize, RawStream);
                hipMemcpyDtoHAsync(*mut c_void, Address, usize, RawStream);
                hipMemsetAsync(Address, c_int, usize, RawStream);
                hipMemGetInfo(*mut usize, *mut usize);
                hipMalloc(*mut Address, usize);
                hipExtMallocWithFlags(*mut Address, usize, c_uint);
                hipFree(Address);
                hipHostMalloc(*mut *mut c_void, usize, c_uint);
                hipHostGetDevicePointer(*mut Address, *mut c_void, c_uint);
                hipMemGetAddressRange(*mut Address, *mut usize, Address);
                hipPointerGetAttribute(*mut c_void, c_uint, Address);
                hipIpcGetMemHandle(*mut Handle, Address);
                hipIpcOpenMemHandle(*mut Address, Handle, c_uint);
                hipIpcCloseMemHandle(Address);
                hipModuleLoadData(*mut RawModule, *const c_void);
                hipModuleGetFunction(*mut RawFunction, RawModule, *const c_char);
                hipFuncGetAttribute(*mut c_int, c_uint, RawFunction);
                hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(
                    *mut c_int,
                    RawFunction,
                    c_int,
                    usize,
                );
                hipModuleLaunchKernel(
                    RawFunction,
                    c_uint,
                    c_uint,
                    c_uint,
                    c_uint,
                    c_uint,
                    c_uint,
                    c_uint,
                    RawStream,
                    *mut *mut c_void,
                    *mut *mut c_void,
                );
            }
            sometimes {
                /// Returns device properties in the layout of release 6.0, the first release with
                /// this function.
                hipGetDevicePropertiesR0600(*mut c_void, c_int);
                /// Returns the device of a stream; exists since release 5.6.
                hipStreamGetDevice(RawStream, *mut c_int);
            }
        }
    };
}

functions!(table);

/// Type of an address in device memory.
pub(super) type Address = u64;

/// `hipIpcMemHandle_t`: IPC handle of device memory, passed by value.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Handle(pub(super) [u8; 64]);

/// Constants and layouts that differ between HIP releases. The numbers were taken from
/// `hip_runtime_api.h` and `driver_types.h` of the releases 5.2.3, 5.4, 5.5, 5.7.1, 6.0.0, 6.2.2,
/// 6.4.3 and 7.2.4. All of these constants changed with release 6.0 and have not changed since.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Release {
    /// `hipMemoryTypeDevice`: memory type of device memory.
    pub(super) of_a_device: u32,
    /// `hipIpcMemLazyEnablePeerAccess`: the only flag that `hipIpcOpenMemHandle` accepts.
    pub(super) lazy_peer_access: u32,
    /// Byte offset of `gcnArchName` in the device properties; the next field of this struct is the
    /// size of the properties in bytes.
    pub(super) arch_name_at: usize,
    pub(super) properties: usize,
}

pub(super) const BEFORE_6: Release =
    Release { of_a_device: 1, lazy_peer_access: 0, arch_name_at: 396, properties: 792 };
pub(super) const SINCE_6: Release =
    Release { of_a_device: 2, lazy_peer_access: 1, arch_name_at: 1160, properties: 1472 };

/// Length of the field `gcnArchName` of the device properties, in bytes.
pub(super) const ARCH_NAME: usize = 256;

/// HIP runtime, loaded and ready for calls.
pub(crate) struct Runtime {
    pub(crate) api: Api,
    version: u32,
}

impl Runtime {
    /// Version in the encoding of `HIP_VERSION`: 70253211 is 7.2.53211.
    pub(crate) fn version(&self) -> u32 {
        self.version
    }

    pub(super) fn release(&self) -> &'static Release {
        release(self.version)
    }

    /// Whether `hipExtMallocWithFlags` supports [`UNCACHED`] memory, which exists since release
    /// 5.5.
    pub(super) fn has_uncached(&self) -> bool {
        self.version >= 50_500_000
    }
}

/// Constants and layouts of the release with version `version`.
fn release(version: u32) -> &'static Release {
    if version < 60_000_000 { &BEFORE_6 } else { &SINCE_6 }
}

/// Defines constants of the runtime, named without the prefix `hip`, each with its name in AMD's
/// headers.
macro_rules! numbers {
    (
        enumerated {
            $($(#[$doc:meta])* $name:ident = $value:literal, $enumeration:ident :: $theirs:ident;)*
        }
        defined { $($(#[$about:meta])* $constant:ident = $number:literal, $macro:ident;)* }
    ) => {
        $($(#[$doc])* pub(super) const $name: u32 = $value;)*
        $($(#[$about])* pub(super) const $constant: u32 = $number;)*

        /// Name of each constant in AMD's headers, and its value here.
        #[cfg(all(test, feature = "hip"))]
        const NUMBERS: &[(&str, u32)] = &[
            $((stringify!($theirs), $name),)*
            $((stringify!($macro), $constant),)*
        ];

        #[cfg(feature = "hip")]
        const _: () = {
            $(assert!(
                reference::number(hip_runtime_sys::$enumeration::$theirs) == $name,
                stringify!($name)
            );)*
            $(assert!(hip_runtime_sys::$macro == $constant, stringify!($constant));)*
        };
    };
}

numbers! {
    enumerated {
        SUCCESS = 0, hipError_t::hipSuccess;
        /// Result code: an argument is not valid in this release.
        INVALID_VALUE = 1, hipError_t::hipErrorInvalidValue;
        /// Result code: the work has not ended.
        NOT_READY = 600, hipError_t::hipErrorNotReady;
        /// Result code: peer access is enabled already, by another rank of this process.
        ALREADY_ENABLED = 704, hipError_t::hipErrorPeerAccessAlreadyEnabled;
        NOT_SUPPORTED = 801, hipError_t::hipErrorNotSupported;
        /// Lowest result code of an error about stream captures.
        FIRST_OF_CAPTURES = 900, hipError_t::hipErrorStreamCaptureUnsupported;
        /// Highest result code of an error about stream captures.
        LAST_OF_CAPTURES = 908, hipError_t::hipErrorStreamCaptureWrongThread;
        /// Device attribute: number of compute units.
        MULTIPROCESSORS = 63, hipDeviceAttribute_t::hipDeviceAttributeMultiprocessorCount;
        /// Device attribute: bytes of LDS that a workgroup can have.
        SHARED_BYTES = 74, hipDeviceAttribute_t::hipDeviceAttributeMaxSharedMemoryPerBlock;
        /// Device attribute: number of threads in a wave.
        WAVE = 87, hipDeviceAttribute_t::hipDeviceAttributeWarpSize;
        /// Device attribute: rate of the clock that kernels read, in ticks per millisecond.
        CLOCK_RATE = 10017, hipDeviceAttribute_t::hipDeviceAttributeWallClockRate;
        LOCAL_BYTES = 3, hipFunction_attribute::HIP_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES;
        REGISTERS = 4, hipFunction_attribute::HIP_FUNC_ATTRIBUTE_NUM_REGS;
        MEMORY_TYPE = 2, hipPointer_attribute::HIP_POINTER_ATTRIBUTE_MEMORY_TYPE;
        /// Pointer attribute: index of the device that owns the memory.
        MEMORY_DEVICE = 9, hipPointer_attribute::HIP_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
        /// Direction of a copy: determined from the addresses.
        COPY_BY_ADDRESS = 4, hipMemcpyKind::hipMemcpyDefault;
        /// Capture mode: runtime calls of this thread never invalidate a capture in progress,
        /// neither one of this thread nor one of another thread.
        CAPTURE_RELAXED = 2, hipStreamCaptureMode::hipStreamCaptureModeRelaxed;
        /// Capture status: the stream is not captured.
        CAPTURE_NONE = 0, hipStreamCaptureStatus::hipStreamCaptureStatusNone;
    }
    defined {
        /// Stream flag: the stream and the null stream do not wait for each other.
        NON_BLOCKING = 1, hipStreamNonBlocking;
        /// Event flag: the event records no time.
        NO_TIMING = 2, hipEventDisableTiming;
        /// Event flag: the event's record is a release at system scope.
        RELEASE_TO_SYSTEM = 0x8000_0000, hipEventReleaseToSystem;
        /// Flag for device memory: fine-grained, so other devices see writes while a kernel runs.
        FINE_GRAINED = 1, hipDeviceMallocFinegrained;
        /// Flag for host memory: pinned for all devices.
        HOST_PORTABLE = 1, hipHostMallocPortable;
        /// Flag for host memory: mapped into the device's address space.
        HOST_MAPPED = 2, hipHostMallocMapped;
        /// Flag for host memory: coherent, so host and device see each other's writes while a
        /// kernel runs.
        HOST_COHERENT = 0x4000_0000, hipHostMallocCoherent;
    }
}

/// `hipDeviceMallocUncached`: flag for device memory that bypasses all caches; since release 5.5.
pub(super) const UNCACHED: u32 = 3;

/// File names of the runtime's library, newest release first.
const NAMES: [&str; 4] =
    ["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so"];

/// Folders in which the library is searched after the loader's path: below the ROCm folders that
/// `ROCM_PATH` and `HIP_PATH` name, then below the usual ROCm folders.
fn folders() -> Vec<String> {
    let told = ["ROCM_PATH", "HIP_PATH"].into_iter().filter_map(|name| std::env::var(name).ok());
    let installed = ["/opt/rocm", "/usr"].map(String::from);
    let roots = told.filter(|root| !root.is_empty()).chain(installed);
    roots.flat_map(|root| ["lib", "lib64"].map(|lib| format!("{root}/{lib}"))).collect()
}

static RUNTIME: OnceLock<Result<Runtime>> = OnceLock::new();

/// HIP runtime of this process; loaded at the first call.
///
/// # Errors
/// [`Error::Library`], with the places searched. A missing device is reported only by the first
/// call that needs one.
pub(crate) fn runtime() -> Result<&'static Runtime> {
    let loaded = RUNTIME.get_or_init(|| {
        load("AMD's HIP runtime", &NAMES, &folders(), |library| {
            let api = Api::of(library)?;
            let mut version = 0;
            // SAFETY: `version` receives the answer.
            match unsafe { (api.hipRuntimeGetVersion)(&mut version) } {
                SUCCESS => Ok(Runtime { api, version: version as u32 }),
                code => Err(format!("hipRuntimeGetVersion gives {code}")),
            }
        })
    });
    loaded.as_ref().map_err(Error::clone)
}

results!();

/// Name that the runtime gives a status code; "unknown code" if it has none.
fn name_of(code: u32) -> String {
    let Some(Ok(runtime)) = RUNTIME.get() else { return "unknown code".into() };
    // SAFETY: `hipGetErrorName` accepts any number as a code.
    let text = unsafe { (runtime.api.hipGetErrorName)(code) };
    if text.is_null() {
        return "unknown code".into();
    }
    // SAFETY: the runtime's strings are constants that end with a zero byte.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Compile-time comparison of the table with the crate hip-runtime-sys.
#[cfg(feature = "hip")]
mod reference {
    use super::*;

    /// Numeric value of an enumerator of hip-runtime-sys.
    pub(super) const fn number<T: Copy>(theirs: T) -> u32 {
        assert!(size_of::<T>() == 4);
        // SAFETY: `T` is a C enumeration of 4 bytes, and all 4 bytes belong to its value.
        unsafe { std::mem::transmute_copy(&theirs) }
    }

    /// Sizes of the parameters and of the result of a function type, in bytes.
    trait Signature {
        const SIZES: &'static [usize];
    }

    macro_rules! signatures {
        ($($first:ident $($rest:ident)*)?) => {
            impl<Of, $($first, $($rest),*)?> Signature for unsafe extern "C" fn($($first, $($rest),*)?) -> Of {
                const SIZES: &'static [usize] =
                    &[size_of::<Of>(), $(size_of::<$first>(), $(size_of::<$rest>()),*)?];
            }
            $(signatures!($($rest)*);)?
        };
    }
    signatures!(A B C D E F G H I J K);

    const fn sizes<F: Signature + Copy>(_: F) -> &'static [usize] {
        F::SIZES
    }

    const fn same(ours: &[usize], theirs: &[usize]) -> bool {
        let mut at = 0;
        while at < ours.len() && at < theirs.len() && ours[at] == theirs[at] {
            at += 1;
        }
        at == ours.len() && at == theirs.len()
    }

    /// Expands to `_` for any type of a parameter or result, so that the compiler infers the type
    /// of hip-runtime-sys.
    macro_rules! theirs {
        ($($ours:ty)?) => {
            _
        };
    }

    macro_rules! hold {
        (
            { $($name:ident($($arg:ty),* $(,)?) $(-> $of:ty)?;)* }
            sometimes { $($newer:tt)* }
        ) => {
            const _: () = {
                $(
                    let theirs =
                        sizes(hip_runtime_sys::$name as unsafe extern "C" fn($(theirs!($arg)),*) -> _);
                    let ours = &[size_of::<$crate::backend::gpu::outcome!($($of)?)>(), $(size_of::<$arg>()),*];
                    assert!(same(ours, theirs), stringify!($name));
                )*
            };
        };
    }
    functions!(hold);

    const _: () = {
        use hip_runtime_sys::{hipDeviceProp_t, hipIpcMemHandle_t, hipMemoryType, hipUUID};
        assert!(size_of::<Handle>() == size_of::<hipIpcMemHandle_t>());
        assert!(align_of::<Handle>() == align_of::<hipIpcMemHandle_t>());
        assert!(size_of::<[u8; 16]>() == size_of::<hipUUID>());
        // The error type of this crate treats code 100 as "runtime without a device".
        assert!(number(hip_runtime_sys::hipError_t::hipErrorNoDevice) == 100);
        // hip-runtime-sys has the constants and layouts of release 5.4.
        assert!(number(hipMemoryType::hipMemoryTypeDevice) == BEFORE_6.of_a_device);
        assert!(hip_runtime_sys::hipIpcMemLazyEnablePeerAccess == BEFORE_6.lazy_peer_access);
        assert!(size_of::<hipDeviceProp_t>() == BEFORE_6.properties);
        assert!(std::mem::offset_of!(hipDeviceProp_t, gcnArchName) == BEFORE_6.arch_name_at);
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_told_apart_by_their_version() {
        assert_eq!(release(50_221_153), &BEFORE_6);
        assert_eq!(release(60_032_830), &SINCE_6);
        assert_eq!(release(70_253_211), &SINCE_6);
    }

    /// Tests the errors for a missing runtime or device; on a machine with both it checks nothing.
    #[test]
    fn what_is_missing_is_said_by_name() {
        match runtime() {
            Err(error @ Error::Library { .. }) => {
                let text = error.to_string();
                assert!(text.contains("libamdhip64.so.7"), "{text}");
                assert!(
                    text.contains("LD_LIBRARY_PATH") && text.contains("/opt/rocm/lib"),
                    "{text}"
                );
            }
            Err(other) => panic!("{other}"),
            Ok(runtime) => assert!(runtime.version() >= 50_000_000, "{}", runtime.version()),
        }
    }

    /// Compares the constants with the AMD headers against which hip-runtime-sys was built, of any
    /// release. Signatures are not compared here, because the compiler checks them against
    /// hip-runtime-sys.
    #[cfg(feature = "hip")]
    #[test]
    fn the_headers_of_this_machine_have_our_numbers() {
        use std::process::Command;

        // Headers before release 5.4 lack the attribute for the clock's rate.
        let number = |(name, number): &(&str, u32)| match *name {
            "hipDeviceAttributeWallClockRate" => {
                format!("#if HIP_VERSION >= 50400000\nIS({name}, {number}u);\n#endif\n")
            }
            _ => format!("IS({name}, {number}u);\n"),
        };
        let numbers = NUMBERS.iter().map(number);
        let since = |name: &str, release: fn(&Release) -> usize| {
            let (before, since) = (release(&BEFORE_6), release(&SINCE_6));
            format!("IS({name}, HIP_VERSION < 60000000 ? {before} : {since});\n")
        };
        let text = [
            "#include <stddef.h>\n#include <hip/hip_runtime_api.h>\n".into(),
            "#define IS(a, b) _Static_assert((unsigned)(a) == (b), #a)\n".into(),
            numbers.collect(),
            since("hipMemoryTypeDevice", |of| of.of_a_device as usize),
            since("hipIpcMemLazyEnablePeerAccess", |of| of.lazy_peer_access as usize),
            since("sizeof(hipDeviceProp_t)", |of| of.properties),
            since("offsetof(hipDeviceProp_t, gcnArchName)", |of| of.arch_name_at),
            format!(
                "#ifdef hipDeviceMallocUncached\nIS(hipDeviceMallocUncached, {UNCACHED});\n#endif\n"
            ),
        ]
        .concat();
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("numbers.c");
        std::fs::write(&file, text).unwrap();
        // The build script of hip-runtime-sys searches these folders, too.
        let told = ["HIP_PATH", "ROCM_PATH"].into_iter().filter_map(std::env::var_os);
        let root = told
            .map(std::path::PathBuf::from)
            .chain(["/opt/rocm".into(), "/opt/rocm/hip".into()])
            .find(|root| root.join("include/hip/hip_runtime_api.h").is_file())
            .expect("hip-runtime-sys was built here");
        let output = Command::new("gcc")
            .args(["-std=c11", "-w", "-fsyntax-only", "-D__HIP_PLATFORM_AMD__", "-idirafter"])
            .arg(root.join("include"))
            .arg(&file)
            .output()
            .expect("gcc starts");
        let log = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {log}", root.display());
    }
}
