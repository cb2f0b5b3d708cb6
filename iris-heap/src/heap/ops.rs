//! What ops need of their heap, beyond memory.

use super::SymmetricHeap;
use crate::error::Result;
use crate::slice::DevWords;
use crate::util::lock;

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
    #[must_use]
    pub fn issue(&self) -> impl Sized + use<'_> {
        let guard = lock(&self.issuing);
        (self.backend.current(), guard)
    }
}
