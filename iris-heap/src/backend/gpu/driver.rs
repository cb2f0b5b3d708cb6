//! What the shared part of the GPU backends asks of a device's driver.

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

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
    /// A context.
    RawContext;
    /// A stream.
    RawStream;
    /// An event.
    RawEvent;
    /// A loaded image of kernels.
    RawModule;
    /// A kernel.
    RawFunction;
}

/// The shape of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchShape {
    /// Workgroups.
    pub groups: u32,
    /// Threads of a workgroup.
    pub threads: u32,
    /// Bytes of dynamic shared memory of a workgroup.
    pub shared_bytes: u32,
}

/// One device, by its driver's calls. Each call sees to the thread's context itself, and leaves it as it
/// was.
///
/// Those that are said to be *apart* are about nothing that a capture could hold: while they run, a
/// capture of another thread, in whatever mode, is not broken by them. Nothing here waits for work of
/// a stream but what says so.
///
/// # Safety of the calls
/// Handles given to a call are alive, and of this device if nothing else is said; events may be of
/// another. Addresses are of memory that stays valid until what is enqueued is over.
pub(crate) trait Driver: Send + Sync {
    /// Its number among the devices that the process sees.
    fn ordinal(&self) -> i32;

    /// Name and architecture: the same on all ranks of a world.
    fn title(&self) -> String;

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

    /// Enqueues a copy from the host. Apart.
    unsafe fn write(&self, to: u64, from: *const u8, bytes: usize, stream: RawStream)
    -> Result<()>;

    /// Enqueues a copy to the host. Apart.
    unsafe fn read(&self, to: *mut u8, from: u64, bytes: usize, stream: RawStream) -> Result<()>;

    /// Enqueues that bytes are set. Apart.
    unsafe fn fill(&self, to: u64, bytes: u64, value: u8, stream: RawStream) -> Result<()>;

    /// Memory of the host that all devices can have mapped, on a page's boundary, for good. Apart.
    fn pin(&self, bytes: usize) -> Result<NonNull<u8>>;

    /// Where the device finds what [`Driver::pin`] gave. Apart.
    unsafe fn pinned_address(&self, host: NonNull<u8>) -> Result<u64>;

    /// Loads an image of kernels, whose end the driver finds. Apart.
    unsafe fn load(&self, image: &[u8]) -> Result<RawModule>;

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
