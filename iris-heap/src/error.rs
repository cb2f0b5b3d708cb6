//! Error type of the crate.
//!
//! This file is long because each variant has a text with advice, and each field a description.

#[cfg(test)]
mod texts;

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use iris_sync::FaultKind;

use crate::limits::explain;

/// Result with this crate's [`enum@Error`] as its default error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Error of a world, a heap or a stream. Every message names the value and what was expected
/// instead.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An environment variable has an invalid value.
    #[error("{variable}={}: expected {expected}; {}", shortened(.value), set(.value))]
    Env {
        /// Name of the environment variable.
        variable: String,
        /// Value of the variable, or `(not set)`.
        value: String,
        /// Description of a valid value.
        expected: String,
    },
    /// An argument is outside its range.
    #[error("{what} is {value}: expected {expected}")]
    Invalid {
        /// Name of the argument that was refused.
        what: String,
        /// Value of the argument that was refused.
        value: String,
        /// Description of a valid value.
        expected: String,
    },
    /// The ranks passed different values to a collective call that needs equal ones. Nothing was
    /// changed on any rank.
    #[error("ranks disagree in {what}: {item} is {}; give all ranks the same", list_values(.values))]
    Disagreement {
        /// Collective step, with its call site.
        what: String,
        /// Name of the first value of the step that differs, such as `bytes`.
        item: String,
        /// Ranks whose value is not the most common one.
        ranks: Vec<usize>,
        /// Number of each rank, and the value that it has given.
        values: Vec<(usize, String)>,
    },
    /// The ranks are in different collective calls. Nothing was changed on any rank.
    #[error(
        "ranks are in different collective calls: {}; all ranks must make the same ones, in one order, from the same \
         places of the program", list_values(.calls)
    )]
    Mismatch {
        /// Ranks whose call differs from the most common one.
        ranks: Vec<usize>,
        /// Number of each rank, and its call: kind, sequence number and call site.
        calls: Vec<(usize, String)>,
    },
    /// The ranks issue the calls of a heap in different orders. The heap accepts no further calls.
    #[error(
        "ranks issue the operators of a heap in different orders: call {call} of the heap is {}; all ranks must \
         issue the calls of a heap in the same order, and leave none out", list_values(.operators)
    )]
    Order {
        /// Number of the first call that differs, counted from 1 over all calls of the heap.
        call: u64,
        /// Ranks that issued another operator than most ranks, or ranks that left the call out.
        ranks: Vec<usize>,
        /// For each rank, its number in the whole world and a text about the call: the operator's
        /// name and id (its number in the order of creation, from 0); `left out` and the step in
        /// which the rank closes the heap or frees the operator; or `not issued yet, or long ago`
        /// if the rank's log of calls does not hold the call.
        operators: Vec<(usize, String)>,
    },
    /// Some ranks did not arrive at a collective call before its deadline.
    #[error(
        "{what}: waited {waited:.1?} for rank {}, which should have come, too: see whether it runs and what it \
         printed; a larger IRIS_DEADLINE waits longer", list_ranks(.ranks)
    )]
    Absent {
        /// Ranks that did not arrive.
        ranks: Vec<usize>,
        /// Collective call, and its call site, of the rank that gave up first.
        what: String,
        /// Time that this rank waited.
        waited: Duration,
    },
    /// A rank died, or dropped its world without closing it.
    #[error(
        "rank {rank} is lost: its process or thread ended, or dropped its world unclosed, before all ranks had closed \
         it; see what rank {rank} printed, then start all ranks anew"
    )]
    PeerLost {
        /// Number of the lost rank.
        rank: usize,
    },
    /// A rank of a world over several nodes died, dropped its world without closing it, or cannot
    /// be reached.
    #[error(
        "rank {rank} on host {host} is lost: its process or thread ended, or dropped its world unclosed, or the \
         network to it is cut; see what rank {rank} printed there"
    )]
    RankLost {
        /// Number of the lost rank.
        rank: usize,
        /// Name of the lost rank's host.
        host: String,
    },
    /// A rank failed in its part of a collective step. Nothing was changed on any rank.
    #[error(
        "rank {rank} failed in {what}, which all ranks must do: {message}; mend that on rank {rank}"
    )]
    PeerFailed {
        /// Number of the rank that failed.
        rank: usize,
        /// Collective step in which the rank failed.
        what: String,
        /// Text of the error on the failed rank.
        message: String,
    },
    /// A rank left the world because its own program failed
    /// ([`World::abort_with`](crate::World::abort_with)), or dropped the world unclosed after an
    /// error about another rank.
    #[error(
        "rank {rank}{} gave up: {reason}; mend that, then start all ranks anew", place(.host)
    )]
    PeerAborted {
        /// Number of the rank that gave up, in the whole world.
        rank: usize,
        /// Name of the host of the rank that gave up; `None` if the world has one node.
        host: Option<String>,
        /// Reason that the rank gave, or the error that it got.
        reason: String,
    },
    /// The process that carries the messages of this split world has ended. Its rank may belong
    /// only to the world of all launched ranks.
    #[error(
        "rank {rank} of the launched world is lost, which carries this world's messages and must outlive it: see what \
         it printed, then start all ranks anew"
    )]
    HubLost {
        /// Number of the rank in the world of all launched ranks.
        rank: usize,
    },
    /// The launcher of a rank has ended while the rank still runs.
    #[error(
        "rank {rank} is lost to its job: its launcher, {launcher}, has ended and left it running, expected to end after \
         its ranks; see what ended the launcher, then start all ranks anew"
    )]
    LauncherLost {
        /// Number that the launcher gave the rank.
        rank: usize,
        /// Name and number of the launcher's process.
        launcher: String,
    },
    /// The epoch of this world has ended: a rank is lost or stopped, or a rank revoked the epoch.
    #[error(
        "the epoch of this world was revoked, because a rank is lost or stopped, or asked for it; expected a world of \
         the current epoch: call Member::next, and go on with its world"
    )]
    Revoked,
    /// The other processes of a job went on without this one.
    #[error(
        "the others went on to epoch {epoch} without this process, because it was stopped, or late: expected it to \
         run; end it, and see what stopped it"
    )]
    Evicted {
        /// Number of the first epoch that does not have this process.
        epoch: u64,
    },
    /// The processes of a job could not find each other.
    #[error("rendezvous at {place}: {problem}")]
    Rendezvous {
        /// Path of the socket, and the identity of the job from which the socket's name was
        /// derived.
        place: String,
        /// Description of the problem.
        problem: String,
    },
    /// The heap has no free block that is large enough. Nothing was changed on any rank.
    #[error(
        "{what}: out of {segment} memory for {name}: asked {asked} bytes, free {free} of {size}, largest \
         block {largest}, rank {rank}; the whole request needs {total}: open the heap with more ({}), or free blocks \
         before", option(.segment)
    )]
    OutOfHeap {
        /// Collective step, with its call site.
        what: String,
        /// Name of the part of the request for which there was no room.
        name: String,
        /// Name of the segment that had no room for the part.
        segment: String,
        /// Rank whose segment is full.
        rank: usize,
        /// Bytes requested for this part, rounded up to the alignment.
        asked: u64,
        /// Free bytes in the segment.
        free: u64,
        /// Bytes of the segment that can be allocated.
        size: u64,
        /// Size of the largest free block in bytes.
        largest: u64,
        /// Bytes of all parts of the request in this segment, each rounded up to the alignment.
        total: u64,
    },
    /// The heap of an epoch after the first does not fit into the memory that is left. No rank has
    /// touched a page of it.
    #[error(
        "a heap of {bytes} bytes on each of {ranks} ranks, in epoch {epoch}: expected at most {available} bytes in all, \
         which the host or this process's control group can still give; release or drop heaps of earlier epochs, or \
         open a smaller one"
    )]
    OutOfMemory {
        /// Bytes of each rank's heap.
        bytes: u64,
        /// Number of ranks of this host.
        ranks: usize,
        /// Number of the epoch.
        epoch: u64,
        /// Bytes that the host can still give.
        available: u64,
    },
    /// The world, heap or other object has been closed.
    #[error("{what} is closed: expected an open one; open another, or close it later")]
    Closed {
        /// Name of the closed object.
        what: &'static str,
    },
    /// A world cannot close while any rank still has a heap of the world, or a world split off it,
    /// open.
    #[error(
        "rank {rank} still has {heaps} heaps and {worlds} split worlds open: expected none; close them on all ranks, \
         then the world"
    )]
    StillOpen {
        /// First rank with open objects.
        rank: usize,
        /// Number of heaps that are still open.
        heaps: usize,
        /// Number of open worlds that were split off this world.
        worlds: usize,
    },
    /// A slice was used with another heap than the heap that allocated it.
    #[error(
        "the slice belongs to heap {slice:#x}, expected one of heap {heap:#x}: use it with the heap that allocated it"
    )]
    ForeignSlice {
        /// Id of the slice's heap.
        slice: u64,
        /// Id of the heap that the slice was used with.
        heap: u64,
    },
    /// A slice passed to `free` is only a part of its allocation.
    #[error(
        "{segment} bytes {offset}..{end} are only a part of the block {start}..{whole_end}, which is expected as a \
         whole: give back the slice that the allocation returned"
    )]
    PartOfBlock {
        /// Name of the segment.
        segment: String,
        /// First byte of the slice in the segment.
        offset: u64,
        /// End of the slice in the segment, in bytes.
        end: u64,
        /// First byte of the allocated block.
        start: u64,
        /// End of the allocated block as requested, without rounding, in bytes.
        whole_end: u64,
    },
    /// The block of a slice has been freed, or was never allocated.
    #[error(
        "{segment} bytes {offset}..{end} are not allocated (any more) to this slice: expected one that has not been \
         freed; allocate again and use the new slice"
    )]
    NotAllocated {
        /// Name of the segment.
        segment: String,
        /// First byte of the slice that was requested.
        offset: u64,
        /// End of the slice, in bytes.
        end: u64,
    },
    /// A range reaches past the end of the indexed object.
    #[error(
        "{what}: {start}..{end} is outside 0..{len}: expected an end of at most {len}; use a smaller range"
    )]
    OutOfBounds {
        /// Name of the indexed object.
        what: String,
        /// First index that was requested.
        start: u64,
        /// End of the range, one after the last index.
        end: u64,
        /// Length of the object that was indexed.
        len: u64,
    },
    /// A CPU launch has more workgroups than the heap has threads, so a workgroup could wait
    /// forever for a workgroup that cannot start.
    #[error(
        "{name}: {groups} workgroups, but the heap has {threads} threads, and none may wait for one that does not run: \
         expected at most {threads}; launch fewer, or open the heap with more (HeapOptions::threads, IRIS_THREADS)"
    )]
    TooManyGroups {
        /// Name of the kernel.
        name: String,
        /// Number of workgroups that were requested.
        groups: u32,
        /// Number of threads of the heap.
        threads: u32,
    },
    /// Enqueued work called a function that waits for enqueued work. The work would wait for its
    /// own end.
    #[error(
        "{what} from work that is enqueued on a stream, expected on a thread of the program's: it may wait for that \
         very work; move it there, or order streams by events"
    )]
    WaitFromWork {
        /// Name of the function.
        what: String,
    },
    /// Work that was enqueued on a stream panicked.
    #[error(
        "{name}{}: panicked: {message}; expected it to return: mend the panic, whose place stands on stderr",
        of_group(.group)
    )]
    Panicked {
        /// Name of the kernel, function or thread.
        name: String,
        /// Index of the workgroup, if a kernel panicked.
        group: Option<u32>,
        /// Message of the panic.
        message: String,
    },
    /// A kernel left a fault record.
    #[error(
        "{op}: {fault}{}{}{}", on_host(.fault, .host), list_standing(.fault, .standing), advice(.fault)
    )]
    Fault {
        /// Label of the operator: its name, shape and place in the program.
        op: String,
        /// Operator, call, tile, awaited rank (its number in the whole world), value seen and value
        /// expected.
        fault: iris_sync::Fault,
        /// Name of the awaited rank's host; `None` if the world has one node.
        host: Option<String>,
        /// For each rank of this node, its number in the whole world, and a text: the operator and
        /// call that the rank is in, as far as known, or the place of its matrix A if the ranks'
        /// places differ. Empty if neither can explain the fault.
        standing: Vec<(usize, String)>,
    },
    /// A kernel gave up waiting for a rank of its node, because that rank waits for another node.
    #[error(
        "{op}, call {}: this rank gave up because rank {} on host {host} waits for {node} in a step between nodes; expected \
         every node to make the same calls: see what the ranks of that node printed, and open the heap and its world anew",
        .fault.call,
        .fault.rank
    )]
    NodeSilent {
        /// Label of the operator: its name, shape and place in the program.
        op: String,
        /// Fault of the kernel; its `rank` field is the number, in the whole world, of the rank
        /// that waits for the other node.
        fault: iris_sync::Fault,
        /// Name of that rank's host.
        host: String,
        /// Awaited node with the name of its host, `node 1 (rank 3 on host b)`, or `another node` if the node
        /// is unknown.
        node: String,
    },
    /// Another rank gave up. If the reason is not known here, look for the error on that rank.
    #[error(
        "rank {rank}{} gave up{}; close the heap and its world, and open them anew",
        place(.host),
        why(*rank, .reason)
    )]
    GaveUp {
        /// Number in the whole world of the rank that gave up, or of the rank for which that rank
        /// had waited in vain.
        rank: usize,
        /// Name of the host of the rank that the field `rank` names; `None` if the world has one
        /// node.
        host: Option<String>,
        /// Error on that rank, if it is known: the error of a step between nodes, or the error
        /// because of which the rank took no part in a step between nodes.
        reason: Option<String>,
    },
    /// A collective step of the host failed after a kernel of this rank had left a fault.
    #[error("{then}; before that a kernel of this rank failed: {fault}")]
    AfterFault {
        /// Fault that the kernel left.
        fault: Box<Error>,
        /// Later error of the host, which may be only a consequence of the fault.
        then: Box<Error>,
    },
    /// Waiting kernels were stopped by an abort code.
    #[error(
        "the work was aborted before it could end: {reason} (code {code}); close the heap and its world, and open them \
         anew"
    )]
    Aborted {
        /// Value of the abort word.
        code: i32,
        /// Meaning of the abort word.
        reason: String,
    },
    /// This backend, bootstrap or platform does not support the request.
    #[error("{what} is not supported: {why}")]
    Unsupported {
        /// Name of the request.
        what: String,
        /// Reason, with an alternative if there is one.
        why: String,
    },
    /// A message from another rank could not be decoded.
    #[error(
        "broken message in {what}: {problem}; expected one of this version of iris: run the same build on all ranks"
    )]
    Wire {
        /// Exchange to which the message belongs.
        what: String,
        /// Description of the problem.
        problem: String,
    },
    /// A system call of the host failed.
    #[error("{call}: {}", explain(.error))]
    System {
        /// Name of the system call, with its object.
        call: String,
        /// Error of the operating system. Its text is part of the message, so it is not returned as
        /// `source`, which would print it twice.
        error: Arc<std::io::Error>,
    },
    /// A library that is loaded at run time is missing or unusable.
    #[error(
        "{library} could not be loaded: {problem}; expected it in {looked}: install it, or name it by its variable \
         (`iris doctor --verbose` lists both)"
    )]
    Library {
        /// Description of the library.
        library: String,
        /// Places in which the library was searched.
        looked: String,
        /// Description of the problem.
        problem: String,
    },
    /// A function of a device's driver failed.
    #[error("{api}: {name} (code {code}), expected success{}", driver_advice(*.code))]
    Device {
        /// Name of the driver function, with its object.
        api: String,
        /// Numeric code that the driver returned.
        code: u32,
        /// Name that the driver gives the code.
        name: String,
    },
    /// Error of a layer above this crate: of a function that was enqueued, or of a callback.
    #[error("{0}")]
    Other(Arc<dyn std::error::Error + Send + Sync>),
}

/// Classification of errors by what a caller can do about them. The kinds are stable, unlike the
/// variants of [`enum@Error`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The environment or an argument is wrong: correct it.
    Usage,
    /// The ranks called different functions or passed different values, as found by the hosts or by
    /// kernels: correct the program.
    Disagreement,
    /// A rank did not arrive before the deadline, at a collective call of the hosts or in a call
    /// for which a kernel waited.
    Timeout,
    /// A rank is gone: close the world and open a new one with the remaining ranks.
    PeerLost,
    /// Memory of the heap or of the device is exhausted.
    OutOfMemory,
    /// An object was used after it had been closed or freed.
    Closed,
    /// A kernel failed, was aborted, or gave up because another rank did.
    Fault,
    /// The backend or platform does not support the request.
    Unsupported,
    /// The operating system or a driver returned an error.
    System,
    /// Error of a layer above this crate.
    Other,
}

/// Name of the [`HeapOptions`](crate::HeapOptions) field that sets the size of this segment.
fn option(segment: &str) -> &'static str {
    match segment {
        "signal" => "HeapOptions::signal_bytes (the heap itself takes the first 4096 of them)",
        "device-local" => "HeapOptions::device_words",
        _ => {
            "pass all plans and a larger room to Plan::open_heap (for a communicator: comm::Options::room; for one \
             in an open heap: comm::Options::footprint), or see HeapOptions::data"
        }
    }
}

/// Advice about an environment variable with this value: set it, or correct it.
fn set(value: &str) -> &'static str {
    if value == "(not set)" { "set it" } else { "correct it, or unset it" }
}

/// Advice for an error code of the device driver; empty if there is none.
fn driver_advice(code: u32) -> &'static str {
    match code {
        2 => ": open a smaller heap, or free memory of the device",
        _ => "; `iris doctor` says which driver and devices are there",
    }
}

/// Lists in which operator and call each rank is, each text once with all of its ranks, such as `;
/// rank 0 and 2 are in X, call 3 of the heap; rank 1 is ..`. If the ranks' matrices A lie at
/// different places, lists these places instead. Adds the rule that may have been broken. Empty for
/// an empty list.
fn list_standing(fault: &iris_sync::Fault, standing: &[(usize, String)]) -> String {
    if standing.is_empty() {
        return String::new();
    }
    if fault.is_about_place() {
        return format!(
            "; A is {}; all ranks must pass it at the same offset and leading dimension, because they read it of \
             each other",
            list_values(standing)
        );
    }
    let text = |(place, ranks): (&String, Vec<usize>)| {
        let are = if ranks.len() == 1 { "is" } else { "are" };
        format!("; rank {} {are} {place}", list_ranks(&ranks))
    };
    let ranks: String = by_value(standing).into_iter().map(text).collect();
    format!("{ranks}; all ranks must issue all calls of a heap, in the same order")
}

/// Text ` on host b` after the number of a rank; empty if the world has one node.
fn place(host: &Option<String>) -> String {
    host.as_ref().map_or(String::new(), |host| format!(" on host {host}"))
}

/// Text that tells why `rank` gave up, as far as known.
fn why(rank: usize, reason: &Option<String>) -> String {
    match reason {
        Some(reason) => format!(": {reason}"),
        None => format!(
            ", or another rank gave up on it, expected to finish its calls: the error of rank {rank} says why, or that \
             of the other rank"
        ),
    }
}

/// Text that names the host of the rank that a fault is about; empty if the world has one node.
fn on_host(fault: &iris_sync::Fault, host: &Option<String>) -> String {
    host.as_ref().map_or(String::new(), |host| format!("; rank {} is on host {host}", fault.rank))
}

/// Advice on how to continue after a fault, by its kind.
fn advice(fault: &iris_sync::Fault) -> &'static str {
    match fault.kind {
        iris_sync::FaultKind::Mismatch => {
            "; give all ranks the same call, and open the heap and its world anew"
        }
        iris_sync::FaultKind::NotEntered | iris_sync::FaultKind::NoProgress => {
            "; see what that rank printed, and open the heap and its world anew"
        }
        _ => "; open the heap and its world anew",
    }
}

impl Error {
    /// Classifies the error by what a caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::Env { .. }
            | Error::Invalid { .. }
            | Error::ForeignSlice { .. }
            | Error::OutOfBounds { .. }
            | Error::PartOfBlock { .. }
            | Error::WaitFromWork { .. }
            | Error::TooManyGroups { .. }
            | Error::StillOpen { .. } => ErrorKind::Usage,
            Error::Disagreement { .. } | Error::Mismatch { .. } | Error::Order { .. } => {
                ErrorKind::Disagreement
            }
            Error::Absent { .. } | Error::NodeSilent { .. } => ErrorKind::Timeout,
            Error::PeerLost { .. }
            | Error::RankLost { .. }
            | Error::PeerAborted { .. }
            | Error::LauncherLost { .. }
            | Error::Revoked
            | Error::HubLost { .. } => ErrorKind::PeerLost,
            Error::Evicted { .. } => ErrorKind::Timeout,
            // A fault has the same kind as the host's error for the same cause, because either the
            // host or a kernel may be the first to notice the cause.
            Error::Fault { fault, .. } => match fault.kind {
                FaultKind::NotEntered | FaultKind::NoProgress => ErrorKind::Timeout,
                FaultKind::Mismatch | FaultKind::StepDiffers => ErrorKind::Disagreement,
                FaultKind::PeerLost => ErrorKind::PeerLost,
                _ => ErrorKind::Fault,
            },
            // Code 2 of a driver means out of memory, in CUDA and in HIP.
            Error::OutOfHeap { .. } | Error::OutOfMemory { .. } | Error::Device { code: 2, .. } => {
                ErrorKind::OutOfMemory
            }
            Error::Closed { .. } | Error::NotAllocated { .. } => ErrorKind::Closed,
            Error::Panicked { .. } | Error::GaveUp { .. } | Error::Aborted { .. } => {
                ErrorKind::Fault
            }
            Error::AfterFault { then, .. } => then.kind(),
            // Missing drivers count as unsupported, and so does a driver without a device: code 100
            // of CUDA and of HIP.
            Error::Unsupported { .. } | Error::Library { .. } | Error::Device { code: 100, .. } => {
                ErrorKind::Unsupported
            }
            Error::Device { .. }
            | Error::System { .. }
            | Error::Wire { .. }
            | Error::Rendezvous { .. } => ErrorKind::System,
            Error::PeerFailed { .. } | Error::Other(_) => ErrorKind::Other,
        }
    }

    /// Whether the error says that exchanges of a world have ended because a rank gave up a heap
    /// that had failed.
    pub(crate) fn is_surrender(&self) -> bool {
        match self {
            Error::AfterFault { then, .. } => then.is_surrender(),
            error => matches!(error, Error::GaveUp { .. }),
        }
    }

    /// Wraps an error of a layer above this crate.
    pub fn other(error: impl std::error::Error + Send + Sync + 'static) -> Error {
        Error::Other(Arc::new(error))
    }

    /// Adds the number of the rank whose process failed, `rank`, to an error that has no field for
    /// it, because the output of several ranks may go to one log.
    pub(crate) fn on_rank(mut self, rank: usize) -> Error {
        if let Error::System { call: at, .. } | Error::Rendezvous { place: at, .. } = &mut self {
            let named = format!(" on rank {rank}");
            if !at.ends_with(&named) {
                at.push_str(&named);
            }
        }
        self
    }

    pub(crate) fn system(call: impl Into<String>, source: impl Into<std::io::Error>) -> Error {
        Error::System { call: call.into(), error: Arc::new(source.into()) }
    }

    pub(crate) fn invalid(
        what: impl Into<String>,
        value: impl ToString,
        expected: impl Into<String>,
    ) -> Error {
        Error::Invalid { what: what.into(), value: value.to_string(), expected: expected.into() }
    }
}

/// Text `, workgroup 3` for a kernel's error; empty otherwise.
fn of_group(group: &Option<u32>) -> String {
    group.map_or(String::new(), |group| format!(", workgroup {group}"))
}

/// Lists ranks as text, such as `1, 3 and 4`.
pub(crate) fn list_ranks(ranks: &[usize]) -> String {
    list_texts(ranks.iter().map(usize::to_string).collect())
}

/// Lists texts as `a, b and c`; `none` for an empty list.
pub(crate) fn list_texts(mut texts: Vec<String>) -> String {
    match texts.pop() {
        None => "none".into(),
        Some(last) if texts.is_empty() => last,
        Some(last) => format!("{} and {last}", texts.join(", ")),
    }
}

/// Text that errors show for a value: the whole value, or the start and the length of a long value.
pub fn shortened(value: &str) -> Cow<'_, str> {
    const MOST: usize = 4096;
    if value.len() <= MOST {
        return value.into();
    }
    let start: String = value.chars().take(32).collect();
    format!("{start}.. ({} bytes)", value.len()).into()
}

/// Lists values with their ranks as text, each value once, such as `4 on rank 0, 2; 5 on rank 1`.
pub(crate) fn list_values(values: &[(usize, String)]) -> String {
    let text = |(value, ranks): (&String, Vec<usize>)| {
        format!("{} on rank {}", shortened(value), list_ranks(&ranks))
    };
    by_value(values).into_iter().map(text).collect::<Vec<_>>().join("; ")
}

/// Values in the order in which they first occur, each with its ranks.
fn by_value(values: &[(usize, String)]) -> Vec<(&String, Vec<usize>)> {
    let mut seen: Vec<(&String, Vec<usize>)> = Vec::new();
    for (rank, value) in values {
        match seen.iter_mut().find(|(v, _)| *v == value) {
            Some((_, ranks)) => ranks.push(*rank),
            None => seen.push((value, vec![*rank])),
        }
    }
    seen
}

/// Ranks whose value is not the most common one; if several values are equally common, the first
/// counts as most common.
pub(crate) fn odd_ranks(values: &[(usize, String)]) -> Vec<usize> {
    let count = |v: &String| values.iter().filter(|(_, w)| w == v).count();
    let mut common = None;
    for (_, v) in values {
        if common.is_none_or(|c| count(v) > count(c)) {
            common = Some(v);
        }
    }
    values.iter().filter(|(_, v)| Some(v) != common).map(|(rank, _)| *rank).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Text of an error followed by all its sources, as anyhow's `{:#}` prints it.
    fn chain(error: &dyn std::error::Error) -> String {
        let mut text = error.to_string();
        let mut at = error.source();
        while let Some(source) = at {
            text = format!("{text}: {source}");
            at = source.source();
        }
        text
    }

    #[test]
    fn a_source_is_said_once() {
        let missing = || std::io::Error::from(std::io::ErrorKind::NotFound);
        let system = Error::system("opening x", missing());
        let expected = format!("opening x: {}", missing());
        assert_eq!(chain(&system), expected);
        assert_eq!(chain(&Error::other(system)), expected);
    }

    #[test]
    fn values_are_listed_once_with_their_ranks() {
        let v = [(4, "4"), (5, "5"), (6, "4"), (7, "4")].map(|(rank, v)| (rank, v.to_string()));
        assert_eq!(list_values(&v), "4 on rank 4, 6 and 7; 5 on rank 5");
        assert_eq!(odd_ranks(&v), [5]);
        assert_eq!(list_ranks(&[7]), "7");
    }
}
