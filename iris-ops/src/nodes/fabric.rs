//! Steps between nodes, enqueued on a stream. A step is a collective over the ranks with the same
//! local rank, one rank on each node.

use std::fmt;
use std::sync::{Arc, Weak};

use iris_heap::abi::abort;
use iris_heap::bootstrap::OnMissing;
use iris_heap::{AwaitedNode, Control, DType, Element, RawSlice, Stream, SymmetricHeap, World};
use iris_kernels::with_type;

use super::exchange::Exchange;
use crate::op_names::Op;

/// Step between nodes, with its input `from` and its output `to` in this rank's data segment. All
/// slots (one for each node) have the same length.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    pub(crate) exchange: Exchange,
    pub(crate) from: RawSlice,
    pub(crate) to: RawSlice,
}

/// Description of a call. Ranks exchange their descriptions, and compare them before they use the
/// call's data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct CallRecord {
    pub(crate) op: Op,
    /// Number of the call among the calls between nodes, counted over all operators of the heap.
    pub(crate) call: u64,
    /// Index of the step within its call.
    pub(crate) step: u64,
    /// Number of rows of the call. For a message without rows, the number of parts into which it is
    /// divided.
    pub(crate) m: u64,
    /// Number of columns of the call, or number of elements of a part; 0 if the number differs
    /// between ranks.
    pub(crate) n: u64,
    /// Hash of the properties of the plan on which all ranks must agree. Two of its bits say which
    /// optional matrices the call has.
    pub(crate) plan: u64,
}

/// Transport for steps between nodes.
pub(crate) trait Fabric: fmt::Debug + Send + Sync {
    /// Enqueues the comparison of the ranks' records of the step, before the step's data is ready.
    /// `records` is the operator's memory for the records. Does nothing if [`Fabric::enqueue`]
    /// compares the records.
    fn announce(
        &self,
        stream: &Stream,
        record: CallRecord,
        records: Option<RawSlice>,
    ) -> iris_heap::Result<()> {
        let _ = (stream, record, records);
        Ok(())
    }

    /// Whether the steps run on a thread of the host. If so, the caller's stream must check for
    /// their errors.
    fn uses_host(&self) -> bool {
        true
    }

    /// Enqueues a step. All ranks with the same local rank must enqueue the same steps in the same
    /// order. If a step fails later, [`Control::check`] of this rank returns the reason, and the
    /// kernels of this node abort.
    fn enqueue(&self, stream: &Stream, step: Step, record: CallRecord) -> iris_heap::Result<()>;

    /// Enqueues the sum of `slots`, one slot of elements of type `dtype` for each node. Adds the
    /// slots in the order of nodes, in f32, and rounds once; the first slot receives the sum.
    fn sum(&self, stream: &Stream, slots: RawSlice, dtype: DType) -> iris_heap::Result<()>;
}

/// Engine that moves the data of steps between nodes, among the ranks with the same local rank.
pub(crate) trait Engine: fmt::Debug + Send + Sync {
    /// Executes an exchange on this rank, which is on node `node` of `nodes` nodes. All ranks have
    /// agreed on the step, and `from` has the same length on all of them. Returns the bytes of
    /// `to`; for shifts, only the slots that are stored, in order of the distance.
    fn exchange(
        &self,
        exchange: Exchange,
        from: Vec<u8>,
        place: (usize, usize),
    ) -> iris_heap::Result<Vec<u8>>;
}

/// Transport over the sockets that the ranks opened when the world was made. It carries the records
/// of all calls, which the ranks compare before a step, and reports lost ranks and failed calls.
/// Without an engine it also moves the data. This is simple but slow, because rank 0 forwards all
/// data; it is meant for tests, and for programs on CPUs that exchange little data.
pub(crate) struct Sockets {
    engine: Option<Arc<dyn Engine>>,
    heap: Weak<SymmetricHeap>,
    control: Arc<Control>,
    across: World,
    /// Rank and host name of this rank's counterpart on each node: the rank with the same local
    /// rank.
    ranks: Arc<Vec<(usize, String)>>,
}

impl fmt::Debug for Sockets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sockets(node {} of {}", self.across.rank(), self.across.size())?;
        match &self.engine {
            Some(engine) => write!(f, ", data by {engine:?})"),
            None => f.write_str(")"),
        }
    }
}

impl Sockets {
    pub(crate) fn new(
        heap: &Arc<SymmetricHeap>,
        across: World,
        engine: Option<Arc<dyn Engine>>,
    ) -> Self {
        let ranks = Arc::new(counterparts(heap));
        let control = Arc::clone(heap.control());
        Self { engine, heap: Arc::downgrade(heap), control, across, ranks }
    }
}

impl Fabric for Sockets {
    fn enqueue(&self, stream: &Stream, step: Step, record: CallRecord) -> iris_heap::Result<()> {
        let (heap, control) = (self.heap.clone(), Arc::clone(&self.control));
        let (across, ranks) = (self.across.clone(), Arc::clone(&self.ranks));
        let engine = self.engine.clone();
        stream.call_cpu("step between nodes", move || {
            // If the heap has been dropped, no rank waits for the step.
            let Some(heap) = heap.upgrade() else { return Ok(()) };
            control.publish_step(Some(awaited_first(step.exchange, &across)));
            let done = exchange(&heap, &across, (&ranks, engine.as_deref()), step, record);
            control.publish_step(None);
            if let Err(error) = done {
                fail(&heap, error);
            }
            Ok(())
        })
    }

    fn sum(&self, stream: &Stream, slots: RawSlice, dtype: DType) -> iris_heap::Result<()> {
        let (heap, nodes) = (self.heap.clone(), self.across.size());
        stream.call_cpu("sum over nodes", move || {
            let Some(heap) = heap.upgrade() else { return Ok(()) };
            let len = slots.len() / nodes;
            let slot = |node: usize| slots.slice(node * len..(node + 1) * len);
            let parts = (0..nodes).map(|node| heap.read(slot(node)?));
            let parts = parts.collect::<iris_heap::Result<Vec<_>>>()?;
            heap.write(slot(0)?, &sum(dtype, parts.into_iter()))
        })
    }
}

/// Rank and host name of this rank's counterpart on each node: the rank with the same local rank.
pub(super) fn counterparts(heap: &SymmetricHeap) -> Vec<(usize, String)> {
    let world = heap.whole_world();
    let rank = |node: usize| {
        let rank = node * heap.local_size() + heap.local_rank();
        (rank, world.host_of(rank).unwrap_or("unknown").to_string())
    };
    (0..world.nodes()).map(rank).collect()
}

/// Marks the heap as failed because of a failed step. Also aborts the other ranks of this node,
/// which wait for this rank in the call.
pub(super) fn fail(heap: &SymmetricHeap, error: iris_heap::Error) {
    heap.control().fail_elsewhere(error);
    let _ = heap.poison(abort::ELSEWHERE);
}

/// Node for which this rank reports that it waits, until the step can tell which nodes are missing.
pub(super) fn awaited_first(exchange: Exchange, across: &World) -> AwaitedNode {
    match (exchange, across.rank(), across.size()) {
        (Exchange::Broadcast { root }, node, _) if node != root => AwaitedNode::Node(root),
        (_, node, 2) => AwaitedNode::Node(1 - node),
        _ => AwaitedNode::Unknown,
    }
}

/// Error of a step for which `rank` on `host` sent the error `message` of its own in place of its data.
pub(super) fn failed(
    (op, call, step): (Op, u64, u64),
    (rank, host): (usize, String),
    message: &str,
) -> iris_heap::Error {
    let reason = format!("{op}, step {step} between nodes of call {call}: {message}");
    iris_heap::Error::GaveUp { rank, host: Some(host), reason: Some(reason) }
}

/// Reason for which a step failed, other than the failure of another rank: the ranks are in different
/// calls, or do not answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StepError {
    #[error(
        "step {step} between nodes of call {call}: {what} is {own} on rank {rank} (host {host}) and {theirs} on rank \
         {other} (host {other_host}); all ranks make the same calls in the same order"
    )]
    Differs {
        call: u64,
        step: u64,
        what: &'static str,
        own: String,
        rank: usize,
        host: String,
        theirs: String,
        other: usize,
        other_host: String,
    },
    #[error(
        "{op}, step {step} between nodes of call {call}: it did not end within {seconds} s, expected {others} to \
         take part: see whether their processes run, and whether the network between the nodes is up"
    )]
    Late { op: Op, call: u64, step: u64, seconds: u64, others: String },
    #[error(
        "steps between nodes with {others}: {error}; expected all of these processes to run, and the network between \
         the nodes to be up"
    )]
    Engine { others: String, error: iris_kernels::vendor::Error },
    #[error(
        "communicator of the steps between nodes: not freed {seconds} s after the heap was closed, expected that all \
         graphs with calls of this heap had been destroyed before"
    )]
    InGraph { seconds: u64 },
    #[error("id of a communicator between nodes: {value} from node 0, expected 128 bytes")]
    Id { value: String },
    #[error(
        "step {step} between nodes of call {call}: rank {rank} on host {host} sent {bytes} bytes, expected {expected}"
    )]
    Length { call: u64, step: u64, rank: usize, host: String, bytes: usize, expected: usize },
}

impl CallRecord {
    /// Names of the record's fields in error messages.
    pub(super) const NAMES: [&'static str; 6] =
        ["operator", "number of the call", "number of the step", "M", "N", Self::PLAN];

    /// Name, in error messages, of the last field of a record. [`CallRecord::plan_of`] computes its
    /// value.
    const PLAN: &'static str = "optional matrices";

    /// Value of the last field: the hash of a plan, on which all ranks have agreed, and in the lowest
    /// two bits whether the call has a bias and whether it has a residual.
    pub(super) fn plan_of(hash: u64, [bias, residual]: [bool; 2]) -> u64 {
        hash & !3 | u64::from(bias) | u64::from(residual) << 1
    }

    /// Values of the record's fields, each with its name for error messages.
    pub(super) fn fields(&self) -> [(&'static str, u64); 6] {
        let op = Op::ALL.iter().position(|&op| op == self.op).unwrap_or_default() as u64;
        let values = [op, self.call, self.step, self.m, self.n, self.plan];
        std::array::from_fn(|at| (Self::NAMES[at], values[at]))
    }

    /// Text of the field `what` with the value `value`, for error messages.
    pub(super) fn show(what: &str, value: u64) -> String {
        match what {
            "operator" => Op::ALL.get(value as usize).map_or("unknown".into(), |op| op.to_string()),
            Self::PLAN => {
                let of =
                    ["no bias and no residual", "a bias", "a residual", "a bias and a residual"];
                format!("{} (plan {:x})", of[(value & 3) as usize], value >> 2)
            }
            _ => value.to_string(),
        }
    }
}

/// Size in bytes of the header before a step's data. The header consists of the record and the
/// length of the error text.
const HEADER: usize = 7 * 8;

/// Executes a step between nodes, on the thread that runs the stream of steps.
fn exchange(
    heap: &SymmetricHeap,
    across: &World,
    (ranks, engine): (&[(usize, String)], Option<&dyn Engine>),
    Step { exchange, from, to }: Step,
    record: CallRecord,
) -> iris_heap::Result<()> {
    let node = across.rank();
    // A rank whose call has failed sends the error in place of its data, so that no peer waits for
    // data that will not come.
    let failure = heap.control().outcome().err().map_or(String::new(), |error| error.to_string());
    let sends = match exchange {
        _ if engine.is_some() => false,
        Exchange::Broadcast { root } => root == node,
        _ => true,
    };
    let mut message = Vec::with_capacity(HEADER + from.len());
    for (_, value) in record.fields() {
        message.extend_from_slice(&value.to_le_bytes());
    }
    message.extend_from_slice(&(failure.len() as u64).to_le_bytes());
    message.extend_from_slice(failure.as_bytes());
    if sends && failure.is_empty() {
        message.extend_from_slice(&heap.read(from)?);
    }
    let control = Arc::clone(heap.control());
    let publish = move |missing: &[usize]| {
        if let Some(&node) = missing.first() {
            control.publish_step(Some(AwaitedNode::Node(node)));
        }
    };
    let publish = OnMissing(Arc::new(publish));
    let all = across.allgather_watched("a step between nodes", &message, publish)?;
    let CallRecord { op, call, step, .. } = record;
    let mut data = Vec::with_capacity(all.len());
    for (message, (rank, host)) in all.iter().zip(ranks) {
        let (rank, host) = (*rank, host.clone());
        let expected = from.len();
        let Some((header, rest)) = message.split_first_chunk::<HEADER>() else {
            let bytes = message.len();
            let error = StepError::Length { call, step, rank, host, bytes, expected };
            return Err(iris_heap::Error::other(error));
        };
        let word = |at: usize| header[8 * at..][..8].try_into().map_or(0, u64::from_le_bytes);
        // A rank that has failed sends its error text. Its record is then not compared, because it
        // may be that of an earlier call.
        let text = usize::try_from(word(6)).unwrap_or(usize::MAX).min(rest.len());
        if text > 0 {
            let message = String::from_utf8_lossy(&rest[..text]).into_owned();
            return Err(failed((op, call, step), (rank, host), &message));
        }
        for (at, (what, own)) in record.fields().into_iter().enumerate() {
            if word(at) != own {
                let (own_rank, own_host) = ranks[node].clone();
                let show = |value| CallRecord::show(what, value);
                return Err(iris_heap::Error::other(StepError::Differs {
                    call,
                    step,
                    what,
                    own: show(own),
                    rank: own_rank,
                    host: own_host,
                    theirs: show(word(at)),
                    other: rank,
                    other_host: host,
                }));
            }
        }
        data.push((&rest[text..], rank, host));
    }
    // No rank has sent an error, so all ranks begin the exchange. A rank that has failed in the
    // meantime begins it, too, because the other ranks are already waiting in it, and a call of MPI
    // has no deadline.
    let exchanged = match engine {
        Some(engine) => Some(engine.exchange(exchange, heap.read(from)?, (node, data.len()))),
        None => None,
    };
    heap.control().outcome()?;
    if let Some(result) = exchanged {
        return store(heap, (exchange, node, data.len()), to, &result?);
    }
    let length = |(bytes, rank, host): &(&[u8], usize, String), expected: usize| match bytes.len() {
        bytes if bytes == expected => Ok(()),
        bytes => {
            let (rank, host) = (*rank, host.clone());
            let error = StepError::Length { call, step, rank, host, bytes, expected };
            Err(iris_heap::Error::other(error))
        }
    };
    let root = match exchange {
        Exchange::Broadcast { root } => Some(root),
        _ => None,
    };
    for (at, part) in data.iter().enumerate() {
        let sent = root.is_none_or(|root| root == at);
        length(part, if sent { from.len() } else { 0 })?;
    }
    let nodes = data.len();
    let result: Vec<u8> = match exchange {
        Exchange::AllReduce(dtype) => sum(dtype, data.iter().map(|(bytes, ..)| bytes.to_vec())),
        Exchange::AllGather => data.iter().flat_map(|(bytes, ..)| bytes.iter().copied()).collect(),
        Exchange::AllToAll => {
            let len = from.len() / nodes;
            data.iter().flat_map(|(bytes, ..)| bytes[node * len..][..len].iter().copied()).collect()
        }
        Exchange::Broadcast { root } => data[root].0.to_vec(),
        Exchange::Shifts { first, shifts, sent } => {
            let senders = Exchange::senders((first, shifts), (node, nodes));
            let bytes = sent.bytes(from.len(), (node, nodes));
            senders.flat_map(|sender| data[sender].0[bytes.clone()].iter().copied()).collect()
        }
    };
    store(heap, (exchange, node, nodes), to, &result)
}

/// Writes the `result` of an exchange on node `node` of `nodes` to the block `to`.
fn store(
    heap: &SymmetricHeap,
    (exchange, node, nodes): (Exchange, usize, usize),
    to: RawSlice,
    result: &[u8],
) -> iris_heap::Result<()> {
    let Exchange::Shifts { first, shifts, .. } = exchange else { return heap.write(to, result) };
    let slot = to.len() / nodes;
    let senders = Exchange::senders((first, shifts), (node, nodes));
    senders.zip(result.chunks(slot)).try_for_each(|(sender, bytes)| {
        heap.write(to.slice(sender * slot..(sender + 1) * slot)?, bytes)
    })
}

/// Sums arrays of elements of type `dtype`, given as bytes, element by element in the order of
/// `parts`: in f32, rounded once at the end.
pub(super) fn sum(dtype: DType, parts: impl Iterator<Item = Vec<u8>>) -> Vec<u8> {
    with_type!(dtype, T => sum_of::<T>(parts), panic!("no sums of {dtype}"))
}

fn sum_of<T: Element>(parts: impl Iterator<Item = Vec<u8>>) -> Vec<u8> {
    let value = |bytes: &[u8]| bytemuck::pod_read_unaligned::<T>(bytes).to_f64() as f32;
    let mut sums: Vec<f32> = Vec::new();
    for part in parts {
        let values = part.chunks_exact(size_of::<T>()).map(value);
        if sums.is_empty() {
            sums = values.collect();
        } else {
            sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
        }
    }
    let rounded: Vec<T> = sums.into_iter().map(|sum| T::from_f64(f64::from(sum))).collect();
    bytemuck::cast_slice(&rounded).to_vec()
}
