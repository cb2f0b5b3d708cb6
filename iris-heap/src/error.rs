//! The one error type of the crate.

use std::sync::Arc;
use std::time::Duration;

use crate::limits::explain;

/// Short for a result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong with worlds, heaps and streams. Every message names the value and what was
/// expected instead.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An environment variable has a value that means nothing.
    #[error("{variable}={value}: expected {expected}")]
    Env {
        /// Its name.
        variable: String,
        /// What it holds, or `(not set)`.
        value: String,
        /// What would be right.
        expected: String,
    },
    /// An argument is outside its range.
    #[error("{what} is {value}: expected {expected}")]
    Invalid {
        /// The argument.
        what: String,
        /// Its value.
        value: String,
        /// What would be right.
        expected: String,
    },
    /// The ranks were to give the same and did not. Nothing was changed on any rank.
    #[error("ranks disagree in {what}: {item} is {}", list_values(.values))]
    Disagreement {
        /// The collective step, with its call site.
        what: String,
        /// The first item that differs.
        item: String,
        /// The ranks that differ from the most common value.
        ranks: Vec<usize>,
        /// The item's value by rank.
        values: Vec<String>,
    },
    /// The ranks are in different collective calls. Nothing was changed on any rank.
    #[error("ranks are in different collective calls: {}", list_values(.calls))]
    Mismatch {
        /// The ranks that differ from the most common call.
        ranks: Vec<usize>,
        /// Kind, sequence number and call site by rank.
        calls: Vec<String>,
    },
    /// The ranks issue the calls of a heap in different orders. The heap takes no further calls.
    #[error(
        "ranks issue the operators of a heap in different orders: call {call} of the heap is {}; all ranks must \
         issue the calls of a heap in the same order", list_values(.operators)
    )]
    Order {
        /// Number of the first call that differs among all calls of the heap, from 1.
        call: u64,
        /// The ranks whose operator is known, and not the most common one.
        ranks: Vec<usize>,
        /// The operator of that call by rank: its name, and its number in the order of creation, from 0;
        /// `not issued yet, or long ago` for a rank of which nobody knows.
        operators: Vec<String>,
    },
    /// Some ranks did not come to a collective call before its deadline.
    #[error("{what}: waited {waited:.1?} for rank {}", list_ranks(.ranks))]
    Absent {
        /// The ranks that did not come.
        ranks: Vec<usize>,
        /// The collective call, with its call site, of the rank that gave up first.
        what: String,
        /// How long that rank waited.
        waited: Duration,
    },
    /// A rank died, or let its world go without closing it.
    #[error("rank {rank} is lost: its process or thread ended, or dropped its world unclosed")]
    PeerLost {
        /// The rank.
        rank: usize,
    },
    /// A rank of a world over several nodes died, let its world go without closing it, or cannot be reached.
    #[error(
        "rank {rank} on host {host} is lost: its process or thread ended, or dropped its world unclosed, or the \
         network to it is cut"
    )]
    RankLost {
        /// The rank.
        rank: usize,
        /// Name of its host.
        host: String,
    },
    /// A rank could not do its part of a collective step. Nothing was changed on any rank.
    #[error("rank {rank} failed in {what}: {message}")]
    PeerFailed {
        /// The rank.
        rank: usize,
        /// The collective step.
        what: String,
        /// Its error.
        message: String,
    },
    /// The process that carries the messages of this split-off world has gone.
    #[error(
        "the process that carries this world's messages, rank 0 of the launched world or of its node, is lost"
    )]
    HubLost,
    /// The processes of a job could not find each other.
    #[error("rendezvous at {place}: {problem}")]
    Rendezvous {
        /// Socket, and what its name was made from.
        place: String,
        /// What was wrong.
        problem: String,
    },
    /// The heap has no block that is large enough. No rank's state has changed.
    #[error(
        "{what}: out of {segment} memory for {name}: asked {asked} bytes, free {free}, largest \
         block {largest}, rank {rank}; the whole request needs {total} (HeapOptions::{} says how much a \
         heap has)", option(.segment)
    )]
    OutOfHeap {
        /// The collective step, with its call site.
        what: String,
        /// The part of the request that did not fit.
        name: String,
        /// Its segment.
        segment: String,
        /// The rank that has no room.
        rank: usize,
        /// Bytes asked for this part, rounded to the alignment.
        asked: u64,
        /// Bytes free.
        free: u64,
        /// Bytes of the largest free block.
        largest: u64,
        /// Bytes of all parts of the request in this segment, each rounded to the alignment.
        total: u64,
    },
    /// The world or heap was closed.
    #[error("{what} is closed")]
    Closed {
        /// Which.
        what: &'static str,
    },
    /// A world cannot close while something of it is open on some rank.
    #[error("rank {rank} still has {heaps} heaps and {worlds} split worlds open")]
    StillOpen {
        /// The first such rank.
        rank: usize,
        /// Open heaps.
        heaps: usize,
        /// Open worlds split off this one.
        worlds: usize,
    },
    /// A slice belongs to another heap.
    #[error("the slice belongs to heap {slice:#x}, not to heap {heap:#x}")]
    ForeignSlice {
        /// The slice's heap.
        slice: u64,
        /// The heap it was used with.
        heap: u64,
    },
    /// A slice was to be given back that is only a part of what was allocated.
    #[error(
        "{segment} bytes {offset}..{end} are only a part of the block {start}..{whole_end}: give \
         back the slice that the allocation returned"
    )]
    PartOfBlock {
        /// The segment.
        segment: String,
        /// First byte of the slice.
        offset: u64,
        /// Its end.
        end: u64,
        /// First byte of the block.
        start: u64,
        /// Its end, as it was asked for.
        whole_end: u64,
    },
    /// A slice's block was given back, or never was one.
    #[error("{segment} bytes {offset}..{end} are not allocated (any more) to this slice")]
    NotAllocated {
        /// The segment.
        segment: String,
        /// First byte.
        offset: u64,
        /// End.
        end: u64,
    },
    /// Something reaches past an end.
    #[error("{what}: {start}..{end} is outside 0..{len}")]
    OutOfBounds {
        /// What was indexed.
        what: String,
        /// First index.
        start: u64,
        /// End.
        end: u64,
        /// Length.
        len: u64,
    },
    /// More workgroups than threads: they could wait for each other for ever.
    #[error(
        "{name}: {groups} workgroups, but the heap has {threads} threads, and none may wait for one that does not run"
    )]
    TooManyGroups {
        /// The kernel.
        name: String,
        /// Workgroups asked for.
        groups: u32,
        /// Threads there are.
        threads: u32,
    },
    /// Enqueued work asked for what waits for enqueued work: for itself, perhaps.
    #[error(
        "{what} from work that is enqueued on a stream: it may wait for that very work; do it on a \
         thread of the program's, or order streams by events"
    )]
    WaitFromWork {
        /// The call.
        what: String,
    },
    /// Enqueued work panicked.
    #[error("{name}{}: panicked: {message}", of_group(.group))]
    Panicked {
        /// The kernel, function or thread.
        name: String,
        /// The workgroup, of a kernel.
        group: Option<u32>,
        /// The panic's message.
        message: String,
    },
    /// A kernel left a fault record.
    #[error("{op}: {fault}{}", about_hashes(.fault))]
    Fault {
        /// The name of the op.
        op: &'static str,
        /// Op, call, tile, awaited rank, the value seen and the value wanted.
        fault: iris_sync::Fault,
    },
    /// Another rank gave up; its own error says why.
    #[error("rank {rank} gave up: its own error says why")]
    GaveUp {
        /// The rank.
        rank: usize,
    },
    /// A step of the host failed after a kernel of this rank had.
    #[error("{then}; before that a kernel of this rank failed: {fault}")]
    AfterFault {
        /// What the kernel left.
        fault: Box<Error>,
        /// What the host met later, which may be no more than the consequence.
        then: Box<Error>,
    },
    /// Waiting kernels were told to leave.
    #[error("the work was aborted: {reason} (code {code})")]
    Aborted {
        /// The value of the abort word.
        code: i32,
        /// The same in words.
        reason: String,
    },
    /// This backend, bootstrap or platform cannot do it.
    #[error("{what} is not supported: {why}")]
    Unsupported {
        /// The request.
        what: String,
        /// The reason, with what to do instead.
        why: String,
    },
    /// A message of another rank could not be read.
    #[error("broken message in {what}: {problem}")]
    Wire {
        /// The exchange.
        what: String,
        /// What was wrong.
        problem: String,
    },
    /// A system call failed.
    #[error("{call}: {}", explain(.error))]
    System {
        /// The call, with its object.
        call: String,
        /// The system's error. It is part of the message, and so no source, which is printed again.
        error: Arc<std::io::Error>,
    },
    /// A library that is loaded at run time is missing or cannot be used.
    #[error("{library} could not be loaded: {problem}; looked for it in {looked}")]
    Library {
        /// Its name, and what it is.
        library: String,
        /// Where it was looked for.
        looked: String,
        /// What was wrong.
        problem: String,
    },
    /// A call of a device's driver failed.
    #[error("{api}: {name} (code {code})")]
    Device {
        /// The function, with what it was about.
        api: String,
        /// The driver's code.
        code: u32,
        /// The driver's name of the code.
        name: String,
    },
    /// Something a layer above enqueued or hooked in failed.
    #[error("{0}")]
    Other(Arc<dyn std::error::Error + Send + Sync>),
}

/// Errors by what a caller can do about them. Stable, unlike the variants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The environment or an argument is wrong: correct it.
    Usage,
    /// The ranks do not do the same: correct the program.
    Disagreement,
    /// A rank did not come in time.
    Timeout,
    /// A rank is gone: close the world and open a new one with those that are left.
    PeerLost,
    /// No room.
    OutOfMemory,
    /// Used after it was closed or given back.
    Closed,
    /// A kernel failed.
    Fault,
    /// Not offered here.
    Unsupported,
    /// The system refused.
    System,
    /// From another layer.
    Other,
}

/// The option of a heap that says how large this segment is.
fn option(segment: &str) -> &'static str {
    match segment {
        "signal" => "signal_bytes",
        "device-local" => "device_words",
        _ => "data_bytes",
    }
}

impl Error {
    /// What a caller can do about it.
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
            Error::Absent { .. } => ErrorKind::Timeout,
            Error::PeerLost { .. } | Error::RankLost { .. } | Error::HubLost => ErrorKind::PeerLost,
            // The code is the same in the drivers of CUDA and HIP.
            Error::OutOfHeap { .. } | Error::Device { code: 2, .. } => ErrorKind::OutOfMemory,
            Error::Closed { .. } | Error::NotAllocated { .. } => ErrorKind::Closed,
            Error::Panicked { .. }
            | Error::Fault { .. }
            | Error::GaveUp { .. }
            | Error::Aborted { .. } => ErrorKind::Fault,
            Error::AfterFault { then, .. } => then.kind(),
            // There is no driver; or there is one, of CUDA or HIP alike, and no device.
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

    /// Wraps an error of another layer.
    pub fn other(error: impl std::error::Error + Send + Sync + 'static) -> Error {
        Error::Other(Arc::new(error))
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

/// `, workgroup 3`, of a kernel.
fn of_group(group: &Option<u32>) -> String {
    group.map_or(String::new(), |group| format!(", workgroup {group}"))
}

/// What the two numbers of a mismatch are where they are hashes. Of all that is hashed only the place
/// of a matrix can still differ in a call: the rest was compared by name when the op was made.
fn about_hashes(fault: &iris_sync::Fault) -> &'static str {
    match fault.differing() {
        Some(iris_sync::Field::Config) => {
            "; these are hashes: A lies at another offset of the heap, or has another leading \
             dimension, on one of the two ranks than on the other, which reads it there"
        }
        _ => "",
    }
}

/// `1, 3 and 4`
pub(crate) fn list_ranks(ranks: &[usize]) -> String {
    let mut texts: Vec<String> = ranks.iter().map(usize::to_string).collect();
    match texts.pop() {
        None => "none".into(),
        Some(last) if texts.is_empty() => last,
        Some(last) => format!("{} and {last}", texts.join(", ")),
    }
}

/// `4 on rank 0, 2; 5 on rank 1`: each value once.
fn list_values(values: &[String]) -> String {
    let mut seen: Vec<(&String, Vec<usize>)> = Vec::new();
    for (rank, value) in values.iter().enumerate() {
        match seen.iter_mut().find(|(v, _)| *v == value) {
            Some((_, ranks)) => ranks.push(rank),
            None => seen.push((value, vec![rank])),
        }
    }
    seen.into_iter()
        .map(|(value, ranks)| format!("{value} on rank {}", list_ranks(&ranks)))
        .collect::<Vec<_>>()
        .join("; ")
}

/// The ranks whose value is not the most common one (of several, the first).
pub(crate) fn odd_ranks(values: &[String]) -> Vec<usize> {
    let count = |v: &String| values.iter().filter(|w| *w == v).count();
    let mut common = None;
    for v in values {
        if common.is_none_or(|c| count(v) > count(c)) {
            common = Some(v);
        }
    }
    (0..values.len()).filter(|&r| Some(&values[r]) != common).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As `{:#}` of anyhow prints it.
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
        let v = ["4", "5", "4", "4"].map(String::from);
        assert_eq!(list_values(&v), "4 on rank 0, 2 and 3; 5 on rank 1");
        assert_eq!(odd_ranks(&v), [1]);
        assert_eq!(list_ranks(&[7]), "7");
    }
}
