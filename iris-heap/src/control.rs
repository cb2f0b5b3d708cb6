//! The host's side of a heap's [`ControlBlock`](crate::abi::ControlBlock).

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use crate::abi::{FAULT_WORDS, MAX_RANKS, PASSED, SEEN, abort};
use crate::board::{Behind, Boards, Difference};
use crate::error::{Error, Result, odd_ranks};
use crate::root::{self, Told};
use crate::util::{lock, unsupported};

const WORDS: usize = 2 + FAULT_WORDS;

/// Abort word and fault record of one rank's heap.
///
/// On the CPU the block lies in the process's own memory, on a GPU in pinned memory of the host. It
/// lives as long as anything that may touch it: heap, streams and enqueued work hold it by `Arc`.
#[derive(Debug)]
pub struct Control {
    words: Words,
    /// Names of the ops of the heap, by id: kernels know numbers only.
    ops: Mutex<Vec<&'static str>>,
    /// Whether the fault was returned to the program, which closing the heap else does.
    told: AtomicBool,
    /// Errors that the program was given, of which the world of this rank knows, too.
    errors: OnceLock<Arc<Told>>,
    /// The issue boards of all ranks, once the heap is open; none where a rank is alone.
    boards: OnceLock<Boards>,
    /// The first difference in the order of calls, once it was found.
    disorder: OnceLock<Error>,
    /// A failure of another node, or of a step between nodes.
    elsewhere: OnceLock<Error>,
    /// When each wait of the host for enqueued work that is under way began.
    waits: Mutex<Vec<Instant>>,
    /// For tests: number of launches on the CPU until one fails; `u32::MAX` if none is to fail.
    launches_left: AtomicU32,
}

/// The words of a `ControlBlock`, on a cache line of their own: every waiting workgroup reads them.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct Line([AtomicI32; WORDS]);

/// Where the words are.
#[derive(Debug)]
enum Words {
    Own(Box<Line>),
    Pinned(PinnedLine),
}

/// A line of pinned memory.
#[derive(Debug)]
pub(crate) struct PinnedLine {
    line: &'static Line,
    /// Where kernels find it.
    pub(crate) address: u64,
    /// Gives the line back to its pool when it is dropped.
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
    /// A block in pinned memory.
    pub(crate) fn pinned(line: PinnedLine) -> Control {
        Control::over(Words::Pinned(line))
    }

    fn over(words: Words) -> Control {
        Control {
            words,
            ops: Mutex::default(),
            told: AtomicBool::new(false),
            errors: OnceLock::new(),
            boards: OnceLock::new(),
            disorder: OnceLock::new(),
            elsewhere: OnceLock::new(),
            waits: Mutex::default(),
            launches_left: AtomicU32::new(u32::MAX),
        }
    }

    /// Where kernels find the block.
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

    /// Tells every waiting kernel of this rank to leave. The first reason stays. Zero is no reason
    /// and changes nothing; the others are in [`abort`].
    pub fn set_host_abort(&self, reason: i32) {
        // Release: who sees the word also sees what led to it.
        let _ = self.words()[0].compare_exchange(0, reason, Ordering::Release, Ordering::Relaxed);
    }

    /// Tells every waiting kernel of this rank to leave because of another node; [`Control::check`] returns `error`.
    /// The first error stays.
    pub fn fail_elsewhere(&self, error: Error) {
        let _ = self.elsewhere.set(error);
        self.set_host_abort(abort::ELSEWHERE);
    }

    /// The reason given to [`Control::set_host_abort`], or zero.
    pub fn host_abort(&self) -> i32 {
        self.words()[0].load(Ordering::Acquire)
    }

    /// The first fault record a kernel completed.
    pub fn fault(&self) -> Option<[i32; FAULT_WORDS]> {
        // Acquire pairs with the release store of 2 behind the record.
        (self.words()[1].load(Ordering::Acquire) == 2)
            .then(|| std::array::from_fn(|i| self.words()[2 + i].load(Ordering::Relaxed)))
    }

    /// Leaves a fault record, as a kernel does. False if there is one already.
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

    /// For tests of deadlines on the CPU backend: kernels of this rank that wait now have waited for so
    /// much longer. Waits that begin later do not see it.
    #[doc(hidden)]
    pub fn let_time_pass(&self, time: std::time::Duration) {
        let millis = i32::try_from(time.as_millis()).unwrap_or(i32::MAX);
        self.words()[PASSED / 4].fetch_add(millis, Ordering::Relaxed);
    }

    /// For tests of deadlines on the CPU backend: whether a kernel that waits has seen what was let pass.
    #[doc(hidden)]
    pub fn has_seen_time_pass(&self) -> bool {
        let word = |at: usize| self.words()[at / 4].load(Ordering::Relaxed);
        word(SEEN) == word(PASSED)
    }

    /// For tests of calls that are enqueued in part: after `count` more launches on the CPU backend, one fails.
    #[doc(hidden)]
    pub fn fail_launch_after(&self, count: u32) {
        self.launches_left.store(count, Ordering::Relaxed);
    }

    /// Counts a launch on the CPU backend.
    ///
    /// # Errors
    /// That of the launch that a test lets fail.
    pub(crate) fn count_launch(&self, name: &'static str) -> Result<()> {
        let left = &self.launches_left;
        let next =
            |count: u32| (count != u32::MAX).then(|| count.checked_sub(1).unwrap_or(u32::MAX));
        match left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next) {
            Ok(0) => Err(unsupported(name, "a test lets this launch fail")),
            _ => Ok(()),
        }
    }

    /// The id of a new op of this name: ranks that make the same ops in the same order give them the
    /// same ids.
    pub fn name_op(&self, name: &'static str) -> u32 {
        let mut ops = lock(&self.ops);
        ops.push(name);
        ops.len() as u32 - 1
    }

    fn op_name(&self, id: i32) -> &'static str {
        let ops = lock(&self.ops);
        usize::try_from(id).ok().and_then(|id| ops.get(id).copied()).unwrap_or("an op")
    }

    /// An operator in an error or a notice: its name, and its number in the order of creation.
    fn describe(&self, operator: u32) -> String {
        format!("{} (operator {operator})", self.op_name(operator as i32))
    }

    /// Lets this rank note the errors that its program is given.
    pub(crate) fn note_errors(&self, errors: &Arc<Told>) {
        let _ = self.errors.set(errors.clone());
    }

    /// Gives this rank the issue boards of all, which the heap shares when it is opened.
    pub(crate) fn set_boards(&self, boards: Boards) {
        let _ = self.boards.set(boards);
    }

    /// The issue boards of all ranks; none where a rank is alone.
    pub(crate) fn boards(&self) -> Option<&Boards> {
        self.boards.get()
    }

    /// The first call that the ranks have issued differently, as an error.
    pub(crate) fn disorder(&self) -> Option<Error> {
        if let Some(found) = self.disorder.get() {
            return Some(found.clone());
        }
        let Difference { call, operators } = self.boards()?.difference().ok()??;
        let name = |operator: &Option<u32>| match operator {
            Some(operator) => self.describe(*operator),
            None => "not issued yet, or long ago".into(),
        };
        let names: Vec<String> = operators.iter().map(name).collect();
        let odd = odd_ranks(&names).into_iter().filter(|&rank| operators[rank].is_some());
        let error = Error::Order { call, ranks: odd.collect(), operators: names };
        Some(self.disorder.get_or_init(|| error).clone())
    }

    /// The call that this rank waits for, in words: one that peers have not issued, or its last; none if it has
    /// issued none.
    pub(crate) fn awaited(&self) -> Option<(Vec<usize>, String)> {
        let Behind { call, operator, ranks } = self.boards()?.behind().ok()??;
        let name = operator.map_or("an op".into(), |operator| self.describe(operator));
        Some((ranks, format!("call {call} of the heap, {name}")))
    }

    /// Notes a wait of the host for enqueued work, until the guard is dropped.
    pub(crate) fn begin_wait(&self) -> HostWait<'_> {
        let began = Instant::now();
        lock(&self.waits).push(began);
        HostWait { control: self, began }
    }

    /// When the longest wait of the host that is under way began.
    pub(crate) fn waits_since(&self) -> Option<Instant> {
        lock(&self.waits).iter().min().copied()
    }

    /// Nothing, or the fault, or the abort, as an error. For whoever hands the error to the program:
    /// closing the heap does not return it once more.
    ///
    /// # Errors
    /// [`Error::Order`], [`Error::PeerLost`], [`Error::HubLost`], [`Error::Closed`], [`Error::Fault`] or
    /// [`Error::Aborted`].
    pub fn check(&self) -> Result<()> {
        self.outcome().inspect_err(|error| {
            self.told.store(true, Ordering::Relaxed);
            self.tell(error);
        })
    }

    /// Notes an error that the program is given.
    pub(crate) fn tell(&self, error: &Error) {
        if matches!(error, Error::Fault { .. } | Error::Order { .. }) {
            self.told.store(true, Ordering::Relaxed);
        }
        if let Some(errors) = self.errors.get() {
            errors.note(error);
        }
    }

    /// Whether the program has got the fault.
    pub(crate) fn is_told(&self) -> bool {
        self.told.load(Ordering::Relaxed)
    }

    /// The record as an error; or another order of calls, from which any fault may follow.
    pub(crate) fn fault_error(&self) -> Option<Error> {
        let words = self.fault()?.first_chunk::<8>().copied()?;
        let fault = iris_sync::Fault::from_words(words)?;
        let error = Error::Fault { op: self.op_name(fault.op), fault };
        Some(self.disorder().unwrap_or(error))
    }

    /// As [`Control::check`], for enqueued work, whose error the program has not seen yet.
    ///
    /// # Errors
    /// As [`Control::check`].
    pub fn outcome(&self) -> Result<()> {
        let code = self.host_abort();
        let disorder = || if code == 0 { None } else { self.disorder() };
        let found = self.fault_error().or_else(disorder);
        let told = match code {
            0 => None,
            abort::CLOSED => Some(Error::Closed { what: "the heap" }),
            abort::HUB_LOST => Some(Error::HubLost),
            abort::ELSEWHERE => self.elsewhere.get().cloned().or_else(|| Some(aborted(code))),
            _ => {
                Some(lost_rank(code).map_or_else(|| aborted(code), |rank| Error::PeerLost { rank }))
            }
        };
        match (found, told) {
            (Some(found), Some(lost)) if root::explains(&lost, &found) => Err(lost),
            (Some(error), _) | (None, Some(error)) => Err(error),
            (None, None) => Ok(()),
        }
    }
}

/// A wait of the host for enqueued work.
pub(crate) struct HostWait<'a> {
    control: &'a Control,
    began: Instant,
}

impl Drop for HostWait<'_> {
    fn drop(&mut self) {
        let mut waits = lock(&self.control.waits);
        if let Some(at) = waits.iter().position(|&began| began == self.began) {
            waits.swap_remove(at);
        }
    }
}

fn aborted(code: i32) -> Error {
    let reason = match code {
        abort::CLOSED => "the heap was closed",
        abort::PANICKED => "a workgroup panicked",
        abort::USER => "the caller asked for it",
        abort::HUB_LOST => "the process that carries messages has gone",
        abort::INCOMPLETE => "a call was enqueued in part, since one of its launches failed",
        abort::ELSEWHERE => "another node failed",
        abort::DISORDER => "ranks issue the calls of the heap in different orders",
        _ if lost_rank(code).is_some() => "a peer was lost",
        _ => "a reason of the layer above",
    };
    Error::Aborted { code, reason: reason.into() }
}

/// The rank that an abort word of the host says is lost.
fn lost_rank(code: i32) -> Option<usize> {
    let rank = usize::try_from(code.checked_sub(abort::PEER_LOST)?).ok()?;
    (rank < MAX_RANKS).then_some(rank)
}

/// The abort code for an error of the world.
pub(crate) fn code_of(error: &Error) -> i32 {
    match error {
        Error::PeerLost { rank } => abort::PEER_LOST + *rank as i32,
        Error::HubLost => abort::HUB_LOST,
        _ => abort::CLOSED,
    }
}

#[cfg(test)]
mod tests {
    use iris_sync::FaultKind;

    use super::*;
    use crate::abi::ControlBlock;

    #[test]
    fn the_words_are_a_control_block() {
        assert_eq!(size_of::<ControlBlock>(), WORDS * size_of::<i32>());
        assert_eq!(Control::default().address() % 128, 0);
    }

    #[test]
    fn the_first_reason_and_the_first_fault_stay() {
        let c = Control::default();
        assert!(c.check().is_ok() && c.fault().is_none());
        assert_eq!((c.name_op("all_reduce"), c.name_op("barrier")), (0, 1));
        let mut words = [0; FAULT_WORDS];
        words[..5].copy_from_slice(&[FaultKind::NoProgress as i32, 1, -5, 9, 2]);
        assert!(c.record_fault(&words));
        assert!(!c.record_fault(&[1; FAULT_WORDS]));
        assert!(matches!(c.check(), Err(Error::Fault { op: "barrier", fault }) if fault.tile == 9));
        c.set_host_abort(abort::PEER_LOST + 2);
        c.set_host_abort(abort::USER);
        assert!(matches!(c.check(), Err(Error::PeerLost { rank: 2 })));
    }

    #[test]
    fn a_lost_peer_explains_waits_for_it_and_no_difference() {
        let outcome = |kind: FaultKind, rank: i32| {
            let c = Control::default();
            let mut words = [0; FAULT_WORDS];
            (words[0], words[4]) = (kind as i32, rank);
            assert!(c.record_fault(&words));
            c.set_host_abort(abort::PEER_LOST + 2);
            c.outcome().unwrap_err()
        };
        let lost = |error| matches!(error, Error::PeerLost { rank: 2 });
        assert!(lost(outcome(FaultKind::NotEntered, 2)) && lost(outcome(FaultKind::PeerGaveUp, 1)));
        for (kind, rank) in [(FaultKind::Mismatch, 2), (FaultKind::NotEntered, 1)] {
            let error = outcome(kind, rank);
            assert!(matches!(&error, Error::Fault { fault, .. } if fault.kind == kind), "{error}");
        }
    }

    #[test]
    fn every_abort_word_is_an_error_that_shows_it() {
        for code in [i32::MIN, -1, 999, abort::PEER_LOST + MAX_RANKS as i32, i32::MAX] {
            let c = Control::default();
            c.set_host_abort(code);
            let error = c.check().unwrap_err();
            assert!(
                matches!(error, Error::Aborted { code: shown, .. } if shown == code),
                "{error}"
            );
        }
        let c = Control::default();
        c.set_host_abort(abort::PEER_LOST + MAX_RANKS as i32 - 1);
        assert!(matches!(c.check(), Err(Error::PeerLost { rank: 63 })));
    }

    #[test]
    fn a_fault_is_told_once_it_was_returned() {
        let c = Control::default();
        let mut words = [0; FAULT_WORDS];
        words[0] = iris_sync::FaultKind::NoProgress as i32;
        assert!(c.record_fault(&words) && c.outcome().is_err() && !c.is_told());
        assert!(matches!(c.fault_error(), Some(Error::Fault { .. })));
        assert!(c.check().is_err() && c.is_told());
    }
}
