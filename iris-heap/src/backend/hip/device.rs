//! HIP devices of this process: their properties, the current device of a thread, and the runtime's
//! calls on them.
//!
//! This file is long because it implements all functions of [`Driver`] for HIP, each with the
//! reasons for unusual calls.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use super::api::{self, Api, Runtime, check, check_for, runtime};
use crate::backend::gpu::{
    DeviceCopy, Driver, Opened, RawEvent, RawFunction, RawModule, RawStream, common_calls,
};
use crate::backend::{BackendKind, LaunchShape};
use crate::error::{Error, Result};
use crate::util::{lock, unsupported};

/// Device of the HIP runtime. Unlike CUDA, HIP has no contexts: streams and memory belong to the
/// process.
pub(super) struct HipDevice {
    pub(super) runtime: &'static Runtime,
    pub(super) ordinal: c_int,
    name: String,
    /// Architecture such as `gfx942`, without the feature suffixes of `gcnArchName`.
    arch: String,
    uuid: String,
    multiprocessors: u32,
    /// Number of threads in a wave.
    wave: u32,
    /// Bytes of LDS (shared memory) that a workgroup can have.
    shared_bytes: u32,
    /// Whether a stream was created that shares a hardware queue with other streams.
    shares_queues: AtomicBool,
    /// Stream on which ranks of other devices copy this device's memory to or from the host;
    /// created by [`HipDevice::for_others`].
    for_others: Mutex<Option<RawStream>>,
}

/// Largest copy between host and device, in bytes. Larger copies of pageable memory hung between
/// processes on a functional simulator of MI300X; splitting copies costs little.
pub(super) const PIECE: usize = 64 << 10;

/// Source of the host-to-device copies that zero new memory.
static ZEROS: [u8; PIECE] = [0; PIECE];

/// Flags of events. The release flag is set because AMD's documentation of coherence says that a
/// release at system scope must be requested, although it is the default in the source of ROCm 6.2.
const EVENT_FLAGS: u32 = api::NO_TIMING | api::RELEASE_TO_SYSTEM;

/// Flags of pinned memory.
const HOST_FLAGS: u32 = api::HOST_PORTABLE | api::HOST_MAPPED | api::HOST_COHERENT;

/// Number of threads in a wave on the devices that the kernels support.
const WAVE: u32 = 64;

/// Rate of the clock that kernels read, in ticks per millisecond, as `iris::port::now` assumes it.
const CLOCK_RATE: u32 = 100_000;

/// Number of devices that this process sees.
pub(super) fn count() -> Result<usize> {
    let api = &runtime()?.api;
    let mut count = 0;
    // SAFETY: `count` receives the answer.
    check("hipGetDeviceCount", unsafe { (api.hipGetDeviceCount)(&mut count) })?;
    Ok(count as usize)
}

impl HipDevice {
    /// Returns the device with index `ordinal` among those that this process sees.
    pub(super) fn get(ordinal: usize) -> Result<Arc<HipDevice>> {
        static OPENED: Opened<HipDevice> = Opened::new();
        OPENED.get(BackendKind::Hip, (ordinal, count()?), HipDevice::open)
    }

    fn open(ordinal: c_int) -> Result<HipDevice> {
        let runtime = runtime()?;
        let api = &runtime.api;
        let name = text("hipDeviceGetName", |to, length| {
            // SAFETY: `to` is a buffer of at least `length` bytes.
            unsafe { (api.hipDeviceGetName)(to, length, ordinal) }
        })?;
        let bus = text("hipDeviceGetPCIBusId", |to, length| {
            // SAFETY: `to` is a buffer of at least `length` bytes.
            unsafe { (api.hipDeviceGetPCIBusId)(to, length, ordinal) }
        })?;
        let mut uuid = [0; 16];
        // SAFETY: `uuid` receives the answer.
        check("hipDeviceGetUuid", unsafe { (api.hipDeviceGetUuid)(&mut uuid, ordinal) })?;
        let attribute = |attribute| {
            let mut value = 0;
            // SAFETY: `value` receives the answer.
            let code = unsafe { (api.hipDeviceGetAttribute)(&mut value, attribute, ordinal) };
            check_for("hipDeviceGetAttribute", || attribute.to_string(), code)?;
            Ok::<u32, Error>(value as u32)
        };
        let device = HipDevice {
            runtime,
            ordinal,
            name,
            arch: arch(runtime, ordinal)?,
            uuid: identity(uuid, &bus),
            multiprocessors: attribute(api::MULTIPROCESSORS)?,
            wave: attribute(api::WAVE)?,
            shared_bytes: attribute(api::SHARED_BYTES)?,
            shares_queues: AtomicBool::new(false),
            for_others: Mutex::default(),
        };
        match attribute(api::CLOCK_RATE) {
            Ok(CLOCK_RATE) => {}
            Ok(rate) => tracing::warn!(
                device = %device.title(), rate, expected = CLOCK_RATE,
                "the clock of kernels has another rate: deadlines and traces are off by as much"
            ),
            // A device that does not report the clock's rate is accepted: releases before 5.4 do
            // not report it.
            Err(error) => tracing::debug!(%error, "the rate of the clock of kernels is not known"),
        }
        Ok(device)
    }

    /// Checks that the kernels, which are written for waves of 64 threads, can run on this device.
    pub(super) fn check_usable(&self) -> Result<()> {
        if self.wave == WAVE {
            return Ok(());
        }
        let why = format!("its waves have {} threads, and the kernels are for {WAVE}", self.wave);
        Err(unsupported(&format!("{} as the device of a heap", self.title()), &why))
    }

    pub(super) fn api(&self) -> &'static Api {
        &self.runtime.api
    }

    /// Clears the runtime's last error of this thread, after an error that this code expected.
    /// Other code of the program may query the last error, and must not see the expected error.
    pub(super) fn forget_error(&self) {
        // SAFETY: the function has no parameters.
        unsafe { (self.api().hipGetLastError)() };
    }

    /// Whether kernels of this device can access memory of device `other`.
    pub(super) fn can_access_memory_of(&self, other: c_int) -> Result<bool> {
        if self.ordinal == other {
            return Ok(true);
        }
        let mut can = 0;
        // SAFETY: `can` receives the answer.
        let code = unsafe { (self.api().hipDeviceCanAccessPeer)(&mut can, self.ordinal, other) };
        check("hipDeviceCanAccessPeer", code)?;
        Ok(can != 0)
    }

    /// Index of the device that owns the memory at an address. Memory of another process counts as
    /// owned by the device on which this process opened it. If the runtime returns an error, the
    /// result is the index of this device.
    fn owner_of(&self, address: u64) -> c_int {
        let mut owner = self.ordinal;
        let to = (&raw mut owner).cast::<c_void>();
        // SAFETY: the value of this attribute is a 4-byte integer.
        let code = unsafe { (self.api().hipPointerGetAttribute)(to, api::MEMORY_DEVICE, address) };
        if code == api::SUCCESS {
            return owner;
        }
        self.forget_error();
        self.ordinal
    }

    /// Enqueues a copy between host and device memory in pieces of at most [`PIECE`] bytes, each
    /// enqueued by `copy`.
    ///
    /// If the memory belongs to another device, the runtime would ignore the given stream and copy
    /// on that device's null stream. The null stream waits for all blocking streams of the device,
    /// perhaps for a kernel of the owner that waits for this rank. So the copy is then made on a
    /// non-blocking stream of the owner, after the given stream's work has ended, and has ended
    /// when this function returns.
    fn in_pieces(
        &self,
        name: &'static str,
        address: u64,
        bytes: usize,
        stream: RawStream,
        copy: impl Fn(&Api, usize, usize, RawStream) -> u32,
    ) -> Result<()> {
        let api = self.api();
        let pieces = |stream| {
            (0..bytes)
                .step_by(PIECE)
                .try_for_each(|at| check(name, copy(api, at, PIECE.min(bytes - at), stream)))
        };
        let sync = |stream| {
            // SAFETY: both streams with which this closure is called are alive.
            check("hipStreamSynchronize", unsafe { (api.hipStreamSynchronize)(stream) })
        };
        let owner = self.owner_of(address);
        let _bound = self.bind_relaxed()?;
        if owner == self.ordinal {
            return pieces(stream);
        }
        sync(stream)?;
        let owner = HipDevice::get(owner as usize)?;
        let _bound = owner.bind_relaxed()?;
        let own = owner.for_others()?;
        let enqueued = pieces(own);
        let waited = sync(own);
        enqueued.and(waited)
    }

    /// Returns the stream on which ranks of other devices copy this device's memory to or from the
    /// host. It is created at its first use, with the device current, and never destroyed.
    fn for_others(&self) -> Result<RawStream> {
        let mut made = lock(&self.for_others);
        if let Some(stream) = *made {
            return Ok(stream);
        }
        let mut stream = RawStream::default();
        // SAFETY: `stream` receives the answer.
        let code = unsafe { (self.api().hipStreamCreateWithFlags)(&mut stream, api::NON_BLOCKING) };
        check("hipStreamCreateWithFlags", code)?;
        Ok(*made.insert(stream))
    }

    /// Lets kernels of this device access memory of device `other`.
    pub(super) fn access_memory_of(&self, other: c_int) -> Result<()> {
        if self.ordinal == other {
            return Ok(());
        }
        let _bound = self.bind_relaxed()?;
        // SAFETY: `self` and `other` are devices of the process; the flags must be zero.
        match unsafe { (self.api().hipDeviceEnablePeerAccess)(other, 0) } {
            api::ALREADY_ENABLED => {
                self.forget_error();
                Ok(())
            }
            code => check_for("hipDeviceEnablePeerAccess", || format!("to device {other}"), code),
        }
    }
}

/// Text that a runtime function `get` writes into a buffer of the given length.
fn text(api: &str, get: impl FnOnce(*mut c_char, c_int) -> u32) -> Result<String> {
    let mut bytes = [0_u8; 256];
    check(api, get(bytes.as_mut_ptr().cast(), 255))?;
    // The runtime writes at most 255 bytes, so the last byte is still zero.
    let text = CStr::from_bytes_until_nul(&bytes).unwrap_or_default();
    Ok(text.to_string_lossy().into_owned())
}

/// Reads the architecture of a device from the device's properties.
fn arch(runtime: &Runtime, ordinal: c_int) -> Result<String> {
    // Buffer for the properties structure: more than large enough for any release, and aligned.
    let mut properties = [0_u64; 512];
    let to = properties.as_mut_ptr().cast::<c_void>();
    let (name, code, release) = match runtime.api.hipGetDevicePropertiesR0600 {
        Some(get) => {
            // SAFETY: the properties of the releases that have this function fit the buffer.
            let code = unsafe { get(to, ordinal) };
            ("hipGetDevicePropertiesR0600", code, &api::SINCE_6)
        }
        None => {
            // SAFETY: the properties of older releases fit the buffer.
            let code = unsafe { (runtime.api.hipGetDeviceProperties)(to, ordinal) };
            ("hipGetDeviceProperties", code, &api::BEFORE_6)
        }
    };
    check(name, code)?;
    let bytes: &[u8] = bytemuck::cast_slice(&properties);
    arch_of(&bytes[release.arch_name_at..][..api::ARCH_NAME])
}

/// Strips the feature suffixes of an architecture's name: `gfx942:sramecc+:xnack-` becomes
/// `gfx942`. Code compiled for the plain name runs whether these features are on or off.
fn arch_of(name: &[u8]) -> Result<String> {
    let name = name.split(|&byte| byte == 0).next().unwrap_or_default();
    let name = String::from_utf8_lossy(name).into_owned();
    match name.split(':').next() {
        Some(arch) if arch.starts_with("gfx") => Ok(arch.into()),
        _ => Err(Error::invalid("gcnArchName of an AMD device", name, "gfx942 or the like")),
    }
}

/// Identifier of a device: its UUID with its PCI address, because some drivers report no UUID.
fn identity(uuid: [u8; 16], bus: &str) -> String {
    let hex: String = uuid.iter().map(|b| format!("{b:02x}")).collect();
    format!("GPU-{hex}-{bus}")
}

/// Bit mask of all `count` compute units, in 32-bit words, for the creation of a stream: a stream
/// with a mask gets its own hardware queue.
fn all_units(count: u32) -> Vec<u32> {
    let word = |at: u32| match count - at {
        left @ 0..32 => (1 << left) - 1,
        _ => u32::MAX,
    };
    (0..count).step_by(32).map(word).collect()
}

/// Warning text if the runtime has too few hardware queues for its streams, given the value of
/// `GPU_MAX_HW_QUEUES`; `None` if there are enough. Streams that share a hardware queue can
/// deadlock, because work queued after a waiting kernel in the same queue does not begin.
fn too_few_queues(variable: Option<&str>) -> Option<String> {
    const DEFAULT: u32 = 4;
    const ENOUGH: u32 = 16;
    let queues = variable.map_or(Some(DEFAULT), |text| text.trim().parse().ok());
    match queues {
        Some(ENOUGH..) => None,
        _ => Some(format!(
            "GPU_MAX_HW_QUEUES is {}: set it to 32, or work that others wait for may stand in a \
             hardware queue behind a kernel that waits",
            variable.unwrap_or("not set, which means 4")
        )),
    }
}

/// Whether the runtime uses kernels for small copies, given the value of `GPU_FORCE_BLIT_COPY_SIZE`
/// (in KiB; its default depends on the release): only the value 0 returns false.
fn small_copies_are_kernels(variable: Option<&str>) -> bool {
    variable.is_none_or(|text| text.trim() != "0")
}

impl Driver for HipDevice {
    fn kind(&self) -> BackendKind {
        BackendKind::Hip
    }

    fn ordinal(&self) -> i32 {
        self.ordinal
    }

    fn title(&self) -> String {
        match self.name.as_str() {
            "" => format!("AMD {}", self.arch),
            name => format!("{name} {}", self.arch),
        }
    }

    fn arch(&self) -> String {
        self.arch.clone()
    }

    fn uuid(&self) -> String {
        self.uuid.clone()
    }

    fn enter(&self) -> Result<Option<i32>> {
        let mut current = 0;
        // SAFETY: `current` receives the answer.
        check("hipGetDevice", unsafe { (self.api().hipGetDevice)(&mut current) })?;
        if current == self.ordinal {
            return Ok(None);
        }
        // SAFETY: `ordinal` is the index of a device that the process sees.
        check("hipSetDevice", unsafe { (self.api().hipSetDevice)(self.ordinal) })?;
        Ok(Some(current))
    }

    fn leave(&self, previous: i32) -> Result<()> {
        // SAFETY: the device was current on this thread before, so it exists.
        check("hipSetDevice", unsafe { (self.api().hipSetDevice)(previous) })
    }

    common_calls! {
        exchange_capture_mode(api::CAPTURE_RELAXED): hipThreadExchangeStreamCaptureMode,
        memory_info: hipMemGetInfo,
        destroy_stream: hipStreamDestroy,
        capture_of: hipStreamGetCaptureInfo_v2,
        sync_stream: hipStreamSynchronize,
        stream_is_done: hipStreamQuery,
        create_event(EVENT_FLAGS): hipEventCreateWithFlags,
        event_is_done: hipEventQuery,
        destroy_event: hipEventDestroy,
        record: hipEventRecord,
        wait_for: hipStreamWaitEvent,
        sync_event: hipEventSynchronize,
        pin(HOST_FLAGS): hipHostMalloc,
        pinned_address: hipHostGetDevicePointer,
        load(is_code, "a code object, or a bundle of them"): hipModuleLoadData,
        resources: hipFuncGetAttribute,
        resident: hipModuleOccupancyMaxActiveBlocksPerMultiprocessor,
    }

    fn shared_by(&self, ranks: u32) {
        let queues = std::env::var("GPU_MAX_HW_QUEUES").ok();
        if self.shares_queues.load(Ordering::Relaxed)
            && let Some(why) = too_few_queues(queues.as_deref())
        {
            tracing::warn!(ranks, "ranks share a device, and {why}");
        }
        let copies = std::env::var("GPU_FORCE_BLIT_COPY_SIZE").ok();
        if small_copies_are_kernels(copies.as_deref()) {
            tracing::warn!(
                ranks,
                "ranks share a device, and GPU_FORCE_BLIT_COPY_SIZE is not 0: small copies by the host \
                 may be kernels then, which wait for room beside kernels that wait for this rank"
            );
        }
    }

    fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    fn create_stream(&self) -> Result<RawStream> {
        let _bound = self.bind_relaxed()?;
        let mut stream = RawStream::default();
        let mask = all_units(self.multiprocessors);
        // SAFETY: `stream` receives the answer; the mask has the number of words that is passed.
        let code = unsafe {
            (self.api().hipExtStreamCreateWithCUMask)(&mut stream, mask.len() as u32, mask.as_ptr())
        };
        let Err(error) = check("hipExtStreamCreateWithCUMask", code) else { return Ok(stream) };
        self.forget_error();
        if !self.shares_queues.swap(true, Ordering::Relaxed) {
            let queues = std::env::var("GPU_MAX_HW_QUEUES").ok();
            match too_few_queues(queues.as_deref()) {
                Some(why) => {
                    tracing::warn!(%error, "a stream has no hardware queue of its own: {why}")
                }
                None => tracing::debug!(%error, "a stream has no hardware queue of its own"),
            }
        }
        // SAFETY: `stream` receives the answer.
        let code = unsafe { (self.api().hipStreamCreateWithFlags)(&mut stream, api::NON_BLOCKING) };
        check("hipStreamCreateWithFlags", code)?;
        Ok(stream)
    }

    unsafe fn use_first(&self, _: RawStream) -> Result<()> {
        // Nothing to do: unlike CUDA's driver, the HIP runtime has not been observed to make
        // streams wait for each other at their first use.
        Ok(())
    }

    unsafe fn owns(&self, stream: RawStream) -> Result<bool> {
        let Some(get) = self.api().hipStreamGetDevice else {
            let why = "this release of HIP does not report a stream's device: use 5.6 or later";
            return Err(unsupported("a stream of the caller's", why));
        };
        let mut device = -1;
        // SAFETY: the stream is alive, by the contract of this function; `device` receives the
        // answer.
        check("hipStreamGetDevice", unsafe { get(stream, &mut device) })?;
        Ok(device == self.ordinal)
    }

    unsafe fn copy(&self, to: u64, from: u64, bytes: u64, stream: RawStream) -> Result<()> {
        let _bound = self.bind()?;
        // SAFETY: the caller guarantees that `bytes` bytes at `to` and at `from` are valid and that
        // the stream is alive.
        let code = unsafe {
            (self.api().hipMemcpyAsync)(to, from, bytes as usize, api::COPY_BY_ADDRESS, stream)
        };
        check("hipMemcpyAsync", code)
    }

    unsafe fn copy_lines(&self, copy: &DeviceCopy, stream: RawStream) -> Result<()> {
        let _bound = self.bind()?;
        let &DeviceCopy { to, from, bytes, lines, strides, .. } = copy;
        let [to_pitch, from_pitch] = strides.map(|it| it as usize);
        let (bytes, lines) = (bytes as usize, lines as usize);
        // SAFETY: the caller guarantees that all lines of source and target are valid and that the
        // stream is alive.
        let code = unsafe {
            let copy = self.api().hipMemcpy2DAsync;
            copy(to, to_pitch, from, from_pitch, bytes, lines, api::COPY_BY_ADDRESS, stream)
        };
        check("hipMemcpy2DAsync", code)
    }

    unsafe fn write(
        &self,
        to: u64,
        from: *const u8,
        bytes: usize,
        stream: RawStream,
    ) -> Result<()> {
        self.in_pieces("hipMemcpyHtoDAsync", to, bytes, stream, |api, at, count, stream| {
            // SAFETY: the caller guarantees that the stream is alive and that both ranges, in which
            // this piece lies, are valid.
            unsafe { (api.hipMemcpyHtoDAsync)(to + at as u64, from.add(at).cast(), count, stream) }
        })
    }

    unsafe fn read(&self, to: *mut u8, from: u64, bytes: usize, stream: RawStream) -> Result<()> {
        self.in_pieces("hipMemcpyDtoHAsync", from, bytes, stream, |api, at, count, stream| {
            // SAFETY: the caller guarantees that the stream is alive and that both ranges, in which
            // this piece lies, are valid.
            unsafe { (api.hipMemcpyDtoHAsync)(to.add(at).cast(), from + at as u64, count, stream) }
        })
    }

    unsafe fn fill(&self, to: u64, bytes: u64, value: u8, stream: RawStream) -> Result<()> {
        let _bound = self.bind_relaxed()?;
        if value != 0 {
            // SAFETY: the caller guarantees that `bytes` bytes at `to` are valid and that the
            // stream is alive.
            let code =
                unsafe { (self.api().hipMemsetAsync)(to, value.into(), bytes as usize, stream) };
            return check("hipMemsetAsync", code);
        }
        // Zeros are copied from the host, because a fill is a kernel, which needs free compute units.
        for at in (0..bytes).step_by(PIECE) {
            let count = (bytes - at).min(PIECE as u64) as usize;
            let from = ZEROS.as_ptr().cast::<c_void>();
            // SAFETY: the caller guarantees that the target is valid and the stream is alive; the
            // source is static.
            let code = unsafe { (self.api().hipMemcpyHtoDAsync)(to + at, from, count, stream) };
            check("hipMemcpyHtoDAsync", code)?;
        }
        Ok(())
    }

    unsafe fn function(
        &self,
        module: RawModule,
        name: &CStr,
        shared_bytes: u32,
    ) -> Result<RawFunction> {
        let _bound = self.bind_relaxed()?;
        let shown = name.to_string_lossy();
        if shared_bytes > self.shared_bytes {
            let expected = format!("at most {} on {}", self.shared_bytes, self.title());
            return Err(Error::invalid(format!("bytes of LDS of {shown}"), shared_bytes, expected));
        }
        let mut function = RawFunction::default();
        // SAFETY: `function` receives the answer; module and name are alive.
        let code =
            unsafe { (self.api().hipModuleGetFunction)(&mut function, module, name.as_ptr()) };
        check_for("hipModuleGetFunction", || format!("of {shown}"), code)?;
        Ok(function)
    }

    unsafe fn launch(
        &self,
        function: RawFunction,
        name: &str,
        shape: LaunchShape,
        parameters: &mut [*mut c_void],
        stream: RawStream,
    ) -> Result<()> {
        let LaunchShape { groups, threads, shared_bytes, .. } = shape;
        let _bound = self.bind()?;
        // SAFETY: the caller guarantees that the parameters match the kernel; the runtime copies
        // them before it returns; stream and function are alive and of this device.
        let code = unsafe {
            (self.api().hipModuleLaunchKernel)(
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
        let what = || format!("of {name}: {groups} groups of {threads} threads");
        check_for("hipModuleLaunchKernel", what, code)
    }
}

/// Whether an image has a format whose length the runtime can determine: an ELF file, or an offload
/// bundle of clang, compressed or not.
fn is_code(image: &[u8]) -> bool {
    let kinds: [&[u8]; 3] = [b"\x7fELF", b"__CLANG_OFFLOAD_BUNDLE__", b"CCOB"];
    kinds.iter().any(|kind| image.starts_with(kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architectures_end_before_their_features() {
        let named = |name: &str| {
            let mut field = [0; api::ARCH_NAME];
            field[..name.len()].copy_from_slice(name.as_bytes());
            arch_of(&field)
        };
        assert_eq!(named("gfx942:sramecc+:xnack-").unwrap(), "gfx942");
        assert_eq!(named("gfx90a").unwrap(), "gfx90a");
        for wrong in ["", "sm_90", ":sramecc+"] {
            let error = named(wrong).unwrap_err().to_string();
            assert!(error.contains("gcnArchName") && error.contains("gfx942"), "{error}");
        }
    }

    #[test]
    fn a_mask_has_every_compute_unit_and_no_other() {
        for (units, words) in [(304, 10), (104, 4), (32, 1), (33, 2), (1, 1), (256, 8)] {
            let mask = all_units(units);
            let ones: u32 = mask.iter().map(|word| word.count_ones()).sum();
            assert_eq!((mask.len(), ones), (words, units));
            assert!(mask[..words - 1].iter().all(|&word| word == u32::MAX));
            assert_eq!(mask[words - 1].trailing_ones(), mask[words - 1].count_ones());
        }
    }

    #[test]
    fn too_few_hardware_queues_are_told_of() {
        for few in [None, Some("4"), Some("8"), Some("many"), Some("")] {
            let text = too_few_queues(few).expect("too few");
            assert!(text.contains("GPU_MAX_HW_QUEUES") && text.contains("32"), "{text}");
            assert!(text.contains(few.unwrap_or("not set")), "{text}");
        }
        assert_eq!([Some("16"), Some(" 32 ")].map(too_few_queues), [None, None]);
    }

    #[test]
    fn small_copies_are_no_kernels_only_where_that_is_said() {
        assert!(small_copies_are_kernels(None) && small_copies_are_kernels(Some("16")));
        assert!(!small_copies_are_kernels(Some("0")));
    }

    #[test]
    fn what_is_loaded_says_how_long_it_is() {
        assert!(is_code(b"\x7fELF\x02\x01") && is_code(b"__CLANG_OFFLOAD_BUNDLE__\0"));
        assert!(is_code(b"CCOB") && !is_code(b"") && !is_code(b".version 8.0\0"));
    }

    #[test]
    fn partitions_and_devices_without_an_identity_are_told_apart_by_their_place() {
        let of = |bus| identity([0; 16], bus);
        assert_ne!(of("0000:05:00.0"), of("0000:26:00.0"));
        assert_ne!(identity([1; 16], "0000:05:00.0"), of("0000:05:00.0"));
    }
}
