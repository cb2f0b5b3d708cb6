//! [`Stream`] and [`Event`]: work in order, the same interface on every device.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use crate::backend::{CpuKernel, EventBackend, HostCopy, StreamBackend};
use crate::control::Control;
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::util::check_may_wait;

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
    /// That of the stream's heap.
    control: Arc<Control>,
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
        Stream { inner }
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
        self.inner.sync().inspect_err(|error| control.tell(error))
    }

    /// An event that is done when everything enqueued before is.
    ///
    /// # Errors
    /// [`Error::Closed`] after the heap was closed.
    pub fn record(&self) -> Result<Event> {
        let inner = self.inner.record()?;
        Ok(Event { inner, control: self.inner.control().clone() })
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

    /// Whether `other` is a clone of this one.
    pub fn is_same(&self, other: &Stream) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
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
        self.inner.sync()
    }

    /// The backend's event.
    pub(crate) fn backend(&self) -> &dyn EventBackend {
        &*self.inner
    }
}

/// Elements that an enqueued copy brings to the host: of [`SymmetricHeap::read_on`](crate::SymmetricHeap::read_on). It owns
/// the memory that they are copied to; dropped before that, it leaves the memory to the copy.
#[must_use]
pub struct PendingRead<T> {
    copy: Box<dyn HostCopy>,
    control: Arc<Control>,
    elements: PhantomData<fn() -> T>,
}

impl<T> fmt::Debug for PendingRead<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PendingRead(done: {})", self.is_done())
    }
}

impl<T> PendingRead<T> {
    pub(crate) fn new(copy: Box<dyn HostCopy>, stream: &Stream) -> Self {
        let control = stream.inner.control().clone();
        Self { copy, control, elements: PhantomData }
    }

    /// Whether the elements are there.
    pub fn is_done(&self) -> bool {
        self.copy.event().is_done()
    }
}

impl<T: Element> PendingRead<T> {
    /// Waits on the host until the elements are there, and returns them. Other work of the stream, enqueued later, is not
    /// waited for.
    ///
    /// # Errors
    /// Those of the device; [`Error::WaitFromWork`], from work that is enqueued; [`Error::Invalid`] if the copy failed, of
    /// which [`Stream::sync`] has the error.
    pub fn wait(self) -> Result<Vec<T>> {
        check_may_wait("waiting for a copy")?;
        let waiting = self.control.begin_wait();
        self.copy.event().sync()?;
        drop(waiting);
        let bytes = self.copy.bytes().ok_or_else(|| {
            Error::invalid(
                "copy to the host",
                "failed",
                "the error of it, by Stream::sync of its stream",
            )
        })?;
        let mut elements = vec![T::zeroed(); bytes.len() / size_of::<T>()];
        bytemuck::cast_slice_mut::<T, u8>(&mut elements).copy_from_slice(&bytes);
        Ok(elements)
    }
}
