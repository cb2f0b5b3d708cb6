//! Streams of a GPU.
//!
//! This file is long because creation, release and reuse of a stream all change the state that a heap's streams
//! share.

use std::any::Any;
use std::cell::Cell;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, RwLockReadGuard, TryLockError};

use super::driver::{Driver, RawStream, warn};
use super::event::GpuEvent;
use super::mapping::as_gpu;
use super::order::{Keeper, Order, Place};
use super::pinned;
use crate::backend::{EventBackend, HostCopy, Mapping, Memory, StreamBackend};
use crate::control::Control;
use crate::error::{Error, Result};
use crate::util::lock;
use crate::util::unsupported;

thread_local! {
    /// Stream of the operator call that this thread is enqueuing, with the number of its capture;
    /// `None` outside a call. A capture can neither begin nor end within a call, so the driver is
    /// asked once for all launches of the call.
    static CALL: Cell<Option<(*const Queue, Option<u64>)>> = const { Cell::new(None) };
}

/// Ends the operator call that this thread is enqueuing: drops the stored answer of
/// [`StreamBackend::is_captured`].
pub(crate) fn end_call() {
    CALL.set(None);
}

/// State that the streams of a heap share.
pub(crate) struct Shared {
    pub(crate) device: Arc<dyn Driver>,
    pub(crate) control: Arc<Control>,
    closed: AtomicBool,
    /// Lock that enqueueing threads hold for reading. Closing the heap takes it for writing, so
    /// that all enqueueing has ended when the heap closes.
    enqueueing: RwLock<()>,
    /// Memory of the heap, set when the heap has been opened; streams keep it alive.
    pub(crate) memory: OnceLock<Memory>,
    order: Mutex<Order>,
    numbers: AtomicU64,
    /// Released streams, to be reused once their work has ended. They are reused because the driver
    /// assigns new streams to its hardware queues round-robin, so a new stream could share a queue
    /// with a waiting kernel of another rank.
    spare: Mutex<Vec<RawStream>>,
    /// Events after the last work of released streams that belong to the caller or another library.
    /// The heap waits for them before it frees memory.
    left: Mutex<Vec<GpuEvent>>,
    /// Streams that were released while they were captured. Querying or destroying a captured
    /// stream would end the capture, so these streams are destroyed later, by a wait for all
    /// streams after the capture has ended.
    kept: Mutex<Vec<Arc<Queue>>>,
    /// Whether no event could be recorded after the last work of a released stream, so that the end
    /// of that work is unknown. The heap's memory is then never freed.
    unknown_end: AtomicBool,
}

impl Shared {
    pub(crate) fn new(device: Arc<dyn Driver>, control: Arc<Control>) -> Result<Shared> {
        let order = Order::new(device.clone())?;
        Ok(Shared {
            device,
            control,
            closed: AtomicBool::new(false),
            enqueueing: RwLock::default(),
            memory: OnceLock::new(),
            order: Mutex::new(order),
            numbers: AtomicU64::new(1),
            spare: Mutex::default(),
            left: Mutex::default(),
            kept: Mutex::default(),
            unknown_end: AtomicBool::new(false),
        })
    }

    /// Checks that the heap is open, and keeps it open while the returned guard lives.
    fn open(&self) -> Result<RwLockReadGuard<'_, ()>> {
        let guard = self.enqueueing.read().unwrap_or_else(PoisonError::into_inner);
        match self.closed.load(Ordering::Relaxed) {
            true => Err(Error::Closed { what: "the stream's heap" }),
            false => Ok(guard),
        }
    }

    /// Makes later enqueueing fail, and waits for calls that are enqueueing at this moment.
    pub(crate) fn refuse_work(&self) {
        self.closed.store(true, Ordering::Relaxed);
        drop(self.enqueueing.write().unwrap_or_else(PoisonError::into_inner));
    }

    /// Makes later enqueueing fail, without waiting. Returns false if a call is still enqueueing.
    pub(crate) fn refuse_work_now(&self) -> bool {
        self.closed.store(true, Ordering::Relaxed);
        !matches!(self.enqueueing.try_write(), Err(TryLockError::WouldBlock))
    }

    /// Forgets the last op when the heap is dropped, so that no stream is kept alive for it.
    pub(crate) fn forget_order(&self) {
        let last = lock(&self.order).forget();
        let kept = std::mem::take(&mut *lock(&self.kept));
        drop((last, kept));
    }

    /// Streams that were released while they were captured and are still kept.
    pub(crate) fn kept(&self) -> Vec<Arc<Queue>> {
        lock(&self.kept).clone()
    }

    /// Waits until the remaining work of all released streams has ended.
    pub(crate) fn finish_rest(&self) -> Result<()> {
        // The streams are dropped outside of the lock: dropping a stream that is still captured
        // puts it back into the list, which takes the lock.
        let kept = std::mem::take(&mut *lock(&self.kept));
        drop(kept);
        let spare = lock(&self.spare).clone();
        let mut outcome = Ok(());
        for raw in spare {
            // SAFETY: spare streams are destroyed only with `self`.
            outcome = outcome.and(unsafe { self.device.sync_stream(raw) });
        }
        let left = std::mem::take(&mut *lock(&self.left));
        left.iter().fold(outcome, |outcome, event| outcome.and(event.sync()))
    }

    /// Whether the remaining work of all released streams has ended.
    pub(crate) fn rest_is_idle(&self) -> bool {
        !self.has_unknown_end()
            && lock(&self.spare).iter().all(|&raw| self.is_done(raw))
            && lock(&self.left).iter().all(EventBackend::is_done)
    }

    /// Whether the end of some released stream's remaining work is unknown.
    pub(crate) fn has_unknown_end(&self) -> bool {
        self.unknown_end.load(Ordering::Relaxed)
    }

    /// Takes a released stream whose work has ended. A busy stream is not reused, because the
    /// stream may run a kernel that waits for the new work.
    fn take_spare(&self) -> Option<RawStream> {
        let mut spare = lock(&self.spare);
        let at = spare.iter().position(|&raw| self.is_done(raw))?;
        Some(spare.swap_remove(at))
    }

    /// Whether all work on `spare`, a released stream, has ended.
    fn is_done(&self, spare: RawStream) -> bool {
        // SAFETY: spare streams are destroyed only with `self`.
        unsafe { self.device.stream_is_done(spare) }
    }

    /// Stores the event after the last work of a released stream, and drops stored events that are
    /// done.
    fn leave(&self, end: Result<GpuEvent>) {
        match end {
            Ok(end) => {
                let mut left = lock(&self.left);
                left.retain(|event| !event.is_done());
                left.push(end);
            }
            Err(error) => {
                tracing::warn!(%error, "nobody knows when a stream that was let go is done");
                self.unknown_end.store(true, Ordering::Relaxed);
            }
        }
    }
}

/// Owner of a stream: the party that keeps the stream alive and destroys it.
enum Owner {
    Ours,
    /// Another library, which keeps the stream alive while this reference is held.
    Held {
        _by: Arc<dyn Any + Send + Sync>,
    },
    /// The caller, who keeps the stream alive while a [`crate::Stream`] that wraps it exists.
    /// `capture` is the number of the capture that was in progress when the stream was passed to
    /// the heap.
    Caller {
        capture: Option<u64>,
    },
}

/// Stream of the device, with the state that orders its work with the other streams of the heap.
pub(crate) struct Queue {
    raw: RawStream,
    number: u64,
    owner: Owner,
    shared: Arc<Shared>,
    /// Host memory that enqueued copies may still read, each with the event recorded after its
    /// copy.
    pending: Mutex<Vec<(GpuEvent, Vec<u8>)>>,
    /// Whether the caller's last `Stream` has been dropped; the driver's stream may no longer exist
    /// then. Code that holds no `Stream` holds this lock while it uses the handle.
    gone: Mutex<bool>,
}

impl Queue {
    /// Makes a stream whose work waits for no other stream (non-blocking).
    pub(crate) fn create(shared: &Arc<Shared>) -> Result<Arc<Queue>> {
        let _open = shared.open()?;
        let raw = match shared.take_spare() {
            Some(raw) => raw,
            None => shared.device.create_stream()?,
        };
        Ok(Queue::of(shared, raw, Owner::Ours))
    }

    fn of(shared: &Arc<Shared>, raw: RawStream, owner: Owner) -> Arc<Queue> {
        let number = shared.numbers.fetch_add(1, Ordering::Relaxed);
        let (pending, gone) = (Mutex::default(), Mutex::default());
        Arc::new(Queue { raw, number, owner, shared: shared.clone(), pending, gone })
    }

    /// Wraps a stream that stays alive as long as `by` is held.
    ///
    /// # Safety
    /// `raw` is a live stream, and stays one until `by` is dropped.
    #[cfg_attr(not(feature = "cudarc-0-19"), expect(dead_code, reason = "for interop"))]
    pub(crate) unsafe fn held(
        shared: &Arc<Shared>,
        raw: RawStream,
        by: Arc<dyn Any + Send + Sync>,
    ) -> Result<Arc<Queue>> {
        Queue::adopt(shared, raw, Owner::Held { _by: by })
    }

    /// Wraps the caller's stream.
    ///
    /// # Safety
    /// `raw` is a live stream, and stays one until the queue is released.
    pub(crate) unsafe fn caller(shared: &Arc<Shared>, raw: RawStream) -> Result<Arc<Queue>> {
        Queue::adopt(shared, raw, Owner::Caller { capture: None })
    }

    fn adopt(shared: &Arc<Shared>, raw: RawStream, mut owner: Owner) -> Result<Arc<Queue>> {
        let _open = shared.open()?;
        let device = &shared.device;
        // SAFETY: the stream is alive, by the contracts of `held` and `caller`.
        if !unsafe { device.owns(raw) }? {
            return Err(Error::invalid(
                "the caller's stream",
                format!("{:#x} of another device or context", raw.0),
                format!("one of the primary context of device {}", device.ordinal()),
            ));
        }
        // SAFETY: the stream is alive, by the contracts of `held` and `caller`.
        let now = unsafe { device.capture_of(raw) }?;
        if now.is_none() {
            // SAFETY: the stream is alive, by the contracts of `held` and `caller`, and not
            // captured.
            unsafe { device.use_first(raw) }?;
        }
        if let Owner::Caller { capture } = &mut owner {
            *capture = now;
        }
        Ok(Queue::of(shared, raw, owner))
    }

    pub(super) fn shared(&self) -> &Shared {
        &self.shared
    }

    pub(crate) fn raw(&self) -> RawStream {
        self.raw
    }

    /// Number of the capture in progress on this stream; `None` if there is none.
    pub(crate) fn capture(&self) -> Result<Option<u64>> {
        if let Some((of, capture)) = CALL.get()
            && std::ptr::eq(of, self)
        {
            return Ok(capture);
        }
        // SAFETY: the stream is alive while the queue is in use.
        unsafe { self.shared.device.capture_of(self.raw) }
    }

    /// Enqueues an op by calling `f`, ordered after the last op of the heap, on whichever stream
    /// that op is.
    pub(crate) fn in_order(self: &Arc<Self>, f: impl FnOnce() -> Result<()>) -> Result<()> {
        let _open = self.shared.open()?;
        let mut order = lock(&self.shared.order);
        // The caller may destroy its own stream before the next op is issued, so nothing here can
        // keep that stream alive.
        let alive = !matches!(self.owner, Owner::Caller { .. });
        let keeper = alive.then(|| self.clone() as Keeper);
        order.op(self.place()?, keeper, f)
    }

    /// Enqueues work by calling `f`, ordered after the last op of the heap, on another stream than
    /// the last op's. The next op does not wait for this work.
    pub(crate) fn beside(&self, f: impl FnOnce() -> Result<()>) -> Result<()> {
        let _open = self.shared.open()?;
        let mut order = lock(&self.shared.order);
        order.beside(self.place()?, f)
    }

    /// Enqueues work by calling `f`, ordered by this stream alone.
    pub(crate) fn in_stream(&self, f: impl FnOnce() -> Result<()>) -> Result<()> {
        let _open = self.shared.open()?;
        f()
    }

    fn place(&self) -> Result<Place> {
        Ok(Place { raw: self.raw, number: self.number, capture: self.capture()? })
    }

    /// Enqueues a copy inside the heap's memory, ordered with its ops.
    pub(crate) fn copy_in_order(self: &Arc<Self>, to: u64, from: u64, bytes: u64) -> Result<()> {
        // SAFETY: the caller checked both ranges, and the heap keeps them until its streams have
        // finished.
        self.in_order(|| unsafe { self.shared.device.copy(to, from, bytes, self.raw) })
    }

    /// Waits until all work enqueued on the stream has ended. Fails while the stream is captured,
    /// even if all of its work was enqueued before the capture.
    fn finish(&self) -> Result<()> {
        self.check_no_capture()?;
        // SAFETY: the stream is alive while the queue is in use.
        self.shared.control.attend_until(|| unsafe { self.shared.device.stream_is_done(self.raw) });
        // SAFETY: the stream is alive while the queue is in use.
        let done = unsafe { self.shared.device.sync_stream(self.raw) };
        lock(&self.pending).retain(|(event, _)| !event.is_done());
        done
    }

    /// Whether the stream is captured. False if the caller's stream was released: the calling heap
    /// holds no `Stream` that keeps the driver's stream alive, so the handle must not be used.
    pub(crate) fn is_captured(&self) -> Result<bool> {
        let gone = lock(&self.gone);
        Ok(!*gone && self.capture()?.is_some())
    }

    /// Waits until all work enqueued on this stream has ended. The heap calls this function while
    /// it holds no `Stream` that keeps the driver's stream alive. A released stream is skipped;
    /// [`Shared::finish_rest`] waits for its work.
    pub(crate) fn finish_apart(&self) -> Result<()> {
        if !matches!(self.owner, Owner::Caller { .. }) {
            return self.finish();
        }
        let gone = lock(&self.gone);
        if *gone {
            return Ok(());
        }
        let end = self.end()?;
        // Release the lock before waiting, because the caller may drop its `Stream` meanwhile.
        drop(gone);
        self.shared.control.attend_until(|| end.is_done());
        end.sync()
    }

    /// Whether all work has ended. True if the caller's stream was released: the calling heap holds
    /// no `Stream` that keeps the driver's stream alive, so the handle must not be used.
    pub(crate) fn is_idle(&self) -> bool {
        let gone = lock(&self.gone);
        *gone || self.idle()
    }

    /// Releases the caller's stream when its last `Stream` is dropped; the driver's handle is not
    /// used afterwards.
    fn let_go(&self) {
        let Owner::Caller { capture: first } = self.owner else { return };
        let mut gone = lock(&self.gone);
        match self.capture() {
            // The capture was in progress when the stream was passed to the heap, so all work of
            // the heap on this stream belongs to the graph, and none remains on the stream.
            Ok(Some(id)) if first == Some(id) => {}
            Ok(None) if self.idle() => {}
            _ => self.shared.leave(self.end()),
        }
        *gone = true;
    }

    /// Records a new event after the work enqueued so far; an error while the stream is captured.
    fn end(&self) -> Result<GpuEvent> {
        self.check_no_capture()?;
        let event = GpuEvent::new(&self.shared.device)?;
        event.record(self.raw).map(|()| event)
    }

    fn check_no_capture(&self) -> Result<()> {
        match self.capture()? {
            Some(_) => Err(unsupported("waiting for a stream", "it is being captured")),
            None => Ok(()),
        }
    }

    /// Whether all enqueued work has ended; false while the stream is captured.
    fn idle(&self) -> bool {
        // Querying a captured stream would end its capture.
        if !matches!(self.capture(), Ok(None)) {
            return false;
        }
        // SAFETY: the stream is alive while the queue is in use.
        unsafe { self.shared.device.stream_is_done(self.raw) }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // Leak host memory that copies may still read, because a destructor must not wait for the
        // copies.
        let pending = std::mem::take(self.pending.get_mut().unwrap_or_else(|e| e.into_inner()));
        for (event, bytes) in pending {
            if !event.is_done() {
                std::mem::forget(bytes);
            }
        }
        let shared = &self.shared;
        let owner = std::mem::replace(&mut self.owner, Owner::Caller { capture: None });
        if matches!(owner, Owner::Caller { .. }) {
            // The caller's stream may no longer exist, so its handle is not used.
        } else if !matches!(self.capture(), Ok(None)) {
            // A captured stream cannot be destroyed: keep it for later, or leak it if the heap is
            // closed.
            if !shared.closed.load(Ordering::Relaxed) {
                let kept = Queue::of(shared, self.raw, owner);
                lock(&shared.kept).push(kept);
            }
        } else if matches!(owner, Owner::Ours) {
            lock(&shared.spare).push(self.raw);
        } else if !self.idle() {
            shared.leave(self.end());
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let spare = std::mem::take(self.spare.get_mut().unwrap_or_else(|e| e.into_inner()));
        for raw in spare {
            // SAFETY: the stream belongs to this heap, and no other handle exists; the driver
            // finishes enqueued work before it destroys a stream.
            warn(unsafe { self.device.destroy_stream(raw) });
        }
    }
}

/// Copy to the host through pinned memory, which returns to its pool when the copy is done.
struct PinnedCopy {
    event: GpuEvent,
    buffer: ManuallyDrop<pinned::Buffer>,
    bytes: usize,
}

impl HostCopy for PinnedCopy {
    fn event(&self) -> &dyn EventBackend {
        &self.event
    }

    fn bytes(&self) -> Option<Vec<u8>> {
        self.event.is_done().then(|| self.buffer.read(self.bytes))
    }
}

impl Drop for PinnedCopy {
    fn drop(&mut self) {
        if self.event.is_done() {
            // SAFETY: `buffer` is not used after this, because `self` is being dropped.
            unsafe { ManuallyDrop::drop(&mut self.buffer) };
        }
    }
}

/// Stream in the form that [`crate::Stream`] holds; its last clone drops this value.
pub(crate) struct GpuStream(pub(crate) Arc<Queue>);

impl GpuStream {
    /// Returns the queue of a GPU's stream; fails for a stream of another backend.
    pub(crate) fn of(stream: &dyn StreamBackend) -> Result<&Arc<Queue>> {
        let stream = stream.as_any().downcast_ref::<GpuStream>().map(|stream| &stream.0);
        stream.ok_or_else(|| unsupported("work of a GPU", "this is the stream of another device"))
    }
}

impl Drop for GpuStream {
    fn drop(&mut self) {
        self.0.let_go();
    }
}

impl StreamBackend for GpuStream {
    fn sync(&self) -> Result<()> {
        let queue = &self.0;
        // The guard that keeps the heap open is dropped at once, so that another thread that closes
        // the heap need not wait for the sync below.
        drop(queue.shared.open()?);
        let done = queue.finish();
        // An error of the heap, such as a fault, explains more than a driver error that it may have
        // caused. So the next two lines look for an error of the heap before `done` is returned.
        queue.shared.control.attend();
        queue.shared.control.check_results()?;
        done
    }

    fn record(&self) -> Result<Arc<dyn EventBackend>> {
        let queue = &*self.0;
        let _open = queue.shared.open()?;
        let event = GpuEvent::new(&queue.shared.device)?;
        event.record(queue.raw)?;
        Ok(Arc::new(event))
    }

    fn wait(&self, event: &dyn EventBackend) -> Result<()> {
        let queue = &*self.0;
        let _open = queue.shared.open()?;
        match event.as_any().downcast_ref::<GpuEvent>() {
            Some(event) => event.before(&*queue.shared.device, queue.raw),
            None => Err(unsupported(
                "waiting for an event",
                "the event belongs to another kind of device",
            )),
        }
    }

    fn copy(
        &self,
        (to, offset): (Arc<dyn Mapping>, u64),
        (from, at): (Arc<dyn Mapping>, u64),
        bytes: u64,
    ) -> Result<()> {
        let queue = &*self.0;
        let _open = queue.shared.open()?;
        let to = as_gpu(&*to)?.at(offset, bytes)?;
        let from = as_gpu(&*from)?.at(at, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: both ranges are mapped, and the heap keeps them mapped until its streams have
        // finished.
        unsafe { queue.shared.device.copy(to, from, bytes, queue.raw) }
    }

    fn write(&self, (to, offset): (Arc<dyn Mapping>, u64), data: Vec<u8>) -> Result<()> {
        let queue = &*self.0;
        let _open = queue.shared.open()?;
        let to = as_gpu(&*to)?.at(offset, data.len() as u64)?;
        if data.is_empty() {
            return Ok(());
        }
        if queue.capture()?.is_some() {
            return Err(unsupported(
                "a copy from the host on a stream that is being captured",
                "the graph would read memory that is gone when it is launched: copy between \
                 slices instead",
            ));
        }
        let device = &queue.shared.device;
        let done = GpuEvent::new(device)?;
        let mut pending = lock(&queue.pending);
        pending.retain(|(event, _)| !event.is_done());
        // SAFETY: the target is mapped, and the heap keeps it mapped; `pending` keeps the source
        // until the event after the copy is done.
        let copied = unsafe { device.write(to, data.as_ptr(), data.len(), queue.raw) };
        // If recording the event fails, the event is never done, so the source is kept for ever.
        let recorded = done.record(queue.raw);
        pending.push((done, data));
        copied.and(recorded)
    }

    fn read(
        &self,
        (from, offset): (Arc<dyn Mapping>, u64),
        bytes: u64,
    ) -> Result<Box<dyn HostCopy>> {
        let queue = &*self.0;
        let _open = queue.shared.open()?;
        let from = as_gpu(&*from)?.at(offset, bytes)?;
        if queue.capture()?.is_some() {
            return Err(unsupported(
                "a copy to the host on a stream that is being captured",
                "the graph would write memory that is gone when it is launched: copy between slices instead, and read \
                 after the launch",
            ));
        }
        let device = &queue.shared.device;
        let (event, buffer) = (GpuEvent::new(device)?, pinned::buffer(&**device, bytes as usize)?);
        let copied = match bytes {
            0 => Ok(()),
            // SAFETY: the source is mapped, and the heap keeps it mapped; the target is kept until
            // the event after the copy is done.
            _ => unsafe { device.read(buffer.pointer(), from, bytes as usize, queue.raw) },
        };
        let recorded = event.record(queue.raw);
        // If recording the event fails, the event is never done, so the buffer is kept for ever.
        let read = PinnedCopy { event, buffer: ManuallyDrop::new(buffer), bytes: bytes as usize };
        copied.and(recorded).map(|()| Box::new(read) as Box<dyn HostCopy>)
    }

    unsafe fn copy_raw(&self, to: u64, from: u64, bytes: u64) -> Result<()> {
        let queue = &*self.0;
        let _open = queue.shared.open()?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller guarantees that both ranges are valid until the copy has ended.
        unsafe { queue.shared.device.copy(to, from, bytes, queue.raw) }
    }

    fn copy_words(&self, copies: &[(u32, u32)]) -> Result<()> {
        let memory = self.0.shared.memory.get().ok_or(Error::Closed { what: "the heap" })?;
        let words = as_gpu(&*memory.device_words)?;
        copies.iter().try_for_each(|&(to, from)| {
            let place = |word: u32| words.at(4 * u64::from(word), 4);
            self.0.copy_in_order(place(to)?, place(from)?, 4)
        })
    }

    fn raw_handle(&self) -> u64 {
        self.0.raw.0
    }

    fn capture(&self) -> Result<Option<u64>> {
        self.0.capture()
    }

    fn is_captured(&self) -> Result<bool> {
        let capture = self.0.capture()?;
        CALL.set(Some((Arc::as_ptr(&self.0), capture)));
        Ok(capture.is_some())
    }

    fn discard_capture(&self) -> Result<bool> {
        let queue = &self.0;
        let captured = queue.capture()?.is_some();
        if captured {
            // Querying a captured stream makes its capture end in an error, which this function is
            // to do. SAFETY: the stream is alive while the queue is in use.
            unsafe { queue.shared.device.stream_is_done(queue.raw) };
        }
        Ok(captured)
    }

    fn control(&self) -> &Arc<Control> {
        &self.0.shared.control
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
