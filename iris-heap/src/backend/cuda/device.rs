//! Devices of this process: what they are, and their primary contexts.

use std::ffi::{CStr, c_int};
use std::marker::PhantomData;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, OnceLock};

use super::api::{self, Driver, check, driver};
use crate::backend::gpu::{RawContext, RawStream};
use crate::error::{Error, Result};
use crate::world::{World, lock};

/// A device with its primary context, which is retained until the process ends: heaps come and go,
/// the context and what others of the process have in it stay.
pub(crate) struct Device {
    pub(crate) driver: &'static Driver,
    pub(crate) ordinal: c_int,
    pub(super) handle: api::Device,
    context: RawContext,
    pub(crate) uuid: [u8; 16],
    pub(crate) name: String,
    /// Compute capability, as 90 for 9.0.
    pub(crate) arch: u32,
    pub(crate) multiprocessors: u32,
    /// Virtual memory management, and its handles as POSIX descriptors.
    pub(super) virtual_memory: bool,
    pub(super) descriptors: bool,
    /// Where first uses of streams copy to; never given back.
    scratch: Mutex<Option<u64>>,
}

/// What first uses of streams copy.
static ZEROS: [u8; 4] = [0; 4];

/// How many devices this process sees.
pub(crate) fn count() -> Result<usize> {
    let driver = driver()?;
    let mut count = 0;
    // SAFETY: `count` is where the answer goes.
    check("cuDeviceGetCount", unsafe { (driver.cuDeviceGetCount)(&mut count) })?;
    Ok(count as usize)
}

impl Device {
    /// Number `ordinal` of the devices that this process sees.
    pub(crate) fn get(ordinal: usize) -> Result<Arc<Device>> {
        static DEVICES: OnceLock<Mutex<Vec<Option<Arc<Device>>>>> = OnceLock::new();
        let count = count()?;
        if ordinal >= count {
            let expected = match count {
                1 => "0: one CUDA device is visible".into(),
                _ => format!("below {count}, the number of CUDA devices that are visible"),
            };
            return Err(Error::invalid("device", ordinal, expected));
        }
        let mut devices = lock(DEVICES.get_or_init(Mutex::default));
        if devices.len() < count {
            devices.resize(count, None);
        }
        if let Some(device) = &devices[ordinal] {
            return Ok(device.clone());
        }
        let device = Arc::new(Device::open(ordinal as c_int)?);
        devices[ordinal] = Some(device.clone());
        Ok(device)
    }

    /// The device of a rank: the one asked for, or by the rank's number on its host.
    pub(crate) fn choose(world: &World, asked: Option<usize>) -> Result<Arc<Device>> {
        let count = count()?;
        if count == 0 {
            return Err(Error::invalid("number of CUDA devices", 0, "at least 1 that is visible"));
        }
        Device::get(asked.unwrap_or(world.local_rank() % count))
    }

    fn open(ordinal: c_int) -> Result<Device> {
        let driver = driver()?;
        let mut handle = 0;
        // SAFETY: `handle` is where the answer goes.
        check("cuDeviceGet", unsafe { (driver.cuDeviceGet)(&mut handle, ordinal) })?;
        let mut name = [0; 256];
        // SAFETY: the array has the length that is given.
        let code = unsafe { (driver.cuDeviceGetName)(name.as_mut_ptr(), 256, handle) };
        check("cuDeviceGetName", code)?;
        let name = name.map(|c| c as u8);
        let name = CStr::from_bytes_until_nul(&name).map_err(|_| {
            Error::invalid("name of a CUDA device", "unterminated", "a string that ends")
        })?;
        let mut uuid = [0; 16];
        // SAFETY: `uuid` is where the answer goes.
        check("cuDeviceGetUuid", unsafe { (driver.cuDeviceGetUuid_v2)(&mut uuid, handle) })?;
        let attribute = |attribute| {
            let mut value = 0;
            // SAFETY: `value` is where the answer goes.
            let code = unsafe { (driver.cuDeviceGetAttribute)(&mut value, attribute, handle) };
            check("cuDeviceGetAttribute", code).map(|()| value as u32)
        };
        let major = attribute(api::ARCH_MAJOR)?;
        let minor = attribute(api::ARCH_MINOR)?;
        let virtual_memory = attribute(api::VIRTUAL_MEMORY)?;
        let descriptors = attribute(api::DESCRIPTORS)?;
        let multiprocessors = attribute(api::MULTIPROCESSORS)?;
        // Last, so that nothing that can fail comes after it: it is never released.
        let mut context = RawContext::default();
        // SAFETY: `context` is where the answer goes.
        let code = unsafe { (driver.cuDevicePrimaryCtxRetain)(&mut context, handle) };
        check("cuDevicePrimaryCtxRetain", code)?;
        Ok(Device {
            driver,
            ordinal,
            handle,
            context,
            uuid,
            name: name.to_string_lossy().into_owned(),
            arch: 10 * major + minor,
            multiprocessors,
            virtual_memory: virtual_memory != 0,
            descriptors: descriptors != 0,
            scratch: Mutex::default(),
        })
    }

    /// Name and architecture: the same on all ranks of a world.
    pub(crate) fn title(&self) -> String {
        format!("{} sm_{}", self.name, self.arch)
    }

    pub(crate) fn uuid_text(&self) -> String {
        let hex: String = self.uuid.iter().map(|b| format!("{b:02x}")).collect();
        format!("GPU-{hex}")
    }

    /// The device's primary context.
    pub(crate) fn context(&self) -> RawContext {
        self.context
    }

    /// Makes the context current on this thread until the guard is dropped.
    pub(crate) fn bind(&self) -> Result<Bound> {
        let driver = self.driver;
        let mut current = RawContext::default();
        // SAFETY: `current` is where the answer goes.
        check("cuCtxGetCurrent", unsafe { (driver.cuCtxGetCurrent)(&mut current) })?;
        let pushed = current != self.context;
        if pushed {
            // SAFETY: the context is retained until the process ends.
            let code = unsafe { (driver.cuCtxPushCurrent_v2)(self.context) };
            check("cuCtxPushCurrent", code)?;
        }
        Ok(Bound { driver, pushed, mode: None, thread: PhantomData })
    }

    /// As [`Device::bind`], for calls that touch nothing a capture could be about: while the guard
    /// lives, a capture of another thread in global mode is not broken by them.
    pub(crate) fn bind_apart(&self) -> Result<Bound> {
        let mut bound = self.bind()?;
        let mut mode = api::CAPTURE_RELAXED;
        // SAFETY: `mode` holds the new mode and is where the old one goes, one of three.
        let code = unsafe { (self.driver.cuThreadExchangeStreamCaptureMode)(&mut mode) };
        check("cuThreadExchangeStreamCaptureMode", code)?;
        bound.mode = Some(mode);
        Ok(bound)
    }

    /// A new stream that waits for no other, and has been used.
    pub(super) fn new_stream(&self) -> Result<RawStream> {
        const NON_BLOCKING: u32 = 1;
        let _bound = self.bind_apart()?;
        let mut stream = RawStream::default();
        // SAFETY: `stream` is where the answer goes.
        let code = unsafe { (self.driver.cuStreamCreate)(&mut stream, NON_BLOCKING) };
        check("cuStreamCreate", code)?;
        let used = self.use_first(stream).and_then(|()| {
            // SAFETY: the stream was made just now.
            let code = unsafe { (self.driver.cuStreamSynchronize)(stream) };
            check("cuStreamSynchronize", code)
        });
        if used.is_err() {
            // SAFETY: nobody else has the handle. The first error is the one to tell.
            warn(check("cuStreamDestroy", unsafe { (self.driver.cuStreamDestroy_v2)(stream) }));
        }
        used.map(|()| stream)
    }

    /// Enqueues a copy of four bytes, so that the work that comes next is not the stream's first.
    ///
    /// When two threads give two streams their first work at the same moment, the driver at times
    /// makes one wait for the other (seen with 580 on H200, up to every other time): for good, if
    /// the other is a kernel that waits for it. So first uses come one after the other. It is a copy,
    /// since a kernel, as a fill is, would need room beside those that wait. The stream is alive and
    /// not captured.
    pub(super) fn use_first(&self, stream: RawStream) -> Result<()> {
        let _bound = self.bind_apart()?;
        let mut scratch = lock(&self.scratch);
        let to = match *scratch {
            Some(to) => to,
            None => {
                let mut to = 0;
                // SAFETY: `to` is where the answer goes.
                check("cuMemAlloc", unsafe { (self.driver.cuMemAlloc_v2)(&mut to, 4) })?;
                *scratch.insert(to)
            }
        };
        let from = (&raw const ZEROS).cast();
        // SAFETY: the four bytes at both ends stay; the caller vouches for the stream.
        check("cuMemcpyHtoDAsync", unsafe {
            (self.driver.cuMemcpyHtoDAsync_v2)(to, from, 4, stream)
        })
    }

    /// The number of the capture that is under way on a stream, which is alive.
    pub(super) fn capture_of(&self, stream: RawStream) -> Result<Option<u64>> {
        let _bound = self.bind()?;
        let (mut status, mut id) = (api::CAPTURE_NONE, 0);
        // SAFETY: the caller vouches for the stream; status and id are where the answers go; the
        // others may be null.
        let code = unsafe {
            (self.driver.cuStreamGetCaptureInfo_v2)(
                stream,
                &mut status,
                &mut id,
                null_mut(),
                null_mut(),
                null_mut(),
            )
        };
        check("cuStreamGetCaptureInfo", code)?;
        Ok((status != api::CAPTURE_NONE).then_some(id))
    }

    /// For ranks that share the device. Memory that one stream gave back to the driver's pool
    /// (`cuMemFreeAsync`, `CudaSlice`) may else go to another at the price that the second waits for
    /// the first: for good, if the first is another rank's, with an op that waits for the second.
    pub(super) fn order_no_streams_by_memory(&self) -> Result<()> {
        let _bound = self.bind_apart()?;
        let mut pool = 0;
        // SAFETY: `pool` is where the answer goes.
        let code = unsafe { (self.driver.cuDeviceGetDefaultMemPool)(&mut pool, self.handle) };
        check("cuDeviceGetDefaultMemPool", code)?;
        const ATTRIBUTE: u32 = api::POOL_DEPENDENCIES;
        let mut off: c_int = 0;
        // SAFETY: the pool is the device's; the attribute has the type of `off`.
        let code =
            unsafe { (self.driver.cuMemPoolSetAttribute)(pool, ATTRIBUTE, (&raw mut off).cast()) };
        check("cuMemPoolSetAttribute", code)
    }

    /// Bytes of the device's memory that are free, and all.
    pub(crate) fn memory_info(&self) -> Result<(u64, u64)> {
        let _bound = self.bind_apart()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the two are where the answers go.
        let code = unsafe { (self.driver.cuMemGetInfo_v2)(&mut free, &mut total) };
        check("cuMemGetInfo", code)?;
        Ok((free as u64, total as u64))
    }

    /// Whether kernels of this device can access memory of the other.
    pub(super) fn can_access(&self, other: &Device) -> Result<bool> {
        if self.ordinal == other.ordinal {
            return Ok(true);
        }
        let mut can = 0;
        // SAFETY: `can` is where the answer goes.
        let code =
            unsafe { (self.driver.cuDeviceCanAccessPeer)(&mut can, self.handle, other.handle) };
        check("cuDeviceCanAccessPeer", code)?;
        Ok(can != 0)
    }

    /// Lets kernels of this device access plain memory of the other: needed for memory that was
    /// not mapped for this device by name.
    pub(super) fn enable_access(&self, other: &Device) -> Result<()> {
        if self.ordinal == other.ordinal {
            return Ok(());
        }
        let _bound = self.bind_apart()?;
        // SAFETY: the other context is retained until the process ends; the flags must be zero.
        match unsafe { (self.driver.cuCtxEnablePeerAccess)(other.context, 0) } {
            api::ALREADY_ENABLED => Ok(()),
            code => check("cuCtxEnablePeerAccess", code),
        }
    }
}

/// A context is current on this thread.
pub(crate) struct Bound {
    driver: &'static Driver,
    pushed: bool,
    /// The thread's mode of capture before, if it was changed.
    mode: Option<u32>,
    /// What was pushed belongs to the thread.
    thread: PhantomData<*const ()>,
}

impl Drop for Bound {
    fn drop(&mut self) {
        if let Some(mode) = &mut self.mode {
            // SAFETY: as in `bind_apart`, with the mode that was there.
            let code = unsafe { (self.driver.cuThreadExchangeStreamCaptureMode)(mode) };
            warn(check("cuThreadExchangeStreamCaptureMode", code));
        }
        if self.pushed {
            let mut context = RawContext::default();
            // SAFETY: `context` is where the context goes that `bind` pushed.
            let code = unsafe { (self.driver.cuCtxPopCurrent_v2)(&mut context) };
            warn(check("cuCtxPopCurrent", code));
        }
    }
}

/// For destructors, which have nobody to tell.
pub(super) fn warn(outcome: Result<()>) {
    if let Err(error) = outcome {
        tracing::warn!(%error, "a call of the CUDA driver failed");
    }
}
