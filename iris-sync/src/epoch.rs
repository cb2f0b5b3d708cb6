//! Versioned lock: one word by which a producer hands data to a consumer.
//!
//! The word holds the number of the call that filled the data. The word is never reset: the next
//! version is the number of the next call. A second word of this kind, which the consumer sets,
//! must tell the producer that it may overwrite the data.

use crate::wait::{Awaited, wait_for};
use crate::{Aborted, Access, Call, Channel, Limit, Memory, SymWord};

/// Publish that the data guarded by `word` is complete and has version `version` (release store).
pub fn publish<M: Memory + ?Sized>(m: &M, word: SymWord, version: Call) {
    m.store(word, version.number(), Access::VersionStore);
}

/// Wait until `producer` has published `version` or a later version in `word`; returns the value of
/// the word.
pub fn wait<M: Memory + ?Sized>(
    m: &M,
    channel: &Channel,
    word: SymWord,
    version: Call,
    producer: u32,
) -> Result<i32, Aborted> {
    let awaited =
        Awaited { call: version, want: version, rank: producer, tile: -1, limit: Limit::Entry };
    let look = || m.load(word, Access::VersionLoad);
    wait_for(m, channel, Access::VersionLoad, awaited, look)
}
