//! [`Stream`] and [`Event`]: work in order, the same interface on every device.

use std::any::Any;
use std::cell::Cell;
use std::fmt;
use std::sync::Arc;

use crate::backend::Mapping;
use crate::backend::cpu::{CpuEvent, CpuStream};
use crate::bootstrap::unsupported;
use crate::control::Control;
use crate::error::{Error, Result};

thread_local! {
    /// Whether this thread does what was enqueued on streams, and nothing else.
    static WORKS: Cell<bool> = const { Cell::new(false) };
}

/// From here on this thread does enqueued work.
pub(crate) fn works_from_now_on() {
    WORKS.set(true);
}

/// That this is no enqueued work. What waits for streams, or holds what others hold while they wait
/// for streams, may else wait for itself: for good.
pub(crate) fn check_may_wait(what: &str) -> Result<()> {
    match WORKS.get() {
        true => Err(Error::WaitFromWork { what: what.into() }),
        false => Ok(()),
    }
}

/// Which workgroup of a launch runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// Its number, from 0.
    pub index: u32,
    /// Workgroups of the launch. All run at the same time.
    pub count: u32,
}

/// A kernel of the CPU backend: called once a workgroup, each on a thread of its own.
pub type CpuKernel = Arc<dyn Fn(Group) -> Result<(), Error> + Send + Sync>;

/// What a backend's stream offers. The GPU's wrap the caller's own streams.
pub trait StreamBackend: Send + Sync {
    /// See [`Stream::sync`].
    ///
    /// # Errors
    /// The first error of enqueued work.
    fn sync(&self) -> Result<()>;

    /// See [`Stream::record`].
    ///
    /// # Errors
    /// [`Error::Closed`].
    fn record(&self) -> Result<Event>;

    /// See [`Stream::wait`].
    ///
    /// # Errors
    /// [`Error::Closed`]; [`Error::Unsupported`] for an event of another kind of device.
    fn wait(&self, event: &Event) -> Result<()>;

    /// Enqueues a copy between mappings of its heap: memory and byte offset of the target, then of
    /// the source.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::Closed`].
    fn copy(
        &self,
        to: (Arc<dyn Mapping>, u64),
        from: (Arc<dyn Mapping>, u64),
        bytes: u64,
    ) -> Result<()>;

    /// Enqueues a copy from the host into a mapping of its heap.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::Closed`].
    fn write(&self, to: (Arc<dyn Mapping>, u64), data: Vec<u8>) -> Result<()>;

    /// Enqueues copies of device-local words of its heap, in the order of the heap's ops: (to, from).
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::Closed`]; those of the device.
    fn copy_words(&self, copies: &[(u32, u32)]) -> Result<()>;

    /// The device's handle, or a number where there is none.
    fn raw_handle(&self) -> u64;

    /// The control block of its heap, by which that is known: a heap has one on each rank.
    fn control(&self) -> &Arc<Control>;

    /// The backend's own type.
    fn as_any(&self) -> &dyn Any;
}

/// What a backend's event offers.
pub trait EventBackend: Send + Sync {
    /// Whether the work before it is done.
    fn is_done(&self) -> bool;

    /// Waits on the host until it is.
    ///
    /// # Errors
    /// Those of the device.
    fn sync(&self) -> Result<()>;

    /// The backend's own type.
    fn as_any(&self) -> &dyn Any;
}

/// A queue of work that is done in order. Clones are the same stream.
///
/// A stream of the CPU backend is a worker thread. It ends when the last clone is gone, after doing
/// what was enqueued.
#[derive(Clone)]
pub struct Stream {
    inner: Arc<dyn StreamBackend>,
}

/// A point in a stream's order.
#[derive(Clone)]
pub struct Event {
    inner: Arc<dyn EventBackend>,
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({})", self.raw_handle())
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Event(done: {})", self.is_done())
    }
}

impl Stream {
    /// Wraps a backend's stream.
    pub fn from_backend(inner: Arc<dyn StreamBackend>) -> Stream {
        Stream { inner }
    }

    /// Waits until everything enqueued before is done.
    ///
    /// # Errors
    /// The first error of enqueued work since the last call; it is returned once. Work behind a
    /// failed piece is still done. [`Error::WaitFromWork`], from work that is enqueued.
    pub fn sync(&self) -> Result<()> {
        check_may_wait("waiting for a stream")?;
        self.inner.sync().inspect_err(|error| {
            if matches!(error, Error::Fault { .. }) {
                self.inner.control().tell();
            }
        })
    }

    /// An event that is done when everything enqueued before is.
    ///
    /// # Errors
    /// [`Error::Closed`] after the heap was closed.
    pub fn record(&self) -> Result<Event> {
        self.inner.record()
    }

    /// Lets what is enqueued after this begin only when `event` is done, which may be one of a stream
    /// of another heap.
    ///
    /// # Errors
    /// [`Error::Closed`] after the heap was closed.
    pub fn wait(&self, event: &Event) -> Result<()> {
        self.inner.wait(event)
    }

    /// Enqueues a kernel of `groups` workgroups on the heap's threads.
    ///
    /// The launches of all streams of a heap run one at a time, in the order in which they were
    /// enqueued; with one thread the stream's worker runs them itself. A workgroup that panics sets
    /// the abort words of all ranks, so that nobody waits for it.
    ///
    /// # Errors
    /// [`Error::TooManyGroups`] or [`Error::Invalid`] (no group), [`Error::Closed`], and
    /// [`Error::Unsupported`] on a GPU's stream. The kernel's own errors come from
    /// [`Stream::sync`].
    pub fn launch_cpu(&self, name: &'static str, groups: u32, kernel: CpuKernel) -> Result<()> {
        self.cpu()?.launch(name, groups, kernel)
    }

    /// Enqueues a function of the host.
    ///
    /// # Errors
    /// [`Error::Closed`]; [`Error::Unsupported`] on a GPU's stream. The function's own errors and
    /// panics come from [`Stream::sync`].
    pub fn call_cpu(
        &self,
        name: &'static str,
        f: impl FnOnce() -> Result<()> + Send + 'static,
    ) -> Result<()> {
        self.cpu()?.call(name, Box::new(f))
    }

    /// The backend's stream.
    pub fn backend(&self) -> &dyn StreamBackend {
        &*self.inner
    }

    /// The device's handle of the stream: a `CUstream` or `hipStream_t`; a number on the CPU.
    pub fn raw_handle(&self) -> u64 {
        self.inner.raw_handle()
    }

    fn cpu(&self) -> Result<&CpuStream> {
        let stream = self.inner.as_any().downcast_ref::<CpuStream>();
        stream.ok_or_else(|| unsupported("a CPU kernel", "this is the stream of another device"))
    }
}

impl Event {
    /// Wraps a backend's event.
    pub fn from_backend(inner: Arc<dyn EventBackend>) -> Event {
        Event { inner }
    }

    /// Whether the work before it is done.
    pub fn is_done(&self) -> bool {
        self.inner.is_done()
    }

    /// Waits on the host until it is.
    ///
    /// # Errors
    /// Those of the device; errors of the work come from [`Stream::sync`]. [`Error::WaitFromWork`],
    /// from work that is enqueued.
    pub fn sync(&self) -> Result<()> {
        check_may_wait("waiting for an event")?;
        self.inner.sync()
    }

    /// The backend's event.
    pub fn backend(&self) -> &dyn EventBackend {
        &*self.inner
    }

    pub(crate) fn cpu(&self) -> Result<CpuEvent> {
        let event = self.inner.as_any().downcast_ref::<CpuEvent>();
        event.cloned().ok_or_else(|| unsupported("waiting for an event", "it is of another device"))
    }
}
