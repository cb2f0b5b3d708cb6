//! The driver's functions: our own table of them, looked for before the first call, each called
//! through one place.
//!
//! Handles are numbers of 64 bits, as a caller gives and gets them, and the few structures that the
//! functions take are below. So no binding to CUDA is chosen here, no version of it is asked for, and
//! nothing is linked: whoever uses one in the same program chooses it alone. Where cudarc is there,
//! a test compares our numbers and structures with its own.

use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

use bytemuck::{Pod, Zeroable};
use libloading::Library;

use crate::backend::gpu::{RawEvent, RawFunction, RawModule, RawStream, load, table};
use crate::error::{Error, Result};

/// Hands the list of functions to a macro.
macro_rules! functions {
    ($take:ident) => {
        $take! {
            {
                cuInit(c_uint);
                cuDriverGetVersion(*mut c_int);
                cuDeviceGetCount(*mut c_int);
                cuDeviceGet(*mut Device, c_int);
                cuDeviceGetName(*mut c_char, c_int, Device);
                cuDeviceGetUuid_v2(*mut [u8; 16], Device);
                cuDeviceGetAttribute(*mut c_int, c_uint, Device);
                cuDeviceCanAccessPeer(*mut c_int, Device, Device);
                cuDevicePrimaryCtxRetain(*mut RawContext, Device);
                cuCtxGetCurrent(*mut RawContext);
                cuCtxPushCurrent_v2(RawContext);
                cuCtxPopCurrent_v2(*mut RawContext);
                cuCtxEnablePeerAccess(RawContext, c_uint);
                cuThreadExchangeStreamCaptureMode(*mut c_uint);
                cuStreamCreate(*mut RawStream, c_uint);
                cuStreamDestroy_v2(RawStream);
                cuStreamSynchronize(RawStream);
                cuStreamQuery(RawStream);
                cuStreamGetCtx(RawStream, *mut RawContext);
                cuStreamWaitEvent(RawStream, RawEvent, c_uint);
                cuStreamGetCaptureInfo_v2(
                    RawStream,
                    *mut c_uint,
                    *mut u64,
                    *mut u64,
                    *mut u64,
                    *mut usize,
                );
                cuEventCreate(*mut RawEvent, c_uint);
                cuEventRecord(RawEvent, RawStream);
                cuEventQuery(RawEvent);
                cuEventSynchronize(RawEvent);
                cuEventDestroy_v2(RawEvent);
                cuMemcpyAsync(Address, Address, usize, RawStream);
                cuMemcpy2DAsync_v2(*const Lines, RawStream);
                cuMemcpyHtoDAsync_v2(Address, *const c_void, usize, RawStream);
                cuMemcpyDtoHAsync_v2(*mut c_void, Address, usize, RawStream);
                cuMemsetD8Async(Address, c_uchar, usize, RawStream);
                cuMemGetInfo_v2(*mut usize, *mut usize);
                cuMemAlloc_v2(*mut Address, usize);
                cuDeviceGetDefaultMemPool(*mut u64, Device);
                cuMemPoolSetAttribute(u64, c_uint, *mut c_void);
                cuMemFree_v2(Address);
                cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
                cuMemHostGetDevicePointer_v2(*mut Address, *mut c_void, c_uint);
                cuMemGetAddressRange_v2(*mut Address, *mut usize, Address);
                cuPointerGetAttribute(*mut c_void, c_uint, Address);
                cuMemGetAllocationGranularity(
                    *mut usize,
                    *const Properties,
                    c_uint,
                );
                cuMemCreate(
                    *mut Physical,
                    usize,
                    *const Properties,
                    c_ulonglong,
                );
                cuMemRelease(Physical);
                cuMemExportToShareableHandle(
                    *mut c_void,
                    Physical,
                    c_uint,
                    c_ulonglong,
                );
                cuMemImportFromShareableHandle(
                    *mut Physical,
                    *mut c_void,
                    c_uint,
                );
                cuMemAddressReserve(*mut Address, usize, usize, Address, c_ulonglong);
                cuMemAddressFree(Address, usize);
                cuMemMap(Address, usize, usize, Physical, c_ulonglong);
                cuMemUnmap(Address, usize);
                cuMemSetAccess(Address, usize, *const Access, usize);
                cuIpcGetMemHandle(*mut LegacyHandle, Address);
                cuIpcOpenMemHandle_v2(*mut Address, LegacyHandle, c_uint);
                cuIpcCloseMemHandle(Address);
                cuModuleLoadData(*mut RawModule, *const c_void);
                cuModuleGetFunction(*mut RawFunction, RawModule, *const c_char);
                cuFuncGetAttribute(*mut c_int, c_uint, RawFunction);
                cuFuncSetAttribute(RawFunction, c_uint, c_int);
                cuOccupancyMaxActiveBlocksPerMultiprocessor(*mut c_int, RawFunction, c_int, usize);
                cuOccupancyMaxActiveClusters(*mut c_int, RawFunction, *const Configuration);
                cuLaunchKernel(
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
                /// Since CUDA 11.8: a launch with attributes.
                cuLaunchKernelEx(*const Configuration, RawFunction, *mut *mut c_void, *mut *mut c_void);
                /// Since CUDA 12.4: loads a kernel that lazy loading would load at its first launch.
                cuFuncLoad(RawFunction);
            }
        }
    };
}

functions!(table);

/// Each function with the sizes of its parameters, ours and cudarc's.
#[cfg(all(test, feature = "cudarc-0-19"))]
macro_rules! signatures {
    ({ $($name:ident($($arg:ty),* $(,)?);)* } sometimes { $($newer:tt)* }) => {
        pub(super) fn signatures() -> Vec<(&'static str, Vec<usize>, Vec<usize>)> {
            vec![$((
                stringify!($name),
                vec![$(size_of::<$arg>()),*],
                (::cudarc::driver::sys::$name as unsafe fn($(theirs!($arg)),*) -> _).sizes(),
            ),)*]
        }
    };
}

/// A parameter that the compiler is to find.
#[cfg(all(test, feature = "cudarc-0-19"))]
macro_rules! theirs {
    ($ours:ty) => {
        _
    };
}

#[cfg(all(test, feature = "cudarc-0-19"))]
functions!(signatures);

/// A context: a pointer in the driver's words, a number here, for any thread to use.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct RawContext(u64);
/// A device's handle, which is no address.
pub(super) type Device = c_int;
/// An address in a device's memory.
pub(super) type Address = u64;
/// A handle of physical memory.
pub(super) type Physical = u64;

/// `CUmemLocation`: a device by its number.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Location {
    /// [`LOCATION_DEVICE`].
    pub(super) kind: c_uint,
    pub(super) id: c_int,
}

/// `CUmemAllocationProp`, with what is asked of physical memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Properties {
    /// [`ALLOCATION_PINNED`].
    pub(super) kind: c_uint,
    /// None, or [`HANDLE_DESCRIPTOR`].
    pub(super) handles: c_uint,
    pub(super) location: Location,
    /// Of Windows.
    pub(super) meta: *mut c_void,
    /// Compression, GPUDirect RDMA, usage.
    pub(super) flags: [u8; 8],
}

/// `CUlaunchConfig`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(super) struct Configuration {
    /// Workgroups, along three axes.
    pub(super) groups: [c_uint; 3],
    /// Threads of one, likewise.
    pub(super) threads: [c_uint; 3],
    pub(super) shared_bytes: c_uint,
    pub(super) reserved: u32,
    pub(super) stream: u64,
    /// Where attributes lie, and how many there are.
    pub(super) attributes: u64,
    pub(super) attribute_count: u64,
}

/// A `CUlaunchAttribute`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(super) struct Attribute {
    pub(super) id: c_uint,
    pub(super) reserved: u32,
    /// The first of its 64 bytes is all that the one below has.
    pub(super) value: [u64; 8],
}

/// Where lines lie, of `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(super) struct Side {
    /// The first byte of a line, and the first line.
    pub(super) begin: [usize; 2],
    /// [`BY_ADDRESS`].
    pub(super) kind: c_uint,
    pub(super) reserved: u32,
    /// Of the host.
    pub(super) host: u64,
    pub(super) address: Address,
    pub(super) array: u64,
    /// Bytes from line to line.
    pub(super) apart: usize,
}

/// `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Lines {
    pub(super) from: Side,
    pub(super) to: Side,
    pub(super) bytes: usize,
    pub(super) lines: usize,
}

/// `CUmemAccessDesc`: who may access memory how.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Access {
    pub(super) location: Location,
    /// [`ACCESS_READ_WRITE`].
    pub(super) flags: c_uint,
}

/// `CUipcMemHandle`, which is passed by value.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct LegacyHandle(pub(super) [u8; 64]);

/// What a function takes, in bytes.
#[cfg(all(test, feature = "cudarc-0-19"))]
trait Parameters {
    fn sizes(&self) -> Vec<usize>;
}

#[cfg(all(test, feature = "cudarc-0-19"))]
macro_rules! parameters {
    ($($first:ident $($rest:ident)*)?) => {
        $(
            impl<Of, $first, $($rest),*> Parameters for unsafe fn($first, $($rest),*) -> Of {
                fn sizes(&self) -> Vec<usize> {
                    vec![size_of::<$first>(), $(size_of::<$rest>()),*]
                }
            }
            parameters!($($rest)*);
        )?
    };
}

#[cfg(all(test, feature = "cudarc-0-19"))]
parameters!(A B C D E F G H I J K);

/// The driver's numbers, by their names without `CU_` and the like.
macro_rules! numbers {
    ($($(#[$doc:meta])* $name:ident = $value:literal, $enumeration:ident :: $theirs:ident;)*) => {
        $($(#[$doc])* pub(super) const $name: u32 = $value;)*

        /// Each number, with the one that cudarc has for it.
        #[cfg(all(test, feature = "cudarc-0-19"))]
        pub(super) fn numbers() -> Vec<(&'static str, u32, u32)> {
            use ::cudarc::driver::sys;
            vec![$((stringify!($name), $name, number(sys::$enumeration::$theirs)),)*]
        }
    };
}

/// cudarc has some enumerations as such, some as structures around a number: all of 4 bytes.
#[cfg(all(test, feature = "cudarc-0-19"))]
fn number<T: Copy>(theirs: T) -> u32 {
    const { assert!(size_of::<T>() == 4) };
    // SAFETY: an enumeration of C's, of 4 bytes that are all part of its value.
    unsafe { std::mem::transmute_copy(&theirs) }
}

numbers! {
    /// It worked.
    SUCCESS = 0, CUresult::CUDA_SUCCESS;
    /// The work has not ended.
    NOT_READY = 600, CUresult::CUDA_ERROR_NOT_READY;
    /// Another rank of this process has asked for it before.
    ALREADY_ENABLED = 704, CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
    /// The device does not let this process do it.
    NOT_PERMITTED = 800, CUresult::CUDA_ERROR_NOT_PERMITTED;
    /// The device does not do it.
    NOT_SUPPORTED = 801, CUresult::CUDA_ERROR_NOT_SUPPORTED;
    /// The event is of a capture.
    CAPTURED = 907, CUresult::CUDA_ERROR_CAPTURED_EVENT;
    /// Of a launch: it need not wait until the one ahead of it on the stream is over.
    EARLY = 6, CUlaunchAttributeID_enum::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    /// Of a device.
    MULTIPROCESSORS = 16, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
    /// Of a device.
    ARCH_MAJOR = 75, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
    /// Of a device.
    ARCH_MINOR = 76, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR;
    /// Of a device: virtual memory management.
    VIRTUAL_MEMORY = 102,
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED;
    /// Of a device: handles of it as POSIX descriptors.
    DESCRIPTORS = 103,
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED;
    /// Of a kernel: bytes of local memory a thread.
    LOCAL_BYTES = 3, CUfunction_attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES;
    /// Of a kernel: registers a thread.
    REGISTERS = 4, CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS;
    /// Of a kernel: the most dynamic shared memory that a launch may ask for.
    MOST_SHARED = 8, CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    /// Of a kernel: how L1 and shared memory are divided.
    CARVEOUT = 9, CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
    /// Of an address: what memory it is in.
    MEMORY_TYPE = 2, CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
    /// Of an address: whose memory it is in.
    MEMORY_DEVICE = 9, CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
    /// A type of memory.
    OF_A_DEVICE = 2, CUmemorytype::CU_MEMORYTYPE_DEVICE;
    /// A type of memory: whatever the address is of.
    BY_ADDRESS = 4, CUmemorytype::CU_MEMORYTYPE_UNIFIED;
    /// A type of handle of physical memory.
    HANDLE_DESCRIPTOR = 1, CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    /// A type of physical memory.
    ALLOCATION_PINNED = 1, CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    /// A type of location.
    LOCATION_DEVICE = 1, CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    /// Of memory: for reading and writing.
    ACCESS_READ_WRITE = 3, CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    /// Which granularity of physical memory.
    GRANULARITY_MINIMUM = 0, CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    /// A mode of capture: this thread's calls are no part of any.
    CAPTURE_RELAXED = 2, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    /// A stream is not captured.
    CAPTURE_NONE = 0, CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    /// Of a pool of memory: whether reuse may let one stream wait for another.
    POOL_DEPENDENCIES = 3,
        CUmemPool_attribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES;
}

/// Where the driver's library may lie that the loader's path does not name.
const FOLDERS: [&str; 6] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/local/nvidia/lib64",
    "/run/opengl-driver/lib",
    "/usr/lib/wsl/lib",
];

/// The driver, ready for calls.
///
/// # Errors
/// [`Error::Library`], with where it was looked for; [`Error::Device`] if it does not start, as
/// without a device.
pub(crate) fn driver() -> Result<&'static Api> {
    static DRIVER: OnceLock<Result<Api>> = OnceLock::new();
    let driver = DRIVER.get_or_init(|| {
        let folders = FOLDERS.map(String::from);
        let driver = load("the CUDA driver", &["libcuda.so.1", "libcuda.so"], &folders, Api::of)?;
        // SAFETY: the flags must be zero.
        let code = unsafe { (driver.cuInit)(0) };
        if code != SUCCESS {
            return Err(error("cuInit", code, name_of(code)));
        }
        Ok(driver)
    });
    driver.as_ref().map_err(Error::clone)
}

/// An outcome of a driver's function, as a result: the one place where codes are read.
pub(crate) fn check(api: &'static str, code: u32) -> Result<()> {
    match code {
        SUCCESS => Ok(()),
        _ => Err(error(api, code, name_of(code))),
    }
}

/// As [`check`], with what the call was about.
pub(super) fn check_for(api: &str, what: impl FnOnce() -> String, code: u32) -> Result<()> {
    match code {
        SUCCESS => Ok(()),
        _ => Err(error(&format!("{api} {}", what()), code, name_of(code))),
    }
}

fn error(api: &str, code: u32, name: String) -> Error {
    Error::Device { api: api.into(), code, name }
}

/// The driver's name of a code. Not through [`driver`], which may be about to fail with it.
fn name_of(code: u32) -> String {
    type Name = unsafe extern "C" fn(u32, *mut *const c_char) -> u32;
    static NAME: OnceLock<Option<Name>> = OnceLock::new();
    let name = NAME.get_or_init(|| {
        // SAFETY: the library is loaded already; this counts one use more.
        let library = unsafe { Library::new("libcuda.so.1") }.ok()?;
        // SAFETY: the function takes a number and where to put a string, as C sees it.
        let name = *unsafe { library.get::<Name>(b"cuGetErrorName\0") }.ok()?;
        // The function is used until the process ends.
        std::mem::forget(library);
        Some(name)
    });
    let mut text: *const c_char = std::ptr::null();
    if let Some(name) = name {
        // SAFETY: `text` is where the driver may put its answer.
        let code = unsafe { name(code, &mut text) };
        if code == SUCCESS && !text.is_null() {
            // SAFETY: the driver's strings are constants that end with zero.
            return unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
        }
    }
    "unknown code".into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_driver_is_an_error_that_says_where_it_was_looked_for() {
        // Where there is a driver, there is nothing to see here; the tests of devices run there.
        if let Err(error @ Error::Library { .. }) = driver().map(drop) {
            let text = error.to_string();
            assert!(text.contains("libcuda.so.1"), "{text}");
            assert!(text.contains("LD_LIBRARY_PATH") && text.contains("/usr/lib64"), "{text}");
        }
    }

    #[test]
    fn codes_become_errors_with_the_function() {
        assert!(check("cuInit", 0).is_ok());
        let text = check("cuMemCreate", 2).unwrap_err().to_string();
        assert!(text.contains("cuMemCreate") && text.contains('2'), "{text}");
    }
}
