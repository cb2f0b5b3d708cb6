//! Control block of a heap, as the host accesses it ([`ControlBlock`](crate::abi::ControlBlock)):
//! an abort word, which tells kernels to stop, and a fault record, which tells why a kernel gave
//! up.
//!
//! This file is long because each state of the control block has words, abort codes and an error.

mod progress;
#[cfg(test)]
mod tests;
mod waits;

pub use waits::NodeEngine;

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use iris_sync::FaultKind;
pub(crate) use progress::await_reason;
#[cfg(test)]
pub(crate) use progress::tests::waits_for_rank_1;

use crate::abi::{FAULT_WORDS, MAX_RANKS, PASSED, SEEN, abort};
use crate::bootstrap::ProcessId;
use crate::error::{Error, ErrorKind, Result, list_values, odd_ranks};
use crate::issue_board::{Behind, Boards, Difference};
use crate::root_error::{self, ReturnedErrors};
use crate::util::{Maker, lock, unsupported};

const WORDS: usize = 2 + FAULT_WORDS;

/// Abort word (tells kernels to stop) and fault record (why a kernel gave up) of one rank's heap.
///
/// On the CPU the block lies in the process's memory, on a GPU in pinned host memory. Heap, streams
/// and enqueued work hold it by `Arc`, so it outlives every access.
#[derive(Debug)]
pub struct Control {
    words: Words,
    process: Maker,
    /// Names of the heap's operators, indexed by id, for errors; kernels know only the ids.
    ops: Mutex<Vec<Arc<str>>>,
    /// Whether the fault has been returned to the program. If not, closing the heap returns the
    /// fault.
    fault_returned: AtomicBool,
    /// Log of the errors that the program has received, shared with this rank's world.
    errors: OnceLock<Arc<ReturnedErrors>>,
    /// Issue boards (logs of issued calls) of all ranks, set when the heap has been opened; unset
    /// in a world of one rank.
    boards: OnceLock<Boards>,
    /// Error about the first difference between ranks in the order of calls, set when the
    /// difference is found.
    disorder: OnceLock<Error>,
    /// Error that ended this node's calls: an error of another node, or of an exchange of data with
    /// it.
    elsewhere: OnceLock<Error>,
    /// Error that ended the exchanges of this heap's world for this rank.
    cut_off: OnceLock<Error>,
    /// Names of the nodes for errors, and the index of this rank's node; set if the heap's world has
    /// several.
    nodes: OnceLock<(Vec<String>, usize)>,
    /// Process of each rank of this node; `None` for a thread of this process.
    processes: OnceLock<Vec<Option<ProcessId>>>,
    /// Name of the other node for which the rank named in this rank's fault record was waiting when
    /// the record was first read. `None` if that rank was in no step between nodes.
    awaited_node: OnceLock<Option<String>>,
    /// Start times of the waits for enqueued work that host threads are in now.
    waits: Mutex<Vec<Instant>>,
    /// Engine that runs the steps between nodes, if they run on streams of a GPU (such as NCCL).
    engine: OnceLock<Arc<dyn NodeEngine>>,
    /// Lock held while the program launches a graph, which may use the engine, and while the
    /// engine's steps are being ended.
    launching: Mutex<()>,
    /// Test hook: number of CPU launches that succeed before one fails; `u32::MAX`: none fails.
    launches_left: AtomicU32,
}

/// Words of a `ControlBlock`, aligned to 128 bytes because every waiting workgroup reads them.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct Line([AtomicI32; WORDS]);

/// Storage of a control block's words: memory of the process (CPU), or pinned host memory (GPU).
#[derive(Debug)]
enum Words {
    Own(Box<Line>),
    Pinned(PinnedLine),
}

/// Pinned host memory, aligned like [`Line`], that holds a control block.
#[derive(Debug)]
pub(crate) struct PinnedLine {
    line: &'static Line,
    /// Address of `line` in the device's address space, for kernels.
    pub(crate) address: u64,
    /// Guard that returns the pinned memory to its pool on drop.
    _lease: Box<dyn Any + Send + Sync>,
}

impl PinnedLine {
    pub(crate) fn new(line: &'static Line, lease: Box<dyn Any + Send + Sync>) -> PinnedLine {
        PinnedLine { line, address: 0, _lease: lease }
    }

    /// Sets all words to zero.
    pub(crate) fn clear(&mut self) {
        for word in &self.line.0 {
            word.store(0, Ordering::Relaxed);
        }
    }
}

impl Default for Control {
    fn default() -> Self {
        Control::over(Words::Own(Box::new(Line([const { AtomicI32::new(0) }; WORDS]))))
    }
}

impl Control {
    pub(crate) fn pinned(line: PinnedLine) -> Control {
        Control::over(Words::Pinned(line))
    }

    fn over(words: Words) -> Control {
        Control {
            words,
            process: Maker::this(),
            ops: Mutex::default(),
            fault_returned: AtomicBool::new(false),
            errors: OnceLock::new(),
            boards: OnceLock::new(),
            disorder: OnceLock::new(),
            elsewhere: OnceLock::new(),
            cut_off: OnceLock::new(),
            nodes: OnceLock::new(),
            processes: OnceLock::new(),
            awaited_node: OnceLock::new(),
            waits: Mutex::default(),
            engine: OnceLock::new(),
            launching: Mutex::default(),
            launches_left: AtomicU32::new(u32::MAX),
        }
    }

    /// Checks that this process made the heap and is not a forked child of that process.
    pub(crate) fn check_process(&self, what: &str) -> Result<()> {
        self.process.check(what)
    }

    /// Address of the control block in the address space of kernels.
    pub fn address(&self) -> u64 {
        match &self.words {
            Words::Own(line) => line.0.as_ptr() as u64,
            Words::Pinned(line) => line.address,
        }
    }

    fn words(&self) -> &[AtomicI32; WORDS] {
        match &self.words {
            Words::Own(line) => &line.0,
            Words::Pinned(line) => &line.line.0,
        }
    }

    /// Tells all kernels of this rank to stop, for a reason listed in [`abort`]. A reason of 0, and
    /// any reason after the first one, has no effect.
    pub fn set_host_abort(&self, reason: i32) {
        // The release order lets a kernel that reads the abort word also see the host's earlier
        // writes.
        let _ = self.words()[0].compare_exchange(0, reason, Ordering::Release, Ordering::Relaxed);
    }

    /// Tells every waiting kernel of this rank to stop because another node failed. From then on
    /// [`Control::check`] returns `error`; later calls do not replace the first error. Peers on
    /// this node that stop because this rank gave up return an error with the same text, unless
    /// `error` is the loss of a rank.
    pub fn fail_elsewhere(&self, error: Error) {
        let is_loss = error.kind() == ErrorKind::PeerLost;
        let text = error.to_string();
        if self.elsewhere.set(error).is_ok()
            && !is_loss
            && let Some(Err(error)) = self.boards().map(|boards| boards.set_reason(&text))
        {
            tracing::debug!(%error, "the failure of another node is not told to other ranks");
        }
        self.set_host_abort(if is_loss { abort::WORLD_LOST } else { abort::ELSEWHERE });
    }

    /// Tells every waiting kernel of this rank to stop because of the world's error `error`. `lost`
    /// is the lost rank of this node; `None` if the error names no rank of this node.
    /// [`Control::check`] returns `error`, unless the kernels were told to stop before, or a kernel
    /// has left a fault that `error` does not explain. Kernels pass the code of a loss on to peers,
    /// so that all ranks return errors of one kind, however they learn of the loss.
    pub(crate) fn lose(&self, lost: Option<usize>, error: Error) {
        let code = match lost {
            Some(rank) => loss_code(rank),
            None if matches!(error, Error::Revoked) => abort::REVOKED,
            None if error.kind() == ErrorKind::PeerLost => abort::WORLD_LOST,
            None => abort::HUB_LOST,
        };
        // The error is stored if it names no lost rank of this node. A lost rank of this node is
        // stored only in a world of one node: with several nodes, the connection of all ranks tells
        // which rank was lost first. It is not stored either if it is this rank itself, which has
        // left its world.
        if lost.is_none_or(|_| self.nodes.get().is_none() && lost != self.own_rank()) {
            let _ = self.cut_off.set(error);
        }
        self.set_host_abort(code);
    }

    /// Tells every waiting kernel of this rank to stop because this rank leaves its world. The
    /// kernels tell peers that this rank is lost, and so does the world of this rank.
    pub(crate) fn leave(&self) {
        self.set_host_abort(self.own_rank().map_or(abort::USER, loss_code));
    }

    /// Reason for which this rank's kernels were told to stop: the code of [`Control::host_abort`].
    /// A code that names this rank itself as lost was stored by [`Control::leave`], and counts as
    /// [`abort::USER`].
    fn reason(&self) -> i32 {
        match self.host_abort() {
            code if lost_rank(code).is_some() && lost_rank(code) == self.own_rank() => abort::USER,
            code => code,
        }
    }

    /// Number of this rank on its node; `None` in a world of one rank.
    fn own_rank(&self) -> Option<usize> {
        self.boards().map(Boards::rank)
    }

    /// Abort word by which this rank, number `own` on its node, tells peers that it takes part in no
    /// further call: the code of the loss if a loss is the reason, otherwise 1 + `own`.
    pub(crate) fn word_for_peers(&self, own: usize) -> i32 {
        match self.host_abort() {
            code @ abort::PEER_LOST..=abort::REVOKED => code,
            _ => own as i32 + 1,
        }
    }

    /// Converts the abort word `word` of this rank into an error for peers; `None` if the word
    /// names no rank of this node and is not [`abort::REVOKED`]. `number` converts a rank's number on this node into the number
    /// that the error shows.
    pub(crate) fn error_of_word(
        &self,
        word: i32,
        number: impl Fn(usize) -> usize,
    ) -> Option<Error> {
        if word == abort::REVOKED {
            return Some(Error::Revoked);
        }
        let of_node = |rank: &usize| *rank < self.boards().map_or(1, Boards::ranks);
        let lost = lost_rank(word).filter(|&rank| self.own_rank() != Some(rank));
        if let Some(rank) = lost.filter(of_node) {
            return Some(Error::PeerLost { rank: number(rank) });
        }
        let named = usize::try_from(i64::from(word) - 1).ok().filter(of_node)?;
        let reason = self.reason_of(named);
        Some(Error::GaveUp { rank: number(named), host: None, reason })
    }

    /// Error for the value `word` that a peer has stored into this rank's abort word.
    pub(crate) fn told_by_peer(&self, word: i32) -> Error {
        match self.error_of_word(word, |rank| rank) {
            Some(Error::GaveUp { rank, .. }) => self.gave_up(rank),
            Some(Error::PeerLost { rank }) => self.loss(rank),
            Some(error) => error,
            _ if word == abort::WORLD_LOST => self.world_loss(),
            _ => {
                let reason = "the abort word names no rank of this world".into();
                Error::Aborted { code: word, reason }
            }
        }
    }

    /// Abort reason that [`Control::set_host_abort`] has stored; 0 if there is none.
    pub fn host_abort(&self) -> i32 {
        self.words()[0].load(Ordering::Acquire)
    }

    /// First fault record that a kernel has completed; `None` if there is none.
    pub fn fault(&self) -> Option<[i32; FAULT_WORDS]> {
        // The acquire pairs with the release store of 2 by which a writer completes the record.
        (self.words()[1].load(Ordering::Acquire) == 2)
            .then(|| std::array::from_fn(|i| self.words()[2 + i].load(Ordering::Relaxed)))
    }

    /// Writes a fault record, as a kernel does. Returns false if there is a record already.
    pub fn record_fault(&self, words: &[i32; FAULT_WORDS]) -> bool {
        let claim = &self.words()[1];
        if claim.compare_exchange(0, 1, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            return false;
        }
        for (to, &word) in self.words()[2..].iter().zip(words) {
            to.store(word, Ordering::Relaxed);
        }
        claim.store(2, Ordering::Release);
        true
    }

    /// Test hook for deadlines on the CPU backend: adds `time` to the age of all waits of this
    /// rank's kernels that are in progress. Later waits are not affected.
    #[doc(hidden)]
    pub fn advance_test_clock(&self, time: std::time::Duration) {
        let millis = i32::try_from(time.as_millis()).unwrap_or(i32::MAX);
        self.words()[PASSED / 4].fetch_add(millis, Ordering::Relaxed);
    }

    /// Test hook for deadlines on the CPU backend: whether a waiting kernel has read the time added
    /// by [`Control::advance_test_clock`].
    #[doc(hidden)]
    pub fn has_seen_time_pass(&self) -> bool {
        let word = |at: usize| self.words()[at / 4].load(Ordering::Relaxed);
        word(SEEN) == word(PASSED)
    }

    /// Test hook for calls that fail in the middle: `count` more CPU launches succeed, and the next
    /// one fails.
    #[doc(hidden)]
    pub fn fail_launch_after(&self, count: u32) {
        self.launches_left.store(count, Ordering::Relaxed);
    }

    /// Counts a launch on the CPU backend; fails if [`Control::fail_launch_after`] has chosen this
    /// launch.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if a test has asked that this launch fail.
    pub(crate) fn count_launch(&self, name: &'static str) -> Result<()> {
        let left = &self.launches_left;
        let next =
            |count: u32| (count != u32::MAX).then(|| count.checked_sub(1).unwrap_or(u32::MAX));
        match left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next) {
            Ok(0) => Err(unsupported(name, "a test lets this launch fail")),
            _ => Ok(()),
        }
    }

    /// Registers an op called `name` and returns its id. Ids are equal on all ranks if all ranks
    /// make their ops in the same order.
    pub fn name_op(&self, name: impl Into<Arc<str>>) -> u32 {
        let mut ops = lock(&self.ops);
        ops.push(name.into());
        ops.len() as u32 - 1
    }

    fn op_name(&self, id: i32) -> Arc<str> {
        let ops = lock(&self.ops);
        let name = usize::try_from(id).ok().and_then(|id| ops.get(id).cloned());
        let number = |boards: &Boards| self.in_whole_world(boards.rank()).0;
        let rank = self.boards().map(|boards| format!("rank {}", number(boards)));
        let rank = rank.unwrap_or_else(|| "this rank".into());
        name.unwrap_or_else(|| format!("an operator that {rank} has not made").into())
    }

    /// Text for an operator in an error or a notice: its name, and its id in parentheses.
    fn describe(&self, operator: u32) -> String {
        format!("{} (operator {operator})", self.op_name(operator as i32))
    }

    /// Sets the log in which this rank records the errors returned to its program.
    pub(crate) fn note_errors(&self, errors: &Arc<ReturnedErrors>) {
        let _ = self.errors.set(errors.clone());
    }

    /// Sets the issue boards of all ranks; called once, when the heap has been opened.
    pub(crate) fn set_boards(&self, boards: Boards) {
        let _ = self.boards.set(boards);
    }

    /// Issue boards of all ranks; `None` in a world of one rank.
    pub(crate) fn boards(&self) -> Option<&Boards> {
        self.boards.get()
    }

    /// Error about the first call for which the ranks issued different operators; `None` if there
    /// is no such call.
    pub(crate) fn disorder(&self) -> Option<Error> {
        if let Some(found) = self.disorder.get() {
            return Some(found.clone());
        }
        let Difference { call, operators } = self.boards()?.difference().ok()??;
        let name = |operator: &Option<u32>| match operator {
            Some(operator) => self.describe(*operator),
            None => "not issued yet, or long ago".into(),
        };
        let names = self.numbered(operators.iter().map(name));
        // Blame no rank whose operator for this call is not known.
        let known = names.iter().zip(&operators).filter(|(_, operator)| operator.is_some());
        let known: Vec<usize> = known.map(|((rank, _), _)| *rank).collect();
        let ranks = odd_ranks(&names).into_iter().filter(|rank| known.contains(rank)).collect();
        let error = Error::Order { call, ranks, operators: names };
        Some(self.disorder.get_or_init(|| error).clone())
    }

    /// Ranks that this rank waits for, and a text that names the call that they have not issued;
    /// `None` if this rank has issued no call.
    pub(crate) fn awaited(&self) -> Option<(Vec<usize>, String)> {
        let Behind { call, operator, ranks } = self.boards()?.behind().ok()??;
        let name = operator.map_or("an operator".into(), |operator| self.describe(operator));
        Some((ranks, format!("call {call} of the heap, {name}")))
    }

    /// Records that this rank's host has seen the heap's first `calls` calls end.
    pub(crate) fn complete(&self, calls: u64) {
        if let Some(boards) = self.boards()
            && let Err(error) = boards.complete(calls)
        {
            tracing::debug!(%error, "the end of a call is not told to other ranks");
        }
    }

    /// Text that names, for each rank, the last call that its host has seen end.
    pub(crate) fn completed(&self) -> String {
        let all = self.boards().and_then(|boards| boards.completed().ok()).unwrap_or_default();
        let text = |calls: &u64| match calls {
            0 => "no call".to_string(),
            calls => format!("call {calls}"),
        };
        let texts = self.numbered(all.iter().map(text));
        format!("last call seen to end: {}", list_values(&texts))
    }

    /// Returns the fault or abort of this heap as an error, if there is one. The error counts as
    /// returned to the program, so closing the heap does not return it again.
    ///
    /// # Errors
    /// [`Error::Order`], [`Error::PeerLost`], [`Error::HubLost`] or another error of the world,
    /// [`Error::Closed`], [`Error::Fault`] or [`Error::Aborted`].
    pub fn check(&self) -> Result<()> {
        self.attend();
        self.check_without_engine()
    }

    /// Does [`Control::check`] without polling the engine that runs the steps between nodes.
    pub(crate) fn check_without_engine(&self) -> Result<()> {
        self.outcome().inspect_err(|error| {
            self.fault_returned.store(true, Ordering::Relaxed);
            self.note_returned(error);
        })
    }

    /// Returns the error of [`Control::check`] only if results of calls may be undefined; does not
    /// poll the engine between nodes. After the loss of a peer or a close of the heap, results are
    /// defined if there is no fault, because a kernel that is stopped within a call leaves a fault.
    /// With an engine the error is always returned, because an exchange of the engine that is
    /// stopped leaves no fault.
    pub(crate) fn check_results(&self) -> Result<()> {
        let code = self.reason();
        let ended = [0, abort::CLOSED, abort::HUB_LOST].contains(&code)
            || (abort::PEER_LOST..=abort::REVOKED).contains(&code);
        let failed = self.fault().is_some() || self.elsewhere.get().is_some();
        if ended && !failed && self.engine().is_none() {
            return Ok(());
        }
        self.check_without_engine()
    }

    /// Records that `error` is returned to the program.
    pub(crate) fn note_returned(&self, error: &Error) {
        if matches!(error, Error::Fault { .. } | Error::NodeSilent { .. } | Error::Order { .. }) {
            self.fault_returned.store(true, Ordering::Relaxed);
        }
        if let Some(errors) = self.errors.get() {
            errors.note(error);
        }
    }

    pub(crate) fn is_fault_returned(&self) -> bool {
        self.fault_returned.load(Ordering::Relaxed)
    }

    /// Fault record as an error. If the ranks issued calls in different orders, returns the error
    /// about the order instead, since a wrong order can cause any fault.
    pub(crate) fn fault_error(&self) -> Option<Error> {
        let words = self.fault()?.first_chunk::<8>().copied()?;
        let fault = iris_sync::Fault::from_words(words)?;
        let fault = match fault.kind {
            FaultKind::PeerLost if fault.seen == abort::WORLD_LOST => {
                return Some(self.world_loss());
            }
            FaultKind::PeerLost if fault.seen == abort::REVOKED => return Some(Error::Revoked),
            // The lost rank is this rank: it has left its world, so the error is an abort by the
            // program, not a loss.
            FaultKind::PeerLost if usize::try_from(fault.rank).ok() == self.own_rank() => {
                iris_sync::Fault { kind: FaultKind::HostAbort, seen: abort::USER, ..fault }
            }
            _ => fault,
        };
        if fault.kind == FaultKind::PeerGaveUp
            && let Ok(rank) = usize::try_from(fault.rank)
            && let told @ Error::GaveUp { reason: Some(_), .. } = self.gave_up(rank)
        {
            return Some(told);
        }
        if fault.kind == FaultKind::StepDiffers
            && let Some(error) = self.engine().and_then(|engine| engine.explain(&fault))
        {
            return Some(error);
        }
        let op = self.op_name(fault.op).to_string();
        // A kernel's fault record has the rank's number on this node. Only a fault of kind
        // `StepDiffers` names a node instead.
        let (rank, host) = match usize::try_from(fault.rank) {
            Ok(rank) if fault.kind != FaultKind::StepDiffers => self.in_whole_world(rank),
            _ => (0, None),
        };
        let awaited = self.awaited_node.get_or_init(|| {
            let is_silent = matches!(fault.kind, FaultKind::NotEntered | FaultKind::NoProgress);
            let rank = usize::try_from(fault.rank).ok().filter(|_| is_silent)?;
            // If the process of the rank is stopped, blame the rank itself and not the node that it
            // waits for.
            self.node_awaited_by(rank).filter(|_| self.stopped_process(rank).is_none())
        });
        let standing = self.standing(&fault);
        let fault = match &host {
            Some(_) => iris_sync::Fault { rank: rank as i32, ..fault },
            None => fault,
        };
        let error = match awaited {
            Some(node) => {
                let (host, node) = (host.unwrap_or_default(), node.clone());
                Error::NodeSilent { op, fault, host, node }
            }
            None => Error::Fault { op, fault, host, standing: standing.unwrap_or_default() },
        };
        Some(self.disorder().unwrap_or(error))
    }

    /// Returns the fault or abort of this heap like [`Control::check`], but does not count the
    /// error as returned to the program; used by enqueued work.
    ///
    /// # Errors
    /// Errors of [`Control::check`].
    pub fn outcome(&self) -> Result<()> {
        if self.fault().is_some_and(|words| words[0] == FaultKind::PeerLost as i32) {
            self.await_own_world();
        }
        let code = self.reason();
        let disorder = || if code == 0 { None } else { self.disorder() };
        let found = self.fault_error().or_else(disorder);
        let told = match code {
            0 => None,
            abort::CLOSED => Some(Error::Closed { what: "the heap" }),
            abort::HUB_LOST => self.cut_off.get().cloned().or_else(|| Some(aborted(code))),
            abort::ELSEWHERE => self.elsewhere.get().cloned().or_else(|| Some(aborted(code))),
            abort::WORLD_LOST => Some(self.world_loss()),
            abort::REVOKED => Some(Error::Revoked),
            _ => Some(lost_rank(code).map_or_else(|| aborted(code), |rank| self.loss(rank))),
        };
        match (found, told) {
            (Some(found), Some(lost)) if root_error::explains(&lost, &found) => Err(lost),
            (Some(error), _) | (None, Some(error)) => Err(error),
            (None, None) => Ok(()),
        }
    }
}

fn aborted(code: i32) -> Error {
    let reason = match code {
        abort::CLOSED => "the heap was closed",
        abort::FAILED => "enqueued work panicked or failed",
        abort::USER => "the caller asked for it",
        abort::HUB_LOST => "the ranks of the world can no longer exchange messages",
        abort::INCOMPLETE => "a call was enqueued only in part, because one of its launches failed",
        abort::ELSEWHERE => "another node failed",
        abort::DISORDER => "ranks issue the calls of the heap in different orders",
        abort::WORLD_LOST => "a rank of the world was lost",
        _ if lost_rank(code).is_some() => "a peer was lost",
        _ => "a reason of the layer above",
    };
    Error::Aborted { code, reason: reason.into() }
}

/// Host abort code that names `rank` of this node as lost.
fn loss_code(rank: usize) -> i32 {
    abort::PEER_LOST + rank as i32
}

/// Rank that a host abort code names as lost; `None` for other codes.
fn lost_rank(code: i32) -> Option<usize> {
    let rank = usize::try_from(code.checked_sub(abort::PEER_LOST)?).ok()?;
    (rank < MAX_RANKS).then_some(rank)
}
