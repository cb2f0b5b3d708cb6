//! The runtime's functions: our own table of them, looked for before the first call, each called through
//! one place.
//!
//! Handles are numbers of 64 bits, and a result is a number of 32 bits, so that no binding to HIP is
//! chosen here and nothing is linked: one program runs with ROCm 5, 6 and 7. What is not the same in all of
//! them is in [`Release`]. With the feature `hip` the compiler holds this table against the crate
//! hip-runtime-sys, and a test holds it against the headers of the machine.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use crate::backend::gpu::{RawEvent, RawFunction, RawModule, RawStream, load, table};
use crate::error::{Error, Result};

/// Hands the list of functions to a macro.
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
                /// Since 6.0, with the properties as they are there.
                hipGetDevicePropertiesR0600(*mut c_void, c_int);
                /// Since 5.6.
                hipStreamGetDevice(RawStream, *mut c_int);
            }
        }
    };
}

functions!(table);

/// An address in a device's memory.
pub(super) type Address = u64;

/// `hipIpcMemHandle_t`, which is passed by value.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Handle(pub(super) [u8; 64]);

/// What is not the same in all releases. The numbers are those of `hip_runtime_api.h` and
/// `driver_types.h` in the releases 5.2.3, 5.4, 5.5, 5.7.1, 6.0.0, 6.2.2, 6.4.3 and 7.2.4: all of it
/// changed with 6.0, and not since.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Release {
    /// `hipMemoryTypeDevice`, a type of memory.
    pub(super) of_a_device: u32,
    /// `hipIpcMemLazyEnablePeerAccess`: `hipIpcOpenMemHandle` takes nothing else.
    pub(super) lazy_peer_access: u32,
    /// Where `gcnArchName` is in the properties, and how long they are.
    pub(super) arch_name_at: usize,
    pub(super) properties: usize,
}

pub(super) const BEFORE_6: Release =
    Release { of_a_device: 1, lazy_peer_access: 0, arch_name_at: 396, properties: 792 };
pub(super) const SINCE_6: Release =
    Release { of_a_device: 2, lazy_peer_access: 1, arch_name_at: 1160, properties: 1472 };

/// The characters of `gcnArchName`.
pub(super) const ARCH_NAME: usize = 256;

/// The runtime, ready for calls.
pub(crate) struct Runtime {
    pub(crate) api: Api,
    version: u32,
}

impl Runtime {
    /// As `HIP_VERSION` has it: 70253211 is 7.2.53211.
    pub(crate) fn version(&self) -> u32 {
        self.version
    }

    pub(super) fn release(&self) -> &'static Release {
        release(self.version)
    }

    /// Whether `hipExtMallocWithFlags` knows uncached memory: since 5.5.
    pub(super) fn has_uncached(&self) -> bool {
        self.version >= 50_500_000
    }
}

/// What a release of this version has.
fn release(version: u32) -> &'static Release {
    if version < 60_000_000 { &BEFORE_6 } else { &SINCE_6 }
}

/// The runtime's numbers, by their names without `hip` and the like, with the names that the headers
/// have for them.
macro_rules! numbers {
    (
        enumerated {
            $($(#[$doc:meta])* $name:ident = $value:literal, $enumeration:ident :: $theirs:ident;)*
        }
        defined { $($(#[$about:meta])* $constant:ident = $number:literal, $macro:ident;)* }
    ) => {
        $($(#[$doc])* pub(super) const $name: u32 = $value;)*
        $($(#[$about])* pub(super) const $constant: u32 = $number;)*

        /// Each number, and what the headers call it.
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
        /// It worked.
        SUCCESS = 0, hipError_t::hipSuccess;
        /// An argument means nothing to this release.
        INVALID_VALUE = 1, hipError_t::hipErrorInvalidValue;
        /// The work has not ended.
        NOT_READY = 600, hipError_t::hipErrorNotReady;
        /// Another rank of this process has asked for it before.
        ALREADY_ENABLED = 704, hipError_t::hipErrorPeerAccessAlreadyEnabled;
        /// The device or the release does not do it.
        NOT_SUPPORTED = 801, hipError_t::hipErrorNotSupported;
        /// The event is of a capture.
        CAPTURED = 907, hipError_t::hipErrorCapturedEvent;
        /// Of a device: its compute units.
        MULTIPROCESSORS = 63, hipDeviceAttribute_t::hipDeviceAttributeMultiprocessorCount;
        /// Of a device: bytes of LDS that a workgroup can have.
        SHARED_BYTES = 74, hipDeviceAttribute_t::hipDeviceAttributeMaxSharedMemoryPerBlock;
        /// Of a device: threads of a wave.
        WAVE = 87, hipDeviceAttribute_t::hipDeviceAttributeWarpSize;
        /// Of a device: ticks of the clock that kernels read, in a millisecond.
        CLOCK_RATE = 10017, hipDeviceAttribute_t::hipDeviceAttributeWallClockRate;
        /// Of a kernel: bytes of local memory a thread.
        LOCAL_BYTES = 3, hipFunction_attribute::HIP_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES;
        /// Of a kernel: registers a thread.
        REGISTERS = 4, hipFunction_attribute::HIP_FUNC_ATTRIBUTE_NUM_REGS;
        /// Of an address: what memory it is in.
        MEMORY_TYPE = 2, hipPointer_attribute::HIP_POINTER_ATTRIBUTE_MEMORY_TYPE;
        /// Of an address: whose memory it is in.
        MEMORY_DEVICE = 9, hipPointer_attribute::HIP_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
        /// A direction of a copy: as the addresses say.
        COPY_BY_ADDRESS = 4, hipMemcpyKind::hipMemcpyDefault;
        /// A mode of capture: this thread's calls are no part of any.
        CAPTURE_RELAXED = 2, hipStreamCaptureMode::hipStreamCaptureModeRelaxed;
        /// A stream is not captured.
        CAPTURE_NONE = 0, hipStreamCaptureStatus::hipStreamCaptureStatusNone;
    }
    defined {
        /// Of a stream: the null stream does not wait for it.
        NON_BLOCKING = 1, hipStreamNonBlocking;
        /// Of an event.
        NO_TIMING = 2, hipEventDisableTiming;
        /// Event flag: the event's record is a release at system scope.
        RELEASE_TO_SYSTEM = 0x8000_0000, hipEventReleaseToSystem;
        /// Of memory of a device: other devices see what is written while a kernel runs.
        FINE_GRAINED = 1, hipDeviceMallocFinegrained;
        /// Of memory of the host: for all devices.
        HOST_PORTABLE = 1, hipHostMallocPortable;
        /// Of memory of the host: in the device's addresses.
        HOST_MAPPED = 2, hipHostMallocMapped;
        /// Of memory of the host: both see what is written while a kernel runs.
        HOST_COHERENT = 0x4000_0000, hipHostMallocCoherent;
    }
}

/// `hipDeviceMallocUncached`, since 5.5: memory of a device that no cache holds.
pub(super) const UNCACHED: u32 = 3;

/// What the runtime's library is called, by releases.
const NAMES: [&str; 4] =
    ["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so"];

/// Where it may lie that the loader's path does not name: where the environment says that ROCm is, and
/// where it is installed.
fn folders() -> Vec<String> {
    let told = ["ROCM_PATH", "HIP_PATH"].into_iter().filter_map(|name| std::env::var(name).ok());
    let installed = ["/opt/rocm", "/usr"].map(String::from);
    let roots = told.filter(|root| !root.is_empty()).chain(installed);
    roots.flat_map(|root| ["lib", "lib64"].map(|lib| format!("{root}/{lib}"))).collect()
}

static RUNTIME: OnceLock<Result<Runtime>> = OnceLock::new();

/// The runtime, loaded the first time.
///
/// # Errors
/// [`Error::Library`], with where it was looked for. That there is no device is said by the first call
/// about one.
pub(crate) fn runtime() -> Result<&'static Runtime> {
    let loaded = RUNTIME.get_or_init(|| {
        load("AMD's HIP runtime", &NAMES, &folders(), |library| {
            let api = Api::of(library)?;
            let mut version = 0;
            // SAFETY: `version` is where the answer goes.
            match unsafe { (api.hipRuntimeGetVersion)(&mut version) } {
                SUCCESS => Ok(Runtime { api, version: version as u32 }),
                code => Err(format!("hipRuntimeGetVersion gives {code}")),
            }
        })
    });
    loaded.as_ref().map_err(Error::clone)
}

/// An outcome of a function, as a result: the one place where codes are read.
pub(crate) fn check(api: &str, code: u32) -> Result<()> {
    match code {
        SUCCESS => Ok(()),
        _ => Err(Error::Device { api: api.into(), code, name: name_of(code) }),
    }
}

/// As [`check`], with what the call was about.
pub(super) fn check_for(api: &str, what: impl FnOnce() -> String, code: u32) -> Result<()> {
    match code {
        SUCCESS => Ok(()),
        _ => check(&format!("{api} {}", what()), code),
    }
}

/// The runtime's name of a code.
fn name_of(code: u32) -> String {
    let Some(Ok(runtime)) = RUNTIME.get() else { return "unknown code".into() };
    // SAFETY: any number may be asked for.
    let text = unsafe { (runtime.api.hipGetErrorName)(code) };
    if text.is_null() {
        return "unknown code".into();
    }
    // SAFETY: the runtime's strings are constants that end with zero.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// hip-runtime-sys, which the table is held against when it is compiled.
#[cfg(feature = "hip")]
mod reference {
    use super::*;

    /// A number of one of its enumerations.
    pub(super) const fn number<T: Copy>(theirs: T) -> u32 {
        assert!(size_of::<T>() == 4);
        // SAFETY: an enumeration of C's, of 4 bytes that are all part of its value.
        unsafe { std::mem::transmute_copy(&theirs) }
    }

    /// What a function takes and gives, in bytes.
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

    /// A parameter or result that the compiler is to find.
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
        // As the crate's error has it: there is a runtime, and no device.
        assert!(number(hip_runtime_sys::hipError_t::hipErrorNoDevice) == 100);
        // It has the release 5.4.
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

    /// Where there is a runtime and a device there is nothing to see here.
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

    /// The headers that hip-runtime-sys was built beside, of whatever release. Numbers alone: what the
    /// functions take is held against that crate.
    #[cfg(feature = "hip")]
    #[test]
    fn the_headers_of_this_machine_have_our_numbers() {
        use std::process::Command;

        // Headers before 5.4 do not have the rate of the clock.
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
        // Where the build script of hip-runtime-sys has looked.
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
