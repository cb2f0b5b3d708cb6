//! Steps between nodes over NCCL or RCCL, on the streams of a GPU.
//!
//! **Problem.** Between nodes, NCCL and RCCL use every kind of network better than code of this
//! crate would. But their calls hang or return wrong data if ranks make different calls, and a call
//! whose peer is lost never ends.
//!
//! **Solution.** Each heap has one communicator over the ranks with equal local ranks. Before a
//! step moves data, the ranks gather their records of the step, and a kernel compares the records.
//! If they differ, the call ends with an error that names both ranks. The communicator is
//! non-blocking, so that no call of the library can hang this process. Host threads that wait for
//! the device also check the communicator: if the heap fails, they abort the communicator, and the
//! streams continue. Background threads also abort it if a rank is lost, or if the library reports
//! an error. In captures these threads may not ask the device about streams or events.
//!
//! **Limits.** Deadlines of steps are checked only in waits of the heap and in
//! [`SymmetricHeap::check`]. If a peer does not begin a step, a program that waits for the step by
//! other means, such as `cudaStreamSynchronize`, waits until another thread calls `check`. A graph
//! with steps must not be launched after its heap has failed, which [`SymmetricHeap::launch_graph`]
//! ensures. NCCL's own ports are not authenticated. RCCL was never called on a device; tests call a
//! fake of it (nodes_hip.rs in iris-testkit).

mod watcher;

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::sync::mpsc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use iris_heap::{
    AwaitedNode, Control, DType, DeviceHandle, Event, NodeEngine, RawSlice, Stream, SymmetricHeap,
    World,
};
use iris_kernels::UserKernel;
use iris_kernels::args::dtype_code;
use iris_kernels::rtc::{KernelSource, Options};
use iris_kernels::vendor::{self, Communicator, CommunicatorOptions, Nccl, NcclCall, Release};
use iris_sync::Fault;

use super::exchange::{Exchange, Sent};
use super::fabric::{
    CallRecord, Fabric, Step, StepError, awaited_first, counterparts, fail, failed,
};
use crate::error::{InOp, Result};
use crate::op_names::Op;
use crate::plan::composed::{RECORD_BYTES, STEP_BLOCKS};
use watcher::{Watcher, named};

const SOURCE: KernelSource<'static> =
    KernelSource { name: "steps.cu", text: include_str!("steps.cu") };
/// Number of threads in a workgroup of the kernels that write and compare records of steps.
const THREADS: u32 = 64;
/// Number of threads in a workgroup of the kernel that adds slots.
const SUM_THREADS: u32 = 256;
/// Number of adjacent elements that a thread adds at once: a divisor of the elements of any slot.
const SUM_WIDTH: usize = 8;

/// Communicator of a heap, with the data that steps on the communicator need.
pub(super) struct Link {
    heap: Weak<SymmetricHeap>,
    /// Control block of the heap; the control block owns this link.
    control: Weak<Control>,
    communicator: Arc<Communicator>,
    across: World,
    /// Rank and host name of this rank's counterpart on each node: the rank with the same local
    /// rank.
    ranks: Vec<(usize, String)>,
    announce: UserKernel,
    compare: UserKernel,
    sum: UserKernel,
    /// Maximum duration of a step; a step that takes longer is treated as hanging.
    deadline: Duration,
    /// Steps whose end has not been seen yet, in the order of the stream.
    running: Mutex<VecDeque<Running>>,
    /// Events before and after the exchange of records of the step that is being enqueued; `None`
    /// in captures.
    begin: Mutex<Option<[Event; 2]>>,
    device: DeviceHandle,
    /// Channel on which an abort in progress reports its end; `None` if no abort is in progress.
    aborting: Mutex<Option<mpsc::Receiver<iris_heap::Result<()>>>>,
}

/// Step between nodes on a stream, outside of captures.
struct Running {
    record: CallRecord,
    awaited: AwaitedNode,
    /// Events before and after the exchange of records.
    records: [Event; 2],
    /// Events before and after the exchange of data. Kernels of this node run between the two
    /// exchanges.
    data: [Event; 2],
    /// Times at which the exchange of records, and that of data, were first seen to have begun.
    begun: [Option<Instant>; 2],
}

impl Running {
    /// Exchange in which the step waits for the other nodes: 0 for its records, 1 for its data;
    /// `None` if it waits for kernels of this node, which have deadlines of their own.
    fn exchange(&self) -> Option<usize> {
        let exchange = usize::from(self.records[1].is_done());
        [&self.records, &self.data][exchange][0].is_done().then_some(exchange)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} between nodes", self.communicator)
    }
}

impl Link {
    /// Returns the heap's link (its communicator). The first call makes the link and is collective
    /// over all ranks of the world.
    #[track_caller]
    pub(super) fn of(
        op: Op,
        heap: &Arc<SymmetricHeap>,
        across: &World,
        records: RawSlice,
    ) -> Result<Arc<Link>> {
        if let Some(engine) = heap.node_engine()
            && let Ok(link) = engine.clone().as_any().downcast()
        {
            return Ok(link);
        }
        let link = Arc::new(Link::new(op, heap, across)?);
        heap.set_node_engine(link.clone());
        // Fails the heap on an error, because later operators would use the unconnected link.
        let connected = heap.whole_world().all_ok(op.name(), link.connect(heap, records));
        connected.inspect_err(|error| link.fail(error.clone())).in_op(op)?;
        Ok(link)
    }

    /// Performs one collective of each kind that needs its own connections. The library connects
    /// ranks at the first collective of a kind; without this function, an operator's call would
    /// then wait on the host for its peers.
    fn connect(&self, heap: &SymmetricHeap, records: RawSlice) -> iris_heap::Result<()> {
        let (own, all) = parts(heap, records)?;
        let stream = heap.stream()?;
        self.collective(heap, &stream, Exchange::AllGather, (own, all))?;
        self.collective(heap, &stream, Exchange::AllToAll, (all, all))?;
        self.collective(heap, &stream, Exchange::AllReduce(DType::F32), (own, own))?;
        stream.sync()
    }

    #[track_caller]
    fn new(op: Op, heap: &Arc<SymmetricHeap>, across: &World) -> Result<Link> {
        let world = heap.whole_world();
        let (node, nodes) = (across.rank(), across.size());
        let gpu = heap.gpu().in_op(op)?;
        let start = || {
            let nccl = Nccl::get(heap.device().kind).map_err(iris_heap::Error::other)?;
            let make = || nccl.new_id().map_err(iris_heap::Error::other);
            let id = if node == 0 { gpu.with_relaxed_capture(make)?.to_vec() } else { Vec::new() };
            let kernel =
                |name, threads| UserKernel::new(heap, SOURCE, &Options::new(), name, (threads, 0));
            let kernels = [
                kernel("iris_step_announce", THREADS)?,
                kernel("iris_step_compare", THREADS)?,
                kernel("iris_step_sum", SUM_THREADS)?,
            ];
            Ok((nccl, id, kernels))
        };
        // All ranks learn of a failure before any rank waits for the others in the library.
        let (nccl, id, kernels) = world.all_ok(op.name(), start()).in_op(op)?;
        let [announce, compare, sum] = kernels;
        let id = across.broadcast(0, &id).in_op(op)?;
        let (most_blocks, deadline) = (Some(STEP_BLOCKS), Some(world.settings().host_deadline()));
        let options = CommunicatorOptions { most_blocks, deadline };
        let ranks = counterparts(heap);
        let join = || {
            let id = id.first_chunk().ok_or_else(|| {
                let value = format!("{} bytes", id.len());
                iris_heap::Error::other(StepError::Id { value })
            })?;
            // An error of the heap, such as the loss of a rank, ends the wait for peers.
            let outcome = || heap.control().outcome();
            let communicator = gpu.with_relaxed_capture(|| {
                Communicator::new(&nccl, id, (node, nodes), options, || outcome().is_err())
                    .map_err(|error| named(outcome, others(&ranks, node), error))
            })?;
            Ok(Link {
                heap: Arc::downgrade(heap),
                control: Arc::downgrade(heap.control()),
                communicator: Arc::new(communicator),
                across: across.clone(),
                ranks,
                announce,
                compare,
                sum,
                deadline: world.settings().entry_deadline(),
                running: Mutex::default(),
                begin: Mutex::default(),
                device: gpu.device_handle(),
                aborting: Mutex::default(),
            })
        };
        // If another rank fails, this rank's link is dropped, which aborts its communicator.
        let link = world.all_ok(op.name(), join()).in_op(op)?;
        let watcher = Watcher {
            heap: Weak::clone(&link.heap),
            communicator: Arc::downgrade(&link.communicator),
            others: link.others(),
        };
        // Ranks go on to the first collective of the communicator only if all ranks have a watcher.
        world.all_ok(op.name(), watcher.start()).in_op(op)?;
        Ok(link)
    }

    /// Enqueues a collective of the library on bytes of this rank's data segment.
    #[allow(unsafe_code, reason = "a library gets addresses of the heap")]
    fn collective(
        &self,
        heap: &SymmetricHeap,
        stream: &Stream,
        exchange: Exchange,
        (from, to): (RawSlice, RawSlice),
    ) -> iris_heap::Result<()> {
        let nodes = self.across.size();
        let elements = |slice: RawSlice, dtype: DType| (slice.len() / dtype.size(), Some(dtype));
        let (call, size) = match exchange {
            Exchange::AllReduce(dtype) => (NcclCall::AllReduce, elements(to, dtype)),
            Exchange::AllGather => (NcclCall::AllGather, (from.len(), None)),
            Exchange::AllToAll => (NcclCall::AllToAll, (from.len() / nodes, None)),
            Exchange::Broadcast { root } => (NcclCall::Broadcast { root }, (to.len(), None)),
            Exchange::Shifts { first, shifts, sent } => {
                let bytes = sent.bytes(from.len(), (0, nodes)).len();
                let by_parts = sent == Sent::Slot;
                (NcclCall::Shifts { first, shifts, by_parts }, (bytes, None))
            }
        };
        if size.0 == 0 {
            return Ok(());
        }
        heap.check_stream("a step between nodes", stream)?;
        let data = heap.view().data[heap.local_rank()];
        let places = (data + from.offset(), data + to.offset());
        heap.gpu()?.with_relaxed_capture(|| {
            // SAFETY: both slices are allocated in this heap, whose close waits for its streams;
            // `stream` is a stream of this heap.
            let done =
                unsafe { self.communicator.enqueue(call, places, size, stream.raw_handle()) };
            done.map_err(|error| self.named(error))
        })
    }

    /// Ranks of the other nodes that take part in this rank's steps, with their hosts.
    fn others(&self) -> String {
        others(&self.ranks, self.across.rank())
    }

    /// Error with which the heap has failed, if it has; `Ok` if the heap has been dropped.
    fn outcome(&self) -> iris_heap::Result<()> {
        self.control.upgrade().map_or(Ok(()), |control| control.outcome())
    }

    /// Publishes for which node this rank waits.
    fn publish(&self, awaited: Option<AwaitedNode>) {
        if let Some(control) = self.control.upgrade() {
            control.publish_step(awaited);
        }
    }

    /// Error to report for an error of the library; see [`named`].
    fn named(&self, error: vendor::Error) -> iris_heap::Error {
        named(|| self.outcome(), self.others(), error)
    }

    /// Frees the communicator by a thread of its own. The call waits until graphs that captured
    /// steps have been destroyed. In the thread, captures are relaxed, so that the call breaks no
    /// capture of another thread. The receiver gets the call's result.
    fn free(&self, release: Release) -> mpsc::Receiver<iris_heap::Result<()>> {
        let device = self.device.clone();
        let (tell, told) = mpsc::channel();
        let by_thread = tell.clone();
        // If nobody waits any more, nobody needs the result.
        let free = move || {
            let run = || release.run().map_err(iris_heap::Error::other);
            let _ = by_thread.send(device.with_relaxed_capture(run));
        };
        let thread = std::thread::Builder::new().name("iris-nccl-end".into()).spawn(free);
        if let Err(error) = thread {
            let _ = tell.send(Err(iris_heap::Error::other(error)));
        }
        told
    }

    /// Aborts the communicator, which ends the steps in progress. Waits until its memory is freed,
    /// but at most 2 s, because graphs that captured steps delay this. If an abort is already in
    /// progress, only waits for it.
    fn abort(&self) {
        const WAIT: Duration = Duration::from_secs(2);
        let mut aborting = lock(&self.aborting);
        if let Some(release) = self.communicator.abort() {
            *aborting = Some(self.free(release));
        }
        let Some(end) = &*aborting else { return };
        match end.recv_timeout(WAIT) {
            Ok(freed) => {
                *aborting = None;
                freed.unwrap_or_else(
                    |error| tracing::debug!(%error, "a communicator was not freed"),
                );
            }
            Err(_) => {
                tracing::debug!("a communicator is freed when its graphs have been destroyed");
            }
        }
    }

    /// Fails the heap because of a step. If the heap has been dropped, there is nothing to fail.
    fn fail(&self, error: iris_heap::Error) {
        if let Some(heap) = self.heap.upgrade() {
            fail(&heap, error);
        }
    }
}

/// Text that lists the counterparts `ranks` (rank and host name per node) of all nodes except `node`.
fn others(ranks: &[(usize, String)], node: usize) -> String {
    let others = ranks.iter().enumerate().filter(|&(at, _)| at != node);
    let others = others.map(|(_, (rank, host))| format!("rank {rank} on host {host}"));
    others.collect::<Vec<_>>().join(", ")
}

/// Parts of the memory for records: this rank's record, and the records of all nodes.
fn parts(heap: &SymmetricHeap, records: RawSlice) -> iris_heap::Result<(RawSlice, RawSlice)> {
    heap.check()?;
    let own = RECORD_BYTES as usize;
    Ok((records.slice(0..own)?, records.slice(own..records.len())?))
}

impl Drop for Link {
    /// Aborts the communicator if the heap was dropped instead of closed. Waits for an abort in
    /// progress, because a process that ended during the call was seen to crash in NCCL.
    fn drop(&mut self) {
        self.abort();
    }
}

impl Fabric for Link {
    #[allow(unsafe_code, reason = "kernels get addresses")]
    fn announce(
        &self,
        stream: &Stream,
        record: CallRecord,
        records: Option<RawSlice>,
    ) -> iris_heap::Result<()> {
        let (Some(heap), Some(records)) = (self.heap.upgrade(), records) else { return Ok(()) };
        let (own, all) = parts(&heap, records)?;
        // A step begins with the exchange of its records, which waits for the other nodes, so the
        // event before that exchange is recorded here.
        let captured = stream.capture()?.is_some();
        let begin = if captured { None } else { Some(stream.record()?) };
        let view = heap.view();
        let values = record.fields().map(|(_, value)| value);
        let data = view.data[heap.local_rank()];
        let nodes = self.across.size() as u32;
        let (to, gathered) = (data + own.offset(), data + all.offset());
        let (view, values) = (bytemuck::bytes_of(&view), bytemuck::bytes_of(&values));
        // SAFETY: the parameters are those of the kernel. The memory of its records is allocated
        // until the heap is closed, which waits for the stream. The kernel waits for no other
        // kernel.
        unsafe {
            let args = [view, values, bytemuck::bytes_of(&to)];
            self.announce.launch_in_stream(stream, 1, &args)?;
        }
        self.collective(&heap, stream, Exchange::AllGather, (own, all))?;
        let end = if captured { None } else { Some(stream.record()?) };
        *lock(&self.begin) = begin.zip(end).map(Into::into);
        // SAFETY: the conditions are the same as for the launch of `announce` above.
        unsafe {
            let args = [view, values, bytemuck::bytes_of(&gathered), bytemuck::bytes_of(&nodes)];
            self.compare.launch_in_stream(stream, 1, &args)
        }
    }

    fn enqueue(&self, stream: &Stream, step: Step, record: CallRecord) -> iris_heap::Result<()> {
        let Some(heap) = self.heap.upgrade() else { return Ok(()) };
        let records = lock(&self.begin).take();
        let begin = if records.is_some() { Some(stream.record()?) } else { None };
        self.collective(&heap, stream, step.exchange, (step.from, step.to))?;
        if let (Some(records), Some(begin)) = (records, begin) {
            let (data, awaited) =
                ([begin, stream.record()?], awaited_first(step.exchange, &self.across));
            let step = Running { record, awaited, records, data, begun: [None; 2] };
            lock(&self.running).push_back(step);
        }
        Ok(())
    }

    #[allow(unsafe_code, reason = "kernels get addresses")]
    fn sum(&self, stream: &Stream, slots: RawSlice, dtype: DType) -> iris_heap::Result<()> {
        let Some(heap) = self.heap.upgrade() else { return Ok(()) };
        let nodes = self.across.size();
        let (address, stride) =
            (heap.view().data[heap.local_rank()] + slots.offset(), slots.len() / nodes);
        let vectors = (stride / dtype.size() / SUM_WIDTH) as u64;
        let groups = vectors
            .div_ceil(SUM_THREADS.into())
            .clamp(1, self.sum.max_coresident_workgroups().into());
        let code = dtype_code(dtype).unwrap_or_default();
        let [nodes, stride] = [nodes, stride].map(|it| it as u64);
        let args = [&address, &stride, &vectors, &nodes].map(bytemuck::bytes_of);
        // SAFETY: the parameters are those of the kernel, and the slots are allocated until the
        // heap is closed, which waits for the stream. The kernel waits for no other kernel.
        unsafe {
            let args = [&args[..], &[bytemuck::bytes_of(&code)]].concat();
            self.sum.launch_in_stream(stream, groups as u32, &args)
        }
    }

    fn uses_host(&self) -> bool {
        false
    }
}

impl NodeEngine for Link {
    fn attend(&self, failed: bool) {
        if failed {
            // The first abort is enough for the streams; a second one would wait for graphs again.
            if lock(&self.aborting).is_none() {
                self.abort();
            }
            // Drops the events. They keep the heap's control block alive, which owns this link.
            lock(&self.running).clear();
            *lock(&self.begin) = None;
            return;
        }
        if let Err(error) = self.communicator.check() {
            self.fail(self.named(error));
            return;
        }
        let mut running = lock(&self.running);
        while running.front().is_some_and(|step| step.data[1].is_done()) {
            running.pop_front();
        }
        let step = running.front_mut().and_then(|step| Some((step.exchange()?, step)));
        let Some((exchange, step)) = step else {
            self.publish(None);
            return;
        };
        self.publish(Some(step.awaited));
        let waited = step.begun[exchange].get_or_insert_with(Instant::now).elapsed();
        if waited > self.deadline {
            let CallRecord { op, call, step, .. } = step.record;
            let seconds = self.deadline.as_secs();
            drop(running);
            let others = self.others();
            self.fail(iris_heap::Error::other(StepError::Late { op, call, step, seconds, others }));
        }
    }

    fn explain(&self, fault: &Fault) -> Option<iris_heap::Error> {
        let place = |node: usize| self.ranks.get(node).cloned();
        let (rank, host) = place(self.across.rank())?;
        let (other, other_host) = place(usize::try_from(fault.rank).ok()?)?;
        let low = |value: i32| u64::from(value as u32);
        let (call, step) = (low(fault.call), low(fault.tile));
        let field = usize::try_from(fault.field).ok()?;
        let Some(&what) = CallRecord::NAMES.get(field) else {
            let op = usize::try_from(fault.op).ok().and_then(|op| Op::ALL.get(op))?;
            let message = "its own error says why";
            return Some(failed((*op, call, step), (other, other_host), message));
        };
        let show = |value| CallRecord::show(what, low(value));
        let (own, theirs) = (show(fault.wanted), show(fault.seen));
        let error =
            StepError::Differs { call, step, what, own, rank, host, theirs, other, other_host };
        Some(iris_heap::Error::other(error))
    }

    fn close(&self) -> iris_heap::Result<()> {
        lock(&self.running).clear();
        if self.outcome().is_err() {
            self.abort();
            return Ok(());
        }
        let release = self.communicator.close().map_err(|error| {
            self.abort();
            iris_heap::Error::other(error)
        })?;
        let Some(release) = release else { return Ok(()) };
        let seconds = self.deadline.as_secs();
        match self.free(release).recv_timeout(self.deadline) {
            Ok(freed) => freed,
            Err(_) => Err(iris_heap::Error::other(StepError::InGraph { seconds })),
        }
    }

    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}
