//! Symmetric heap, [`SymmetricHeap`]: memory that every rank maps with the same layout.
//!
//! This file is long because it has all collective steps of a heap (open, alloc, free, close) and
//! the checks that the ranks agree in these steps.

mod access;
#[cfg(test)]
mod call_sites;
pub(crate) mod fill;
mod import;
mod nodes;
mod ops;
mod options;
mod order;
mod retired;

pub use nodes::NodeStream;
pub use ops::IssueGuard;
pub use options::HeapOptions;
pub use retired::Retired;

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;
use std::panic::Location;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{
    Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
};
use std::time::SystemTime;

use iris_sync::PROTOCOL_VERSION;

use crate::abi::{ABORT_WORD, HeapView, MAX_RANKS, SIGNAL_RESERVED, abort};
use crate::backend::nothing_passed;
use crate::backend::{
    Backend, BackendKind, DeviceInfo, Export, Gpu, Imported, Mapping, Memory, Purpose,
};
use crate::bootstrap::Object;
use crate::control::Control;
use crate::dtype::Element;
use crate::encoding::{Reader, Writer, hash};
use crate::env;
use crate::error::{Error, Result, odd_ranks};
use crate::issue_board::Ended;
use crate::layout::{ALIGNMENT, Full, Layout, rounded};
use crate::module::Module;
use crate::root_error::{self, Distance};
use crate::segment::JointMemory;
use crate::slice::{DevWords, RawSlice, Segment, SymSlice};
use crate::stream::Stream;
use crate::util::{check_may_wait, lock, unsupported};
use crate::world::{PeerAccess, Registration, World};

use order::Watch;

/// Symmetric heap, seen from one rank.
///
/// Methods marked collective must be called by every rank of the world, in the same order, with the
/// same arguments, from the same place in the program. A difference is an error on every rank and
/// changes nothing on any rank. If the heap has failed ([`SymmetricHeap::check`]), collective
/// methods return the heap's error and wait for no other rank. All other methods are local.
pub struct SymmetricHeap {
    world: World,
    options: HeapOptions,
    id: u64,
    // Backend of the heap. The field precedes `memory`, because fields drop in order: the backend's
    // streams must end, or be told to end, before the memory that they use is unmapped.
    backend: Arc<dyn Backend>,
    memory: Memory,
    state: RwLock<State>,
    /// Lock held during a collective step, so that steps of two threads do not interleave.
    step: Mutex<()>,
    device_words: Mutex<Layout>,
    /// Device word that counts the calls of all ops; allocated at first use.
    sequence: OnceLock<DevWords>,
    /// Description of the device, cached so that the driver is asked only once.
    device: OnceLock<DeviceInfo>,
    /// Lock held while the launches of one call are enqueued.
    issuing: Mutex<()>,
    /// Blocks of an epoch's heap that calls or copies of peers write, as (segment, serial number).
    written_by_peers: Mutex<BTreeSet<(Segment, u64)>>,
    registration: Mutex<Option<Registration>>,
    watch: Mutex<Option<Watch>>,
    /// World of the ranks of all nodes, and world of this rank's counterparts on the other nodes; set
    /// only if the heap's world has several nodes.
    nodes: OnceLock<nodes::Nodes>,
}

/// Outcome of opening the heap of one node.
enum Opening {
    Heap(Arc<SymmetricHeap>),
    /// No heap was opened, because devices of the node cannot access each other's memory. Contains
    /// the world with smaller nodes, and the options for a heap in that world.
    Grouped(World, HeapOptions),
}

/// Device and memory of a rank that opens a heap, before any exchange with other ranks.
struct Made {
    backend: Arc<dyn Backend>,
    /// Memory of the data segment, the signal segment and the device words.
    memory: [Arc<dyn Mapping>; 3],
    boards: Option<JointMemory>,
    access: PeerAccess,
}

struct State {
    closed: bool,
    data: Layout,
    signal: Layout,
    /// Serial number of the next import. It identifies the import, because segment numbers are
    /// reused.
    imports: u64,
    /// Blocks that a collective free is freeing now, as (segment, serial number); new work that
    /// uses them is refused.
    ending: Vec<(Segment, u64)>,
}

/// Part of a [`SymmetricHeap::alloc_many`] request: one allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Segment in which to allocate: [`Segment::Data`] or [`Segment::Signal`].
    pub segment: Segment,
    /// Number of bytes to allocate.
    pub bytes: u64,
    /// Purpose of the memory; compared between ranks, and named in errors.
    pub name: Cow<'static, str>,
}

impl Request {
    /// Makes a request of `bytes` bytes for `name`.
    pub fn new(segment: Segment, bytes: u64, name: impl Into<Cow<'static, str>>) -> Request {
        Request { segment, bytes, name: name.into() }
    }
}

impl fmt::Debug for SymmetricHeap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SymmetricHeap({:#x}, rank {} of {})", self.id, self.rank(), self.size())
    }
}

impl SymmetricHeap {
    /// Opens a heap. Collective: all ranks call it.
    ///
    /// If GPUs of one node cannot access each other's memory, the heap divides every node of the
    /// world into nodes of equal size: the largest groups of consecutive ranks whose GPUs all have
    /// access to each other, in the worst case groups of one rank. The heap then has several nodes,
    /// and its operators move data between nodes over NCCL or RCCL. [`SymmetricHeap::whole_world`]
    /// has the nodes of the heap; `world` keeps the nodes that it had. So make plans from the heap,
    /// or from the world that [`World::for_heap`] returns. Rank 0 logs a warning that names the
    /// GPUs. A GPU that a process does not see (`CUDA_VISIBLE_DEVICES`) counts as accessible,
    /// because the driver says nothing about it.
    ///
    /// # Errors
    /// [`Error::Disagreement`] if the ranks differ in crate or protocol version, options,
    /// device or `IRIS_*` variables; [`Error::PeerFailed`] if another rank could not get its
    /// memory; [`Error::Invalid`], [`Error::Unsupported`], [`Error::System`]; errors of
    /// [`World::barrier`].
    #[track_caller]
    pub fn open(world: &World, options: HeapOptions) -> Result<Arc<SymmetricHeap>> {
        check_may_wait("opening a heap")?;
        if world.nodes() > 1 {
            return SymmetricHeap::open_on_nodes(world, options);
        }
        match SymmetricHeap::open_node(world, options)? {
            Opening::Heap(heap) => Ok(heap),
            Opening::Grouped(world, options) => SymmetricHeap::open_on_nodes(&world, options),
        }
    }

    /// Opens the heap of a world of one node, unless devices of the ranks cannot access each
    /// other's memory.
    #[track_caller]
    fn open_node(world: &World, options: HeapOptions) -> Result<Opening> {
        let made = SymmetricHeap::make_local(world, &options);
        let device = made.as_ref().map_or(String::new(), |made| made.backend.device().name);
        let mut items = vec![
            ("iris-heap version", env!("CARGO_PKG_VERSION").into()),
            ("protocol version", PROTOCOL_VERSION.to_string()),
            ("backend", options.backend.to_string()),
        ];
        items.extend(options.agreed.iter().map(|(name, value)| (&**name, value.clone())));
        items.extend([
            ("data_bytes", options.data_bytes.to_string()),
            ("signal_bytes", options.signal_bytes.to_string()),
            ("device_words", options.device_words.to_string()),
            ("legacy_memory", options.legacy_memory.to_string()),
            ("deadline factor", world.settings().deadline.to_string()),
        ]);
        items.extend(env::agreed());
        let ids = world.note(world.agree_with("open", &items, &fresh_id().to_le_bytes()))?;
        let id = ids[0].first_chunk::<8>().map_or(0, |b| u64::from_le_bytes(*b));
        let (made, access) = world.all_ok_with("open", made, |made| made.access.encode())?;
        world.agree("open", &[("device", device)])?;
        if let Some(grouped) = world.grouped_by_access(&access)? {
            // The ranks were grouped by what this device can access, so the heap must use the same
            // device.
            let options = HeapOptions { device: Some(made.access.index), ..options };
            return Ok(Opening::Grouped(grouped, options));
        }
        let Made { backend, memory: [data, signal, device_words], boards, .. } = made;

        // This rank takes part in each exchange even if it failed in the previous exchange, because
        // its peers wait for it.
        let data = share(&*backend, world, data);
        let signal = share(&*backend, world, signal);
        let boards = order::share_boards(world, boards);
        let (control, registered) = (backend.control(), Arc::default());
        let shared = data.and_then(|data| {
            let (signal, boards) = (signal?, boards?);
            let watch = boards.map(|boards| {
                control.set_boards(boards);
                Watch::start(world, &control)
            });
            Ok((data, signal, watch.transpose()?))
        });
        let (data, signal, watch) = world.all_ok("open", shared)?;
        let memory = Memory { data, signal, device_words, control, registered };
        backend.opened(memory.clone());
        let registration = world.register(&memory.control);
        let words = memory.device_words.bytes();
        tracing::debug!(rank = world.rank(), id, "heap open");
        Ok(Opening::Heap(Arc::new(SymmetricHeap {
            world: world.clone(),
            id,
            backend,
            memory,
            state: RwLock::new(State {
                closed: false,
                data: Layout::new(options.data_bytes, 0, ALIGNMENT),
                signal: Layout::new(options.signal_bytes, SIGNAL_RESERVED, ALIGNMENT),
                imports: 0,
                ending: Vec::new(),
            }),
            options,
            step: Mutex::new(()),
            device_words: Mutex::new(Layout::new(words, 0, 128)),
            sequence: OnceLock::new(),
            device: OnceLock::new(),
            issuing: Mutex::new(()),
            written_by_peers: Mutex::default(),
            registration: Mutex::new(Some(registration)),
            watch: Mutex::new(watch),
            nodes: OnceLock::new(),
        })))
    }

    /// Opens this rank's device and allocates its memory, before any exchange with other ranks.
    fn make_local(world: &World, options: &HeapOptions) -> Result<Made> {
        options.check()?;
        nodes::check_size(world)?;
        let words = 4 * options.device_words;
        let threads = || options.resolve_threads(world);
        if world.is_elastic() && options.backend != BackendKind::Cpu {
            let what = format!("a heap of {} in a world of a Member", options.backend);
            let why = "nobody has tried what a GPU's store to the memory of a killed process does; use a world that \
                       no Member has joined";
            return Err(unsupported(&what, why));
        }
        options.check_fits(world)?;
        let gpu = (options.device, options.legacy_memory);
        let backend = options.backend.open(world, threads, gpu)?;
        let data = backend.allocate(Purpose::Data, options.data_bytes)?;
        let signal = backend.allocate(Purpose::Signal, options.signal_bytes)?;
        let device_words = backend.allocate(Purpose::DeviceWords, words)?;
        let access = options.backend.peer_access(backend.device().index)?;
        let boards = order::make_boards(world)?;
        Ok(Made { backend, memory: [data, signal, device_words], boards, access })
    }

    /// Allocates `len` elements of data memory on every rank: collective. The contents are
    /// undefined; use [`SymmetricHeap::zeros`] or another method of that kind for initial values.
    ///
    /// ```
    /// # use iris_heap::{Error, HeapOptions, SymmetricHeap, World};
    /// World::run_threads(2, |world| -> Result<(), Error> {
    ///     let heap = SymmetricHeap::open(&world, HeapOptions::new())?;
    ///     let slice = heap.alloc::<f32>(3)?;
    ///     heap.write(slice, &[world.rank() as f32; 3])?;
    ///     world.barrier()?; // every rank has written
    ///     assert_eq!(heap.read_from(slice, 1)?, [1.0; 3]);
    ///     world.barrier()?; // every rank has read
    ///     heap.free(slice)?;
    ///     heap.close()
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::OutOfHeap`] on every rank if any rank has no room, before any rank has changed its
    /// state; [`Error::Disagreement`] if the requests differ; errors of [`World::barrier`].
    #[track_caller]
    pub fn alloc<T: Element>(&self, len: usize) -> Result<SymSlice<T>> {
        self.alloc_in(Segment::Data, len)
    }

    /// Allocates `words` words of signal memory, 4 bytes each, on every rank: collective. The
    /// contents are undefined.
    ///
    /// # Errors
    /// Errors of [`SymmetricHeap::alloc`].
    #[track_caller]
    pub fn alloc_signal(&self, words: usize) -> Result<SymSlice<i32>> {
        self.alloc_in(Segment::Signal, words)
    }

    #[track_caller]
    fn alloc_in<T: Element>(&self, segment: Segment, len: usize) -> Result<SymSlice<T>> {
        let bytes = (len as u64).saturating_mul(size_of::<T>() as u64);
        let name = format!("{} x {len}", T::DTYPE);
        let blocks = self.alloc_many("alloc", &[Request::new(segment, bytes, name)])?;
        let block = blocks[0];
        Ok(SymSlice::new(self.id, segment, block.serial(), block.offset(), len as u64))
    }

    /// Allocates several blocks in one collective step, either all or none of them, for operators.
    /// `what` names the step in errors.
    ///
    /// # Errors
    /// Errors of [`SymmetricHeap::alloc`]; [`Error::Invalid`] for a registered segment.
    #[track_caller]
    pub fn alloc_many(&self, what: &str, requests: &[Request]) -> Result<Vec<RawSlice>> {
        let _step = self.step("allocation of symmetric memory")?;
        self.check_before_step()?;
        // The request is tried on copies of the layouts, because nothing may change before all
        // ranks have agreed.
        let (mut data, mut signal) = {
            let state = self.open_state()?;
            (state.data.clone(), state.signal.clone())
        };
        let mut blocks = Vec::with_capacity(requests.len());
        let mut full: Option<(&Request, Full)> = None;
        let mut items = vec![("what", what.to_string())];
        // If this rank alone has an error, the error is sent to the peers, which then change
        // nothing.
        let mut possible = self.backend.check_no_capture("allocation");
        for request in requests {
            let Request { segment, bytes, name } = request;
            items.push(("request", format!("{bytes} bytes of {segment} memory for {name}")));
            let layout = match segment {
                Segment::Data => &mut data,
                Segment::Signal => &mut signal,
                other => {
                    let error = Error::invalid("segment of a request", other, "data or signal");
                    possible = possible.and(Err(error));
                    continue;
                }
            };
            match layout.alloc(*bytes) {
                _ if full.is_some() => {}
                Ok(block) => blocks.push(block),
                Err(e) => full = Some((request, e)),
            }
        }
        let mut outcome = Writer::default();
        match (&possible, full) {
            (Err(e), _) => outcome.u64(2).text(&e.to_string()),
            (Ok(()), Some((r, full))) => outcome
                .u64(1)
                .text(&r.name)
                .text(&r.segment.to_string())
                .u64(full.asked)
                .u64(full.free)
                .u64(full.largest),
            (Ok(()), None) => {
                blocks.iter().fold(outcome.u64(0), |w, b| w.u64(b.offset).u64(b.serial))
            }
        };
        let outcomes = self.world.agree_with("alloc", &items, &outcome.finish());
        let outcomes = self.world.note(outcomes.map_err(|e| self.after_fault(e)))?;
        possible?;
        for (rank, outcome) in outcomes.iter().enumerate() {
            let mut r = Reader::new("alloc", outcome);
            let code = r.u64()?;
            if code == 2 {
                let (what, message) = (what.into(), r.text()?);
                return self.world.note_returned(Err(Error::PeerFailed { rank, what, message }));
            }
            if code == 1 {
                let (name, segment) = (r.text()?, r.text()?);
                let parts = requests.iter().filter(|part| part.segment.to_string() == segment);
                let total = parts.map(|part| rounded(part.bytes, ALIGNMENT));
                let total = total.fold(0, u64::saturating_add);
                // Size of the full segment, which is the same on all ranks.
                let is_signal = segment == Segment::Signal.to_string();
                let size = if is_signal { signal.capacity() } else { data.capacity() };
                return Err(Error::OutOfHeap {
                    what: what.into(),
                    name,
                    segment,
                    rank: self.world.hosts().number(rank),
                    asked: r.u64()?,
                    free: r.u64()?,
                    size,
                    largest: r.u64()?,
                    total,
                });
            }
        }
        // The outcomes of all ranks are compared. They are equal unless a layout is broken, because
        // all layouts see the same requests in the same order.
        if outcomes.iter().any(|o| *o != outcomes[0]) {
            let values = self.world.numbered(outcomes.iter().map(|o| format!("{o:?}")));
            let (what, item) = (what.into(), "offsets".into());
            return Err(Error::Disagreement { what, item, ranks: odd_ranks(&values), values });
        }
        let mut state = self.state_mut();
        state.data = data;
        state.signal = signal;
        let slice = |(b, r): (&crate::layout::Block, &Request)| {
            SymSlice::new(self.id, r.segment, b.serial, b.offset, r.bytes)
        };
        Ok(blocks.iter().zip(requests).map(slice).collect())
    }

    /// Frees a block: collective. Waits until the streams of this rank and of its peers have
    /// finished; errors of enqueued work are returned by [`Stream::sync`], not here. If one rank
    /// refuses the request, that rank returns without waiting, and all ranks keep the block. While
    /// a rank waits, calls and copies of the block that other threads enqueue are refused with
    /// [`Error::NotAllocated`].
    ///
    /// If the heap has failed before this rank's streams have finished, free returns the heap's
    /// error and does not wait for other ranks, which may be stuck. The memory then stays allocated
    /// until the heap is closed.
    ///
    /// # Errors
    /// Errors of [`SymmetricHeap::check`];
    /// [`Error::Disagreement`] if the ranks free different blocks; [`Error::NotAllocated`] if the
    /// block was freed already; [`Error::PartOfBlock`]; [`Error::ForeignSlice`];
    /// [`Error::Unsupported`] while a stream is captured; [`Error::PeerFailed`]; errors of
    /// [`World::barrier`].
    #[track_caller]
    pub fn free<T>(&self, slice: SymSlice<T>) -> Result<()> {
        let bytes = slice.bytes();
        let (segment, serial, offset) = (slice.segment(), slice.serial(), slice.offset());
        self.free_many(&[SymSlice::new(slice.heap(), segment, serial, offset, bytes)])
    }

    /// Frees several blocks, all or none: collective.
    ///
    /// # Errors
    /// Errors of [`SymmetricHeap::free`].
    #[track_caller]
    pub fn free_many(&self, slices: &[RawSlice]) -> Result<()> {
        let _step = self.step("giving symmetric memory back")?;
        self.check_before_step()?;
        let mut items = Vec::with_capacity(slices.len());
        for s in slices {
            let (segment, offset, serial) = (s.segment(), s.offset(), s.serial());
            items.push(("block", format!("{segment} {offset} (allocation {serial})")));
        }
        let capture = self.backend.check_no_capture("giving memory back");
        let planned = capture.and_then(|()| self.plan_free(slices));
        // A rank that refuses the request does not wait for its streams.
        let _ending = planned.is_ok().then(|| {
            let ending = self.refuse_work_on(slices);
            self.finish_streams();
            ending
        });
        // The enqueued work for which this rank has just waited may have failed.
        self.check_before_step()?;
        // If no rank refuses, the streams of all ranks have finished when `agree_with` returns.
        let outcomes = self.world.agree_with("free", &items, &refusal(&planned));
        let (data, signal) = planned?;
        let outcomes = self.world.note(outcomes.map_err(|e| self.after_fault(e)))?;
        self.world.note_returned(check_refusals("free", &outcomes))?;
        let mut state = self.state_mut();
        state.data = data;
        state.signal = signal;
        let mut gone = Vec::new();
        let mut registered = lock(&self.memory.registered);
        for s in slices {
            if let Segment::Registered(n) = s.segment()
                && let Some(place) = registered.get_mut(usize::from(n))
            {
                gone.push(place.take());
            }
        }
        drop((registered, state));
        // The imports are dropped without holding a lock, because unmapping may take long.
        drop(gone);
        let unmapped = slices.iter().any(|s| matches!(s.segment(), Segment::Registered(_)));
        self.world.note(self.settle(unmapped))
    }

    /// Refuses further work on `slices` until the returned guard is dropped. When this function
    /// returns, all earlier work on `slices` has been enqueued.
    fn refuse_work_on(&self, slices: &[RawSlice]) -> Ending<'_> {
        // Copies are enqueued while the state is locked for reading, and calls while the lock
        // `issuing` is held. So taking both locks waits for both.
        self.state_mut().ending.extend(slices.iter().map(|s| (s.segment(), s.serial())));
        drop(lock(&self.issuing));
        Ending(self)
    }

    /// Ends a step in which memory may have been unmapped. If the driver blocks an unmapping rank
    /// until its device is idle, the step ends with a barrier. Without the barrier two ranks could
    /// block each other for ever: rank 0 continues and launches a kernel that waits for rank 1,
    /// while rank 1 still unmaps, which waits for that kernel.
    #[track_caller]
    fn settle(&self, unmapped: bool) -> Result<()> {
        match unmapped && self.backend.waits_for_device() {
            true => self.world.exchange("barrier", &[], None).map(drop),
            false => Ok(()),
        }
    }

    /// Returns copies of the layouts of the data and signal segments in which the blocks of
    /// `slices` are free.
    fn plan_free(&self, slices: &[RawSlice]) -> Result<(Layout, Layout)> {
        let state = self.open_state()?;
        let (mut data, mut signal) = (state.data.clone(), state.signal.clone());
        let mut ended = Vec::new();
        for s in slices {
            self.check_heap(s.heap())?;
            // Start and requested length of the block that contains the slice.
            let found = |layout: &Layout| {
                let block = layout.find(s.offset(), s.bytes())?;
                (block.serial == s.serial()).then_some((block.offset, block.asked))
            };
            let (start, len) = match s.segment() {
                Segment::Data => found(&data),
                Segment::Signal => found(&signal),
                Segment::Registered(_) if ended.contains(&s.segment()) => None,
                Segment::Registered(_) => self.imported(s).map(|imported| (0, imported.bytes)),
            }
            .ok_or_else(|| not_allocated(s))?;
            if (s.offset(), s.bytes()) != (start, len) {
                return Err(Error::PartOfBlock {
                    segment: s.segment().to_string(),
                    offset: s.offset(),
                    end: s.offset() + s.bytes(),
                    start,
                    whole_end: start + len,
                });
            }
            match s.segment() {
                Segment::Data => drop(data.free(s.offset(), s.serial())),
                Segment::Signal => drop(signal.free(s.offset(), s.serial())),
                segment @ Segment::Registered(_) => ended.push(segment),
            }
        }
        Ok((data, signal))
    }

    /// Closes the heap: collective. Waits until the streams of all ranks have finished, and ends
    /// these streams. CPU memory is unmapped when the last `Arc` of heap or stream is dropped. GPU
    /// memory is unmapped here; its addresses are invalid afterwards.
    ///
    /// If the heap has failed ([`SymmetricHeap::check`]), close waits for no other rank, which may be
    /// stuck. It tells the waiting kernels of all ranks to leave, waits for this rank's streams, and
    /// ends the exchanges of the heap's world: other ranks that close the heap, or make another
    /// collective call of that world, get [`Error::GaveUp`]. Close the world next, which then waits
    /// for no rank either. GPU memory that another process may have opened by a legacy handle, or on
    /// HIP, stays allocated until this process ends.
    ///
    /// # Errors
    /// [`Error::Closed`] if the heap was closed before. [`Error::Unsupported`] while a stream is
    /// captured, which cannot be waited for, and [`Error::PeerFailed`] on the other ranks; the heap
    /// then stays open on all. Errors of [`World::barrier`]; local resources are closed
    /// nevertheless. Otherwise the first error of enqueued work, such as a fault, that no earlier
    /// call has returned to the program; the heap is then closed.
    #[track_caller]
    pub fn close(&self) -> Result<()> {
        let _step = self.step("closing a heap")?;
        drop(self.open_state()?);
        let capture = match self.backend.check_no_capture("closing the heap") {
            // Only a capture in progress keeps the heap open; a device error does not.
            Err(error) if !matches!(error, Error::Unsupported { .. }) => Ok(()),
            checked => checked,
        };
        let failure = self.failure();
        if failure.is_some() {
            capture.clone()?;
            self.give_up();
        }
        let items = [("heap", format!("{:#x}", self.id))];
        if capture.is_ok() {
            // This text stays on this rank's issue board after the close: if this rank has left out
            // a call, the error of its peers then names the call site of the close.
            let step = format!("close heap at {}", Location::caller());
            self.memory.control.publish_host_step(Some(&step));
            self.memory.control.publish_end(Some(Ended::Heap));
        }
        let outcome = self.world.agree_with("close heap", &items, &refusal(&capture));
        capture?;
        if let Ok(outcomes) = &outcome
            && let Err(error) = check_refusals("close heap", outcomes)
        {
            // The heap stays open on all ranks, so this rank withdraws the announcement that it
            // closes the heap.
            self.memory.control.publish_end(None);
            return self.world.note_returned(Err(error));
        }
        if self.nodes.get().is_some() {
            // Enqueued steps between nodes access the heap, so they must end before the heap is
            // closed.
            self.finish_streams();
        }
        self.state_mut().closed = true;
        self.backend.refuse_work();
        self.finish_streams();
        // After this barrier all streams of all ranks have finished. (No closure, because the
        // barrier's call site would then be a place in this crate.)
        let finished = match outcome {
            Ok(_) => self.world.exchange("close heap", &[], None).map(drop),
            Err(error) => Err(error),
        };
        lock(&self.watch).take();
        self.backend.shutdown();
        // Every process closes its mappings of peers' memory before this barrier, so that the
        // owners can unmap that memory after the barrier.
        let finished = match finished {
            Ok(()) if self.backend.waits_for_device() && !self.world.same_process() => {
                self.world.exchange("barrier", &[], None).map(drop)
            }
            finished => finished,
        };
        self.backend.unmap(finished.is_ok());
        let settled = match finished {
            Ok(()) => self.settle(true),
            Err(error) => Err(error),
        };
        lock(&self.registration).take();
        let settled = settled.and(self.leave_nodes());
        let unreported = match settled {
            Err(error) if error.is_surrender() => {
                // If another rank's failure has ended the heap, close must return that failure,
                // unless the program has got it already.
                self.take_unreported().or_else(|| match failure {
                    Some(Error::Aborted { .. }) => None,
                    Some(failure) => (!self.memory.control.has_told()).then_some(failure),
                    None => Some(error),
                })
            }
            settled => {
                self.world.note(settled.map_err(|e| self.after_fault(e)))?;
                self.take_unreported()
            }
        };
        self.world.note_returned(unreported.map_or(Ok(()), Err))
    }

    /// Error that [`SymmetricHeap::check`] would return, if any; the error does not count as
    /// returned to the program.
    fn failure(&self) -> Option<Error> {
        self.memory.control.outcome().and_then(|()| self.check_peers()).err()
    }

    /// Tells the kernels of all ranks to leave, and ends the exchanges of the heap's worlds on all
    /// ranks.
    fn give_up(&self) {
        if let Err(error) = self.poison(abort::CLOSED) {
            tracing::debug!(%error, "not all ranks could be told that the heap is closed");
        }
        self.end_exchanges();
    }

    /// Ends the exchanges of the heap's worlds on all ranks.
    fn end_exchanges(&self) {
        // Peers get the same error from this rank's abort word and from their world, whichever
        // reaches them first.
        let (control, word) = (&self.memory.control, self.word_for_peers().unwrap_or(0));
        if self.local_size() > 1 {
            self.world.give_up(control.error_of_word(word, |rank| rank));
        }
        if let Some(across) = self.across() {
            across.give_up(None);
            let number = |rank| control.in_whole_world(rank).0;
            self.whole_world().give_up(control.error_of_word(word, number));
        }
    }

    /// First error of enqueued work that has not been returned to the program. If the program has
    /// got any error, calls that it left out are not an error, because the program may close the
    /// heap early for that reason.
    fn take_unreported(&self) -> Option<Error> {
        let control = &self.memory.control;
        // A stream may keep a fault that another call has returned already; such a fault is not
        // returned again.
        let is_told = |error: &Error| {
            control.is_fault_returned()
                && matches!(
                    error,
                    Error::Fault { .. } | Error::NodeSilent { .. } | Error::Order { .. }
                )
        };
        let found = std::iter::from_fn(|| self.backend.take_unreported())
            .chain(control.fault_error())
            .find(|error| !is_told(error));
        match found {
            Some(error) if Distance::of(&error) != Distance::Consequence => Some(error),
            found if control.has_told() => found,
            found => control.broken_order().or(found),
        }
    }

    /// Makes a new stream on the heap's device.
    ///
    /// # Errors
    /// [`Error::Closed`]; [`Error::System`].
    pub fn stream(&self) -> Result<Stream> {
        self.world.note_returned(self.backend.stream()).map(Stream::from_backend)
    }

    /// Waits until all streams of this rank have finished their enqueued work. Errors of the work
    /// are returned by [`Stream::sync`], not here.
    ///
    /// # Errors
    /// [`Error::Unsupported`] while a stream is captured, before any waiting, and in a forked child;
    /// [`Error::WaitFromWork`] if called from enqueued work.
    pub fn finish(&self) -> Result<()> {
        self.world.check_process("waiting for all streams")?;
        check_may_wait("waiting for all streams")?;
        self.backend.check_no_capture("waiting for all streams")?;
        self.finish_streams();
        Ok(())
    }

    fn finish_streams(&self) {
        let _waiting = self.memory.control.begin_wait();
        self.backend.finish();
    }

    /// Addresses and deadlines that kernels need to access the memory of all ranks.
    pub fn view(&self) -> HeapView {
        let nanos = |d: std::time::Duration| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX);
        let addresses = |mappings: &[Arc<dyn Mapping>]| {
            std::array::from_fn::<u64, MAX_RANKS, _>(|r| mappings.get(r).map_or(0, |m| m.address()))
        };
        HeapView {
            rank: self.local_rank() as u32,
            size: self.local_size() as u32,
            data: addresses(&self.memory.data),
            signal: addresses(&self.memory.signal),
            control: self.memory.control.address(),
            device_words: self.memory.device_words.address(),
            entry_deadline_ns: nanos(self.world.settings().entry_deadline()),
            progress_deadline_ns: nanos(self.world.settings().progress_deadline()),
        }
    }

    /// All mappings of the heap, for callers that must keep them alive.
    pub fn memory(&self) -> Memory {
        self.memory.clone()
    }

    /// Control block of this rank: abort word and fault record.
    pub fn control(&self) -> &Arc<Control> {
        &self.memory.control
    }

    /// Checks that no failure has happened so far, on this rank or on a peer that reported its
    /// failure. Does not wait for enqueued calls; on a GPU it waits for the copy of one word from
    /// the device. Over several nodes, after a rank was lost, it waits up to 2 s to learn which
    /// rank was lost first.
    ///
    /// # Errors
    /// [`Error::PeerLost`], [`Error::Fault`], [`Error::Order`], [`Error::GaveUp`],
    /// [`Error::Aborted`], [`Error::Closed`].
    pub fn check(&self) -> Result<()> {
        drop(self.open_state()?);
        let own = self.memory.control.check();
        match (own, self.world.note_returned(self.check_peers())) {
            // A rank that gave up may have left its world since, so this rank counts it as lost.
            // Then the error that it gave up is returned, because it is the cause.
            (
                Err(Error::PeerLost { .. } | Error::RankLost { .. }),
                Err(told @ Error::GaveUp { .. }),
            ) => Err(told),
            (Err(error), _) => Err(error),
            (Ok(()), told) => told,
        }
    }

    /// Checks that no peer has told this rank's kernels to leave.
    fn check_peers(&self) -> Result<()> {
        let code = self.abort_word(&*self.memory.signal[self.local_rank()])?;
        if code == 0 {
            return Ok(());
        }
        if let Some(disorder) = self.memory.control.disorder() {
            return Err(disorder);
        }
        Err(self.memory.control.told_by_peer(code))
    }

    /// Abort word in a signal segment of this node.
    fn abort_word(&self, signal: &dyn Mapping) -> Result<i32> {
        let mut word = [0; 4];
        self.backend.read(signal, 4 * ABORT_WORD as u64, &mut word)?;
        Ok(i32::from_ne_bytes(word))
    }

    /// Abort word by which this rank tells peers that it takes part in no further call: the word by
    /// which a peer told this rank to leave, or else the word of this rank's own reason.
    fn word_for_peers(&self) -> Result<i32> {
        Ok(match self.abort_word(&*self.memory.signal[self.local_rank()])? {
            0 => self.memory.control.word_for_peers(self.local_rank()),
            told => told,
        })
    }

    /// Tells all ranks that no further call of this heap can succeed, for a `reason` listed in
    /// [`abort`](crate::abi::abort): waiting kernels leave, and [`SymmetricHeap::check`] fails
    /// everywhere. Later calls replace neither the first reason nor the first rank that gave up. If
    /// a peer has told this rank a reason before, such as the loss of a rank, this rank passes on
    /// that reason instead.
    ///
    /// # Errors
    /// Errors of the device, if not all peers could be told. Peers that were not told fail at their
    /// deadlines. [`Error::Unsupported`] in a forked child.
    pub fn poison(&self, reason: i32) -> Result<()> {
        self.world.check_process("poisoning a heap")?;
        self.memory.control.set_host_abort(reason);
        let word = self.word_for_peers()?;
        let tell = |signal: &Arc<dyn Mapping>| match self.abort_word(&**signal)? {
            0 => self.backend.write(&**signal, 4 * ABORT_WORD as u64, &word.to_ne_bytes()),
            _ => Ok(()),
        };
        self.memory.signal.iter().map(tell).fold(Ok(()), Result::and)
    }

    /// Checks that `stream` belongs to this heap. Every function that enqueues an access to the
    /// heap's memory must make this check: the heap keeps memory until its own streams have
    /// finished, and orders ops only among its own streams.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a stream of another heap.
    pub fn check_stream(&self, what: &str, stream: &Stream) -> Result<()> {
        stream.check_of(Arc::as_ptr(&self.memory.control), what)
    }

    /// World of the ranks of this rank's node, which share the heap's memory; if there is one node,
    /// the world in which the heap was opened. If there are several nodes, a rank's number in this
    /// world differs from its number in [`SymmetricHeap::whole_world`].
    pub fn local_world(&self) -> &World {
        &self.world
    }

    /// Number of this rank in the world in which the heap was opened, from 0.
    pub fn rank(&self) -> usize {
        self.whole_world().rank()
    }

    /// Number of ranks of the world in which the heap was opened.
    pub fn size(&self) -> usize {
        self.whole_world().size()
    }

    /// Number of this rank within its node, from 0. Kernels use this number
    /// ([`HeapView::rank`](crate::abi::HeapView)).
    pub fn local_rank(&self) -> usize {
        self.world.rank()
    }

    /// Number of ranks of this rank's node.
    pub fn local_size(&self) -> usize {
        self.world.size()
    }

    /// Numbers of the ranks of this rank's node in the world in which the heap was opened: the ranks
    /// whose memory this rank can read and write.
    pub fn node_ranks(&self) -> Range<usize> {
        let first = self.rank() - self.local_rank();
        first..first + self.local_size()
    }

    /// Options with which the heap was opened.
    pub fn options(&self) -> &HeapOptions {
        &self.options
    }

    /// Number of workgroups of this rank that can be co-resident.
    pub fn workgroups(&self) -> u32 {
        self.device().workgroups
    }

    /// Number of ranks that use this rank's device, this rank included.
    pub fn ranks_on_device(&self) -> u32 {
        self.backend.ranks_on_device()
    }

    /// Description of this rank's device.
    pub fn device(&self) -> &DeviceInfo {
        self.device.get_or_init(|| self.backend.device())
    }

    /// This rank's device as a GPU, for enqueueing the work of other libraries.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the device is not a GPU.
    pub fn gpu(&self) -> Result<&Gpu> {
        self.backend.as_any().downcast_ref().ok_or_else(|| {
            let why = format!("the heap is of {}", self.options.backend);
            unsupported("the GPU of a heap", &why)
        })
    }

    /// Loads compiled kernels onto the device: machine code for its architecture (a cubin or a code
    /// object), or PTX that ends with a zero byte. Loading may wait for the device, so call it in a
    /// collective step.
    ///
    /// # Errors
    /// [`Error::Unsupported`] on the CPU, whose kernels are host code; [`Error::Invalid`] for other
    /// images; [`Error::Device`].
    pub fn load(&self, image: &[u8]) -> Result<Module> {
        let gpu = self
            .gpu()
            .map_err(|_| unsupported("compiled kernels", "kernels of this device are host code"))?;
        Ok(Module::new(gpu.load(image)?, &self.memory.control))
    }

    /// Id of the heap, the same on all ranks.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Number of free bytes in a segment, and size of its largest free block in bytes; (0, 0) for
    /// imported memory.
    pub fn free_bytes(&self, segment: Segment) -> (u64, u64) {
        let state = self.state();
        match segment {
            Segment::Data => (state.data.free_bytes(), state.data.largest()),
            Segment::Signal => (state.signal.free_bytes(), state.signal.largest()),
            Segment::Registered(_) => (0, 0),
        }
    }

    /// Takes the lock of a collective step. Fails if called from enqueued work, because `close`
    /// holds this lock while it waits for enqueued work.
    fn step(&self, what: &str) -> Result<MutexGuard<'_, ()>> {
        self.world.check_process(what)?;
        check_may_wait(what)?;
        Ok(lock(&self.step))
    }

    /// Adds to `then`, the error of a collective step on the host, the fault that a kernel of this
    /// rank left before. Returns `then` unchanged if there is no fault, or if `then` is the cause
    /// of the fault.
    fn after_fault(&self, then: Error) -> Error {
        let control = &self.memory.control;
        // If the ranks issued calls in different orders, return that error, because the difference
        // made the peers leave.
        if (then.is_surrender() || control.host_abort() == abort::DISORDER)
            && let Some(order) = control.broken_order()
        {
            return order;
        }
        match control.fault_error().filter(|fault| !root_error::explains(&then, fault)) {
            // The error is returned unchanged, because the world has already added the fault to it.
            _ if matches!(then, Error::AfterFault { .. }) => then,
            Some(fault) => Error::AfterFault { fault: Box::new(fault), then: Box::new(then) },
            None => then,
        }
    }

    /// Records that peers write the block of `slice`, if ranks may go on after this heap's epoch.
    fn note_peer_writes(&self, slice: &RawSlice) {
        if self.world.is_elastic() {
            lock(&self.written_by_peers).insert((slice.segment(), slice.serial()));
        }
    }

    fn imported(&self, slice: &RawSlice) -> Option<Imported> {
        let Segment::Registered(n) = slice.segment() else {
            return None;
        };
        let imported = lock(&self.memory.registered).get(usize::from(n))?.clone()?;
        let end = slice.offset().checked_add(slice.bytes())?;
        (imported.serial == slice.serial() && end <= imported.bytes).then_some(imported)
    }

    fn check_heap(&self, slice: u64) -> Result<()> {
        if slice == self.id {
            return Ok(());
        }
        Err(Error::ForeignSlice { slice, heap: self.id })
    }

    fn open_state(&self) -> Result<RwLockReadGuard<'_, State>> {
        self.world.check_process("using a heap")?;
        self.state_unless_closed()
    }

    /// State of the open heap; the caller has checked that this process is not a forked child.
    fn state_unless_closed(&self) -> Result<RwLockReadGuard<'_, State>> {
        let state = self.state();
        if state.closed {
            return Err(Error::Closed { what: "the heap" });
        }
        Ok(state)
    }

    // Ignores the poisoning of the lock: the state is always replaced as a whole, so a panic of
    // another holder leaves it consistent.
    fn state(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn state_mut(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for SymmetricHeap {
    fn drop(&mut self) {
        if self.world.check_process("dropping a heap").is_err() {
            // In a forked child nothing is dropped: the child must not end the parent's threads or
            // unmap the device's memory.
            std::mem::forget((self.backend.clone(), self.memory.clone()));
            return;
        }
        if !self.state().closed && self.size() > 1 {
            // Debug level suffices: if a peer waits for a further call of this rank, the peer
            // returns an error.
            tracing::debug!(rank = self.rank(), id = self.id, "a heap was dropped without close");
            if self.world.is_elastic() {
                // This rank leaves the epoch, or goes on without it, and so do its peers. Otherwise the
                // drop of the backend would tell them that this rank gave up.
                self.memory.control.set_host_abort(abort::REVOKED);
            }
            // Each operator holds an `Arc` of its heap, so no operator is left that could issue a
            // further call.
            self.memory.control.publish_end(Some(Ended::Dropped));
        }
    }
}

/// Guard of a step that frees blocks; when it is dropped, blocks that are still allocated may be used
/// again. The lock of collective steps is held, so there is one guard at a time.
struct Ending<'a>(&'a SymmetricHeap);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.state_mut().ending.clear();
    }
}

/// Exchanges mappings: collective; each rank passes its own mapping and gets the mappings of all
/// ranks.
#[track_caller]
fn share(
    backend: &dyn Backend,
    world: &World,
    own: Arc<dyn Mapping>,
) -> Result<Vec<Arc<dyn Mapping>>> {
    if world.same_process() {
        let objects = world.share_objects(Arc::new(own.clone()))?;
        let mapping = |object: Object| {
            let mapping = object.downcast::<Arc<dyn Mapping>>();
            mapping.map(|m| Arc::clone(&*m)).map_err(|_| Error::Wire {
                what: "exchange of memory".into(),
                problem: "a rank sent something else".into(),
            })
        };
        let all = objects.into_iter().map(mapping).collect::<Result<_>>()?;
        return backend.join(&*own, all);
    }
    // This rank takes part in both exchanges even if it has nothing to pass, because its peers wait
    // for it.
    let described = backend.describe(&*own);
    let messages = world.allgather(described.as_deref().unwrap_or_default())?;
    let described = described.and_then(|_| match messages.iter().position(Vec::is_empty) {
        Some(rank) => Err(nothing_passed(rank)),
        None => Ok(()),
    });
    let descriptors = described.and_then(|()| backend.descriptors(world.rank(), &*own, &messages));
    let (descriptors, failure) = match descriptors {
        Ok(descriptors) => (descriptors, None),
        Err(error) => (Vec::new(), Some(error)),
    };
    let passed = world.share_descriptors(descriptors)?;
    if let Some(error) = failure {
        return Err(error);
    }
    let export = |(message, descriptors)| Export { message, descriptors };
    let all = messages.into_iter().zip(passed).map(export).collect();
    backend.import(world.rank(), own, all)
}

/// Message to the peers about this rank's outcome of a step: empty for `Ok`, else the error's text.
fn refusal<T>(mine: &Result<T>) -> Vec<u8> {
    mine.as_ref().err().map_or(Vec::new(), |error| error.to_string().into_bytes())
}

/// Checks that no rank has refused a step; `told` has the [`refusal`] message of each rank, by
/// rank.
fn check_refusals(what: &str, told: &[Vec<u8>]) -> Result<()> {
    match told.iter().enumerate().find(|(_, message)| !message.is_empty()) {
        None => Ok(()),
        Some((rank, message)) => {
            let message = String::from_utf8_lossy(message).into_owned();
            Err(Error::PeerFailed { rank, what: what.into(), message })
        }
    }
}

fn not_allocated(slice: &RawSlice) -> Error {
    Error::NotAllocated {
        segment: slice.segment().to_string(),
        offset: slice.offset(),
        end: slice.offset() + slice.bytes(),
    }
}

/// Makes an id for a heap: a hash of process, time and a counter, so that it differs from all other
/// ids of this host.
fn fresh_id() -> u64 {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed).to_le_bytes();
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let process = std::process::id().to_le_bytes();
    hash(&[&since.as_nanos().to_le_bytes(), &process, &count]) as u64
}
