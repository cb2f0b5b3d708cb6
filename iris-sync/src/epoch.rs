//! The word by which a producer hands data to a consumer: a versioned lock.
//!
//! It holds the call that filled the data beside it. It is never reset: the next version is the next
//! call. The way back, that the data may be written again, is a second word.

use crate::wait::{Awaited, wait_for};
use crate::{Access, Call, Channel, Limit, Memory, Stop, SymWord};

/// Say that the data beside `word` is that of `version`.
pub fn publish<M: Memory + ?Sized>(m: &M, word: SymWord, version: Call) {
    m.store(word, version.number(), Access::VersionStore);
}

/// Wait until `producer` has published `version` or a later one; returns what the word held.
pub fn wait<M: Memory + ?Sized>(
    m: &M,
    channel: &Channel,
    word: SymWord,
    version: Call,
    producer: u32,
) -> Result<i32, Stop> {
    let awaited =
        Awaited { call: version, want: version, rank: producer, tile: -1, limit: Limit::Entry };
    let look = || m.load(word, Access::VersionLoad);
    wait_for(m, channel, Access::VersionLoad, awaited, look)
}
