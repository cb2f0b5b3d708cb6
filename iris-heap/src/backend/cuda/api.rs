//! Table of the CUDA driver's functions, filled before the first call.
//!
//! Handles are 64-bit numbers, and the few structures that the functions take are defined below. So
//! this crate depends on no CUDA binding and no CUDA version, and links nothing; a program may use
//! any CUDA binding beside this crate. If the feature for cudarc is enabled, a test compares the
//! numbers and structures here with cudarc's.

use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

use bytemuck::{Pod, Zeroable};
use libloading::Library;

use crate::backend::gpu::{RawEvent, RawFunction, RawModule, RawStream, load, results, table};
use crate::error::{Error, Result};

/// Calls macro `$take` with the list of driver functions, so that one list defines several items.
macro_rules! functions {
    ($take:ident) => {
        $take! {
            {
                cuInit(c_uint);
                cuDriverGetVersion(*mut c_int);
                cuDeviceGetCount(*mut c_int);
                cuDeviceGet(*mut DeviceHandle, c_int);
                cuDeviceGetName(*mut c_char, c_int, DeviceHandle);
                cuDeviceGetUuid_v2(*mut [u8; 16], DeviceHandle);
                cuDeviceGetAttribute(*mut c_int, c_uint, DeviceHandle);
                cuDeviceCanAccessPeer(*mut c_int, DeviceHandle, DeviceHandle);
                cuDevicePrimaryCtxRetain(*mut RawContext, DeviceHandle);
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
                cuDeviceGetDefaultMemPool(*mut u64, DeviceHandle);
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
                cuIpcGetMemHandle(*mut Handle, Address);
                cuIpcOpenMemHandle_v2(*mut Address, Handle, c_uint);
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
                /// Enqueues a kernel launch with attributes; exists since CUDA 11.8.
                cuLaunchKernelEx(*const Configuration, RawFunction, *mut *mut c_void, *mut *mut c_void);
                /// Loads a kernel at once, which with lazy loading would be loaded at its first
                /// launch; exists since CUDA 12.4.
                cuFuncLoad(RawFunction);
            }
        }
    };
}

functions!(table);

/// Sizes of each function's parameters in bytes, according to this table and to cudarc, for a test
/// that compares them.
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

/// Expands to `_` for any parameter type, so that the compiler infers cudarc's type.
#[cfg(all(test, feature = "cudarc-0-19"))]
macro_rules! theirs {
    ($ours:ty) => {
        _
    };
}

#[cfg(all(test, feature = "cudarc-0-19"))]
functions!(signatures);

/// Handle of a context: an opaque pointer, stored as a number so that any thread may use it.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct RawContext(u64);
/// Handle of a device (`CUdevice`): a small number, not an address.
pub(super) type DeviceHandle = c_int;
/// Address in the device's address space (`CUdeviceptr`).
pub(super) type Address = u64;
/// Handle of an allocation of physical memory (`CUmemGenericAllocationHandle`).
pub(super) type Physical = u64;

/// `CUmemLocation`: a device by its index.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Location {
    /// Always [`LOCATION_DEVICE`]: the location is a device.
    pub(super) kind: c_uint,
    pub(super) id: c_int,
}

/// `CUmemAllocationProp`: properties of physical memory to be allocated.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Properties {
    /// Type of the allocation: always [`ALLOCATION_PINNED`], which means that the memory is not
    /// migrated.
    pub(super) kind: c_uint,
    /// 0 for memory that is not exported, or [`HANDLE_DESCRIPTOR`].
    pub(super) handles: c_uint,
    pub(super) location: Location,
    /// Windows security attributes; null here.
    pub(super) meta: *mut c_void,
    /// Bytes of the flags for compression, GPUDirect RDMA and usage; zero here.
    pub(super) flags: [u8; 8],
}

/// `CUlaunchConfig`: shape, stream and attributes of a launch.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(super) struct Configuration {
    /// Number of workgroups along three axes.
    pub(super) groups: [c_uint; 3],
    /// Number of threads per workgroup along three axes.
    pub(super) threads: [c_uint; 3],
    pub(super) shared_bytes: c_uint,
    pub(super) reserved: u32,
    pub(super) stream: u64,
    /// Address of the array of attributes; the next field is the array's length.
    pub(super) attributes: u64,
    pub(super) attribute_count: u64,
}

/// `CUlaunchAttribute`: id and value of one launch attribute.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(super) struct Attribute {
    pub(super) id: c_uint,
    pub(super) reserved: u32,
    /// Value in 64 bytes; the only attribute used here sets the first byte.
    pub(super) value: [u64; 8],
}

/// Source or target of a 2D copy, in the layout of `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(super) struct Side {
    /// Position of the first byte: its offset within a row in bytes, and the index of its row.
    pub(super) begin: [usize; 2],
    /// Always [`BY_ADDRESS`]: the driver determines the memory type from the address.
    pub(super) kind: c_uint,
    pub(super) reserved: u32,
    /// Host address; unused, because `address` is set.
    pub(super) host: u64,
    pub(super) address: Address,
    pub(super) array: u64,
    /// Stride from row to row in bytes.
    pub(super) pitch: usize,
}

/// `CUDA_MEMCPY2D`: a strided (2D) copy.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Lines {
    pub(super) from: Side,
    pub(super) to: Side,
    pub(super) bytes: usize,
    pub(super) lines: usize,
}

/// `CUmemAccessDesc`: access rights of a device to mapped memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Access {
    pub(super) location: Location,
    /// Kind of access: always [`ACCESS_READ_WRITE`], which means that the device may read and
    /// write.
    pub(super) flags: c_uint,
}

/// `CUipcMemHandle`: IPC handle of plain memory, passed by value.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Handle(pub(super) [u8; 64]);

/// Sizes of the parameters of a function type, in bytes.
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

/// Defines driver constants, named without the prefix `CU_`, each with cudarc's name for
/// comparison.
macro_rules! numbers {
    ($($(#[$doc:meta])* $name:ident = $value:literal, $enumeration:ident :: $theirs:ident;)*) => {
        $($(#[$doc])* pub(super) const $name: u32 = $value;)*

        /// Each constant's value here and in cudarc, for comparison.
        #[cfg(all(test, feature = "cudarc-0-19"))]
        pub(super) fn numbers() -> Vec<(&'static str, u32, u32)> {
            use ::cudarc::driver::sys;
            vec![$((stringify!($name), $name, number(sys::$enumeration::$theirs)),)*]
        }
    };
}

/// Value of a cudarc enumerator. cudarc has some enumerations as Rust enums and some as structs
/// around a number; all have 4 bytes.
#[cfg(all(test, feature = "cudarc-0-19"))]
fn number<T: Copy>(theirs: T) -> u32 {
    const { assert!(size_of::<T>() == 4) };
    // SAFETY: `T` is a C enumeration of 4 bytes, and all 4 bytes belong to its value.
    unsafe { std::mem::transmute_copy(&theirs) }
}

numbers! {
    SUCCESS = 0, CUresult::CUDA_SUCCESS;
    /// Result code: the work has not ended.
    NOT_READY = 600, CUresult::CUDA_ERROR_NOT_READY;
    /// Result code: peer access is enabled already, by another rank of this process.
    ALREADY_ENABLED = 704, CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
    /// Result code: the operating system does not permit the operation to this process.
    NOT_PERMITTED = 800, CUresult::CUDA_ERROR_NOT_PERMITTED;
    NOT_SUPPORTED = 801, CUresult::CUDA_ERROR_NOT_SUPPORTED;
    /// Lowest result code of an error about stream captures.
    FIRST_OF_CAPTURES = 900, CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    /// Highest result code of an error about stream captures.
    LAST_OF_CAPTURES = 908, CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    /// Launch attribute: the kernel may begin before the previous kernel on the stream has ended.
    EARLY = 6, CUlaunchAttributeID_enum::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    MULTIPROCESSORS = 16, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
    ARCH_MAJOR = 75, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
    ARCH_MINOR = 76, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR;
    VIRTUAL_MEMORY = 102,
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED;
    /// Device attribute: support for exporting virtual memory as POSIX descriptors.
    DESCRIPTORS = 103,
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED;
    LOCAL_BYTES = 3, CUfunction_attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES;
    REGISTERS = 4, CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS;
    /// Kernel attribute: largest dynamic shared memory that a launch may request, in bytes.
    MOST_SHARED = 8, CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    /// Kernel attribute: preferred division between L1 and shared memory, in percent.
    CARVEOUT = 9, CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
    MEMORY_TYPE = 2, CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
    /// Pointer attribute: index of the device that owns the memory.
    MEMORY_DEVICE = 9, CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
    /// Memory type of device memory.
    OF_A_DEVICE = 2, CUmemorytype::CU_MEMORYTYPE_DEVICE;
    /// Memory type: unified, determined from the address.
    BY_ADDRESS = 4, CUmemorytype::CU_MEMORYTYPE_UNIFIED;
    /// Type of a handle of physical memory: POSIX descriptor.
    HANDLE_DESCRIPTOR = 1, CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    /// Type of physical memory: pinned.
    ALLOCATION_PINNED = 1, CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    /// Type of a location: device.
    LOCATION_DEVICE = 1, CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    /// Access right: read and write.
    ACCESS_READ_WRITE = 3, CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    /// Argument of the granularity query: the smallest granularity of physical memory.
    GRANULARITY_MINIMUM = 0, CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    /// Capture mode: driver calls of this thread never invalidate a capture in progress, neither
    /// one of this thread nor one of another thread.
    CAPTURE_RELAXED = 2, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    /// Capture status: the stream is not captured.
    CAPTURE_NONE = 0, CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    /// Memory pool attribute: whether reuse of freed memory may make one stream wait for another.
    POOL_DEPENDENCIES = 3,
        CUmemPool_attribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES;
}

/// Folders in which the driver's library is searched after the loader's path.
const FOLDERS: [&str; 6] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/local/nvidia/lib64",
    "/run/opengl-driver/lib",
    "/usr/lib/wsl/lib",
];

/// CUDA driver, initialised and ready for calls.
///
/// # Errors
/// [`Error::Library`] if no library is found, with the places searched; [`Error::Device`] if the
/// driver does not start, for example without a device.
pub(crate) fn driver() -> Result<&'static Api> {
    static DRIVER: OnceLock<Result<Api>> = OnceLock::new();
    let driver = DRIVER.get_or_init(|| {
        let folders = FOLDERS.map(String::from);
        let driver = load("the CUDA driver", &["libcuda.so.1", "libcuda.so"], &folders, Api::of)?;
        // SAFETY: `cuInit` has one parameter, flags, which must be zero.
        check("cuInit", unsafe { (driver.cuInit)(0) })?;
        Ok(driver)
    });
    driver.as_ref().map_err(Error::clone)
}

results!();

/// Name of a status code, from the driver. Loads the library itself instead of calling [`driver`],
/// because `driver` may be failing with this code.
fn name_of(code: u32) -> String {
    type Name = unsafe extern "C" fn(u32, *mut *const c_char) -> u32;
    static NAME: OnceLock<Option<Name>> = OnceLock::new();
    let name = NAME.get_or_init(|| {
        // SAFETY: the library is loaded already; this only adds a reference.
        let library = unsafe { Library::new("libcuda.so.1") }.ok()?;
        // SAFETY: the type is the C signature of the function: a status code, and a pointer to
        // which a string pointer is written.
        let name = *unsafe { library.get::<Name>(b"cuGetErrorName\0") }.ok()?;
        // The library must stay loaded, because `name` is called until the process ends.
        std::mem::forget(library);
        Some(name)
    });
    let mut text: *const c_char = std::ptr::null();
    if let Some(name) = name {
        // SAFETY: `text` is a valid target for the string pointer.
        let code = unsafe { name(code, &mut text) };
        if code == SUCCESS && !text.is_null() {
            // SAFETY: the driver's strings are constants that end with a zero byte.
            return unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
        }
    }
    "unknown code".into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_error_ends_work_and_a_capture_does_not() {
        let ended = [SUCCESS, 700, 719].map(has_ended);
        assert_eq!(ended, [true; 3]);
        let unknown = [NOT_READY, FIRST_OF_CAPTURES, 907, LAST_OF_CAPTURES].map(has_ended);
        assert_eq!(unknown, [false; 4]);
    }

    #[test]
    fn a_missing_driver_is_an_error_that_says_where_it_was_looked_for() {
        // The test checks nothing on a machine with a CUDA driver.
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
