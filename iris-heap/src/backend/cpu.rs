//! The CPU: shared memory of the host, a worker thread a stream, a fixed set of threads a heap for
//! workgroups.
//!
//! The worker of the stream whose launch runs is one of the threads: it runs workgroup 0, the pool
//! the others. So a heap of one thread has no pool, and a heap of `n` threads computes on `n`.
//!
//! Long because pool, streams and events share the turn-taking that keeps launches in order.

use std::any::Any;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;

use crossbeam::channel::{Receiver, Sender, unbounded};

use super::{Backend, BackendKind, DeviceInfo, Mapping, Memory, Purpose};
use crate::abi::{ABORT_WORD, abort};
use crate::bootstrap::unsupported;
use crate::control::Control;
use crate::error::{Error, Result};
use crate::segment::{JointMemory, SharedMemory};
use crate::stream::{CpuKernel, Event, EventBackend, Group, Stream, StreamBackend};
use crate::world::{World, lock, panic_message};

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

fn own(mapping: &dyn Mapping) -> Result<&SharedMemory> {
    let memory = mapping.as_any().downcast_ref::<SharedMemory>();
    memory.ok_or_else(|| unsupported("access from the host", "it is memory of another device"))
}

/// The CPU as the device of one rank.
pub(crate) struct CpuBackend {
    rank: usize,
    shared: Arc<Shared>,
    workers: Mutex<Vec<Worker>>,
    pool: Mutex<Vec<JoinHandle<()>>>,
    closed: AtomicBool,
    names: AtomicU64,
}

/// A stream's thread.
struct Worker {
    stream: Weak<Queue>,
    thread: JoinHandle<()>,
}

/// What streams and threads share.
struct Shared {
    rank: usize,
    threads: u32,
    control: Arc<Control>,
    /// Keeps all memory mapped while work is enqueued.
    memory: OnceLock<Memory>,
    /// Number of the next launch. Held while something is enqueued, so that the launches of one
    /// queue are in the order of their numbers.
    issue: Mutex<u64>,
    /// Number of the launch whose turn it is.
    turn: Mutex<u64>,
    turned: Condvar,
    pool: Pool,
    /// The heap is gone: what is still enqueued is skipped.
    dropped: AtomicBool,
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
            let thread = spawn(format!("iris-{rank}-group-{index}"), move || shared.help(index))?;
            lock(&backend.pool).push(thread);
        }
        Ok(backend)
    }

    fn end_pool(&self) {
        lock(&self.shared.pool.state).stop = true;
        self.shared.pool.start.notify_all();
    }
}

fn spawn(name: String, f: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    let builder = std::thread::Builder::new().name(name.clone());
    builder.spawn(f).map_err(|e| Error::system(format!("starting thread {name}"), e))
}

/// Memory of the heap's on all ranks: one file, that of rank 0, with each rank's part at an offset.
/// So a rank receives one descriptor, however many ranks there are; descriptors on their way are
/// limited for each user.
fn share_joint(world: &World, name: &str, sizes: &[u64]) -> Result<Vec<Arc<dyn Mapping>>> {
    let made = match world.rank() {
        0 => JointMemory::create(name, sizes).map(|joint| vec![joint]),
        _ => Ok(Vec::new()),
    };
    let mine = world.all_ok("making the memory of all ranks", made)?;
    // Rank 0 is a peer like the others from here on.
    let descriptors = mine.into_iter().map(JointMemory::into_descriptor).collect();
    let mut passed = world.share_descriptors(descriptors)?.into_iter().flatten();
    let descriptor = passed.next().ok_or_else(|| broken(0, "no descriptor"))?;
    let parts = JointMemory::import(descriptor, sizes)?.map()?;
    Ok(parts.into_iter().map(|part| Arc::new(part) as Arc<dyn Mapping>).collect())
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
            uuid: String::new(),
            workgroups: self.shared.threads,
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

    fn share(&self, world: &World, mapping: Arc<dyn Mapping>) -> Result<Vec<Arc<dyn Mapping>>> {
        let memory = own(&*mapping)?;
        if world.same_process() {
            // One mapping serves all threads; it lives until the last of them lets it go.
            memory.close_descriptor();
            let all = world.share_objects(Arc::new(mapping.clone()))?;
            let take = |object: Arc<dyn Any + Send + Sync>| {
                let mapping = object.downcast::<Arc<dyn Mapping>>();
                mapping.map(|m| Arc::clone(&*m)).map_err(|_| Error::Wire {
                    what: "exchange of memory".into(),
                    problem: "a rank sent something else".into(),
                })
            };
            return all.into_iter().map(take).collect();
        }
        // The size of each rank's part, and whether it is memory of the heap's or of the caller's.
        let mut part = memory.bytes().to_le_bytes().to_vec();
        part.push(u8::from(memory.is_fresh()));
        let mut sizes = Vec::with_capacity(world.size());
        let mut fresh = true;
        for (rank, part) in world.allgather(&part)?.iter().enumerate() {
            let Some((size, [is_fresh])) = part.split_first_chunk::<8>() else {
                return Err(broken(rank, "no size"));
            };
            sizes.push(u64::from_le_bytes(*size));
            fresh &= *is_fresh == 1;
        }
        if fresh {
            return share_joint(world, memory.name(), &sizes);
        }
        // Also with nothing to give: the peers wait.
        let (mine, failure) = match memory.export() {
            Ok(descriptor) => (vec![descriptor], None),
            Err(error) => (Vec::new(), Some(error)),
        };
        let passed = world.share_descriptors(mine)?;
        if let Some(error) = failure {
            return Err(error);
        }
        memory.close_descriptor();
        let mut all: Vec<Arc<dyn Mapping>> = Vec::with_capacity(passed.len());
        for (rank, (mut descriptors, size)) in passed.into_iter().zip(sizes).enumerate() {
            if rank == world.rank() {
                all.push(mapping.clone());
                continue;
            }
            let descriptor = descriptors.pop().ok_or_else(|| broken(rank, "no descriptor"))?;
            let peer = SharedMemory::import(descriptor, size)?;
            peer.close_descriptor();
            all.push(Arc::new(peer));
        }
        Ok(all)
    }

    fn adopt(&self, descriptor: OwnedFd, bytes: u64) -> Result<Arc<dyn Mapping>> {
        Ok(Arc::new(SharedMemory::import(descriptor, bytes)?))
    }

    unsafe fn register(&self, address: u64, bytes: u64) -> Result<Arc<dyn Mapping>> {
        // SAFETY: the caller vouches for the memory, in the words of the trait.
        Ok(Arc::new(unsafe { SharedMemory::foreign(address, bytes)? }))
    }

    fn control(&self) -> Arc<Control> {
        self.shared.control.clone()
    }

    fn opened(&self, memory: Memory) {
        // A second call would be the heap's mistake, and harmless: the first memory stays.
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

    fn stream(&self) -> Result<Stream> {
        let mut workers = lock(&self.workers);
        if self.closed.load(Ordering::Relaxed) {
            return Err(Error::Closed { what: "the heap" });
        }
        workers.retain(|w| !w.thread.is_finished());
        let number = self.names.fetch_add(1, Ordering::Relaxed);
        let (sender, jobs) = unbounded();
        let queue = Arc::new(Queue {
            number,
            shared: self.shared.clone(),
            sender: Mutex::new(Some(sender)),
            failed: Arc::default(),
        });
        let (shared, failed) = (self.shared.clone(), queue.failed.clone());
        let name = format!("iris-{}-stream-{number}", self.rank);
        let thread = spawn(name, move || shared.work(&jobs, &failed))?;
        workers.push(Worker { stream: Arc::downgrade(&queue), thread });
        Ok(Stream::from_backend(Arc::new(CpuStream(queue))))
    }

    fn finish(&self) {
        let mut workers = lock(&self.workers);
        let mut live = Vec::new();
        for worker in std::mem::take(&mut *workers) {
            match worker.stream.upgrade() {
                Some(queue) => {
                    // Closed only if `shutdown` ran before, which has waited.
                    if let Ok(event) = queue.record() {
                        event.wait();
                    }
                    live.push(worker);
                }
                // Nobody can enqueue any more; what is there ends.
                None => join(worker.thread),
            }
        }
        *workers = live;
    }

    fn shutdown(&self) {
        self.closed.store(true, Ordering::Relaxed);
        for worker in std::mem::take(&mut *lock(&self.workers)) {
            if let Some(queue) = worker.stream.upgrade() {
                lock(&queue.sender).take();
            }
            join(worker.thread);
        }
        self.end_pool();
        for thread in std::mem::take(&mut *lock(&self.pool)) {
            join(thread);
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for CpuBackend {
    /// Waits for nothing: what is enqueued is skipped, what runs is told to leave, and the threads
    /// hold the memory until then.
    fn drop(&mut self) {
        if !self.closed.load(Ordering::Relaxed) {
            self.shared.dropped.store(true, Ordering::Relaxed);
            self.shared.control.set_host_abort(abort::CLOSED);
            for worker in lock(&self.workers).iter() {
                if let Some(queue) = worker.stream.upgrade() {
                    lock(&queue.sender).take();
                }
            }
            // The pool's threads end after the launch that runs; no other will come, since the
            // workers skip what they find.
            self.end_pool();
        }
    }
}

/// Joins, unless the caller is that very thread.
fn join(thread: JoinHandle<()>) {
    if thread.thread().id() != std::thread::current().id() && thread.join().is_err() {
        // Workers catch the panics of what they run.
        tracing::error!("a worker thread panicked");
    }
}

enum Job {
    Launch { name: &'static str, groups: u32, number: u64, kernel: CpuKernel },
    Call { name: &'static str, f: Box<dyn FnOnce() -> Result<()> + Send> },
    Done(CpuEvent),
    Wait(CpuEvent),
}

/// The first error since the last sync.
type Failed = Arc<Mutex<Option<Error>>>;

struct Queue {
    number: u64,
    shared: Arc<Shared>,
    sender: Mutex<Option<Sender<Job>>>,
    failed: Failed,
}

impl Queue {
    fn push(&self, job: Job) -> Result<()> {
        let closed = Error::Closed { what: "the stream's heap" };
        match &*lock(&self.sender) {
            Some(sender) => sender.send(job).map_err(|_| closed),
            None => Err(closed),
        }
    }

    fn record(&self) -> Result<CpuEvent> {
        let event = CpuEvent::default();
        self.push(Job::Done(event.clone()))?;
        Ok(event)
    }
}

/// A stream of the CPU.
pub(crate) struct CpuStream(Arc<Queue>);

impl CpuStream {
    pub(crate) fn launch(&self, name: &'static str, groups: u32, kernel: CpuKernel) -> Result<()> {
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

    pub(crate) fn call(
        &self,
        name: &'static str,
        f: Box<dyn FnOnce() -> Result<()> + Send>,
    ) -> Result<()> {
        self.0.push(Job::Call { name, f })
    }
}

impl StreamBackend for CpuStream {
    fn sync(&self) -> Result<()> {
        let done = self.0.record();
        if let Ok(event) = &done {
            event.wait();
        }
        match lock(&self.0.failed).take() {
            Some(error) => Err(error),
            None => done.map(drop),
        }
    }

    fn record(&self) -> Result<Event> {
        Ok(Event::from_backend(Arc::new(self.0.record()?)))
    }

    fn wait(&self, event: &Event) -> Result<()> {
        self.0.push(Job::Wait(event.cpu()?))
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
        self.call("copy", Box::new(f))
    }

    fn write(&self, (to, offset): (Arc<dyn Mapping>, u64), data: Vec<u8>) -> Result<()> {
        in_bounds(&*to, offset, data.len() as u64)?;
        self.call("write", Box::new(move || own(&*to)?.write(offset, &data)))
    }

    fn raw_handle(&self) -> u64 {
        self.0.number
    }

    fn as_any(&self) -> &dyn Any {
        self
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

/// A point in a queue.
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

/// The threads that run workgroups 1 and up.
#[derive(Default)]
struct Pool {
    state: Mutex<PoolState>,
    start: Condvar,
    done: Condvar,
}

#[derive(Default)]
struct PoolState {
    /// Counts launches, so that a thread takes part in each once.
    launch: u64,
    job: Option<(CpuKernel, &'static str, u32)>,
    /// Workgroups of the pool that have not ended.
    running: u32,
    error: Option<Error>,
    stop: bool,
}

impl Shared {
    /// A stream's thread: until nobody can enqueue any more.
    fn work(&self, jobs: &Receiver<Job>, failed: &Failed) {
        for job in jobs {
            let skip = self.dropped.load(Ordering::Relaxed);
            let outcome = match job {
                Job::Launch { name, groups, number, kernel } => {
                    self.take_turn(number);
                    let outcome = if skip { Ok(()) } else { self.run(name, groups, kernel) };
                    self.end_turn();
                    outcome
                }
                Job::Call { name, f } if !skip => self.guard(name, 0, f),
                Job::Call { .. } => Ok(()),
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
                lock(failed).get_or_insert(error);
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

    /// All workgroups of one launch. The error returned is the first one.
    fn run(&self, name: &'static str, groups: u32, kernel: CpuKernel) -> Result<()> {
        if groups > 1 {
            let mut state = lock(&self.pool.state);
            if state.stop {
                return Err(Error::Closed { what: "the stream's heap" });
            }
            state.launch += 1;
            state.running = groups - 1;
            state.job = Some((kernel.clone(), name, groups));
            drop(state);
            self.pool.start.notify_all();
        }
        let mine = self.guard(name, 0, || kernel(Group { index: 0, count: groups }));
        if groups == 1 {
            return mine;
        }
        if let Err(error) = mine {
            lock(&self.pool.state).error.get_or_insert(error);
        }
        let state = lock(&self.pool.state);
        let waited = self.pool.done.wait_while(state, |s| s.running > 0);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner);
        state.job = None;
        state.error.take().map_or(Ok(()), Err)
    }

    /// A thread of the pool.
    fn help(&self, index: u32) {
        let mut seen = 0;
        let mut state = lock(&self.pool.state);
        loop {
            if state.launch != seen {
                seen = state.launch;
                // The job is gone where the launch had too few workgroups for this thread and has
                // ended meanwhile.
                if let Some((kernel, name, groups)) = state.job.clone()
                    && index < groups
                {
                    drop(state);
                    let outcome =
                        self.guard(name, index, || kernel(Group { index, count: groups }));
                    drop(kernel);
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

    /// Runs work of others. If it panics, nobody shall wait for it: the abort words of this rank
    /// and of its peers are set.
    fn guard(&self, name: &str, group: u32, f: impl FnOnce() -> Result<()>) -> Result<()> {
        match catch_unwind(AssertUnwindSafe(f)) {
            Ok(outcome) => outcome,
            Err(panic) => {
                self.control.set_host_abort(abort::PANICKED);
                let peers = self.memory.get().map_or(&[][..], |m| &m.signal);
                for signal in peers {
                    let word = own(&**signal).and_then(|s| s.word(4 * ABORT_WORD as u64));
                    if let Ok(word) = word {
                        // Release: as every signal. The first reason stays.
                        let to = self.rank as i32 + 1;
                        let _ = word.compare_exchange(0, to, Ordering::Release, Ordering::Relaxed);
                    }
                }
                let message = panic_message(&*panic);
                Err(Error::Panicked { name: name.into(), group, message })
            }
        }
    }
}
