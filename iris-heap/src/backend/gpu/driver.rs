//! Driver calls that the vendor-independent part of the GPU backends needs: the trait [`Driver`].

use std::ffi::{CStr, c_void};
use std::marker::PhantomData;
use std::ptr::NonNull;

use crate::backend::{BackendKind, LaunchShape};
use crate::error::Result;

/// Defines handle types of the driver: opaque pointers, which are stored as numbers so that any
/// thread may use them.
macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident;)*) => {
        $(
            $(#[$doc])*
            #[repr(transparent)]
            #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
            pub(crate) struct $name(pub(crate) u64);
        )*
    };
}

handles! {
    /// Handle of a stream, as the driver knows it.
    RawStream;
    /// Handle of an event, as the driver knows it.
    RawEvent;
    /// Handle of a loaded image (module) of kernels.
    RawModule;
    /// Handle of a kernel, as the driver knows it.
    RawFunction;
}

/// Guard that keeps a device current on this thread; dropping it restores the previous device.
pub(crate) struct Current<'a> {
    device: &'a dyn Driver,
    /// Device that was current before, to be restored; the result of [`Driver::enter`].
    previous: Option<i32>,
    /// Capture mode that the thread had before; `None` if it was not changed.
    mode: Option<u32>,
    /// Makes the guard `!Send`, because a device is current per thread.
    thread: PhantomData<*const ()>,
}

impl<'a> Current<'a> {
    /// Makes a device current. If `relaxed`, also sets the thread's capture mode to relaxed, for
    /// driver calls that do not concern captured work: while the guard lives, these calls do not
    /// invalidate a global-mode capture of another thread.
    pub(crate) fn new(device: &'a dyn Driver, relaxed: bool) -> Result<Self> {
        let previous = device.enter()?;
        // From here on, dropping `current` restores the thread's state.
        let mut current = Current { device, previous, mode: None, thread: PhantomData };
        if relaxed {
            current.mode = Some(device.exchange_capture_mode(None)?);
        }
        Ok(current)
    }
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        if self.mode.is_some() {
            warn(self.device.exchange_capture_mode(self.mode).map(drop));
        }
        if let Some(previous) = self.previous {
            warn(self.device.leave(previous));
        }
    }
}

/// Copy between device addresses that the device has mapped: its own memory or a peer's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceCopy {
    /// Address to which the copy writes.
    pub to: u64,
    /// Address from which the copy reads.
    pub from: u64,
    /// Number of bytes per line.
    pub bytes: u64,
    /// Number of lines that are copied.
    pub lines: u64,
    /// Stride from line to line in bytes: of the target, then of the source.
    pub strides: [u64; 2],
    /// Whether the copy is a signal: a peer that sees the copied word must also see the earlier
    /// copies on the same stream.
    pub signal: bool,
}

impl DeviceCopy {
    /// Makes a copy of one 4-byte word with [`DeviceCopy::signal`] set.
    pub fn signal(to: u64, from: u64) -> Self {
        Self { to, from, bytes: 4, lines: 1, strides: [4; 2], signal: true }
    }
}

/// Driver calls for one device. Each call makes the device or its context current on the calling
/// thread and restores the previous state.
///
/// Some calls are documented not to affect graph captures: these never break a capture that another
/// thread makes at the same time, in any capture mode. No call waits for work of a stream unless
/// its documentation says so.
///
/// # Safety of the calls
/// Handles passed to a call are alive and belong to this device unless stated otherwise; events may
/// belong to another device. Addresses refer to memory that stays valid until the enqueued work has
/// ended.
pub(crate) trait Driver: Send + Sync {
    /// Kind of device: CUDA or HIP.
    fn kind(&self) -> BackendKind;

    /// Index among the devices visible to the process.
    fn ordinal(&self) -> i32;

    /// Name and architecture of the device; must be equal on all ranks of a world.
    fn title(&self) -> String;

    /// Architecture in the notation of the vendor's tools: `sm_90`, `gfx942`.
    fn arch(&self) -> String;

    /// Identifier that distinguishes this device from all others of the host, and is equal in all
    /// processes.
    fn uuid(&self) -> String;

    /// Free and total memory of the device in bytes. Does not affect graph captures (see
    /// [`Driver`]).
    fn memory_info(&self) -> Result<(u64, u64)>;

    /// Makes this device current on the thread. Returns the device that [`Driver::leave`] is to
    /// return to; `None` if this device was current before.
    fn enter(&self) -> Result<Option<i32>>;

    /// Undoes [`Driver::enter`] on this thread: makes device `previous` current again. CUDA ignores
    /// the parameter, because its driver keeps a stack of contexts.
    fn leave(&self, previous: i32) -> Result<()>;

    /// Sets the capture mode of this thread, relaxed if `mode` is `None`, and returns the previous
    /// mode.
    fn exchange_capture_mode(&self, mode: Option<u32>) -> Result<u32>;

    /// Makes this device current on the thread until the guard is dropped.
    fn bind(&self) -> Result<Current<'_>>
    where
        Self: Sized,
    {
        Current::new(self, false)
    }

    /// Does [`Driver::bind`] and sets the thread's capture mode to relaxed, see [`Current::new`].
    fn bind_relaxed(&self) -> Result<Current<'_>>
    where
        Self: Sized,
    {
        Current::new(self, true)
    }

    /// Prepares the device for several ranks of a heap that are threads of this process: configures
    /// the driver, or warns the user, so that no stream of one rank waits for a kernel of another.
    fn shared_by(&self, ranks: u32);

    /// Number of multiprocessors or compute units.
    fn multiprocessors(&self) -> u32;

    /// Makes a non-blocking stream, which has been used once (see [`Driver::use_first`]). Does not
    /// affect graph captures (see [`Driver`]).
    fn create_stream(&self) -> Result<RawStream>;

    /// Destroys a stream; the driver finishes its enqueued work first. Does not affect graph
    /// captures (see [`Driver`]).
    unsafe fn destroy_stream(&self, stream: RawStream) -> Result<()>;

    /// Enqueues a copy of four bytes, so that later work is not the stream's first work. With some
    /// drivers a stream waits for another stream at its first use. The stream must not be captured.
    /// Does not affect graph captures (see [`Driver`]).
    unsafe fn use_first(&self, stream: RawStream) -> Result<()>;

    /// Whether a stream belongs to this device and to the context that the backend uses.
    unsafe fn owns(&self, stream: RawStream) -> Result<bool>;

    /// Number of the capture in progress on a stream; `None` if there is none.
    unsafe fn capture_of(&self, stream: RawStream) -> Result<Option<u64>>;

    /// Waits until all work enqueued on a stream has ended. Does not affect graph captures (see
    /// [`Driver`]).
    unsafe fn sync_stream(&self, stream: RawStream) -> Result<()>;

    /// Whether all work enqueued on a stream has ended, normally or by a device error. False if the
    /// stream is captured or the state is unknown. Does not affect graph captures (see [`Driver`]).
    unsafe fn stream_is_done(&self, stream: RawStream) -> bool;

    /// Makes an event without timing. Does not affect graph captures (see [`Driver`]).
    fn create_event(&self) -> Result<RawEvent>;

    /// Destroys an event; enqueued waits for the event stay valid. Does not affect graph captures
    /// (see [`Driver`]).
    unsafe fn destroy_event(&self, event: RawEvent) -> Result<()>;

    /// Records an event after the work enqueued on a stream so far.
    unsafe fn record(&self, event: RawEvent, stream: RawStream) -> Result<()>;

    /// Makes work that is enqueued on `stream` after this call wait for an event.
    unsafe fn wait_for(&self, event: RawEvent, stream: RawStream) -> Result<()>;

    /// Whether the work before a recorded event has ended, normally or by a device error. False if
    /// the event belongs to a capture or the state is unknown. Does not affect graph captures (see
    /// [`Driver`]).
    unsafe fn event_is_done(&self, event: RawEvent) -> bool;

    /// Waits until the work before a recorded event has ended. Does not affect graph captures (see
    /// [`Driver`]).
    unsafe fn sync_event(&self, event: RawEvent) -> Result<()>;

    /// Enqueues a copy between addresses that the device has mapped.
    unsafe fn copy(&self, to: u64, from: u64, bytes: u64, stream: RawStream) -> Result<()>;

    /// Enqueues a strided (2D) copy between addresses that the device has mapped.
    unsafe fn copy_lines(&self, copy: &DeviceCopy, stream: RawStream) -> Result<()>;

    /// Enqueues a copy from host memory, in several pieces if the driver copies only small ones
    /// reliably. Does not affect graph captures (see [`Driver`]).
    unsafe fn write(&self, to: u64, from: *const u8, bytes: usize, stream: RawStream)
    -> Result<()>;

    /// Enqueues a copy to host memory. Does not affect graph captures (see [`Driver`]).
    unsafe fn read(&self, to: *mut u8, from: u64, bytes: usize, stream: RawStream) -> Result<()>;

    /// Enqueues a fill of `bytes` bytes at `to` with `value`. The driver may use a kernel for it,
    /// so it is called only before any kernel of the heap runs. Does not affect graph captures (see
    /// [`Driver`]).
    unsafe fn fill(&self, to: u64, bytes: u64, value: u8, stream: RawStream) -> Result<()>;

    /// Allocates pinned host memory, page-aligned, which all devices can map and which is never
    /// freed. Does not affect graph captures (see [`Driver`]).
    fn pin(&self, bytes: usize) -> Result<NonNull<u8>>;

    /// Device address of memory that [`Driver::pin`] returned. Does not affect graph captures (see
    /// [`Driver`]).
    unsafe fn pinned_address(&self, host: NonNull<u8>) -> Result<u64>;

    /// Loads an image of kernels whose length the driver can determine;
    /// [`Error::Invalid`](crate::Error::Invalid) for any other image. Does not affect graph
    /// captures (see [`Driver`]).
    fn load(&self, image: &[u8]) -> Result<RawModule>;

    /// Returns the kernel called `name`, ready for its first launch with `shared_bytes` bytes of
    /// dynamic shared memory. Does not affect graph captures (see [`Driver`]).
    unsafe fn function(
        &self,
        module: RawModule,
        name: &CStr,
        shared_bytes: u32,
    ) -> Result<RawFunction>;

    /// Number of registers per thread, and of bytes of local memory per thread. Does not affect
    /// graph captures (see [`Driver`]).
    unsafe fn resources(&self, function: RawFunction) -> Result<(u32, u32)>;

    /// Number of workgroups of a kernel that are co-resident on one multiprocessor, if each has
    /// `threads` threads and `shared` bytes of shared memory. Does not affect graph captures (see
    /// [`Driver`]).
    unsafe fn resident(&self, function: RawFunction, threads: u32, shared: u32) -> Result<u32>;

    /// Number of clusters of a kernel that are co-resident on the whole device, for a launch of
    /// this shape with clusters of `cluster` workgroups. Does not affect graph captures (see
    /// [`Driver`]).
    unsafe fn resident_clusters(
        &self,
        function: RawFunction,
        shape: LaunchShape,
        cluster: u32,
    ) -> Result<u32> {
        let LaunchShape { threads, shared_bytes, .. } = shape;
        // SAFETY: the caller keeps this function's contract, which covers that of `resident`.
        let each = unsafe { self.resident(function, threads, shared_bytes) }?;
        Ok(each * self.multiprocessors() / cluster)
    }

    /// Enqueues a launch. The driver copies the parameters before the function returns.
    unsafe fn launch(
        &self,
        function: RawFunction,
        name: &str,
        shape: LaunchShape,
        parameters: &mut [*mut c_void],
        stream: RawStream,
    ) -> Result<()>;
}

/// Logs an error as a warning; for destructors, which cannot return errors.
pub(crate) fn warn(outcome: Result<()>) {
    if let Err(error) = outcome {
        tracing::warn!(%error, "a call of the device's driver failed");
    }
}
