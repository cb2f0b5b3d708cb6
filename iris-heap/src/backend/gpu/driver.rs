//! What the shared part of the GPU backends asks of a device's driver.

use std::ffi::{CStr, c_void};
use std::marker::PhantomData;
use std::ptr::NonNull;

use crate::backend::{BackendKind, LaunchShape};
use crate::error::Result;

/// A handle of the driver's: a pointer in its own words, a number here, for any thread to use.
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
    /// A stream.
    RawStream;
    /// An event.
    RawEvent;
    /// A loaded image of kernels.
    RawModule;
    /// A kernel.
    RawFunction;
}

/// State of a thread before a device was made current on it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Before {
    /// Device that was current, if another was; CUDA's driver remembers it itself.
    pub(crate) device: Option<i32>,
    /// Mode of capture, if it was changed.
    pub(crate) mode: Option<u32>,
}

/// A device that is current on this thread until this is dropped.
pub(crate) struct Current<'a> {
    device: &'a dyn Driver,
    before: Before,
    /// Not `Send`: a device is current on one thread.
    thread: PhantomData<*const ()>,
}

impl<'a> Current<'a> {
    /// Makes a device current; apart, if that is asked for.
    pub(crate) fn new(device: &'a dyn Driver, apart: bool) -> Result<Self> {
        Ok(Current { device, before: device.make_current(apart)?, thread: PhantomData })
    }
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        self.device.restore(self.before);
    }
}

/// A copy between addresses of memory that the device has mapped, its own or a peer's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceCopy {
    /// Where to.
    pub to: u64,
    /// Where from.
    pub from: u64,
    /// How many bytes of a line.
    pub bytes: u64,
    /// How many lines.
    pub lines: u64,
    /// Bytes from the beginning of a line to that of the next, where to and where from.
    pub apart: [u64; 2],
    /// Whether it is a signal: a peer that sees it sees the copies ahead of it on the stream.
    pub signal: bool,
}

impl DeviceCopy {
    /// A copy of a word of 4 bytes that is a signal.
    pub fn signal(to: u64, from: u64) -> Self {
        Self { to, from, bytes: 4, lines: 1, apart: [4; 2], signal: true }
    }
}

/// One device, by its driver's calls. Each call sees to the thread's context or current device itself,
/// and leaves it as it was.
///
/// Those that are said to be *apart* are about nothing that a capture could hold: while they run, a
/// capture of another thread, in whatever mode, is not broken by them. Nothing here waits for work of
/// a stream but what says so.
///
/// # Safety of the calls
/// Handles given to a call are alive, and of this device if nothing else is said; events may be of
/// another. Addresses are of memory that stays valid until what is enqueued is over.
pub(crate) trait Driver: Send + Sync {
    /// Whose it is.
    fn kind(&self) -> BackendKind;

    /// Its number among the devices that the process sees.
    fn ordinal(&self) -> i32;

    /// Name and architecture: the same on all ranks of a world.
    fn title(&self) -> String;

    /// Its architecture, as the vendor's tools name it: `sm_90`, `gfx942`.
    fn arch(&self) -> String;

    /// What tells this very device from every other of the host, the same in all processes.
    fn uuid(&self) -> String;

    /// Bytes of its memory that are free, and all. Apart.
    fn memory_info(&self) -> Result<(u64, u64)>;

    /// Makes it this thread's current device, for a library that is called then. Apart, if that is asked for.
    fn make_current(&self, apart: bool) -> Result<Before>;

    /// Takes back what [`Driver::make_current`] did on this thread.
    fn restore(&self, before: Before);

    /// Several ranks of a heap, threads of this process, use the device: what the driver must be told,
    /// or the user, so that no stream of one waits for a kernel of another.
    fn shared_by(&self, ranks: u32);

    /// How many multiprocessors (compute units) it has.
    fn multiprocessors(&self) -> u32;

    /// A new stream that waits for no other, and has been used. Apart.
    fn create_stream(&self) -> Result<RawStream>;

    /// Apart. What is enqueued is done before the driver lets the stream go.
    unsafe fn destroy_stream(&self, stream: RawStream) -> Result<()>;

    /// Enqueues a copy of four bytes, so that the work that comes next is not the stream's first. The
    /// stream is not captured. Apart.
    unsafe fn use_first(&self, stream: RawStream) -> Result<()>;

    /// Whether a stream is one of this device and of the context that the backend uses.
    unsafe fn owns(&self, stream: RawStream) -> Result<bool>;

    /// The number of the capture that is under way on a stream.
    unsafe fn capture_of(&self, stream: RawStream) -> Result<Option<u64>>;

    /// Waits until all is done. Apart.
    unsafe fn sync_stream(&self, stream: RawStream) -> Result<()>;

    /// Whether all is done; not, where nobody can tell. Apart.
    unsafe fn stream_is_done(&self, stream: RawStream) -> bool;

    /// A new event, that measures no time. Apart.
    fn create_event(&self) -> Result<RawEvent>;

    /// Apart. A wait for it that is enqueued stays valid.
    unsafe fn destroy_event(&self, event: RawEvent) -> Result<()>;

    /// Puts an event behind what is enqueued.
    unsafe fn record(&self, event: RawEvent, stream: RawStream) -> Result<()>;

    /// Lets what is enqueued next begin after an event.
    unsafe fn wait_for(&self, event: RawEvent, stream: RawStream) -> Result<()>;

    /// Whether an event that was recorded is over, be it by an error of the device, which ends all; not,
    /// where it is of a capture or nobody can tell. Apart.
    unsafe fn event_is_done(&self, event: RawEvent) -> bool;

    /// Waits until it is. Apart.
    unsafe fn sync_event(&self, event: RawEvent) -> Result<()>;

    /// Enqueues a copy between memory that the device has mapped.
    unsafe fn copy(&self, to: u64, from: u64, bytes: u64, stream: RawStream) -> Result<()>;

    /// Enqueues a copy of lines between such memory.
    unsafe fn copy_lines(&self, copy: &DeviceCopy, stream: RawStream) -> Result<()>;

    /// Enqueues a copy from the host, in as many pieces as the driver takes well. Apart.
    unsafe fn write(&self, to: u64, from: *const u8, bytes: usize, stream: RawStream)
    -> Result<()>;

    /// Enqueues a copy to the host. Apart.
    unsafe fn read(&self, to: *mut u8, from: u64, bytes: usize, stream: RawStream) -> Result<()>;

    /// Enqueues that bytes of new memory are set, before a kernel runs: it may be by a kernel. Apart.
    unsafe fn fill(&self, to: u64, bytes: u64, value: u8, stream: RawStream) -> Result<()>;

    /// Memory of the host that all devices can have mapped, on a page's boundary, for good. Apart.
    fn pin(&self, bytes: usize) -> Result<NonNull<u8>>;

    /// Where the device finds what [`Driver::pin`] gave. Apart.
    unsafe fn pinned_address(&self, host: NonNull<u8>) -> Result<u64>;

    /// Loads an image of kernels, of a kind whose end the driver finds:
    /// [`Error::Invalid`](crate::Error::Invalid) for anything else. Apart.
    fn load(&self, image: &[u8]) -> Result<RawModule>;

    /// The kernel of this name, ready for its first launch with so much dynamic shared memory. Apart.
    unsafe fn function(
        &self,
        module: RawModule,
        name: &CStr,
        shared_bytes: u32,
    ) -> Result<RawFunction>;

    /// Registers a thread, and bytes of local memory a thread. Apart.
    unsafe fn resources(&self, function: RawFunction) -> Result<(u32, u32)>;

    /// Workgroups of a kernel that a multiprocessor takes at a time. Apart.
    unsafe fn resident(&self, function: RawFunction, threads: u32, shared: u32) -> Result<u32>;

    /// Clusters of a kernel that the whole device takes at a time, for a launch of this shape whose workgroups
    /// come in clusters of so many. Apart.
    unsafe fn resident_clusters(
        &self,
        function: RawFunction,
        shape: LaunchShape,
        cluster: u32,
    ) -> Result<u32> {
        let LaunchShape { threads, shared_bytes, .. } = shape;
        // SAFETY: as the caller says.
        let each = unsafe { self.resident(function, threads, shared_bytes) }?;
        Ok(each * self.multiprocessors() / cluster)
    }

    /// Enqueues a launch. The parameters, as the kernel has them, are copied before it returns.
    unsafe fn launch(
        &self,
        function: RawFunction,
        name: &str,
        shape: LaunchShape,
        parameters: &mut [*mut c_void],
        stream: RawStream,
    ) -> Result<()>;
}

/// For destructors, which have nobody to tell.
pub(crate) fn warn(outcome: Result<()>) {
    if let Err(error) = outcome {
        tracing::warn!(%error, "a call of the device's driver failed");
    }
}
