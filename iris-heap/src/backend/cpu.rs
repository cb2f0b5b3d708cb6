//! CPU backend: shared memory of the host, one worker thread per stream, and one pool of threads
//! per heap, which run workgroups.
//!
//! The worker thread of a launch's stream executes workgroup 0 of the launch, and the pool's
//! threads execute the other workgroups. So for a heap of `n` threads the pool has `n - 1` threads.
//!
//! No lock is held while waiting for enqueued work, because that work may itself call functions of
//! the heap that take the lock.
//!
//! This file is long because pool, streams and events all take part in running launches one at a
//! time.

use std::any::Any;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;

use super::{Backend, BackendKind, DeviceInfo, Export, Mapping, Memory, Purpose};
use super::{CpuCall, CpuKernel, EventBackend, Group, HostCopy, StreamBackend, nothing_passed};
use crate::abi::{ABORT_WORD, abort};
use crate::atomic_copy;
use crate::control::Control;
use crate::error::{Error, Result};
use crate::plain_access::{Access, Span};
use crate::segment::{JointMemory, SharedMemory};
use crate::util::{lock, mark_worker, panic_message, spawn, unsupported};

impl Mapping for SharedMemory {
    fn address(&self) -> u64 {
        SharedMemory::address(self)
    }

    fn bytes(&self) -> u64 {
        SharedMemory::bytes(self)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

pub(crate) fn own(mapping: &dyn Mapping) -> Result<&SharedMemory> {
    let memory = mapping.as_any().downcast_ref::<SharedMemory>();
    memory
        .ok_or_else(|| unsupported("access from the host", "the memory belongs to another device"))
}

/// Backend for a rank whose device is the CPU: kernels are Rust functions, workgroups are threads.
pub(crate) struct CpuBackend {
    rank: usize,
    shared: Arc<Shared>,
    workers: Mutex<Vec<Worker>>,
    pool: Mutex<Vec<JoinHandle<()>>>,
    closed: AtomicBool,
    names: AtomicU64,
}

/// Worker thread of a stream.
struct Worker {
    number: u64,
    stream: Weak<Queue>,
    /// Event that is set when the worker thread has finished all work of its stream.
    ended: CpuEvent,
    thread: JoinHandle<()>,
}

/// State that the streams and threads of a heap share.
struct Shared {
    rank: usize,
    threads: u32,
    control: Arc<Control>,
    /// Memory of the heap; this reference keeps it mapped while work is enqueued.
    memory: OnceLock<Memory>,
    /// Number of the next launch. The lock is held while a launch is enqueued, so that the launches
    /// in one queue are in the order of their numbers.
    issue: Mutex<u64>,
    /// Number of the launch whose turn it is: launches run one at a time, in order.
    turn: Mutex<u64>,
    turned: Condvar,
    pool: Pool,
    /// Whether the heap has been dropped; enqueued work is then skipped.
    dropped: AtomicBool,
    /// Errors that no wait has returned to the program yet, oldest first, each with the number of
    /// its stream.
    failures: Mutex<Vec<(u64, Error)>>,
}

impl CpuBackend {
    pub(crate) fn new(rank: usize, threads: u32) -> Result<CpuBackend> {
        let shared = Arc::new(Shared {
            rank,
            threads,
            control: Arc::default(),
            memory: OnceLock::new(),
            issue: Mutex::new(0),
            turn: Mutex::new(0),
            turned: Condvar::new(),
            pool: Pool::default(),
            dropped: AtomicBool::new(false),
            failures: Mutex::default(),
        });
        let backend = CpuBackend {
            rank,
            shared,
            workers: Mutex::default(),
            pool: Mutex::default(),
            closed: AtomicBool::new(false),
            names: AtomicU64::new(0),
        };
        for index in 1..threads {
            let shared = backend.shared.clone();
            let thread = spawn(format!("iris-{rank}-group-{index}"), move || {
                mark_worker();
                shared.help(index);
            })?;
            lock(&backend.pool).push(thread);
        }
        Ok(backend)
    }

    fn end_pool(&self) {
        lock(&self.shared.pool.state).stop = true;
        self.shared.pool.start.notify_all();
    }
}

/// Sizes of all ranks' memory and how it is shared, read from the messages that the ranks have
/// exchanged; only for ranks that are processes.
struct Parts {
    /// Size of each rank's part, in bytes.
    sizes: Vec<u64>,
    /// Whether every rank's memory was made by the heap and is still unused. Then one file, which
    /// rank 0 creates, replaces the separate memories, with each rank's memory at an offset. So
    /// each rank receives one descriptor instead of one per rank. This matters because the system
    /// limits the number of descriptors in transit per user.
    joint: bool,
}

impl Parts {
    fn read<'a>(described: impl Iterator<Item = &'a Vec<u8>>) -> Result<Parts> {
        let mut parts = Parts { sizes: Vec::new(), joint: true };
        for (rank, part) in described.enumerate() {
            let Some((size, [is_fresh])) = part.split_first_chunk::<8>() else {
                return Err(broken(rank, "no size"));
            };
            parts.sizes.push(u64::from_le_bytes(*size));
            parts.joint &= *is_fresh == 1;
        }
        Ok(parts)
    }
}

fn broken(rank: usize, problem: &str) -> Error {
    Error::Wire { what: format!("memory of rank {rank}"), problem: problem.into() }
}

impl Backend for CpuBackend {
    fn device(&self) -> DeviceInfo {
        DeviceInfo {
            kind: BackendKind::Cpu,
            index: 0,
            name: std::env::consts::ARCH.into(),
            arch: std::env::consts::ARCH.into(),
            uuid: String::new(),
            workgroups: self.shared.threads,
            multiprocessors: 0,
        }
    }

    fn allocate(&self, purpose: Purpose, bytes: u64) -> Result<Arc<dyn Mapping>> {
        let name = match purpose {
            Purpose::Data => "iris-data",
            Purpose::Signal => "iris-signal",
            Purpose::DeviceWords => "iris-device-words",
        };
        let memory = SharedMemory::create(name, bytes)?;
        if purpose == Purpose::DeviceWords {
            memory.close_descriptor();
        }
        Ok(Arc::new(memory))
    }

    fn describe(&self, mapping: &dyn Mapping) -> Result<Vec<u8>> {
        let memory = own(mapping)?;
        let mut message = memory.bytes().to_le_bytes().to_vec();
        message.push(u8::from(memory.is_fresh()));
        Ok(message)
    }

    fn descriptors(
        &self,
        rank: usize,
        mapping: &dyn Mapping,
        described: &[Vec<u8>],
    ) -> Result<Vec<OwnedFd>> {
        let (memory, parts) = (own(mapping)?, Parts::read(described.iter())?);
        match (parts.joint, rank) {
            (true, 0) => {
                let joint = JointMemory::create(memory.name(), &parts.sizes)?;
                Ok(vec![joint.into_descriptor()])
            }
            (true, _) => Ok(Vec::new()),
            (false, _) => Ok(vec![memory.export()?]),
        }
    }

    fn import(
        &self,
        rank: usize,
        mapping: Arc<dyn Mapping>,
        all: Vec<Export>,
    ) -> Result<Vec<Arc<dyn Mapping>>> {
        // The peers have received descriptors of this rank's memory, so the original can be closed.
        own(&*mapping)?.close_descriptor();
        let Parts { sizes, joint } = Parts::read(all.iter().map(|export| &export.message))?;
        let mut passed = all.into_iter().map(|mut export| export.descriptors.pop());
        if joint {
            let descriptor = passed.next().flatten();
            let descriptor = descriptor.ok_or_else(|| nothing_passed(0))?;
            let parts = JointMemory::import(descriptor, &sizes)?.map()?;
            return Ok(parts.into_iter().map(|part| Arc::new(part) as Arc<dyn Mapping>).collect());
        }
        let map = |(from, (descriptor, size))| -> Result<Arc<dyn Mapping>> {
            if from == rank {
                return Ok(mapping.clone());
            }
            let descriptor: Option<OwnedFd> = descriptor;
            let descriptor = descriptor.ok_or_else(|| nothing_passed(from))?;
            let peer = SharedMemory::import(descriptor, size)?;
            peer.close_descriptor();
            Ok(Arc::new(peer))
        };
        passed.zip(sizes).enumerate().map(map).collect()
    }

    fn join(
        &self,
        mapping: &dyn Mapping,
        all: Vec<Arc<dyn Mapping>>,
    ) -> Result<Vec<Arc<dyn Mapping>>> {
        // All threads use one mapping; the memory is unmapped when the last thread drops it.
        own(mapping)?.close_descriptor();
        Ok(all)
    }

    fn adopt(&self, descriptor: OwnedFd, bytes: u64) -> Result<Arc<dyn Mapping>> {
        Ok(Arc::new(SharedMemory::import(descriptor, bytes)?))
    }

    unsafe fn register(&self, address: u64, bytes: u64) -> Result<Arc<dyn Mapping>> {
        // SAFETY: the caller guarantees that `bytes` bytes at `address` are valid; `foreign`
        // requires exactly this.
        Ok(Arc::new(unsafe { SharedMemory::foreign(address, bytes)? }))
    }

    fn control(&self) -> Arc<Control> {
        self.shared.control.clone()
    }

    fn opened(&self, memory: Memory) {
        // `set` fails only on a second call, which would be a bug of the heap and would keep the
        // first memory. So the result is ignored.
        let _ = self.shared.memory.set(memory);
    }

    fn write(&self, to: &dyn Mapping, offset: u64, data: &[u8]) -> Result<()> {
        own(to)?.write(offset, data)
    }

    fn read(&self, from: &dyn Mapping, offset: u64, data: &mut [u8]) -> Result<()> {
        own(from)?.read(offset, data)
    }

    fn fill(&self, to: &dyn Mapping, offset: u64, bytes: u64, value: u8) -> Result<()> {
        own(to)?.fill(offset, bytes, value)
    }

    fn stream(&self) -> Result<Arc<dyn StreamBackend>> {
        let mut workers = lock(&self.workers);
        if self.closed.load(Ordering::Relaxed) {
            return Err(Error::Closed { what: "the heap" });
        }
        workers.retain(|w| !w.thread.is_finished());
        self.shared.forget_failures(|stream| workers.iter().any(|w| w.number == stream));
        let number = self.names.fetch_add(1, Ordering::Relaxed);
        let (jobs, ended) = (Arc::<Jobs>::default(), CpuEvent::default());
        let shared = self.shared.clone();
        let queue = Queue { number, shared, jobs: jobs.clone(), ended: ended.clone() };
        let (queue, shared) = (Arc::new(queue), self.shared.clone());
        let name = format!("iris-{}-stream-{number}", self.rank);
        let end = ended.clone();
        let thread = spawn(name, move || {
            mark_worker();
            shared.work(&jobs, number);
            end.set();
        })?;
        workers.push(Worker { number, stream: Arc::downgrade(&queue), ended, thread });
        Ok(Arc::new(CpuStream(queue)))
    }

    fn finish(&self) {
        let end = |worker: &Worker| match worker.stream.upgrade().map(|queue| queue.record()) {
            Some(Ok(event)) => event,
            // The queue is closed or dropped, so no event can be recorded in it. Wait for the end
            // of its worker thread instead.
            None | Some(Err(_)) => worker.ended.clone(),
        };
        let ends: Vec<CpuEvent> = lock(&self.workers).iter().map(end).collect();
        ends.iter().for_each(CpuEvent::wait);
    }

    fn refuse_work(&self) {
        let workers = lock(&self.workers);
        // `closed` is set while `workers` is locked. Otherwise a stream could be made after the
        // loop below has closed the queues.
        self.closed.store(true, Ordering::Relaxed);
        let queues = workers.iter().filter_map(|worker| worker.stream.upgrade());
        queues.for_each(|queue| queue.jobs.close());
    }

    fn take_unreported(&self) -> Option<Error> {
        let mut failures = lock(&self.shared.failures);
        match failures.is_empty() {
            true => None,
            false => Some(failures.remove(0).1),
        }
    }

    /// Does nothing: the memory is unmapped when its last mapping is dropped.
    fn unmap(&self, _met: bool) {}

    fn shutdown(&self) {
        let workers = std::mem::take(&mut *lock(&self.workers));
        workers.into_iter().for_each(|worker| join(worker.thread));
        self.end_pool();
        let pool = std::mem::take(&mut *lock(&self.pool));
        pool.into_iter().for_each(join);
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for CpuBackend {
    /// Returns without waiting: enqueued work is skipped, running kernels are told to stop by the
    /// abort word, and the threads keep the memory mapped until they end.
    fn drop(&mut self) {
        if !self.closed.load(Ordering::Relaxed) {
            self.shared.dropped.store(true, Ordering::Relaxed);
            self.shared.control.set_host_abort(abort::CLOSED);
            let queues: Vec<_> =
                lock(&self.workers).iter().filter_map(|w| w.stream.upgrade()).collect();
            for queue in queues {
                queue.jobs.close();
            }
            // Ends the pool's threads, which stop after the launch that runs now; no other launch
            // follows, because the workers skip all enqueued work.
            self.end_pool();
        }
    }
}

/// Joins a worker or pool thread; must not be called from such a thread.
fn join(thread: JoinHandle<()>) {
    if thread.join().is_err() {
        // Workers catch panics of the work that they run, so a panic of the thread itself is a bug.
        tracing::error!("a worker thread panicked");
    }
}

enum Job {
    Launch { name: &'static str, groups: u32, number: u64, kernel: CpuKernel },
    Call { name: &'static str, f: Box<dyn FnOnce() -> Result<()> + Send> },
    Done(CpuEvent),
    Wait(CpuEvent),
}

struct Queue {
    number: u64,
    shared: Arc<Shared>,
    jobs: Arc<Jobs>,
    /// Event that is set when the worker thread has finished all work of the queue.
    ended: CpuEvent,
}

/// Enqueued work of a stream that has not begun. The queue keeps its capacity, so a program that
/// never has more jobs enqueued than before allocates nothing.
#[derive(Default)]
struct Jobs {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Default)]
struct Waiting {
    jobs: VecDeque<Job>,
    closed: bool,
}

impl Jobs {
    /// Adds a job unless the queue is closed; returns whether it was added.
    fn push(&self, job: Job) -> bool {
        let mut waiting = lock(&self.waiting);
        if !waiting.closed {
            waiting.jobs.push_back(job);
            self.changed.notify_one();
        }
        !waiting.closed
    }

    /// Closes the queue: no more jobs can be added.
    fn close(&self) {
        lock(&self.waiting).closed = true;
        self.changed.notify_one();
    }

    /// Waits for the next job; `None` once the queue is closed and empty.
    fn next(&self) -> Option<Job> {
        let idle = |waiting: &mut Waiting| waiting.jobs.is_empty() && !waiting.closed;
        let waited = self.changed.wait_while(lock(&self.waiting), idle);
        waited.unwrap_or_else(PoisonError::into_inner).jobs.pop_front()
    }
}

impl Queue {
    fn push(&self, job: Job) -> Result<()> {
        self.shared.control.check_process("enqueued work")?;
        match self.jobs.push(job) {
            true => Ok(()),
            false => Err(Error::Closed { what: "the stream's heap" }),
        }
    }

    fn record(&self) -> Result<CpuEvent> {
        let event = CpuEvent::default();
        self.push(Job::Done(event.clone()))?;
        Ok(event)
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.jobs.close();
    }
}

/// Stream of the CPU backend: a queue of jobs, which one worker thread runs in order.
pub(crate) struct CpuStream(Arc<Queue>);

impl StreamBackend for CpuStream {
    fn launch_cpu(&self, name: &'static str, groups: u32, kernel: CpuKernel) -> Result<()> {
        let shared = &self.0.shared;
        if groups == 0 {
            return Err(Error::invalid(format!("workgroups of {name}"), 0, "at least 1"));
        }
        if groups > shared.threads {
            let name = name.into();
            return Err(Error::TooManyGroups { name, groups, threads: shared.threads });
        }
        let mut issue = lock(&shared.issue);
        self.0.push(Job::Launch { name, groups, number: *issue, kernel })?;
        *issue += 1;
        Ok(())
    }

    fn call_cpu(&self, name: &'static str, f: CpuCall) -> Result<()> {
        self.0.push(Job::Call { name, f })
    }

    fn sync(&self) -> Result<()> {
        let done = self.0.record();
        match &done {
            Ok(event) => event.wait(),
            // The queue is closed, but the worker thread still runs the work that was accepted
            // before; wait for its end.
            Err(_) => self.0.ended.wait(),
        }
        match self.0.shared.failure_of(self.0.number) {
            Some(error) => Err(error),
            None => done.map(drop).and_then(|()| self.0.shared.control.check_results()),
        }
    }

    fn record(&self) -> Result<Arc<dyn EventBackend>> {
        Ok(Arc::new(self.0.record()?))
    }

    fn wait(&self, event: &dyn EventBackend) -> Result<()> {
        match event.as_any().downcast_ref::<CpuEvent>() {
            Some(event) => self.0.push(Job::Wait(event.clone())),
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
        in_bounds(&*to, offset, bytes)?;
        in_bounds(&*from, at, bytes)?;
        let f = move || own(&*to)?.copy(offset, own(&*from)?, at, bytes);
        self.call_cpu("copy", Box::new(f))
    }

    fn write(&self, (to, offset): (Arc<dyn Mapping>, u64), data: Vec<u8>) -> Result<()> {
        in_bounds(&*to, offset, data.len() as u64)?;
        self.call_cpu("write", Box::new(move || own(&*to)?.write(offset, &data)))
    }

    fn read(&self, (from, at): (Arc<dyn Mapping>, u64), bytes: u64) -> Result<Box<dyn HostCopy>> {
        in_bounds(&*from, at, bytes)?;
        let data = Arc::<Mutex<Option<Vec<u8>>>>::default();
        let to = data.clone();
        let f = move || {
            let mut read = vec![0; bytes as usize];
            own(&*from)?.read(at, &mut read)?;
            *lock(&to) = Some(read);
            Ok(())
        };
        self.call_cpu("read", Box::new(f))?;
        Ok(Box::new(CpuCopy { event: self.0.record()?, data }))
    }

    unsafe fn copy_raw(&self, to: u64, from: u64, bytes: u64) -> Result<()> {
        let span = |start: u64, written| Span { bytes: start..start + bytes, written };
        let spans = [span(to, true), span(from, false)];
        let f = move || {
            let _access = Access::of_copy(&spans);
            // SAFETY: the caller guarantees that both ranges stay valid until this job has run, and
            // `_access` excludes plain accesses to memory of the heap among them.
            unsafe { atomic_copy::copy(from as *const u8, to as *mut u8, bytes as usize) };
            Ok(())
        };
        self.call_cpu("copy", Box::new(f))
    }

    fn copy_words(&self, copies: &[(u32, u32)]) -> Result<()> {
        let words = self.0.shared.memory.get().map(|memory| memory.device_words.clone());
        let words = words.ok_or(Error::Closed { what: "the heap" })?;
        let place = |word: u32| (words.clone(), 4 * u64::from(word));
        copies.iter().try_for_each(|&(to, from)| self.copy(place(to), place(from), 4))
    }

    fn raw_handle(&self) -> u64 {
        self.0.number
    }

    fn control(&self) -> &Arc<Control> {
        &self.0.shared.control
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Copy to the host: bytes that a job of the stream reads, available once `event` is set.
struct CpuCopy {
    event: CpuEvent,
    data: Arc<Mutex<Option<Vec<u8>>>>,
}

impl HostCopy for CpuCopy {
    fn event(&self) -> &dyn EventBackend {
        &self.event
    }

    fn bytes(&self) -> Option<Vec<u8>> {
        lock(&self.data).take()
    }
}

fn in_bounds(mapping: &dyn Mapping, offset: u64, bytes: u64) -> Result<()> {
    let len = own(mapping)?.bytes();
    match offset.checked_add(bytes) {
        Some(end) if end <= len => Ok(()),
        end => Err(Error::OutOfBounds {
            what: "bytes of a mapping".into(),
            start: offset,
            end: end.unwrap_or(u64::MAX),
            len,
        }),
    }
}

/// Event of a CPU stream, done when the work enqueued before it is done.
#[derive(Clone, Default)]
pub(crate) struct CpuEvent(Arc<(Mutex<bool>, Condvar)>);

impl CpuEvent {
    fn wait(&self) {
        let (done, changed) = &*self.0;
        let waited = changed.wait_while(lock(done), |done| !*done);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    fn set(&self) {
        *lock(&self.0.0) = true;
        self.0.1.notify_all();
    }
}

impl EventBackend for CpuEvent {
    fn is_done(&self) -> bool {
        *lock(&self.0.0)
    }

    fn sync(&self) -> Result<()> {
        self.wait();
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Pool of threads that run workgroups 1, 2, ... of a launch; the launching thread runs
/// workgroup 0.
#[derive(Default)]
struct Pool {
    state: Mutex<PoolState>,
    start: Condvar,
    done: Condvar,
}

#[derive(Default)]
struct PoolState {
    /// Number of launches so far. Each pool thread keeps the number of the last launch that it saw,
    /// so it takes part in each launch at most once.
    launch: u64,
    job: Option<(CpuKernel, &'static str, u32)>,
    /// Number of pool threads that have not begun their workgroup of the current launch; the next
    /// field: number of those that have not ended it.
    starting: u32,
    running: u32,
    error: Option<Error>,
    stop: bool,
}

impl Shared {
    /// Takes the first error of a stream since its last sync; `None` if there is none.
    fn failure_of(&self, stream: u64) -> Option<Error> {
        let mut failures = lock(&self.failures);
        let at = failures.iter().position(|&(number, _)| number == stream)?;
        let (_, error) = failures.remove(at);
        Some(error)
    }

    /// Drops the errors of streams for which `lives` is false, because they no longer exist. Keeps
    /// the oldest error, which closing the heap returns.
    fn forget_failures(&self, lives: impl Fn(u64) -> bool) {
        let mut first = true;
        lock(&self.failures).retain(|&(stream, _)| std::mem::take(&mut first) || lives(stream));
    }

    /// Main loop of the worker thread of stream number `stream`; returns when the queue is closed
    /// and empty.
    fn work(&self, jobs: &Jobs, stream: u64) {
        while let Some(job) = jobs.next() {
            let skip = self.dropped.load(Ordering::Relaxed);
            let outcome = match job {
                Job::Launch { name, groups, number, kernel } => {
                    self.take_turn(number);
                    let outcome = match skip {
                        false => self.run(name, groups, kernel),
                        true => self.discard(name, kernel),
                    };
                    self.end_turn();
                    outcome
                }
                Job::Call { name, f } if !skip => self.guard(name, None, f),
                Job::Call { name, f } => self.discard(name, f),
                Job::Done(event) => {
                    event.set();
                    Ok(())
                }
                Job::Wait(event) => {
                    event.wait();
                    Ok(())
                }
            };
            if let Err(error) = outcome {
                tracing::debug!(%error, "enqueued work failed");
                let mut failures = lock(&self.failures);
                if failures.iter().all(|&(number, _)| number != stream) {
                    failures.push((stream, error));
                }
            }
        }
    }

    fn take_turn(&self, number: u64) {
        let waited = self.turned.wait_while(lock(&self.turn), |turn| *turn != number);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    fn end_turn(&self) {
        *lock(&self.turn) += 1;
        self.turned.notify_all();
    }

    /// Runs all workgroups of one launch; returns the first error.
    fn run(&self, name: &'static str, groups: u32, kernel: CpuKernel) -> Result<()> {
        if groups > 1 {
            let mut state = lock(&self.pool.state);
            if state.stop {
                drop(state);
                let closed = Err(Error::Closed { what: "the stream's heap" });
                return self.discard(name, kernel).and(closed);
            }
            state.launch += 1;
            state.running = groups - 1;
            state.starting = groups - 1;
            state.job = Some((kernel.clone(), name, groups));
            drop(state);
            self.pool.start.notify_all();
        }
        // The kernel is moved into `guard` and dropped there if this workgroup is the last to end.
        // So a panic of its destructor is caught like a panic of the kernel.
        let mine = self.guard(name, Some(0), move || kernel(Group { index: 0, count: groups }));
        if groups == 1 {
            return mine;
        }
        if let Err(error) = mine {
            lock(&self.pool.state).error.get_or_insert(error);
        }
        let state = lock(&self.pool.state);
        let waited = self.pool.done.wait_while(state, |s| s.running > 0);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner);
        state.error.take().map_or(Ok(()), Err)
    }

    /// Main loop of pool thread `index`: runs workgroup `index` of each launch that has one.
    fn help(&self, index: u32) {
        let mut seen = 0;
        let mut state = lock(&self.pool.state);
        loop {
            if state.launch != seen {
                seen = state.launch;
                // `state.job` is already `None` if the launch had too few workgroups for this
                // thread and has ended.
                if let Some((_, name, groups)) = state.job
                    && index < groups
                {
                    // The last pool thread to start takes the kernel out of `state.job` instead of
                    // a clone. So the kernel is dropped inside `guard`, which catches a panic of
                    // its destructor.
                    state.starting -= 1;
                    let job = match state.starting {
                        0 => state.job.take(),
                        _ => state.job.clone(),
                    };
                    drop(state);
                    let run = || job.map_or(Ok(()), |(k, ..)| k(Group { index, count: groups }));
                    let outcome = self.guard(name, Some(index), run);
                    state = lock(&self.pool.state);
                    if let Err(error) = outcome {
                        state.error.get_or_insert(error);
                    }
                    state.running -= 1;
                    if state.running == 0 {
                        self.pool.done.notify_one();
                    }
                }
                continue;
            }
            if state.stop {
                return;
            }
            let waited = self.pool.start.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Drops work that will not run, guarded against panics of its destructor.
    fn discard<T>(&self, name: &str, work: T) -> Result<()> {
        self.guard(name, None, move || {
            drop(work);
            Ok(())
        })
    }

    /// Runs `f`, which may be code of the program. If `f` panics, or returns an error while the
    /// heap has not failed yet, sets the abort words of this rank and its peers. So no rank waits
    /// for this rank forever or uses sums that lack this rank's contribution.
    fn guard(&self, name: &str, group: Option<u32>, f: impl FnOnce() -> Result<()>) -> Result<()> {
        match catch_unwind(AssertUnwindSafe(f)) {
            Ok(outcome) => {
                // Abort words are set only at the first failure: after it the peers know already,
                // and this error may be a consequence of that failure.
                if outcome.is_err() && self.signals().len() > 1 && !self.control.has_failed() {
                    self.tell();
                }
                outcome
            }
            Err(panic) => {
                self.tell();
                let message = panic_message(&*panic);
                Err(Error::Panicked { name: name.into(), group, message })
            }
        }
    }

    /// Signal segments of all ranks; empty until the heap's memory is mapped.
    fn signals(&self) -> &[Arc<dyn Mapping>] {
        self.memory.get().map_or(&[][..], |m| &m.signal)
    }

    /// Sets the abort words of this rank and of its peers; words that are set already keep their
    /// value.
    fn tell(&self) {
        self.control.set_host_abort(abort::FAILED);
        for signal in self.signals() {
            let word = own(&**signal).and_then(|s| s.word(4 * ABORT_WORD as u64));
            if let Ok(word) = word {
                // The abort word is stored with release order, like every signal.
                let to = self.rank as i32 + 1;
                let _ = word.compare_exchange(0, to, Ordering::Release, Ordering::Relaxed);
            }
        }
    }
}
