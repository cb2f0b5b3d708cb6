//! [`Stream`] and [`Event`]: work in order, the same interface on every device.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::backend::{CpuKernel, EventBackend, StreamBackend};
use crate::control::Control;
use crate::error::{Error, Result};
use crate::util::check_may_wait;

/// A queue of work that is done in order. Clones are the same stream.
///
/// A stream of the CPU backend is a worker thread. It ends when the last clone is gone, after doing
/// what was enqueued.
#[derive(Clone)]
pub struct Stream {
    inner: Arc<dyn StreamBackend>,
    /// Number, in the heap, of the last call of an operator that was issued on the stream; 0 for none.
    issued: Arc<AtomicU64>,
}

/// A point in a stream's order.
#[derive(Clone)]
pub struct Event {
    inner: Arc<dyn EventBackend>,
    /// That of the stream's heap.
    control: Arc<Control>,
    /// Number, in the heap, of the last call before the event; 0 for none.
    issued: u64,
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
    pub(crate) fn from_backend(inner: Arc<dyn StreamBackend>) -> Stream {
        Stream { inner, issued: Arc::default() }
    }

    /// Notes that the call of this number, in the heap, is issued on the stream.
    pub(crate) fn note_issued(&self, call: u64) {
        self.issued.fetch_max(call, Ordering::Relaxed);
    }

    /// Waits until everything enqueued before is done. A wait of seconds for a peer is told on stderr, or to
    /// `tracing` where the program has set that up.
    ///
    /// # Errors
    /// The first error of enqueued work since the last call; it is returned once. Work behind a
    /// failed piece is still done. [`Error::WaitFromWork`], from work that is enqueued.
    pub fn sync(&self) -> Result<()> {
        check_may_wait("waiting for a stream")?;
        let control = self.inner.control();
        let _waiting = control.begin_wait();
        let issued = self.issued.load(Ordering::Relaxed);
        self.inner.sync().inspect_err(|error| control.tell(error))?;
        control.complete(issued);
        Ok(())
    }

    /// An event that is done when everything enqueued before is.
    ///
    /// # Errors
    /// [`Error::Closed`] after the heap was closed.
    pub fn record(&self) -> Result<Event> {
        let inner = self.inner.record()?;
        let issued = self.issued.load(Ordering::Relaxed);
        Ok(Event { inner, control: self.inner.control().clone(), issued })
    }

    /// Lets what is enqueued after this begin only when `event` is done, which may be one of a stream
    /// of another heap.
    ///
    /// # Errors
    /// [`Error::Closed`] after the heap was closed.
    pub fn wait(&self, event: &Event) -> Result<()> {
        self.inner.wait(event.backend())
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
        self.inner.control().count_launch(name)?;
        self.inner.launch_cpu(name, groups, kernel)
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
        self.inner.call_cpu(name, Box::new(f))
    }

    /// That it is a stream of the heap with this control block, which keeps memory until its own streams
    /// have finished and orders ops among these. Whatever enqueues an access to the heap's memory asks
    /// this.
    pub(crate) fn check_of(&self, heap: *const Control, what: &str) -> Result<()> {
        if std::ptr::eq(Arc::as_ptr(self.inner.control()), heap) {
            return Ok(());
        }
        Err(Error::invalid(
            format!("stream for {what}"),
            "one of another heap",
            "one of this heap, which waits for its own before it gives memory back",
        ))
    }

    /// The backend's stream.
    pub(crate) fn backend(&self) -> &dyn StreamBackend {
        &*self.inner
    }

    /// The device's handle of the stream: a `CUstream` or `hipStream_t`; a number on the CPU.
    pub fn raw_handle(&self) -> u64 {
        self.inner.raw_handle()
    }
}

impl Event {
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
        let _waiting = self.control.begin_wait();
        self.inner.sync()?;
        self.control.complete(self.issued);
        Ok(())
    }

    /// The backend's event.
    pub(crate) fn backend(&self) -> &dyn EventBackend {
        &*self.inner
    }
}
