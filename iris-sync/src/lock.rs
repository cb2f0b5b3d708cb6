//! The versioned lock, by which a producer hands data to a consumer, and the spinlock.
//!
//! A versioned lock is one word that holds the call that filled the data beside it. It is never
//! reset: the next version is the next call.

use crate::wait::{Awaited, wait_for};
use crate::{Access, Call, Channel, Limit, Memory, Stop, SymWord};

/// What a free spinlock holds; a taken one holds 1 + the rank that took it.
pub const FREE: i32 = 0;

/// Say that the data beside `word` is that of `version`.
pub fn publish_version<M: Memory + ?Sized>(m: &M, word: SymWord, version: Call) {
    m.store(word, version.number(), Access::VersionStore);
}

/// Wait until `producer` has published `version` or a later one; returns what the word held.
pub fn wait_version<M: Memory + ?Sized>(
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

/// Take a spinlock. One lane calls this.
///
/// Whoever holds it needs no other lock and no signal to give it back, so no cycle can arise. A
/// wait past the deadline of progress names the holder.
pub fn take<M: Memory + ?Sized>(
    m: &M,
    channel: &Channel,
    call: Call,
    word: SymWord,
    tile: u32,
) -> Result<(), Stop> {
    let mine = channel.rank as i32 + 1;
    let mut spins = 0;
    loop {
        let held = m.compare_exchange(word, FREE, mine, Access::LockTake);
        if held == FREE {
            return Ok(());
        }
        let awaited = Awaited {
            call,
            want: Call::new(FREE),
            rank: held as u32 - 1,
            tile: tile as i32,
            limit: Limit::Progress,
        };
        if crate::wait::stopped(m, channel, &awaited) {
            return Err(Stop);
        }
        if m.expired(Limit::Progress, spins) {
            crate::wait::no_progress(m, channel, &awaited, held);
            return Err(Stop);
        }
        m.pause(spins);
        spins = spins.saturating_add(1);
    }
}

/// Give a spinlock back.
pub fn give<M: Memory + ?Sized>(m: &M, word: SymWord) {
    m.store(word, FREE, Access::LockGive);
}
