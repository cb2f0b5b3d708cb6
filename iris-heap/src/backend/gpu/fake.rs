//! Fake driver that runs no work but logs calls, and tests of the vendor-independent GPU code on
//! it. This file is long because the driver implements all functions of two traits.

use std::collections::{HashMap, HashSet};
use std::ffi::{CStr, c_void};
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use super::event::GpuEvent;
use super::mapping::GpuMapping;
use super::memory::{MemoryDriver, Region, Wanted};
use super::stream::{GpuStream, Queue, Shared};
use super::*;
use crate::backend::{BackendKind, EventBackend, LaunchShape, Mapping, StreamBackend};
use crate::control::Control;
use crate::error::{Error, ErrorKind, Result};
use crate::stream::Stream;
use crate::util::unsupported;

mod beside;
mod ranks;

/// Fake driver of one device; tests set which of its streams are captured, busy or done.
#[derive(Default)]
struct Fake {
    ordinal: i32,
    /// Index of a device whose memory this device cannot access.
    far: Option<i32>,
    handles: AtomicU64,
    /// Number of the capture in progress on each stream, by the stream's handle.
    captured: Mutex<HashMap<u64, u64>>,
    busy: Mutex<HashSet<u64>>,
    /// Calls that enqueue or order work, in the order in which they were made.
    log: Mutex<Vec<String>>,
    /// Name of the driver call that is to fail; `None` if all calls succeed.
    fails: Mutex<Option<&'static str>>,
    /// Whether all events count as not done.
    events_are_busy: AtomicBool,
}

impl Fake {
    fn fresh(&self) -> u64 {
        self.handles.fetch_add(1, Ordering::Relaxed) + 1
    }

    fn call(&self, name: &'static str, what: String) -> Result<()> {
        if *self.fails.lock().unwrap() == Some(name) {
            return Err(unsupported(name, "the test says so"));
        }
        self.log.lock().unwrap().push(format!("{name} {what}"));
        Ok(())
    }

    fn taken(&self) -> Vec<String> {
        std::mem::take(&mut *self.log.lock().unwrap())
    }

    fn capture(&self, stream: u64, id: Option<u64>) {
        let mut captured = self.captured.lock().unwrap();
        match id {
            Some(id) => captured.insert(stream, id),
            None => captured.remove(&stream),
        };
    }
}

impl Driver for Fake {
    fn kind(&self) -> BackendKind {
        BackendKind::Hip
    }
    fn ordinal(&self) -> i32 {
        self.ordinal
    }
    fn title(&self) -> String {
        format!("a fake {}", self.arch())
    }
    fn arch(&self) -> String {
        "gfx000".into()
    }
    fn uuid(&self) -> String {
        format!("fake {}", self.ordinal)
    }
    fn memory_info(&self) -> Result<(u64, u64)> {
        Ok((0, 0))
    }
    fn enter(&self) -> Result<Option<i32>> {
        self.call("current", self.ordinal.to_string())?;
        Ok(None)
    }
    fn leave(&self, _: i32) -> Result<()> {
        Ok(())
    }
    fn exchange_capture_mode(&self, _: Option<u32>) -> Result<u32> {
        Ok(0)
    }
    fn shared_by(&self, ranks: u32) {
        self.call("shared_by", ranks.to_string()).unwrap();
    }
    fn multiprocessors(&self) -> u32 {
        8
    }
    fn create_stream(&self) -> Result<RawStream> {
        Ok(RawStream(self.fresh()))
    }
    unsafe fn destroy_stream(&self, stream: RawStream) -> Result<()> {
        self.call("destroy_stream", stream.0.to_string())
    }
    unsafe fn use_first(&self, _: RawStream) -> Result<()> {
        Ok(())
    }
    unsafe fn owns(&self, _: RawStream) -> Result<bool> {
        Ok(true)
    }
    unsafe fn capture_of(&self, stream: RawStream) -> Result<Option<u64>> {
        Ok(self.captured.lock().unwrap().get(&stream.0).copied())
    }
    unsafe fn sync_stream(&self, stream: RawStream) -> Result<()> {
        self.call("sync_stream", stream.0.to_string())?;
        self.busy.lock().unwrap().remove(&stream.0);
        Ok(())
    }
    unsafe fn stream_is_done(&self, stream: RawStream) -> bool {
        !self.busy.lock().unwrap().contains(&stream.0)
    }
    fn create_event(&self) -> Result<RawEvent> {
        Ok(RawEvent(self.fresh()))
    }
    unsafe fn destroy_event(&self, _: RawEvent) -> Result<()> {
        Ok(())
    }
    unsafe fn record(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        self.call("record", format!("{} on {}", event.0, stream.0))
    }
    unsafe fn wait_for(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        self.call("wait_for", format!("{} on {}", event.0, stream.0))
    }
    unsafe fn event_is_done(&self, _: RawEvent) -> bool {
        !self.events_are_busy.load(Ordering::Relaxed)
    }
    unsafe fn sync_event(&self, event: RawEvent) -> Result<()> {
        self.call("sync_event", event.0.to_string())
    }
    unsafe fn copy(&self, _: u64, _: u64, _: u64, stream: RawStream) -> Result<()> {
        self.call("copy", format!("on {}", stream.0))
    }
    unsafe fn copy_lines(&self, copy: &DeviceCopy, stream: RawStream) -> Result<()> {
        self.call("copy_lines", format!("{} of {} on {}", copy.lines, copy.bytes, stream.0))
    }
    unsafe fn write(&self, _: u64, _: *const u8, _: usize, stream: RawStream) -> Result<()> {
        self.call("write", format!("on {}", stream.0))
    }
    unsafe fn read(&self, _: *mut u8, _: u64, _: usize, stream: RawStream) -> Result<()> {
        self.call("read", format!("on {}", stream.0))
    }
    unsafe fn fill(&self, _: u64, _: u64, _: u8, stream: RawStream) -> Result<()> {
        self.call("fill", format!("on {}", stream.0))
    }
    fn pin(&self, bytes: usize) -> Result<NonNull<u8>> {
        // The memory is leaked, because pinned memory is never freed. It starts at a multiple of
        // 128 bytes.
        let lines = vec![0_u128; bytes / 16 + 8].leak();
        let skipped = lines.as_ptr().align_offset(128);
        Ok(NonNull::from(&mut lines[skipped..]).cast())
    }
    unsafe fn pinned_address(&self, _: NonNull<u8>) -> Result<u64> {
        Ok(0)
    }
    fn load(&self, image: &[u8]) -> Result<RawModule> {
        self.call("load", format!("{} bytes", image.len()))?;
        Ok(RawModule(self.fresh()))
    }
    unsafe fn function(&self, _: RawModule, _: &CStr, _: u32) -> Result<RawFunction> {
        Ok(RawFunction(self.fresh()))
    }
    unsafe fn resources(&self, _: RawFunction) -> Result<(u32, u32)> {
        Ok((0, 0))
    }
    unsafe fn resident(&self, _: RawFunction, _: u32, _: u32) -> Result<u32> {
        Ok(1)
    }
    unsafe fn launch(
        &self,
        _: RawFunction,
        name: &str,
        _: LaunchShape,
        _: &mut [*mut c_void],
        stream: RawStream,
    ) -> Result<()> {
        self.call("launch", format!("{name} on {}", stream.0))
    }
}

/// Region of fake memory: an address and a length only.
struct FakeRegion {
    device: Arc<Fake>,
    address: u64,
    bytes: u64,
    /// Handle by which other processes open the region; empty for memory of the caller or of a
    /// peer.
    handle: Vec<u8>,
}

impl Region for FakeRegion {
    fn address(&self) -> u64 {
        self.address
    }
    fn bytes(&self) -> u64 {
        self.bytes
    }
    fn ordinal(&self) -> i32 {
        self.device.ordinal
    }
    fn handle(&self) -> Result<Vec<u8>> {
        Ok(self.handle.clone())
    }
    fn descriptor(&self) -> Result<Option<OwnedFd>> {
        Ok(None)
    }
    fn grant(&self, ordinals: &[i32]) -> Result<()> {
        self.device.call("grant", format!("{} to {ordinals:?}", self.address))
    }
    fn asks_for_access(&self) -> bool {
        true
    }
}

impl Drop for FakeRegion {
    fn drop(&mut self) {
        self.device.call("free", self.address.to_string()).unwrap();
    }
}

impl Fake {
    fn region(self: &Arc<Self>, bytes: u64, handle: Vec<u8>) -> Arc<dyn Region> {
        let (device, address) = (self.clone(), 1000 * self.fresh());
        Arc::new(FakeRegion { device, address, bytes, handle })
    }
}

impl MemoryDriver for Fake {
    fn allocate(self: Arc<Self>, bytes: u64, wanted: Wanted) -> Result<Arc<dyn Region>> {
        self.call("allocate", format!("{bytes} of {:?}", wanted.purpose))?;
        let handle =
            if wanted.exported { format!("{bytes} of {}", self.ordinal) } else { "".into() };
        Ok(self.region(bytes, handle.into_bytes()))
    }
    fn import(self: Arc<Self>, _: OwnedFd, bytes: u64) -> Result<Arc<dyn Region>> {
        self.call("import", bytes.to_string())?;
        Ok(self.region(bytes, Vec::new()))
    }
    fn open(&self, handle: &[u8]) -> Result<u64> {
        self.call("open", String::from_utf8_lossy(handle).into_owned())?;
        Ok(1000 * self.fresh())
    }
    unsafe fn close(&self, address: u64) -> Result<()> {
        self.call("close", address.to_string())
    }
    unsafe fn free(&self, address: u64) -> Result<()> {
        self.call("free", address.to_string())
    }
    fn handle_of(&self, _: u64) -> Result<Vec<u8>> {
        Ok(Vec::new())
    }
    fn check_foreign(&self, _: u64, _: u64) -> Result<()> {
        Ok(())
    }
    fn can_access(&self, ordinal: i32) -> Result<bool> {
        Ok(self.far != Some(ordinal))
    }
    fn enable_access(&self, ordinal: i32) -> Result<()> {
        self.call("enable_access", ordinal.to_string())
    }
}

/// Makes a fake driver and the state that the streams of a heap on it share.
fn shared() -> (Arc<Fake>, Arc<Shared>) {
    let fake = Arc::new(Fake::default());
    let shared = Shared::new(fake.clone(), Arc::<Control>::default()).unwrap();
    (fake, Arc::new(shared))
}

fn stream(shared: &Arc<Shared>) -> Arc<GpuStream> {
    Arc::new(GpuStream(Queue::create(shared).unwrap()))
}

/// Enqueues an empty op (a copy of 0 bytes) on `stream`.
fn op(stream: &GpuStream) -> Result<()> {
    stream.0.copy_in_order(0, 0, 0)
}

/// Fails the test if `f` has not ended after a time limit, because `f` then waits forever.
fn bounded(f: impl FnOnce() + Send + 'static) {
    let (done, outcome) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        f();
        let _ = done.send(());
    });
    match outcome.recv_timeout(Duration::from_secs(20)) {
        Ok(()) => {}
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("it waits for ever"),
        Err(mpsc::RecvTimeoutError::Disconnected) => {
            std::panic::resume_unwind(thread.join().unwrap_err())
        }
    }
}

/// Tests a wait for all streams while a released stream is still captured: the stream is not
/// destroyed but put back into the list of released captured streams, without a deadlock on the
/// list's lock.
#[test]
fn a_stream_that_is_captured_still_is_kept_again() {
    bounded(|| {
        let (fake, shared) = shared();
        let captured = stream(&shared);
        let raw = captured.raw_handle();
        fake.capture(raw, Some(7));
        drop(captured);
        for _ in 0..3 {
            assert_eq!(shared.kept().len(), 1);
            shared.finish_rest().unwrap();
        }
        assert!(fake.taken().is_empty(), "to wait for it would end the capture");
        fake.capture(raw, None);
        shared.finish_rest().unwrap();
        assert!(shared.kept().is_empty());
        assert_eq!(fake.taken(), [format!("sync_stream {raw}")]);
        // A new stream reuses the released one.
        assert_eq!(stream(&shared).raw_handle(), raw);
        shared.forget_order();
    });
}

#[test]
fn an_event_that_was_not_recorded_is_not_done() {
    let (fake, shared) = shared();
    let device: Arc<dyn Driver> = fake.clone();
    let (stream, event) = (stream(&shared), GpuEvent::new(&device).unwrap());
    assert!(!event.is_done());
    event.record(stream.0.raw()).unwrap();
    assert!(event.is_done());
    *fake.fails.lock().unwrap() = Some("record");
    event.record(stream.0.raw()).unwrap_err();
    assert!(!event.is_done(), "nobody knows");
}

#[test]
fn ops_are_in_order_over_streams() {
    let (fake, shared) = shared();
    let (a, b) = (stream(&shared), stream(&shared));
    let (x, y) = (a.raw_handle(), b.raw_handle());
    op(&a).unwrap();
    op(&a).unwrap();
    assert_eq!(fake.taken(), [format!("copy on {x}"), format!("copy on {x}")], "one stream");
    op(&b).unwrap();
    let calls = fake.taken();
    let number = calls[0].split(' ').nth(1).unwrap().to_string();
    let behind = [
        format!("record {number} on {x}"),
        format!("wait_for {number} on {y}"),
        format!("copy on {y}"),
        format!("record {number} on {y}"),
    ];
    assert_eq!(calls, behind);
    op(&a).unwrap();
    let back = [
        format!("wait_for {number} on {x}"),
        format!("copy on {x}"),
        format!("record {number} on {x}"),
    ];
    assert_eq!(fake.taken(), back);
    // Work that is to run at the same time as ops must be refused on the stream of the last op.
    let error = a.0.beside(|| Ok(())).unwrap_err();
    assert!(error.to_string().contains("that of an op"), "{error}");
    b.0.beside(|| Ok(())).unwrap();
    assert_eq!(fake.taken(), [format!("wait_for {number} on {y}")]);
    // An op in a capture does not wait for the last op outside of captures, because ops in a
    // capture are ordered only among themselves.
    fake.capture(y, Some(1));
    op(&b).unwrap();
    assert!(!fake.taken().iter().any(|call| call.starts_with("wait_for")));
    fake.capture(y, None);
    shared.forget_order();
}

/// Tests an op that is enqueued but after which no event can be recorded. The op returns no error;
/// the next op on another stream fails before it is enqueued.
#[test]
fn an_op_is_refused_behind_one_whose_event_could_not_be_recorded() {
    let (fake, shared) = shared();
    // SAFETY: handles of the fake driver are plain numbers.
    let theirs = GpuStream(unsafe { Queue::caller(&shared, RawStream(99)) }.unwrap());
    let ours = stream(&shared);
    let fails = |name| *fake.fails.lock().unwrap() = name;
    fails(Some("record"));
    op(&theirs).unwrap();
    assert_eq!(fake.taken(), ["copy on 99"]);
    fails(None);
    let error = op(&ours).unwrap_err();
    assert!(error.to_string().contains("record"), "{error}");
    assert!(fake.taken().is_empty());
    op(&theirs).unwrap();
    op(&ours).unwrap();
    // The stream of the last op is kept alive, so the next op tries again to record its event.
    fails(Some("record"));
    op(&ours).unwrap();
    fails(None);
    fake.taken();
    op(&theirs).unwrap();
    let calls = fake.taken();
    let on_ours = format!(" on {}", ours.raw_handle());
    assert!(calls[0].starts_with("record") && calls[0].ends_with(&on_ours), "{calls:?}");
    shared.forget_order();
}

/// Tests that an op is refused while the previous op's stream is captured, because no event can
/// then be recorded after the previous op.
#[test]
fn an_op_behind_a_stream_that_is_captured_is_refused() {
    let (fake, shared) = shared();
    let (a, b) = (stream(&shared), stream(&shared));
    op(&a).unwrap();
    fake.capture(a.raw_handle(), Some(1));
    assert_eq!(op(&b).unwrap_err().kind(), ErrorKind::Unsupported);
    fake.capture(a.raw_handle(), None);
    op(&b).unwrap();
    shared.forget_order();
}

#[test]
fn nothing_is_enqueued_when_the_heap_closes() {
    let (fake, shared) = shared();
    let a = stream(&shared);
    shared.refuse_work();
    for outcome in [op(&a), a.sync(), a.record().map(drop), Queue::create(&shared).map(drop)] {
        assert!(matches!(outcome, Err(Error::Closed { .. })), "{outcome:?}");
    }
    assert!(fake.taken().is_empty());
}

/// Tests that a stream that was released while busy is reused only after its work has ended.
#[test]
fn streams_are_used_again_once_they_are_done() {
    let (fake, shared) = shared();
    let busy = stream(&shared);
    let raw = busy.raw_handle();
    fake.busy.lock().unwrap().insert(raw);
    drop(busy);
    assert!(!shared.rest_is_idle());
    let other = stream(&shared);
    assert_ne!(other.raw_handle(), raw);
    shared.finish_rest().unwrap();
    assert!(shared.rest_is_idle());
    assert_eq!(stream(&shared).raw_handle(), raw);
    fake.taken();
    drop(other);
    drop(shared);
    assert_eq!(fake.taken().len(), 2, "both are given back to the driver with the heap");
}

/// Tests that the handle of the caller's stream is not used after the last `Stream` is dropped: the
/// caller may then destroy the stream.
#[test]
fn a_stream_of_the_callers_is_left_alone_when_it_was_let_go() {
    let (fake, shared) = shared();
    // SAFETY: handles of the fake driver are plain numbers.
    let queue = unsafe { Queue::caller(&shared, RawStream(99)) }.unwrap();
    let theirs = Stream::from_backend(Arc::new(GpuStream(queue.clone())));
    fake.busy.lock().unwrap().insert(99);
    drop(theirs);
    let calls = fake.taken();
    assert!(calls.len() == 1 && calls[0].ends_with("on 99"), "its end is kept: {calls:?}");
    queue.finish_apart().unwrap();
    assert!(queue.is_idle() && !queue.is_captured().unwrap());
    shared.finish_rest().unwrap();
    let calls = fake.taken();
    assert!(calls.iter().all(|call| call.starts_with("sync_event")), "{calls:?}");
}

/// Tests that a copy to the host that is dropped before it is done keeps its pinned memory, which
/// the device may still write. A copy that is done returns its memory to the pool.
#[test]
fn a_copy_to_the_host_keeps_its_memory_until_it_is_done() {
    let (fake, shared) = shared();
    let stream = stream(&shared);
    let device: Arc<Fake> = fake.clone();
    let region = device.region(64, Vec::new());
    let memory: Arc<dyn Mapping> = Arc::new(GpuMapping::new(region));
    let read = || stream.read((memory.clone(), 0), 64).unwrap();
    let free = || super::pinned::buffer(&*fake, 64).unwrap().pointer();
    let copy = read();
    assert_eq!(copy.bytes().map(|bytes| bytes.len()), Some(64));
    drop(copy);
    // A buffer that is returned to the pool is the next one taken.
    let first = free();
    assert_eq!(first, free());
    fake.events_are_busy.store(true, Ordering::Relaxed);
    let copy = read();
    assert_eq!(copy.bytes(), None, "it is not done");
    drop(copy);
    fake.events_are_busy.store(false, Ordering::Relaxed);
    assert_ne!(first, free(), "the device may write it still");
    fake.capture(stream.raw_handle(), Some(7));
    let error = stream.read((memory.clone(), 0), 64).err().unwrap().to_string();
    assert!(error.contains("captured"), "{error}");
    fake.capture(stream.raw_handle(), None);
}
