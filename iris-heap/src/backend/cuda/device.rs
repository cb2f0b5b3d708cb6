//! CUDA devices of this process: their properties, primary contexts, and the driver's calls on
//! them. This file is long because it implements all functions of [`Driver`] for CUDA, each with
//! the reasons for unusual calls.

use std::ffi::{CStr, c_int, c_void};
use std::ptr::{NonNull, null_mut};
use std::sync::{Arc, Mutex, OnceLock};

use bytemuck::Zeroable;

use super::api::{self, Api, RawContext, check, check_for, driver};
use crate::backend::gpu::{
    DeviceCopy, Driver, Opened, RawEvent, RawFunction, RawModule, RawStream, common_calls, warn,
};
use crate::backend::{BackendKind, LaunchShape};
use crate::error::{Error, Result};
use crate::util::lock;

/// CUDA device with its primary context. The context is retained from the device's first use until
/// the process ends, so closing a heap does not destroy objects of other libraries in the context.
pub(super) struct CudaDevice {
    pub(super) driver: &'static Api,
    pub(super) ordinal: c_int,
    pub(super) handle: api::DeviceHandle,
    /// Empty until [`CudaDevice::context`] is called, because a primary context takes device
    /// memory, and a program may need only the device's description.
    context: OnceLock<RawContext>,
    pub(super) uuid: [u8; 16],
    pub(super) name: String,
    /// Compute capability times ten: 90 for compute capability 9.0.
    pub(super) arch: u32,
    pub(super) multiprocessors: u32,
    /// Whether launches with attribute [`api::EARLY`] are used, which begin before the previous
    /// launch on the stream has ended. They must also work in a capture.
    early: bool,
    /// Whether the device supports virtual memory management; the next field: whether it can export
    /// virtual memory as POSIX descriptors.
    pub(super) virtual_memory: bool,
    pub(super) descriptors: bool,
    /// Four bytes of device memory, to which `use_first_of` copies for each new stream; never
    /// freed.
    scratch: Mutex<Option<u64>>,
}

/// Bytes of dynamic shared memory per workgroup that a kernel may use without raising its limit by
/// an attribute.
const SHARED_LIMIT: u32 = 48 << 10;

/// Flag for events: without timing.
const NO_TIMING: u32 = 2;

/// Flags of pinned memory: `CU_MEMHOSTALLOC_PORTABLE` (for all contexts) and
/// `CU_MEMHOSTALLOC_DEVICEMAP` (mapped into the device's address space).
const PORTABLE_AND_MAPPED: u32 = 1 | 2;

/// Source of the copies that [`CudaDevice::use_first_of`] enqueues.
static ZEROS: [u8; 4] = [0; 4];

/// Newest CUDA version that the driver supports, in the driver's encoding: 12080 is CUDA 12.8.
pub(super) fn driver_version() -> Result<u32> {
    let driver = driver()?;
    let mut version = 0;
    // SAFETY: `version` receives the answer.
    check("cuDriverGetVersion", unsafe { (driver.cuDriverGetVersion)(&mut version) })?;
    Ok(version as u32)
}

/// First driver version that keeps launch attribute [`api::EARLY`] in graphs.
const EARLY_SINCE: u32 = 12030;

/// Number of devices that this process sees.
pub(super) fn count() -> Result<usize> {
    let driver = driver()?;
    let mut count = 0;
    // SAFETY: `count` receives the answer.
    check("cuDeviceGetCount", unsafe { (driver.cuDeviceGetCount)(&mut count) })?;
    Ok(count as usize)
}

impl CudaDevice {
    /// Returns the device with index `ordinal` among those that this process sees.
    pub(super) fn get(ordinal: usize) -> Result<Arc<CudaDevice>> {
        static OPENED: Opened<CudaDevice> = Opened::new();
        OPENED.get(BackendKind::Cuda, (ordinal, count()?), CudaDevice::open)
    }

    fn open(ordinal: c_int) -> Result<CudaDevice> {
        let driver = driver()?;
        let mut handle = 0;
        // SAFETY: `handle` receives the answer.
        check("cuDeviceGet", unsafe { (driver.cuDeviceGet)(&mut handle, ordinal) })?;
        let mut name = [0; 256];
        // SAFETY: `name` has the 256 bytes whose number is passed.
        let code = unsafe { (driver.cuDeviceGetName)(name.as_mut_ptr(), 256, handle) };
        check("cuDeviceGetName", code)?;
        let name = name.map(|c| c as u8);
        let name = CStr::from_bytes_until_nul(&name).map_err(|_| {
            Error::invalid("name of a CUDA device", "unterminated", "a string that ends")
        })?;
        let mut uuid = [0; 16];
        // SAFETY: `uuid` receives the answer.
        check("cuDeviceGetUuid", unsafe { (driver.cuDeviceGetUuid_v2)(&mut uuid, handle) })?;
        let attribute = |attribute| {
            let mut value = 0;
            // SAFETY: `value` receives the answer.
            let code = unsafe { (driver.cuDeviceGetAttribute)(&mut value, attribute, handle) };
            check("cuDeviceGetAttribute", code).map(|()| value as u32)
        };
        let major = attribute(api::ARCH_MAJOR)?;
        let minor = attribute(api::ARCH_MINOR)?;
        let virtual_memory = attribute(api::VIRTUAL_MEMORY)?;
        let descriptors = attribute(api::DESCRIPTORS)?;
        let multiprocessors = attribute(api::MULTIPROCESSORS)?;
        Ok(CudaDevice {
            driver,
            ordinal,
            handle,
            context: OnceLock::new(),
            uuid,
            name: name.to_string_lossy().into_owned(),
            arch: 10 * major + minor,
            multiprocessors,
            early: major >= 9 && driver_version()? >= EARLY_SINCE,
            virtual_memory: virtual_memory != 0,
            descriptors: descriptors != 0,
            scratch: Mutex::default(),
        })
    }

    pub(super) fn api(&self) -> &'static Api {
        self.driver
    }

    /// Does nothing: unlike HIP's runtime, the driver keeps no last error of a thread.
    pub(super) fn forget_error(&self) {}

    /// Returns the device's primary context, which is retained at the first call.
    fn context(&self) -> Result<RawContext> {
        if let Some(&context) = self.context.get() {
            return Ok(context);
        }
        let mut context = RawContext::default();
        // SAFETY: `context` receives the answer.
        let code = unsafe { (self.api().cuDevicePrimaryCtxRetain)(&mut context, self.handle) };
        check("cuDevicePrimaryCtxRetain", code)?;
        // Two concurrent first calls retain the context twice, which is harmless because this
        // process never releases it.
        Ok(*self.context.get_or_init(|| context))
    }

    fn new_stream(&self) -> Result<RawStream> {
        const NON_BLOCKING: u32 = 1;
        let _bound = self.bind_relaxed()?;
        let mut stream = RawStream::default();
        // SAFETY: `stream` receives the answer.
        let code = unsafe { (self.api().cuStreamCreate)(&mut stream, NON_BLOCKING) };
        check("cuStreamCreate", code)?;
        let used = self.use_first_of(stream).and_then(|()| {
            // SAFETY: `stream` was created just now.
            let code = unsafe { (self.api().cuStreamSynchronize)(stream) };
            check("cuStreamSynchronize", code)
        });
        if used.is_err() {
            // SAFETY: `stream` was created just now, and no other handle of it exists. A failure is
            // only a warning, because the first error is returned.
            warn(check("cuStreamDestroy", unsafe { (self.api().cuStreamDestroy_v2)(stream) }));
        }
        used.map(|()| stream)
    }

    /// Enqueues a copy of four bytes, so that later work is not the stream's first.
    ///
    /// If two threads give two streams their first work at the same moment, the driver sometimes
    /// makes one stream wait for the other (driver 580 on H200: up to every second time). The wait
    /// never ends if the other stream runs a kernel that waits for the first stream. So first uses
    /// are serialised by a lock. The work is a copy, because a kernel or a fill needs a free
    /// multiprocessor, which waiting kernels may not leave. The stream must be alive and not
    /// captured.
    fn use_first_of(&self, stream: RawStream) -> Result<()> {
        let _bound = self.bind_relaxed()?;
        let mut scratch = lock(&self.scratch);
        let to = match *scratch {
            Some(to) => to,
            None => {
                let mut to = 0;
                // SAFETY: `to` receives the answer.
                check("cuMemAlloc", unsafe { (self.api().cuMemAlloc_v2)(&mut to, 4) })?;
                *scratch.insert(to)
            }
        };
        let from = (&raw const ZEROS).cast();
        // SAFETY: source and target of the copy are never freed; the caller guarantees that the
        // stream is alive.
        check("cuMemcpyHtoDAsync", unsafe {
            (self.api().cuMemcpyHtoDAsync_v2)(to, from, 4, stream)
        })
    }

    /// Disables, for ranks that share the device, waits that the driver's memory pool adds between
    /// streams. Otherwise memory that one stream frees to the pool (`cuMemFreeAsync`, `CudaSlice`)
    /// may be reused by a second stream, and the driver then makes the second stream wait for the
    /// first. The wait never ends if the first stream runs an op of another rank that waits for the
    /// second stream.
    fn order_no_streams_by_memory(&self) -> Result<()> {
        let _bound = self.bind_relaxed()?;
        let mut pool = 0;
        // SAFETY: `pool` receives the answer.
        let code = unsafe { (self.api().cuDeviceGetDefaultMemPool)(&mut pool, self.handle) };
        check("cuDeviceGetDefaultMemPool", code)?;
        const ATTRIBUTE: u32 = api::POOL_DEPENDENCIES;
        let mut off: c_int = 0;
        // SAFETY: the pool is the device's; the attribute has the type of `off`.
        let code =
            unsafe { (self.api().cuMemPoolSetAttribute)(pool, ATTRIBUTE, (&raw mut off).cast()) };
        check("cuMemPoolSetAttribute", code)
    }

    /// Whether kernels of this device can access memory of `other`.
    pub(super) fn can_access_memory_of(&self, other: &CudaDevice) -> Result<bool> {
        let mut can = 0;
        // SAFETY: `can` receives the answer.
        let code =
            unsafe { (self.api().cuDeviceCanAccessPeer)(&mut can, self.handle, other.handle) };
        check("cuDeviceCanAccessPeer", code)?;
        Ok(can != 0)
    }

    /// Lets kernels of this device access plain memory of `other`; needed for memory that was not
    /// mapped for this device explicitly.
    pub(super) fn access_memory_of(&self, other: &CudaDevice) -> Result<()> {
        let other = other.context()?;
        let _bound = self.bind_relaxed()?;
        // SAFETY: the other context is retained until the process ends; the flags must be zero.
        match unsafe { (self.api().cuCtxEnablePeerAccess)(other, 0) } {
            api::ALREADY_ENABLED => Ok(()),
            code => check("cuCtxEnablePeerAccess", code),
        }
    }
}

/// Whether an image of kernels has a format whose length the driver can determine: a cubin, or PTX
/// that ends with a zero byte.
fn is_code(image: &[u8]) -> bool {
    image.starts_with(b"\x7fELF") || image.last() == Some(&0)
}

impl Driver for CudaDevice {
    fn kind(&self) -> BackendKind {
        BackendKind::Cuda
    }

    fn ordinal(&self) -> i32 {
        self.ordinal
    }

    fn title(&self) -> String {
        format!("{} {}", self.name, self.arch())
    }

    fn arch(&self) -> String {
        format!("sm_{}", self.arch)
    }

    fn uuid(&self) -> String {
        let hex: String = self.uuid.iter().map(|b| format!("{b:02x}")).collect();
        format!("GPU-{hex}")
    }

    fn enter(&self) -> Result<Option<i32>> {
        let context = self.context()?;
        let mut current = RawContext::default();
        // SAFETY: `current` receives the answer.
        check("cuCtxGetCurrent", unsafe { (self.api().cuCtxGetCurrent)(&mut current) })?;
        if current == context {
            return Ok(None);
        }
        // SAFETY: the context stays retained until the process ends, so it is alive.
        check("cuCtxPushCurrent", unsafe { (self.api().cuCtxPushCurrent_v2)(context) })?;
        Ok(Some(self.ordinal))
    }

    fn leave(&self, _: i32) -> Result<()> {
        let mut context = RawContext::default();
        // SAFETY: `context` receives the context that `enter` pushed.
        check("cuCtxPopCurrent", unsafe { (self.api().cuCtxPopCurrent_v2)(&mut context) })
    }

    common_calls! {
        exchange_capture_mode(api::CAPTURE_RELAXED): cuThreadExchangeStreamCaptureMode,
        memory_info: cuMemGetInfo_v2,
        destroy_stream: cuStreamDestroy_v2,
        capture_of: cuStreamGetCaptureInfo_v2,
        sync_stream: cuStreamSynchronize,
        stream_is_done: cuStreamQuery,
        create_event(NO_TIMING): cuEventCreate,
        event_is_done: cuEventQuery,
        destroy_event: cuEventDestroy_v2,
        record: cuEventRecord,
        wait_for: cuStreamWaitEvent,
        sync_event: cuEventSynchronize,
        pin(PORTABLE_AND_MAPPED): cuMemHostAlloc,
        pinned_address: cuMemHostGetDevicePointer_v2,
        load(is_code, "a cubin, or PTX that ends with a zero byte"): cuModuleLoadData,
        resources: cuFuncGetAttribute,
        resident: cuOccupancyMaxActiveBlocksPerMultiprocessor,
    }

    fn shared_by(&self, ranks: u32) {
        if let Err(error) = self.order_no_streams_by_memory() {
            tracing::warn!(%error, "streams of ranks that share a device may wait for each other");
        }
        if std::env::var_os("CUDA_DEVICE_MAX_CONNECTIONS").is_none() {
            tracing::warn!(
                ranks,
                "ranks share a device, and CUDA_DEVICE_MAX_CONNECTIONS is not set: set it to 32, \
                 or streams of one rank may wait for kernels of another"
            );
        }
    }

    fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    fn create_stream(&self) -> Result<RawStream> {
        self.new_stream()
    }

    unsafe fn use_first(&self, stream: RawStream) -> Result<()> {
        self.use_first_of(stream)
    }

    unsafe fn owns(&self, stream: RawStream) -> Result<bool> {
        let _bound = self.bind()?;
        let mut context = RawContext::default();
        // SAFETY: the stream is alive, by the contract of this function; `context` receives the
        // answer.
        let code = unsafe { (self.api().cuStreamGetCtx)(stream, &mut context) };
        check("cuStreamGetCtx", code)?;
        Ok(context == self.context()?)
    }

    unsafe fn copy(&self, to: u64, from: u64, bytes: u64, stream: RawStream) -> Result<()> {
        let _bound = self.bind()?;
        // SAFETY: the caller guarantees that `bytes` bytes at `to` and at `from` are valid and that
        // the stream is alive.
        let code = unsafe { (self.api().cuMemcpyAsync)(to, from, bytes as usize, stream) };
        check("cuMemcpyAsync", code)
    }

    unsafe fn copy_lines(&self, copy: &DeviceCopy, stream: RawStream) -> Result<()> {
        let _bound = self.bind()?;
        let side = |address, pitch: u64| api::Side {
            kind: api::BY_ADDRESS,
            address,
            pitch: pitch as usize,
            ..Zeroable::zeroed()
        };
        let lines = api::Lines {
            from: side(copy.from, copy.strides[1]),
            to: side(copy.to, copy.strides[0]),
            bytes: copy.bytes as usize,
            lines: copy.lines as usize,
        };
        // SAFETY: the caller guarantees that all lines of source and target are valid and that the
        // stream is alive.
        check("cuMemcpy2DAsync", unsafe { (self.api().cuMemcpy2DAsync_v2)(&lines, stream) })
    }

    unsafe fn write(
        &self,
        to: u64,
        from: *const u8,
        bytes: usize,
        stream: RawStream,
    ) -> Result<()> {
        let _bound = self.bind_relaxed()?;
        // SAFETY: the caller guarantees that `bytes` bytes at `to` and at `from` are valid and that
        // the stream is alive.
        let code = unsafe { (self.api().cuMemcpyHtoDAsync_v2)(to, from.cast(), bytes, stream) };
        check("cuMemcpyHtoDAsync", code)
    }

    unsafe fn read(&self, to: *mut u8, from: u64, bytes: usize, stream: RawStream) -> Result<()> {
        let _bound = self.bind_relaxed()?;
        // SAFETY: the caller guarantees that `bytes` bytes at `to` and at `from` are valid and that
        // the stream is alive.
        let code = unsafe { (self.api().cuMemcpyDtoHAsync_v2)(to.cast(), from, bytes, stream) };
        check("cuMemcpyDtoHAsync", code)
    }

    unsafe fn fill(&self, to: u64, bytes: u64, value: u8, stream: RawStream) -> Result<()> {
        let _bound = self.bind_relaxed()?;
        // SAFETY: the caller guarantees that `bytes` bytes at `to` are valid and that the stream is
        // alive.
        let code = unsafe { (self.api().cuMemsetD8Async)(to, value, bytes as usize, stream) };
        check("cuMemsetD8Async", code)
    }

    unsafe fn function(
        &self,
        module: RawModule,
        name: &CStr,
        shared_bytes: u32,
    ) -> Result<RawFunction> {
        let _bound = self.bind_relaxed()?;
        let shown = name.to_string_lossy();
        let mut function = RawFunction::default();
        // SAFETY: `function` receives the answer; module and name are alive.
        let code =
            unsafe { (self.api().cuModuleGetFunction)(&mut function, module, name.as_ptr()) };
        check_for("cuModuleGetFunction", || format!("of {shown}"), code)?;
        if let Some(load) = self.api().cuFuncLoad {
            // SAFETY: `function` was returned by the driver just now.
            check("cuFuncLoad", unsafe { load(function) })?;
        }
        let set = |attribute, value: u32, what: &str| {
            // SAFETY: `function` was returned by the driver just now.
            let code =
                unsafe { (self.api().cuFuncSetAttribute)(function, attribute, value as i32) };
            check_for("cuFuncSetAttribute", || format!("{value} {what} for {shown}"), code)
        };
        // Every kernel gets the same split between L1 and shared memory, because a multiprocessor
        // changes the split only when it is idle: a kernel with another split might wait for a
        // running kernel to end.
        set(api::CARVEOUT, 100, "% of the memory that L1 and shared memory divide")?;
        if shared_bytes > SHARED_LIMIT {
            set(api::MOST_SHARED, shared_bytes, "bytes of shared memory")?;
        }
        Ok(function)
    }

    unsafe fn resident_clusters(
        &self,
        function: RawFunction,
        LaunchShape { groups, threads, shared_bytes, .. }: LaunchShape,
        _: u32,
    ) -> Result<u32> {
        let _bound = self.bind_relaxed()?;
        let shape = api::Configuration {
            groups: [groups, 1, 1],
            threads: [threads, 1, 1],
            shared_bytes,
            ..Zeroable::zeroed()
        };
        let mut clusters = 0;
        // SAFETY: `clusters` receives the answer; the function is alive.
        let code =
            unsafe { (self.api().cuOccupancyMaxActiveClusters)(&mut clusters, function, &shape) };
        check("cuOccupancyMaxActiveClusters", code)?;
        Ok(clusters as u32)
    }

    unsafe fn launch(
        &self,
        function: RawFunction,
        name: &str,
        shape: LaunchShape,
        parameters: &mut [*mut c_void],
        stream: RawStream,
    ) -> Result<()> {
        let LaunchShape { groups, threads, shared_bytes, early } = shape;
        let _bound = self.bind()?;
        let what = || format!("of {name}: {groups} groups of {threads} threads");
        if let Some(launch) = self.api().cuLaunchKernelEx.filter(|_| early && self.early) {
            let attribute = api::Attribute {
                id: api::EARLY,
                value: [1, 0, 0, 0, 0, 0, 0, 0],
                ..Zeroable::zeroed()
            };
            let shape = api::Configuration {
                groups: [groups, 1, 1],
                threads: [threads, 1, 1],
                shared_bytes,
                stream: stream.0,
                attributes: &raw const attribute as u64,
                attribute_count: 1,
                ..Zeroable::zeroed()
            };
            // SAFETY: the caller guarantees that the parameters match the kernel; the driver reads
            // shape and attribute before it returns.
            let code = unsafe { launch(&shape, function, parameters.as_mut_ptr(), null_mut()) };
            return check_for("cuLaunchKernelEx", what, code);
        }
        // SAFETY: the caller guarantees that the parameters match the kernel; the driver copies
        // them before it returns; stream and function are alive and of this context.
        let code = unsafe {
            (self.api().cuLaunchKernel)(
                function,
                groups,
                1,
                1,
                threads,
                1,
                1,
                shared_bytes,
                stream,
                parameters.as_mut_ptr(),
                null_mut(),
            )
        };
        check_for("cuLaunchKernel", what, code)
    }
}
