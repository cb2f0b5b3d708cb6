//! Ordered queues of work and points in them, with one interface for every device: [`Stream`] and
//! [`Event`].

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::backend::{CpuKernel, EventBackend, HostCopy, StreamBackend};
use crate::control::Control;
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::util::check_may_wait;

/// Queue of work that is done in order. Clones refer to the same stream.
///
/// A stream of the CPU backend is a worker thread. After the last clone of the stream is dropped,
/// the thread finishes the enqueued work and ends.
#[derive(Clone)]
pub struct Stream {
    inner: Arc<dyn StreamBackend>,
    /// Number of the last operator call that was issued on the stream, counted over all calls of
    /// the heap; 0 if there is none.
    issued: Arc<AtomicU64>,
}

/// Point in a stream's order of work; see [`Stream::record`].
#[derive(Clone)]
pub struct Event {
    inner: Arc<dyn EventBackend>,
    /// Control block of the stream's heap.
    control: Arc<Control>,
    /// Number of the last operator call that was issued on the stream before the event, counted
    /// over all calls of the heap; 0 if there is none.
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
    /// Wraps the backend's stream `inner`, on which no call has been issued yet.
    pub(crate) fn from_backend(inner: Arc<dyn StreamBackend>) -> Stream {
        Stream { inner, issued: Arc::default() }
    }

    /// Records that call number `call` of the heap is issued on the stream.
    pub(crate) fn note_issued(&self, call: u64) {
        self.issued.fetch_max(call, Ordering::Relaxed);
    }

    /// Waits until all work enqueued so far is done. After some seconds of waiting for a peer, logs
    /// a line to `tracing`, or to stderr if the program has set up no subscriber.
    ///
    /// # Errors
    /// The first error of enqueued work since the last `sync`, which returns each error once. After
    /// a fault of a call on this heap, or an abort other than the loss of a peer, every `sync`
    /// returns an error, because results may be undefined. The loss of a peer is an error if a call
    /// has waited for it; [`SymmetricHeap::check`](crate::SymmetricHeap::check) returns any loss.
    /// Work enqueued after failed work still runs. [`Error::Closed`] if the heap was closed;
    /// returned only after all work that was accepted before the close has ended.
    /// [`Error::WaitFromWork`] if called from enqueued work.
    pub fn sync(&self) -> Result<()> {
        let control = self.inner.control();
        control.check_process("waiting for a stream")?;
        check_may_wait("waiting for a stream")?;
        let _waiting = control.begin_wait();
        let issued = self.issued.load(Ordering::Relaxed);
        self.inner.sync().inspect_err(|error| control.note_returned(error))?;
        control.complete(issued);
        Ok(())
    }

    /// Records an event that is done when all work enqueued so far is done.
    ///
    /// # Errors
    /// [`Error::Closed`] after the heap was closed.
    pub fn record(&self) -> Result<Event> {
        let inner = self.inner.record()?;
        let issued = self.issued.load(Ordering::Relaxed);
        Ok(Event { inner, control: self.inner.control().clone(), issued })
    }

    /// Makes work that is enqueued after this call wait for `event`, which may belong to a stream
    /// of another heap.
    ///
    /// # Errors
    /// [`Error::Closed`] after the heap was closed.
    pub fn wait(&self, event: &Event) -> Result<()> {
        self.inner.wait(event.backend())
    }

    /// Enqueues a CPU kernel of `groups` workgroups on the heap's threads.
    ///
    /// Launches of all streams of a heap run one at a time, in the order in which they were
    /// enqueued; in a heap of one thread the stream's worker thread itself runs the workgroups. A
    /// workgroup that panics sets the abort words of all ranks, so that no rank waits for it.
    ///
    /// # Errors
    /// [`Error::TooManyGroups`]; [`Error::Invalid`] for no workgroup; [`Error::Closed`];
    /// [`Error::Unsupported`] on a GPU's stream. Errors of the kernel itself are returned by
    /// [`Stream::sync`].
    pub fn launch_cpu(&self, name: &'static str, groups: u32, kernel: CpuKernel) -> Result<()> {
        self.inner.control().count_launch(name)?;
        self.inner.launch_cpu(name, groups, kernel)
    }

    /// Enqueues a function that runs on the host.
    ///
    /// # Errors
    /// [`Error::Closed`]; [`Error::Unsupported`] on a GPU's stream. Errors and panics of the
    /// function are returned by [`Stream::sync`].
    pub fn call_cpu(
        &self,
        name: &'static str,
        f: impl FnOnce() -> Result<()> + Send + 'static,
    ) -> Result<()> {
        self.inner.call_cpu(name, Box::new(f))
    }

    /// Checks that this stream belongs to the heap whose control block is `heap`. Every function
    /// that enqueues an access to a heap's memory must make this check: a heap keeps its memory
    /// until its own streams have finished, and orders ops only among its own streams.
    pub(crate) fn check_of(&self, heap: *const Control, what: &str) -> Result<()> {
        if std::ptr::eq(Arc::as_ptr(self.inner.control()), heap) {
            return Ok(());
        }
        Err(Error::invalid(
            format!("stream for {what}"),
            "one of another heap",
            "a stream of this heap, which waits only for its own streams before it frees memory",
        ))
    }

    /// Whether `other` is a clone of this stream.
    pub fn is_same(&self, other: &Stream) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    pub(crate) fn backend(&self) -> &dyn StreamBackend {
        &*self.inner
    }

    /// Number of the capture into a graph that is in progress on the stream; `None` if there is none.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn capture(&self) -> Result<Option<u64>> {
        self.inner.capture()
    }

    /// Handle of the stream as a number: a `CUstream` or `hipStream_t`; on the CPU a number that
    /// has no other use.
    pub fn raw_handle(&self) -> u64 {
        self.inner.raw_handle()
    }
}

impl Event {
    /// Whether the work that was enqueued before the event is done.
    pub fn is_done(&self) -> bool {
        self.inner.is_done()
    }

    /// Waits on the host until the event is done.
    ///
    /// # Errors
    /// Errors of the device; errors of the work are returned by [`Stream::sync`].
    /// [`Error::WaitFromWork`] if called from enqueued work.
    pub fn sync(&self) -> Result<()> {
        self.control.check_process("waiting for an event")?;
        check_may_wait("waiting for an event")?;
        let _waiting = self.control.begin_wait();
        self.control.attend_until(|| self.inner.is_done());
        self.inner.sync()?;
        self.control.complete(self.issued);
        Ok(())
    }

    pub(crate) fn backend(&self) -> &dyn EventBackend {
        &*self.inner
    }
}

/// Result of [`SymmetricHeap::read_on`](crate::SymmetricHeap::read_on): elements that an enqueued
/// copy brings to the host. Owns the copy's target memory, which stays allocated until the copy is
/// complete even if this object is dropped before.
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

    /// Whether the copy is complete.
    pub fn is_done(&self) -> bool {
        self.copy.event().is_done()
    }
}

impl<T: Element> PendingRead<T> {
    /// Waits on the host until the copy is complete, and returns the elements. Does not wait for
    /// work that was enqueued on the stream later.
    ///
    /// # Errors
    /// Errors of the device; [`Error::WaitFromWork`] if called from enqueued work;
    /// [`Error::Invalid`] if the copy failed, while the copy's own error is returned by
    /// [`Stream::sync`]; the fault of a call on this heap, or an abort other than the loss of a
    /// peer, because the elements may be undefined.
    pub fn wait(self) -> Result<Vec<T>> {
        self.control.check_process("waiting for a copy")?;
        check_may_wait("waiting for a copy")?;
        let waiting = self.control.begin_wait();
        self.control.attend_until(|| self.copy.event().is_done());
        self.copy.event().sync()?;
        drop(waiting);
        self.control.check_results()?;
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
