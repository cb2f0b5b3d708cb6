//! The driver's functions: looked for before the first call, each called through one place.
//!
//! The types are cudarc's, and each signature is checked against cudarc's at compile time. The
//! functions are looked up here and not called through cudarc, because cudarc panics where the
//! library or one function is missing, and takes the code that is returned for one that it knows,
//! which a newer driver need not return.

use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};
use std::path::Path;
use std::sync::OnceLock;

use cudarc::driver::sys::{self, CUdevice, CUdeviceptr};
use libloading::Library;

use crate::error::{Error, Result};

macro_rules! driver {
    ($($name:ident($($arg:ty),* $(,)?);)*) => {
        /// The functions of the driver that are called. Each returns a `CUresult` as a number.
        #[allow(non_snake_case)]
        pub(crate) struct Driver {
            $(pub(crate) $name: unsafe extern "C" fn($($arg),*) -> u32,)*
            /// Since CUDA 12.4: loads a kernel that lazy loading would load at its first launch.
            pub(crate) cuFuncLoad: Option<unsafe extern "C" fn(sys::CUfunction) -> u32>,
            /// Never called: keeps the functions.
            _library: Library,
        }

        // The signatures are cudarc's.
        const _: () = {
            $(let _: unsafe fn($($arg),*) -> sys::CUresult = sys::$name;)*
        };

        impl Driver {
            #[allow(non_snake_case)]
            fn of(library: Library) -> Result<Driver, String> {
                $(
                    let $name = {
                        let name = concat!(stringify!($name), "\0");
                        // SAFETY: the type is cudarc's, checked above, with the returned
                        // enumeration as the number that C returns.
                        let symbol = unsafe {
                            library.get::<unsafe extern "C" fn($($arg),*) -> u32>(name.as_bytes())
                        };
                        *symbol.map_err(|e| format!("it has no {}: {e}", stringify!($name)))?
                    };
                )*
                // SAFETY: as above; the type is that of CUDA 12.4 and later.
                let load = unsafe {
                    library.get::<unsafe extern "C" fn(sys::CUfunction) -> u32>(b"cuFuncLoad\0")
                };
                let load = load.ok().map(|symbol| *symbol);
                Ok(Driver { $($name,)* cuFuncLoad: load, _library: library })
            }
        }
    };
}

driver! {
    cuInit(c_uint);
    cuDeviceGetCount(*mut c_int);
    cuDeviceGet(*mut CUdevice, c_int);
    cuDeviceGetName(*mut c_char, c_int, CUdevice);
    cuDeviceGetUuid_v2(*mut sys::CUuuid, CUdevice);
    cuDeviceGetAttribute(*mut c_int, sys::CUdevice_attribute, CUdevice);
    cuDeviceCanAccessPeer(*mut c_int, CUdevice, CUdevice);
    cuDevicePrimaryCtxRetain(*mut sys::CUcontext, CUdevice);
    cuCtxGetCurrent(*mut sys::CUcontext);
    cuCtxPushCurrent_v2(sys::CUcontext);
    cuCtxPopCurrent_v2(*mut sys::CUcontext);
    cuCtxEnablePeerAccess(sys::CUcontext, c_uint);
    cuThreadExchangeStreamCaptureMode(*mut sys::CUstreamCaptureMode);
    cuStreamCreate(*mut sys::CUstream, c_uint);
    cuStreamDestroy_v2(sys::CUstream);
    cuStreamSynchronize(sys::CUstream);
    cuStreamQuery(sys::CUstream);
    cuStreamGetCtx(sys::CUstream, *mut sys::CUcontext);
    cuStreamWaitEvent(sys::CUstream, sys::CUevent, c_uint);
    cuStreamGetCaptureInfo_v2(
        sys::CUstream,
        *mut sys::CUstreamCaptureStatus,
        *mut sys::cuuint64_t,
        *mut sys::CUgraph,
        *mut *const sys::CUgraphNode,
        *mut usize,
    );
    cuEventCreate(*mut sys::CUevent, c_uint);
    cuEventRecord(sys::CUevent, sys::CUstream);
    cuEventQuery(sys::CUevent);
    cuEventSynchronize(sys::CUevent);
    cuEventDestroy_v2(sys::CUevent);
    cuMemcpyAsync(CUdeviceptr, CUdeviceptr, usize, sys::CUstream);
    cuMemcpyHtoDAsync_v2(CUdeviceptr, *const c_void, usize, sys::CUstream);
    cuMemcpyDtoHAsync_v2(*mut c_void, CUdeviceptr, usize, sys::CUstream);
    cuMemsetD8Async(CUdeviceptr, c_uchar, usize, sys::CUstream);
    cuMemGetInfo_v2(*mut usize, *mut usize);
    cuMemAlloc_v2(*mut CUdeviceptr, usize);
    cuDeviceGetDefaultMemPool(*mut sys::CUmemoryPool, CUdevice);
    cuMemPoolSetAttribute(sys::CUmemoryPool, sys::CUmemPool_attribute, *mut c_void);
    cuMemFree_v2(CUdeviceptr);
    cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
    cuMemHostGetDevicePointer_v2(*mut CUdeviceptr, *mut c_void, c_uint);
    cuMemGetAddressRange_v2(*mut CUdeviceptr, *mut usize, CUdeviceptr);
    cuPointerGetAttribute(*mut c_void, sys::CUpointer_attribute, CUdeviceptr);
    cuMemGetAllocationGranularity(
        *mut usize,
        *const sys::CUmemAllocationProp,
        sys::CUmemAllocationGranularity_flags,
    );
    cuMemCreate(
        *mut sys::CUmemGenericAllocationHandle,
        usize,
        *const sys::CUmemAllocationProp,
        c_ulonglong,
    );
    cuMemRelease(sys::CUmemGenericAllocationHandle);
    cuMemExportToShareableHandle(
        *mut c_void,
        sys::CUmemGenericAllocationHandle,
        sys::CUmemAllocationHandleType,
        c_ulonglong,
    );
    cuMemImportFromShareableHandle(
        *mut sys::CUmemGenericAllocationHandle,
        *mut c_void,
        sys::CUmemAllocationHandleType,
    );
    cuMemAddressReserve(*mut CUdeviceptr, usize, usize, CUdeviceptr, c_ulonglong);
    cuMemAddressFree(CUdeviceptr, usize);
    cuMemMap(CUdeviceptr, usize, usize, sys::CUmemGenericAllocationHandle, c_ulonglong);
    cuMemUnmap(CUdeviceptr, usize);
    cuMemSetAccess(CUdeviceptr, usize, *const sys::CUmemAccessDesc, usize);
    cuIpcGetMemHandle(*mut sys::CUipcMemHandle, CUdeviceptr);
    cuIpcOpenMemHandle_v2(*mut CUdeviceptr, sys::CUipcMemHandle, c_uint);
    cuIpcCloseMemHandle(CUdeviceptr);
    cuModuleLoadData(*mut sys::CUmodule, *const c_void);
    cuModuleGetFunction(*mut sys::CUfunction, sys::CUmodule, *const c_char);
    cuFuncGetAttribute(*mut c_int, sys::CUfunction_attribute, sys::CUfunction);
    cuFuncSetAttribute(sys::CUfunction, sys::CUfunction_attribute, c_int);
    cuOccupancyMaxActiveBlocksPerMultiprocessor(*mut c_int, sys::CUfunction, c_int, usize);
    cuLaunchKernel(
        sys::CUfunction,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        sys::CUstream,
        *mut *mut c_void,
        *mut *mut c_void,
    );
}

/// `CUDA_SUCCESS`.
pub(super) const SUCCESS: u32 = 0;
/// `CUDA_ERROR_NOT_READY`: the work has not ended.
pub(super) const NOT_READY: u32 = sys::CUresult::CUDA_ERROR_NOT_READY as u32;

/// `CUDA_ERROR_CAPTURED_EVENT`: the event is of a capture.
pub(super) const CAPTURED: u32 = sys::CUresult::CUDA_ERROR_CAPTURED_EVENT as u32;

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
pub(crate) fn driver() -> Result<&'static Driver> {
    static DRIVER: OnceLock<Result<Driver>> = OnceLock::new();
    let driver = DRIVER.get_or_init(|| {
        let driver = load()?;
        // SAFETY: the flags must be zero.
        let code = unsafe { (driver.cuInit)(0) };
        if code != SUCCESS {
            return Err(error("cuInit", code, name_of(code)));
        }
        Ok(driver)
    });
    driver.as_ref().map_err(Error::clone)
}

/// The library, by name through the loader, then in the known folders.
fn load() -> Result<Driver> {
    const NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];
    let names = NAMES.map(String::from).into_iter();
    let places = FOLDERS.iter().map(|folder| format!("{folder}/{}", NAMES[0]));
    let mut problem = "no such file".to_string();
    for candidate in names.chain(places) {
        if candidate.starts_with('/') && !Path::new(&candidate).exists() {
            continue;
        }
        // SAFETY: the driver's library is made to be loaded by any program.
        match unsafe { Library::new(&candidate) } {
            Ok(library) => match Driver::of(library) {
                Ok(driver) => return Ok(driver),
                Err(e) => problem = format!("{candidate}: {e}"),
            },
            Err(e) => problem = e.to_string(),
        }
    }
    let path = std::env::var("LD_LIBRARY_PATH").unwrap_or_else(|_| "not set".into());
    Err(Error::Library {
        library: format!("{} (the CUDA driver)", NAMES[0]),
        looked: format!(
            "the loader's path (LD_LIBRARY_PATH is {path}), then {}",
            FOLDERS.join(", ")
        ),
        problem,
    })
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

/// The driver's name of a code. Not through [`Driver`]: the code may be one that cudarc's type of
/// the argument does not have.
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
