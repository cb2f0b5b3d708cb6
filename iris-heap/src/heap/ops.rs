//! Functions of the heap that operators need in addition to memory.

use std::cell::Cell;
use std::sync::MutexGuard;

use super::SymmetricHeap;
use crate::backend::Current;
use crate::dtype::Element;
use crate::error::Result;
use crate::issue_board::{Ended, Pulled};
use crate::slice::{DevWords, RawSlice, SymSlice};
use crate::stream::Stream;
use crate::util::lock;

/// Guard for enqueueing the launches of one call; made by [`SymmetricHeap::issue`].
#[must_use]
pub struct IssueGuard<'a> {
    heap: &'a SymmetricHeap,
    /// Stream and number of the call that was announced. The stream gets the number when this guard
    /// is dropped.
    announced: Cell<Option<(Stream, u64)>>,
    /// Keeps the device current on this thread.
    _current: Option<Current<'a>>,
    _guard: MutexGuard<'a, ()>,
}

impl SymmetricHeap {
    /// Returns the device word that counts the calls of all ops of this heap. Ops must be called in
    /// the same order on all ranks. The word can be read, but neither written nor freed.
    ///
    /// # Errors
    /// Errors of [`SymmetricHeap::alloc_device_words`], at the first call.
    pub fn sequence_word(&self) -> Result<DevWords> {
        if let Some(&word) = self.sequence.get() {
            return Ok(word);
        }
        let word = self.alloc_device_words(1)?;
        let kept = *self.sequence.get_or_init(|| word);
        if kept != word {
            self.free_device_words(word)?;
        }
        Ok(kept)
    }

    /// Checks, before a collective step, that the heap has not failed. If the heap has failed, this
    /// rank must not take part in the step, because another rank may be stuck. Ranks that wait in
    /// the step then get [`Error::GaveUp`](crate::Error::GaveUp), as after a close of the failed
    /// heap.
    ///
    /// # Errors
    /// Errors of [`SymmetricHeap::check`].
    pub fn check_before_step(&self) -> Result<()> {
        drop(self.open_state()?);
        // If a world has lost a rank of this node, its exchanges fail at once with the first
        // reason. If the lost rank is on another node, the ranks of this node can complete the
        // step, and each rank learns of the loss itself.
        if self.world.has_lost() || self.whole_world().has_lost() || self.failure().is_none() {
            return Ok(());
        }
        self.end_exchanges();
        self.check()
    }

    /// Locks the heap for enqueueing the launches of one call, so that launches of two calls do not
    /// interleave. The device stays current on the thread while the guard lives, so each launch,
    /// copy and event needs one driver call less.
    ///
    /// Operators take this lock in `run`, and so does [`SymmetricHeap::free`]: a thread that holds the
    /// guard and calls one of them waits for itself.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) in a forked child, whose announcements would
    /// be taken for its parent's.
    pub fn issue(&self) -> Result<IssueGuard<'_>> {
        self.world.check_process("issuing a call")?;
        let guard = lock(&self.issuing);
        let announced = Cell::default();
        Ok(IssueGuard { heap: self, announced, _current: self.backend.current(), _guard: guard })
    }
}

impl Drop for IssueGuard<'_> {
    fn drop(&mut self) {
        if let Some((stream, call)) = self.announced.take() {
            stream.note_issued(call);
        }
        self.heap.backend.end_call();
    }
}

impl IssueGuard<'_> {
    /// Returns the address of this rank's part of a slice, for work that is enqueued while the guard
    /// lives. A thread that frees the slice waits for the guard and then for the work.
    ///
    /// # Errors
    /// Errors of [`SymmetricHeap::resolve`]; [`Error::NotAllocated`](crate::Error::NotAllocated) also
    /// while another thread frees the slice.
    pub fn resolve<T: Element>(&self, slice: SymSlice<T>) -> Result<u64> {
        let state = self.heap.state_unless_closed()?;
        let (mapping, offset) =
            self.heap.locate_for_work(&state, &slice.raw(), self.heap.local_rank())?;
        Ok(mapping.address() + offset)
    }

    /// Records that a call writes the block of `slice`, so that [`Retired::resolve`](crate::Retired::resolve)
    /// refuses it: a peer that was stopped in the call may store to it later.
    pub fn note_result(&self, slice: &RawSlice) {
        self.heap.note_peer_writes(slice);
    }

    /// Announces to the hosts of all ranks that this rank issues a call of the op with id `op`;
    /// called before the call's first launch. The hosts compare the order in which their ranks
    /// issue calls. `pulled` is the place at which peers read a matrix of this rank. If kernels
    /// find that this place differs between ranks, the error shows the place of each rank.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn announce(&self, stream: &Stream, op: u32, pulled: Pulled) -> Result<()> {
        match self.heap.memory.control.boards() {
            None => Ok(()),
            Some(boards) if stream.backend().is_captured()? => boards.set_captured(),
            Some(boards) => {
                boards.issue(op, pulled)?;
                self.announced.set(Some((stream.clone(), boards.issued()?)));
                Ok(())
            }
        }
    }

    /// Announces to the hosts of all ranks that this rank issues no further call of the op with id
    /// `op`, because it frees the op. A rank that waits for this rank to issue a call of the op
    /// then fails at once.
    pub fn announce_end(&self, op: u32) {
        self.heap.memory.control.publish_end(Some(Ended::Operator(op)));
    }

    /// Removes the last announcement; called if no part of the announced call was enqueued.
    ///
    /// # Errors
    /// Errors of [`IssueGuard::announce`].
    pub fn retract(&self, stream: &Stream) -> Result<()> {
        match self.heap.memory.control.boards() {
            Some(boards) if !stream.backend().is_captured()? => {
                self.announced.take();
                boards.retract()
            }
            _ => Ok(()),
        }
    }

    /// Invalidates the capture in progress on a stream, so that it ends in an error instead of a
    /// graph. Returns whether a capture was in progress.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device).
    pub fn discard_capture(&self, stream: &Stream) -> Result<bool> {
        stream.backend().discard_capture()
    }
}
