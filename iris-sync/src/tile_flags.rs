//! Flags of the staged all-gather, in which some workgroups copy remote data to a staging buffer
//! and other workgroups of the same device read it. A flag tells the readers that one unit (a fixed
//! piece) of the buffer is filled. It holds the number of the call that filled the unit and is
//! never reset.

use crate::memory::share;
use crate::wait::{Awaited, wait_for};
use crate::{Aborted, Access, Call, Channel, Limit, Memory};

/// Raise the flag of unit (piece) number `unit` of the staging buffer, which this workgroup has
/// filled with data of another rank. One thread calls this function, after a barrier of the
/// workgroup.
pub fn raise<M: Memory + ?Sized>(m: &M, channel: &Channel, call: Call, unit: u32) {
    m.dev_store(channel.flag(unit), call.number(), Access::FlagStore);
}

/// Wait until a workgroup of this device has filled unit (piece) number `unit` of the staging
/// buffer with data of rank `source`. Only one thread of the waiting workgroup may call this
/// function.
pub fn wait<M: Memory + ?Sized>(
    m: &M,
    channel: &Channel,
    call: Call,
    unit: u32,
    source: u32,
) -> Result<(), Aborted> {
    let awaited =
        Awaited { call, want: call, rank: source, tile: unit as i32, limit: Limit::Progress };
    let look = || m.dev_load(channel.flag(unit), Access::FlagLoad);
    wait_for(m, channel, Access::FlagLoad, awaited, look).map(drop)
}

/// Store the number of this call into this thread's share of the flags, so that no flag becomes
/// 2^31 calls old, when the comparison would change sign. All threads of the last workgroup call
/// this function, in every [`crate::REFRESH_PERIOD`]-th call.
pub(crate) fn stamp<M: Memory + ?Sized>(m: &M, channel: &Channel, call: Call) {
    for unit in share(m, 0..channel.flag_count) {
        m.dev_store(channel.flag(unit), call.number(), Access::FlagStamp);
    }
}
