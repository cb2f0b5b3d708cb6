//! Page of the epochs: words by which the processes of a job agree on the members of each epoch.
//! PROTOCOL.md in iris-sync, section "Going on after a lost rank", argues the order of accesses.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::abi::MAX_RANKS;
use crate::error::Result;
use crate::segment::{JointMemory, SharedMemory};

/// Largest number of an epoch; the first epoch is 0.
pub(super) const LAST_EPOCH: u64 = 4096;
/// Bytes of a slot's line, which has the slot's phase only, so that no two processes write one line.
const LINE: u64 = 128;
/// Offset in bytes of the decision of epoch 0, which is never made.
const DECISIONS: u64 = LINE * MAX_RANKS as u64;
/// Size of the page in bytes.
const BYTES: u64 = DECISIONS + 8 * (LAST_EPOCH + 1);

/// Phase of a process, as its word in the page has it; 0 for a process that works in the first
/// epoch. The phase only grows.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Phase(u64);

impl Phase {
    /// Phase of a process that has left the job, which goes on without it.
    pub(super) const LEFT: Phase = Phase(u64::MAX - 1);
    /// Phase of a process that has left the job after the members have closed their world.
    pub(super) const ENDED: Phase = Phase(u64::MAX);

    /// Phase of a process for which `epoch` has ended.
    pub(super) const fn revoked(epoch: u64) -> Phase {
        Phase(4 * epoch + 1)
    }

    /// Phase of a process that waits for the epoch after `epoch`.
    pub(super) const fn waits(epoch: u64) -> Phase {
        Phase(4 * epoch + 2)
    }

    /// Whether the process has left the job.
    pub(super) fn has_left(self) -> bool {
        self >= Phase::LEFT
    }
}

/// Mapping of the page.
pub(super) struct Page(SharedMemory);

impl Page {
    /// Creates the file of a page.
    pub(super) fn create() -> Result<JointMemory> {
        JointMemory::create("iris-epochs", &[BYTES])
    }

    /// Maps the page whose file was made by [`Page::create`], here or in another process.
    pub(super) fn map(file: JointMemory) -> Result<Page> {
        let page = Page(file.map()?.swap_remove(0));
        // The largest offset is checked once, so that accesses cannot fail.
        page.0.long(BYTES - 8)?;
        Ok(page)
    }

    /// Sizes of the parts of the page's file.
    pub(super) fn sizes() -> [u64; 1] {
        [BYTES]
    }

    fn word(&self, offset: u64) -> &AtomicU64 {
        self.0.long(offset).expect("an offset below BYTES, which `map` has checked")
    }

    /// Phase of the process in `slot`. What the process did before it entered the phase is visible.
    pub(super) fn phase(&self, slot: usize) -> Phase {
        Phase(self.word(LINE * slot as u64).load(Ordering::Acquire))
    }

    /// Moves this process, which is in `slot`, on to `phase`, unless it is there or further.
    pub(super) fn enter(&self, slot: usize, phase: Phase) {
        self.word(LINE * slot as u64).fetch_max(phase.0, Ordering::AcqRel);
    }

    /// Slots of those who go on in `epoch`, as a mask; 0 until that is decided.
    pub(super) fn decided(&self, epoch: u64) -> u64 {
        self.word(DECISIONS + 8 * epoch).load(Ordering::Acquire)
    }

    /// Decides that the slots of `mask` go on in `epoch`, unless another process has decided before.
    /// Returns the decision.
    pub(super) fn decide(&self, epoch: u64, mask: u64) -> u64 {
        let word = self.word(DECISIONS + 8 * epoch);
        match word.compare_exchange(0, mask, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => mask,
            Err(decided) => decided,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_grow_and_the_first_decision_stands() {
        let page = Page::map(Page::create().unwrap()).unwrap();
        assert_eq!(page.phase(63), Phase(0));
        page.enter(63, Phase::waits(0));
        page.enter(63, Phase::revoked(0));
        assert_eq!((page.phase(63), page.phase(62)), (Phase::waits(0), Phase(0)));
        assert!(Phase::waits(0) < Phase::revoked(1) && Phase::waits(LAST_EPOCH) < Phase::LEFT);
        for epoch in [1, LAST_EPOCH] {
            assert_eq!(page.decided(epoch), 0);
            assert_eq!((page.decide(epoch, 6), page.decide(epoch, 3)), (6, 6));
        }
        assert_eq!(page.decided(2), 0);
    }
}
