//! Error type of the crate.

use std::sync::Arc;
use std::time::Duration;

use crate::limits::explain;

/// Result with this crate's [`enum@Error`] as its default error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Error of a world, a heap or a stream. Every message names the value and what was expected
/// instead.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An environment variable has an invalid value.
    #[error("{variable}={value}: expected {expected}")]
    Env {
        /// Name of the variable.
        variable: String,
        /// Value of the variable, or `(not set)`.
        value: String,
        /// Description of a valid value.
        expected: String,
    },
    /// An argument is outside its range.
    #[error("{what} is {value}: expected {expected}")]
    Invalid {
        /// Name of the argument.
        what: String,
        /// Value of the argument.
        value: String,
        /// Description of a valid value.
        expected: String,
    },
    /// The ranks passed different values to a collective call that needs equal ones. Nothing was
    /// changed on any rank.
    #[error("ranks disagree in {what}: {item} is {}", list_values(.values))]
    Disagreement {
        /// Collective step, with its call site.
        what: String,
        /// First item that differs.
        item: String,
        /// Ranks whose value is not the most common one.
        ranks: Vec<usize>,
        /// Value of the item, by rank.
        values: Vec<String>,
    },
    /// The ranks are in different collective calls. Nothing was changed on any rank.
    #[error("ranks are in different collective calls: {}", list_values(.calls))]
    Mismatch {
        /// Ranks whose call is not the most common one.
        ranks: Vec<usize>,
        /// Kind, sequence number and call site, by rank.
        calls: Vec<String>,
    },
    /// The ranks issue the calls of a heap in different orders. The heap takes no further calls.
    #[error(
        "ranks issue the operators of a heap in different orders: call {call} of the heap is {}; all ranks must \
         issue the calls of a heap in the same order", list_values(.operators)
    )]
    Order {
        /// Number, from 1 among all calls of the heap, of the first call that differs.
        call: u64,
        /// Ranks whose operator is known and is not the most common one.
        ranks: Vec<usize>,
        /// Operator of that call, by rank: its name and its id (its number in the order of
        /// creation, from 0), or `not issued yet, or long ago` if the rank's board does not hold
        /// the call.
        operators: Vec<String>,
    },
    /// Some ranks did not arrive at a collective call before its deadline.
    #[error("{what}: waited {waited:.1?} for rank {}", list_ranks(.ranks))]
    Absent {
        /// Ranks that did not arrive.
        ranks: Vec<usize>,
        /// Collective call, with its call site, of the rank that gave up first.
        what: String,
        /// Time that this rank waited.
        waited: Duration,
    },
    /// A rank died, or dropped its world without closing it.
    #[error("rank {rank} is lost: its process or thread ended, or dropped its world unclosed")]
    PeerLost {
        /// Number of the lost rank.
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
    /// A rank failed in its part of a collective step. Nothing was changed on any rank.
    #[error("rank {rank} failed in {what}: {message}")]
    PeerFailed {
        /// Number of the failed rank.
        rank: usize,
        /// Collective step.
        what: String,
        /// Text of that rank's error.
        message: String,
    },
    /// The process that carries the messages of this split-off world has ended.
    #[error(
        "the process that carries this world's messages, rank 0 of the launched world or of its node, is lost"
    )]
    HubLost,
    /// The processes of a job could not find each other.
    #[error("rendezvous at {place}: {problem}")]
    Rendezvous {
        /// Path of the socket, and the job identity that its name was made from.
        place: String,
        /// Description of the problem.
        problem: String,
    },
    /// The heap has no free block that is large enough. Nothing was changed on any rank.
    #[error(
        "{what}: out of {segment} memory for {name}: asked {asked} bytes, free {free}, largest \
         block {largest}, rank {rank}; the whole request needs {total} (HeapOptions::{} says how much a \
         heap has)", option(.segment)
    )]
    OutOfHeap {
        /// Collective step, with its call site.
        what: String,
        /// Name of the part of the request that did not fit.
        name: String,
        /// Name of its segment.
        segment: String,
        /// Rank whose segment is full.
        rank: usize,
        /// Bytes requested for this part, rounded up to the alignment.
        asked: u64,
        /// Free bytes in the segment.
        free: u64,
        /// Size of the largest free block in bytes.
        largest: u64,
        /// Bytes of all parts of the request in this segment, each rounded up to the alignment.
        total: u64,
    },
    /// The world or heap has been closed.
    #[error("{what} is closed")]
    Closed {
        /// Name of the closed object.
        what: &'static str,
    },
    /// A world cannot close while some rank still has a heap or a split-off world of it open.
    #[error("rank {rank} still has {heaps} heaps and {worlds} split worlds open")]
    StillOpen {
        /// First rank with open objects.
        rank: usize,
        /// Number of open heaps.
        heaps: usize,
        /// Number of open worlds that were split off this one.
        worlds: usize,
    },
    /// A slice was used with another heap than its own.
    #[error("the slice belongs to heap {slice:#x}, not to heap {heap:#x}")]
    ForeignSlice {
        /// Id of the slice's heap.
        slice: u64,
        /// Id of the heap that it was used with.
        heap: u64,
    },
    /// A slice passed to `free` is only a part of its allocation.
    #[error(
        "{segment} bytes {offset}..{end} are only a part of the block {start}..{whole_end}: give \
         back the slice that the allocation returned"
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
    /// The block of a slice has been freed, or never was allocated.
    #[error("{segment} bytes {offset}..{end} are not allocated (any more) to this slice")]
    NotAllocated {
        /// Name of the segment.
        segment: String,
        /// First byte of the slice.
        offset: u64,
        /// End of the slice, in bytes.
        end: u64,
    },
    /// A range reaches past the end.
    #[error("{what}: {start}..{end} is outside 0..{len}")]
    OutOfBounds {
        /// Name of the indexed object.
        what: String,
        /// First index.
        start: u64,
        /// End of the range.
        end: u64,
        /// Length of the object.
        len: u64,
    },
    /// A CPU launch has more workgroups than the heap has threads; waiting workgroups could
    /// deadlock.
    #[error(
        "{name}: {groups} workgroups, but the heap has {threads} threads: workgroups that wait for each other must all run at once"
    )]
    TooManyGroups {
        /// Name of the kernel.
        name: String,
        /// Number of workgroups requested.
        groups: u32,
        /// Number of threads of the heap.
        threads: u32,
    },
    /// A function that may wait for enqueued work was called from enqueued work; it could wait for
    /// itself.
    #[error(
        "{what} was called from enqueued work and could wait for that work itself: call it on a \
         thread of the program's, or order streams by events"
    )]
    WaitFromWork {
        /// Name of the function.
        what: String,
    },
    /// Enqueued work panicked.
    #[error("{name}{}: panicked: {message}", of_group(.group))]
    Panicked {
        /// Name of the kernel, function or thread.
        name: String,
        /// Index of the workgroup, if a kernel panicked.
        group: Option<u32>,
        /// Message of the panic.
        message: String,
    },
    /// A kernel left a fault record.
    #[error("{op}: {fault}{}", about_hashes(.fault))]
    Fault {
        /// Name of the op.
        op: &'static str,
        /// Fault record: op, call, tile, awaited rank, the value seen and the value wanted.
        fault: iris_sync::Fault,
    },
    /// Another rank gave up; its own error has the reason.
    #[error("rank {rank} gave up: its own error says why")]
    GaveUp {
        /// Number of the rank that gave up.
        rank: usize,
    },
    /// A step of the host failed after a kernel of this rank had failed.
    #[error("{then}; before that a kernel of this rank failed: {fault}")]
    AfterFault {
        /// Fault that the kernel left.
        fault: Box<Error>,
        /// Later error of the host, which may be only a consequence of the fault.
        then: Box<Error>,
    },
    /// Waiting kernels were told to leave.
    #[error("the work was aborted: {reason} (code {code})")]
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
        /// Reason, with an alternative.
        why: String,
    },
    /// A message from another rank could not be decoded.
    #[error("broken message in {what}: {problem}")]
    Wire {
        /// Exchange to which the message belongs.
        what: String,
        /// Description of the problem.
        problem: String,
    },
    /// A system call failed.
    #[error("{call}: {}", explain(.error))]
    System {
        /// Name of the system call, with its object.
        call: String,
        /// The system's error. Its text is part of the message, so it is not returned as `source`,
        /// which would print it twice.
        error: Arc<std::io::Error>,
    },
    /// A library that is loaded at run time is missing or unusable.
    #[error("{library} could not be loaded: {problem}; looked for it in {looked}")]
    Library {
        /// Description of the library.
        library: String,
        /// Places that were searched.
        looked: String,
        /// Description of the problem.
        problem: String,
    },
    /// A function of a device's driver failed.
    #[error("{api}: {name} (code {code})")]
    Device {
        /// Name of the function, with its object.
        api: String,
        /// Numeric code that the driver returned.
        code: u32,
        /// The driver's name of the code.
        name: String,
    },
    /// Error of a layer above: of enqueued work or of a hook.
    #[error("{0}")]
    Other(Arc<dyn std::error::Error + Send + Sync>),
}

/// Classification of errors by what a caller can do about them. Stable, unlike the variants of
/// [`enum@Error`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The environment or an argument is wrong: correct it.
    Usage,
    /// The ranks called different functions or passed different values: correct the program.
    Disagreement,
    /// A rank did not arrive in time.
    Timeout,
    /// A rank is gone: close the world and open a new one with the remaining ranks.
    PeerLost,
    /// Out of memory.
    OutOfMemory,
    /// An object was used after it was closed or freed.
    Closed,
    /// A kernel failed.
    Fault,
    /// Not supported on this backend or platform.
    Unsupported,
    /// The operating system or a driver returned an error.
    System,
    /// Error of another layer.
    Other,
}

/// Name of the [`HeapOptions`](crate::HeapOptions) field that sets the size of this segment.
fn option(segment: &str) -> &'static str {
    match segment {
        "signal" => "signal_bytes",
        "device-local" => "device_words",
        _ => "data_bytes",
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
            Error::Absent { .. } => ErrorKind::Timeout,
            Error::PeerLost { .. } | Error::RankLost { .. } | Error::HubLost => ErrorKind::PeerLost,
            // Code 2 means out of memory in the drivers of both CUDA and HIP.
            Error::OutOfHeap { .. } | Error::Device { code: 2, .. } => ErrorKind::OutOfMemory,
            Error::Closed { .. } | Error::NotAllocated { .. } => ErrorKind::Closed,
            Error::Panicked { .. }
            | Error::Fault { .. }
            | Error::GaveUp { .. }
            | Error::Aborted { .. } => ErrorKind::Fault,
            Error::AfterFault { then, .. } => then.kind(),
            // No driver; or, code 100 in both CUDA and HIP, a driver without a device.
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

    /// Wraps the error of another layer.
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

/// Text `, workgroup 3` for a kernel's error; empty otherwise.
fn of_group(group: &Option<u32>) -> String {
    group.map_or(String::new(), |group| format!(", workgroup {group}"))
}

/// Explanation for a mismatch whose two numbers are hashes. Only the placement of a matrix can
/// still differ in a call: everything else in the hash was compared by name when the op was made.
fn about_hashes(fault: &iris_sync::Fault) -> &'static str {
    match fault.differing() {
        Some(iris_sync::Field::Config) => {
            "; these are hashes: A lies at another offset of the heap, or has another leading \
             dimension, on one of the two ranks than on the other, which reads it there"
        }
        _ => "",
    }
}

/// Text such as `1, 3 and 4`.
pub(crate) fn list_ranks(ranks: &[usize]) -> String {
    let mut texts: Vec<String> = ranks.iter().map(usize::to_string).collect();
    match texts.pop() {
        None => "none".into(),
        Some(last) if texts.is_empty() => last,
        Some(last) => format!("{} and {last}", texts.join(", ")),
    }
}

/// Text such as `4 on rank 0, 2; 5 on rank 1`: each value once, with its ranks.
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

/// Ranks whose value is not the most common one; if several are equally common, the first one
/// counts as common.
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

    /// Text as anyhow's `{:#}` prints it: the error and all its sources.
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
