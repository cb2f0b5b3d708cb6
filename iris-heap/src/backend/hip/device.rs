//! Devices of this process: what they are, which of them is current, and the runtime's calls on them.
//!
//! Long because every call of the shared part comes here, each with its reason.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::marker::PhantomData;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use super::api::{self, Api, Runtime, check, check_for, runtime};
use crate::backend::gpu::{
    Before, DeviceCopy, Driver, Opened, RawEvent, RawFunction, RawModule, RawStream, warn,
};
use crate::backend::{BackendKind, LaunchShape};
use crate::error::{Error, Result};
use crate::util::{lock, unsupported};

/// A device. What the process has on it belongs to the process: there is no context.
pub(super) struct Device {
    pub(super) runtime: &'static Runtime,
    pub(super) ordinal: c_int,
    name: String,
    /// `gfx942`, without the features that `gcnArchName` has behind it.
    arch: String,
    uuid: String,
    multiprocessors: u32,
    /// Threads of a wave.
    wave: u32,
    /// Bytes of LDS that a workgroup can have.
    shared_bytes: u32,
    /// A stream was made that has no hardware queue of its own.
    shares_queues: AtomicBool,
    /// The stream of [`Device::for_others`].
    for_others: Mutex<Option<RawStream>>,
}

/// The most that is copied between host and device at a time. Larger copies of pageable memory were seen
/// to hang between processes on a functional simulator of MI300X, and cost little in pieces.
pub(super) const PIECE: usize = 64 << 10;

/// What new memory is cleared with.
static ZEROS: [u8; PIECE] = [0; PIECE];

/// Threads of a wave, on the devices that the kernels are for.
const WAVE: u32 = 64;

/// Ticks of the clock in a millisecond, as `iris::port::now` takes them.
const CLOCK_RATE: u32 = 100_000;

/// How many devices this process sees.
pub(super) fn count() -> Result<usize> {
    let api = &runtime()?.api;
    let mut count = 0;
    // SAFETY: `count` is where the answer goes.
    check("hipGetDeviceCount", unsafe { (api.hipGetDeviceCount)(&mut count) })?;
    Ok(count as usize)
}

impl Device {
    /// Number `ordinal` of the devices that this process sees.
    pub(super) fn get(ordinal: usize) -> Result<Arc<Device>> {
        static OPENED: Opened<Device> = Opened::new();
        OPENED.get(BackendKind::Hip, (ordinal, count()?), Device::open)
    }

    fn open(ordinal: c_int) -> Result<Device> {
        let runtime = runtime()?;
        let api = &runtime.api;
        let name = text("hipDeviceGetName", |to, length| {
            // SAFETY: the place has the length that is given.
            unsafe { (api.hipDeviceGetName)(to, length, ordinal) }
        })?;
        let bus = text("hipDeviceGetPCIBusId", |to, length| {
            // SAFETY: as above.
            unsafe { (api.hipDeviceGetPCIBusId)(to, length, ordinal) }
        })?;
        let mut uuid = [0; 16];
        // SAFETY: `uuid` is where the answer goes.
        check("hipDeviceGetUuid", unsafe { (api.hipDeviceGetUuid)(&mut uuid, ordinal) })?;
        let attribute = |attribute| {
            let mut value = 0;
            // SAFETY: `value` is where the answer goes.
            let code = unsafe { (api.hipDeviceGetAttribute)(&mut value, attribute, ordinal) };
            check_for("hipDeviceGetAttribute", || attribute.to_string(), code)?;
            Ok::<u32, Error>(value as u32)
        };
        let device = Device {
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
            // Releases before 5.4 do not tell it.
            Err(error) => tracing::debug!(%error, "the rate of the clock of kernels is not known"),
        }
        Ok(device)
    }

    /// That kernels of ours can run on it: they are written for waves of 64 threads.
    pub(super) fn check_usable(&self) -> Result<()> {
        if self.wave == WAVE {
            return Ok(());
        }
        let why = format!("its waves have {} threads, and the kernels are for {WAVE}", self.wave);
        Err(unsupported(&format!("{} as the device of a heap", self.title()), &why))
    }

    /// Makes it the current device of this thread until the guard is dropped.
    fn bind(&self) -> Result<Bound> {
        let api = &self.runtime.api;
        let mut current = 0;
        // SAFETY: `current` is where the answer goes.
        check("hipGetDevice", unsafe { (api.hipGetDevice)(&mut current) })?;
        let previous = (current != self.ordinal).then_some(current);
        if previous.is_some() {
            // SAFETY: it is one of the process's devices.
            check("hipSetDevice", unsafe { (api.hipSetDevice)(self.ordinal) })?;
        }
        Ok(Bound { api, previous, mode: None, thread: PhantomData })
    }

    /// As [`Device::bind`], for calls that touch nothing a capture could be about: while the guard
    /// lives, a capture of another thread in global mode is not broken by them.
    pub(super) fn bind_apart(&self) -> Result<Bound> {
        let mut bound = self.bind()?;
        let mut mode = api::CAPTURE_RELAXED;
        // SAFETY: `mode` holds the new mode and is where the old one goes, one of three.
        let code = unsafe { (bound.api.hipThreadExchangeStreamCaptureMode)(&mut mode) };
        check("hipThreadExchangeStreamCaptureMode", code)?;
        bound.mode = Some(mode);
        Ok(bound)
    }

    /// The runtime keeps the last error of a thread for whoever asks: one that was expected is no news to
    /// the rest of the program.
    pub(super) fn forget_error(&self) {
        // SAFETY: it takes nothing.
        unsafe { (self.runtime.api.hipGetLastError)() };
    }

    /// Whether kernels of this device can access memory of the other.
    pub(super) fn can_access_memory_of(&self, other: c_int) -> Result<bool> {
        if self.ordinal == other {
            return Ok(true);
        }
        let mut can = 0;
        // SAFETY: `can` is where the answer goes.
        let code =
            unsafe { (self.runtime.api.hipDeviceCanAccessPeer)(&mut can, self.ordinal, other) };
        check("hipDeviceCanAccessPeer", code)?;
        Ok(can != 0)
    }

    /// The device whose memory an address is in; memory that another process gave is the device's that
    /// opened it.
    fn owner_of(&self, address: u64) -> c_int {
        let mut owner = self.ordinal;
        let to = (&raw mut owner).cast::<c_void>();
        // SAFETY: of this attribute the answer is one number of 4 bytes.
        let code =
            unsafe { (self.runtime.api.hipPointerGetAttribute)(to, api::MEMORY_DEVICE, address) };
        if code == api::SUCCESS {
            return owner;
        }
        self.forget_error();
        self.ordinal
    }

    /// Enqueues a copy between the host and memory of a device, in pieces that `copy` enqueues.
    ///
    /// Of another device's memory the runtime would make the copy on that device's null stream, whatever
    /// stream it is given, and behind all of its blocking streams: behind a kernel of the owner that waits for
    /// this rank. So it is made on a stream of the owner's that waits for none, when what the given stream had
    /// to do is done, and is over when this returns.
    fn in_pieces(
        &self,
        name: &'static str,
        address: u64,
        bytes: usize,
        stream: RawStream,
        copy: impl Fn(&Api, usize, usize, RawStream) -> u32,
    ) -> Result<()> {
        let api = &self.runtime.api;
        let pieces = |stream| {
            (0..bytes)
                .step_by(PIECE)
                .try_for_each(|at| check(name, copy(api, at, PIECE.min(bytes - at), stream)))
        };
        let sync = |stream| {
            // SAFETY: both streams that this is called with are alive.
            check("hipStreamSynchronize", unsafe { (api.hipStreamSynchronize)(stream) })
        };
        let owner = self.owner_of(address);
        let _bound = self.bind_apart()?;
        if owner == self.ordinal {
            return pieces(stream);
        }
        sync(stream)?;
        let owner = Device::get(owner as usize)?;
        let _bound = owner.bind_apart()?;
        let own = owner.for_others()?;
        let enqueued = pieces(own);
        let waited = sync(own);
        enqueued.and(waited)
    }

    /// The stream on which other devices' ranks copy this one's memory to or from the host: made at its first
    /// use, with the device current, and kept.
    fn for_others(&self) -> Result<RawStream> {
        let mut made = lock(&self.for_others);
        if let Some(stream) = *made {
            return Ok(stream);
        }
        let mut stream = RawStream::default();
        // SAFETY: `stream` is where the answer goes.
        let code =
            unsafe { (self.runtime.api.hipStreamCreateWithFlags)(&mut stream, api::NON_BLOCKING) };
        check("hipStreamCreateWithFlags", code)?;
        Ok(*made.insert(stream))
    }

    /// Lets kernels of this device access memory of the other.
    pub(super) fn access_memory_of(&self, other: c_int) -> Result<()> {
        if self.ordinal == other {
            return Ok(());
        }
        let _bound = self.bind_apart()?;
        // SAFETY: both are devices of the process; the flags must be zero.
        match unsafe { (self.runtime.api.hipDeviceEnablePeerAccess)(other, 0) } {
            api::ALREADY_ENABLED => {
                self.forget_error();
                Ok(())
            }
            code => check_for("hipDeviceEnablePeerAccess", || format!("to device {other}"), code),
        }
    }
}

/// A text that a function of the runtime writes.
fn text(api: &str, get: impl FnOnce(*mut c_char, c_int) -> u32) -> Result<String> {
    let mut bytes = [0_u8; 256];
    check(api, get(bytes.as_mut_ptr().cast(), 255))?;
    // The last byte is zero still.
    let text = CStr::from_bytes_until_nul(&bytes).unwrap_or_default();
    Ok(text.to_string_lossy().into_owned())
}

/// The architecture of a device, by its properties.
fn arch(runtime: &Runtime, ordinal: c_int) -> Result<String> {
    // Twice what any release has, on the boundary that the structure needs.
    let mut properties = [0_u64; 512];
    let to = properties.as_mut_ptr().cast::<c_void>();
    let (name, code, release) = match runtime.api.hipGetDevicePropertiesR0600 {
        Some(get) => {
            // SAFETY: the structure of these releases fits the place.
            let code = unsafe { get(to, ordinal) };
            ("hipGetDevicePropertiesR0600", code, &api::SINCE_6)
        }
        None => {
            // SAFETY: as above.
            let code = unsafe { (runtime.api.hipGetDeviceProperties)(to, ordinal) };
            ("hipGetDeviceProperties", code, &api::BEFORE_6)
        }
    };
    check(name, code)?;
    let bytes: &[u8] = bytemuck::cast_slice(&properties);
    arch_of(&bytes[release.arch_name_at..][..api::ARCH_NAME])
}

/// `gfx942` of `gfx942:sramecc+:xnack-`: code for it runs with those features on and off.
fn arch_of(name: &[u8]) -> Result<String> {
    let name = name.split(|&byte| byte == 0).next().unwrap_or_default();
    let name = String::from_utf8_lossy(name).into_owned();
    match name.split(':').next() {
        Some(arch) if arch.starts_with("gfx") => Ok(arch.into()),
        _ => Err(Error::invalid("gcnArchName of an AMD device", name, "gfx942 or the like")),
    }
}

/// What tells a device from every other: devices whose driver gives no identity have the place on the bus.
fn identity(uuid: [u8; 16], bus: &str) -> String {
    let hex: String = uuid.iter().map(|b| format!("{b:02x}")).collect();
    format!("GPU-{hex}-{bus}")
}

/// A mask of all compute units: a stream that has one gets a hardware queue of its own.
fn all_units(count: u32) -> Vec<u32> {
    let word = |at: u32| match count - at {
        left @ 0..32 => (1 << left) - 1,
        _ => u32::MAX,
    };
    (0..count).step_by(32).map(word).collect()
}

/// What is wrong with the number of hardware queues that the runtime's streams share, as its variable has
/// it: behind a kernel that waits nothing begins that shares its queue.
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

/// Whether small copies are kernels, as the runtime's variable has it; its default, in KiB, depends on the
/// release.
fn small_copies_are_kernels(variable: Option<&str>) -> bool {
    variable.is_none_or(|text| text.trim() != "0")
}

/// The device is current on this thread.
pub(super) struct Bound {
    api: &'static Api,
    /// The device that was, if it was another.
    previous: Option<c_int>,
    /// The thread's mode of capture before, if it was changed.
    mode: Option<u32>,
    /// What is current belongs to the thread.
    thread: PhantomData<*const ()>,
}

impl Drop for Bound {
    fn drop(&mut self) {
        if let Some(mode) = &mut self.mode {
            // SAFETY: as in `bind_apart`, with the mode that was there.
            let code = unsafe { (self.api.hipThreadExchangeStreamCaptureMode)(mode) };
            warn(check("hipThreadExchangeStreamCaptureMode", code));
        }
        if let Some(previous) = self.previous {
            // SAFETY: it was this thread's device.
            warn(check("hipSetDevice", unsafe { (self.api.hipSetDevice)(previous) }));
        }
    }
}

impl Driver for Device {
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

    fn memory_info(&self) -> Result<(u64, u64)> {
        let bound = self.bind_apart()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the two are where the answers go.
        let code = unsafe { (bound.api.hipMemGetInfo)(&mut free, &mut total) };
        check("hipMemGetInfo", code)?;
        Ok((free as u64, total as u64))
    }

    fn make_current(&self, apart: bool) -> Result<Before> {
        let bound = if apart { self.bind_apart() } else { self.bind() }?;
        let before = Before { device: bound.previous, mode: bound.mode };
        // `restore` makes it again.
        std::mem::forget(bound);
        Ok(before)
    }

    fn restore(&self, Before { device: previous, mode }: Before) {
        drop(Bound { api: &self.runtime.api, previous, mode, thread: PhantomData });
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
        let bound = self.bind_apart()?;
        let mut stream = RawStream::default();
        let mask = all_units(self.multiprocessors);
        // SAFETY: `stream` is where the answer goes; the mask has as many words as said.
        let code = unsafe {
            (bound.api.hipExtStreamCreateWithCUMask)(&mut stream, mask.len() as u32, mask.as_ptr())
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
        // SAFETY: `stream` is where the answer goes.
        let code = unsafe { (bound.api.hipStreamCreateWithFlags)(&mut stream, api::NON_BLOCKING) };
        check("hipStreamCreateWithFlags", code)?;
        Ok(stream)
    }

    unsafe fn destroy_stream(&self, stream: RawStream) -> Result<()> {
        let bound = self.bind_apart()?;
        // SAFETY: as the caller says.
        check("hipStreamDestroy", unsafe { (bound.api.hipStreamDestroy)(stream) })
    }

    unsafe fn use_first(&self, _: RawStream) -> Result<()> {
        // That streams wait for each other at their first use was seen with CUDA's driver alone.
        Ok(())
    }

    unsafe fn owns(&self, stream: RawStream) -> Result<bool> {
        let Some(get) = self.runtime.api.hipStreamGetDevice else {
            let why = "this release of HIP does not tell whose it is: it takes 5.6 or later";
            return Err(unsupported("a stream of the caller's", why));
        };
        let mut device = -1;
        // SAFETY: the stream is alive, as the caller says; `device` is where the answer goes.
        check("hipStreamGetDevice", unsafe { get(stream, &mut device) })?;
        Ok(device == self.ordinal)
    }

    unsafe fn capture_of(&self, stream: RawStream) -> Result<Option<u64>> {
        let bound = self.bind()?;
        let (mut status, mut id) = (api::CAPTURE_NONE, 0);
        // SAFETY: the stream is alive, as the caller says; status and id are where the answers go; the
        // others may be null.
        let code = unsafe {
            (bound.api.hipStreamGetCaptureInfo_v2)(
                stream,
                &mut status,
                &mut id,
                null_mut(),
                null_mut(),
                null_mut(),
            )
        };
        check("hipStreamGetCaptureInfo", code)?;
        Ok((status != api::CAPTURE_NONE).then_some(id))
    }

    unsafe fn sync_stream(&self, stream: RawStream) -> Result<()> {
        let bound = self.bind_apart()?;
        // SAFETY: the stream is alive, as the caller says.
        check("hipStreamSynchronize", unsafe { (bound.api.hipStreamSynchronize)(stream) })
    }

    unsafe fn stream_is_done(&self, stream: RawStream) -> bool {
        let Ok(bound) = self.bind_apart() else { return false };
        // SAFETY: the stream is alive, as the caller says.
        let code = unsafe { (bound.api.hipStreamQuery)(stream) };
        if code == api::NOT_READY {
            self.forget_error();
        }
        code == api::SUCCESS
    }

    fn create_event(&self) -> Result<RawEvent> {
        let bound = self.bind_apart()?;
        let mut event = RawEvent::default();
        // A release at system scope is the default in the source of ROCm 6.2, but AMD's page about coherence says
        // that it is asked for.
        let flags = api::NO_TIMING | api::RELEASE_TO_SYSTEM;
        // SAFETY: `event` is where the answer goes.
        let code = unsafe { (bound.api.hipEventCreateWithFlags)(&mut event, flags) };
        check("hipEventCreateWithFlags", code)?;
        Ok(event)
    }

    unsafe fn destroy_event(&self, event: RawEvent) -> Result<()> {
        let bound = self.bind_apart()?;
        // SAFETY: as the caller says.
        check("hipEventDestroy", unsafe { (bound.api.hipEventDestroy)(event) })
    }

    unsafe fn record(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        let bound = self.bind()?;
        // SAFETY: both are alive, as the caller says.
        check("hipEventRecord", unsafe { (bound.api.hipEventRecord)(event, stream) })
    }

    unsafe fn wait_for(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        let bound = self.bind()?;
        // SAFETY: both are alive, as the caller says.
        check("hipStreamWaitEvent", unsafe { (bound.api.hipStreamWaitEvent)(stream, event, 0) })
    }

    unsafe fn event_is_done(&self, event: RawEvent) -> bool {
        let Ok(bound) = self.bind_apart() else { return false };
        // SAFETY: the event is alive, as the caller says.
        let code = unsafe { (bound.api.hipEventQuery)(event) };
        // An error of the device ends everything on it. What is captured has not begun.
        let unfinished = [api::NOT_READY, api::CAPTURED].contains(&code);
        if unfinished {
            self.forget_error();
        }
        !unfinished
    }

    unsafe fn sync_event(&self, event: RawEvent) -> Result<()> {
        let bound = self.bind_apart()?;
        // SAFETY: the event is alive, as the caller says.
        check("hipEventSynchronize", unsafe { (bound.api.hipEventSynchronize)(event) })
    }

    unsafe fn copy(&self, to: u64, from: u64, bytes: u64, stream: RawStream) -> Result<()> {
        let bound = self.bind()?;
        // SAFETY: the caller vouches for both ranges and the stream.
        let code = unsafe {
            (bound.api.hipMemcpyAsync)(to, from, bytes as usize, api::COPY_BY_ADDRESS, stream)
        };
        check("hipMemcpyAsync", code)
    }

    unsafe fn copy_lines(&self, copy: &DeviceCopy, stream: RawStream) -> Result<()> {
        let bound = self.bind()?;
        let &DeviceCopy { to, from, bytes, lines, apart, .. } = copy;
        let [to_apart, from_apart] = apart.map(|it| it as usize);
        let (bytes, lines) = (bytes as usize, lines as usize);
        // SAFETY: the caller vouches for both ranges and the stream.
        let code = unsafe {
            let copy = bound.api.hipMemcpy2DAsync;
            copy(to, to_apart, from, from_apart, bytes, lines, api::COPY_BY_ADDRESS, stream)
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
            // SAFETY: the caller vouches for both ranges, which the piece is in, and the stream.
            unsafe { (api.hipMemcpyHtoDAsync)(to + at as u64, from.add(at).cast(), count, stream) }
        })
    }

    unsafe fn read(&self, to: *mut u8, from: u64, bytes: usize, stream: RawStream) -> Result<()> {
        self.in_pieces("hipMemcpyDtoHAsync", from, bytes, stream, |api, at, count, stream| {
            // SAFETY: as in `write`, the other way round.
            unsafe { (api.hipMemcpyDtoHAsync)(to.add(at).cast(), from + at as u64, count, stream) }
        })
    }

    unsafe fn fill(&self, to: u64, bytes: u64, value: u8, stream: RawStream) -> Result<()> {
        let bound = self.bind_apart()?;
        if value != 0 {
            // SAFETY: the caller vouches for the range and the stream.
            let code =
                unsafe { (bound.api.hipMemsetAsync)(to, value.into(), bytes as usize, stream) };
            return check("hipMemsetAsync", code);
        }
        // By copies: setting memory is a kernel.
        for at in (0..bytes).step_by(PIECE) {
            let count = (bytes - at).min(PIECE as u64) as usize;
            let from = ZEROS.as_ptr().cast::<c_void>();
            // SAFETY: as above; the zeros stay.
            let code = unsafe { (bound.api.hipMemcpyHtoDAsync)(to + at, from, count, stream) };
            check("hipMemcpyHtoDAsync", code)?;
        }
        Ok(())
    }

    fn pin(&self, bytes: usize) -> Result<NonNull<u8>> {
        const FLAGS: u32 = api::HOST_PORTABLE | api::HOST_MAPPED | api::HOST_COHERENT;
        let bound = self.bind_apart()?;
        let mut memory = null_mut();
        // SAFETY: `memory` is where the answer goes.
        let code = unsafe { (bound.api.hipHostMalloc)(&mut memory, bytes, FLAGS) };
        check("hipHostMalloc", code)?;
        NonNull::new(memory.cast::<u8>())
            .ok_or_else(|| Error::invalid("address of pinned memory", "null", "a page's"))
    }

    unsafe fn pinned_address(&self, host: NonNull<u8>) -> Result<u64> {
        let bound = self.bind_apart()?;
        let mut address = 0;
        let host = host.as_ptr().cast::<c_void>();
        // SAFETY: `address` is where the answer goes; `pin` gave the memory, as the caller says.
        let code = unsafe { (bound.api.hipHostGetDevicePointer)(&mut address, host, 0) };
        check("hipHostGetDevicePointer", code)?;
        Ok(address)
    }

    fn load(&self, image: &[u8]) -> Result<RawModule> {
        if !is_code(image) {
            let expected = "a code object, or a bundle of them";
            return Err(Error::invalid("image of a module", "something else", expected));
        }
        let bound = self.bind_apart()?;
        let mut module = RawModule::default();
        let image = image.as_ptr().cast::<c_void>();
        // SAFETY: `module` is where the answer goes; what the image begins with says how long it is.
        check("hipModuleLoadData", unsafe { (bound.api.hipModuleLoadData)(&mut module, image) })?;
        Ok(module)
    }

    unsafe fn function(
        &self,
        module: RawModule,
        name: &CStr,
        shared_bytes: u32,
    ) -> Result<RawFunction> {
        let bound = self.bind_apart()?;
        let shown = name.to_string_lossy();
        if shared_bytes > self.shared_bytes {
            let expected = format!("at most {} on {}", self.shared_bytes, self.title());
            return Err(Error::invalid(format!("bytes of LDS of {shown}"), shared_bytes, expected));
        }
        let mut function = RawFunction::default();
        // SAFETY: `function` is where the answer goes; module and name are alive.
        let code =
            unsafe { (bound.api.hipModuleGetFunction)(&mut function, module, name.as_ptr()) };
        check_for("hipModuleGetFunction", || format!("of {shown}"), code)?;
        Ok(function)
    }

    unsafe fn resources(&self, function: RawFunction) -> Result<(u32, u32)> {
        let bound = self.bind_apart()?;
        let attribute = |attribute| {
            let mut value = 0;
            // SAFETY: `value` is where the answer goes; the function is alive.
            let code = unsafe { (bound.api.hipFuncGetAttribute)(&mut value, attribute, function) };
            check("hipFuncGetAttribute", code).map(|()| value as u32)
        };
        Ok((attribute(api::REGISTERS)?, attribute(api::LOCAL_BYTES)?))
    }

    unsafe fn resident(&self, function: RawFunction, threads: u32, shared: u32) -> Result<u32> {
        let bound = self.bind_apart()?;
        let mut each = 0;
        // SAFETY: `each` is where the answer goes; the function is alive.
        let code = unsafe {
            (bound.api.hipModuleOccupancyMaxActiveBlocksPerMultiprocessor)(
                &mut each,
                function,
                threads as i32,
                shared as usize,
            )
        };
        check("hipModuleOccupancyMaxActiveBlocksPerMultiprocessor", code)?;
        Ok(each as u32)
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
        let bound = self.bind()?;
        // SAFETY: the caller vouches for the parameters, which the runtime copies before it
        // returns; stream and function are alive and of this device.
        let code = unsafe {
            (bound.api.hipModuleLaunchKernel)(
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

/// Whether an image is of a kind whose end the runtime finds: an ELF file, or a bundle of clang's, be it
/// compressed.
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
