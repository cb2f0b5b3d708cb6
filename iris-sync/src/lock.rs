//! Spinlock for a tile: one word; a rank takes the lock by compare-and-exchange.

use crate::wait::Awaited;
use crate::{Aborted, Access, Call, Channel, Limit, Memory, SymWord};

/// Value of a spinlock that no rank holds. The value of a held lock is 1 + the rank that holds it.
pub const FREE: i32 = 0;

/// Take a spinlock. Only one thread of the workgroup calls this.
///
/// The holder needs no other lock and no signal before it releases the lock, so no deadlock can
/// arise. Fails after the progress deadline, with a fault that names the holder.
pub fn take<M: Memory + ?Sized>(
    m: &M,
    channel: &Channel,
    call: Call,
    word: SymWord,
    tile: u32,
) -> Result<(), Aborted> {
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
            return Err(Aborted);
        }
        if m.expired(Limit::Progress, spins) {
            crate::wait::no_progress(m, channel, &awaited, held);
            return Err(Aborted);
        }
        m.pause(spins);
        spins = spins.saturating_add(1);
    }
}

/// Release a spinlock that this rank holds, after the stores that it protects (release store).
pub fn give<M: Memory + ?Sized>(m: &M, word: SymWord) {
    m.store(word, FREE, Access::LockGive);
}
