//! What ops need of their heap, beyond memory.

use std::sync::MutexGuard;

use super::SymmetricHeap;
use crate::backend::Current;
use crate::error::Result;
use crate::slice::DevWords;
use crate::stream::Stream;
use crate::util::lock;

/// The right to enqueue the launches of one call: [`SymmetricHeap::issue`].
#[must_use]
pub struct Issuing<'a> {
    heap: &'a SymmetricHeap,
    /// Makes the device current on this thread.
    _current: Option<Current<'a>>,
    _guard: MutexGuard<'a, ()>,
}

impl SymmetricHeap {
    /// The word that counts the calls of all ops of this heap; they are issued in one order, the
    /// same on all ranks.
    ///
    /// # Errors
    /// As [`SymmetricHeap::alloc_device_words`], the first time.
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

    /// Held by whoever enqueues the launches of one call, so that those of two calls do not mix. The device
    /// is current on the thread meanwhile: not each launch, copy and event makes it so again.
    pub fn issue(&self) -> Issuing<'_> {
        let guard = lock(&self.issuing);
        Issuing { heap: self, _current: self.backend.current(), _guard: guard }
    }
}

impl Issuing<'_> {
    /// Tells the hosts of all ranks that this rank issues a call of the op with this id, before its first launch:
    /// they compare in which order the ranks issue the calls that all of them count.
    ///
    /// # Errors
    /// Those of the device.
    pub fn announce(&self, stream: &Stream, op: u32) -> Result<()> {
        match self.heap.memory.control.boards() {
            None => Ok(()),
            Some(boards) if stream.backend().is_captured()? => boards.set_captured(),
            Some(boards) => {
                boards.issue(op)?;
                stream.note_issued(boards.issued()?);
                Ok(())
            }
        }
    }

    /// Takes back what was announced last: nothing of that call was enqueued.
    ///
    /// # Errors
    /// As [`Issuing::announce`].
    pub fn retract(&self, stream: &Stream) -> Result<()> {
        match self.heap.memory.control.boards() {
            Some(boards) if !stream.backend().is_captured()? => boards.retract(),
            _ => Ok(()),
        }
    }

    /// Makes the capture that is under way on a stream invalid, so that it ends in an error and no graph; returns
    /// whether one was under way.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device).
    pub fn discard_capture(&self, stream: &Stream) -> Result<bool> {
        stream.backend().discard_capture()
    }
}
