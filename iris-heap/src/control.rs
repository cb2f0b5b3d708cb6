//! The host's side of a heap's [`ControlBlock`](crate::abi::ControlBlock).

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::abi::{FAULT_WORDS, MAX_RANKS, PASSED, SEEN, abort};
use crate::error::{Error, Result};

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
        Control { words, ops: Mutex::default(), told: AtomicBool::new(false) }
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

    /// The id of a new op of this name: ranks that make the same ops in the same order give them the
    /// same ids.
    pub fn name_op(&self, name: &'static str) -> u32 {
        let mut ops = self.ops.lock().unwrap_or_else(PoisonError::into_inner);
        ops.push(name);
        ops.len() as u32 - 1
    }

    fn op_name(&self, id: i32) -> &'static str {
        let ops = self.ops.lock().unwrap_or_else(PoisonError::into_inner);
        usize::try_from(id).ok().and_then(|id| ops.get(id).copied()).unwrap_or("an op")
    }

    /// Nothing, or the fault, or the abort, as an error. For whoever hands the error to the program:
    /// closing the heap does not return it once more.
    ///
    /// # Errors
    /// [`Error::PeerLost`], [`Error::HubLost`], [`Error::Closed`], [`Error::Fault`] or
    /// [`Error::Aborted`].
    pub fn check(&self) -> Result<()> {
        let outcome = self.outcome();
        if outcome.is_err() {
            self.tell();
        }
        outcome
    }

    /// The program has got the fault.
    pub(crate) fn tell(&self) {
        self.told.store(true, Ordering::Relaxed);
    }

    /// Whether it has.
    pub(crate) fn is_told(&self) -> bool {
        self.told.load(Ordering::Relaxed)
    }

    /// The record as an error.
    pub(crate) fn fault_error(&self) -> Option<Error> {
        let words = self.fault()?.first_chunk::<8>().copied()?;
        let fault = iris_sync::Fault::from_words(words)?;
        Some(Error::Fault { op: self.op_name(fault.op), fault })
    }

    /// As [`Control::check`], for enqueued work, whose error the program has not seen yet.
    ///
    /// # Errors
    /// As [`Control::check`].
    pub fn outcome(&self) -> Result<()> {
        // A lost peer explains the fault that waiting for it leaves, not the other way round.
        let code = self.host_abort();
        if let Some(rank) = lost_rank(code) {
            return Err(Error::PeerLost { rank });
        }
        if code == abort::HUB_LOST {
            return Err(Error::HubLost);
        }
        if let Some(fault) = self.fault_error() {
            return Err(fault);
        }
        match code {
            0 => Ok(()),
            abort::CLOSED => Err(Error::Closed { what: "the heap" }),
            _ => Err(aborted(code)),
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
        words[..4].copy_from_slice(&[iris_sync::FaultKind::NoProgress as i32, 1, -5, 9]);
        assert!(c.record_fault(&words));
        assert!(!c.record_fault(&[1; FAULT_WORDS]));
        assert!(matches!(c.check(), Err(Error::Fault { op: "barrier", fault }) if fault.tile == 9));
        c.set_host_abort(abort::PEER_LOST + 2);
        c.set_host_abort(abort::USER);
        assert!(matches!(c.check(), Err(Error::PeerLost { rank: 2 })));
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
