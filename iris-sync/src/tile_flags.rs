//! Flags of the staged all-gather: workgroups of one device tell each other that a unit of the
//! staging buffer is filled. A flag holds the call that filled it and is never reset.

use crate::wait::{Awaited, wait_for};
use crate::{Access, Call, Channel, Limit, Memory, Stop};

/// Say that `unit` is filled. One thread, after the barrier of the workgroup that filled it.
pub fn raise<M: Memory + ?Sized>(m: &M, channel: &Channel, call: Call, unit: u32) {
    m.dev_store(channel.flag(unit), call.number(), Access::FlagStore);
}

/// Wait until `unit`, which comes from rank `source`, is filled. One thread.
pub fn wait<M: Memory + ?Sized>(
    m: &M,
    channel: &Channel,
    call: Call,
    unit: u32,
    source: u32,
) -> Result<(), Stop> {
    let awaited =
        Awaited { call, want: call, rank: source, tile: unit as i32, limit: Limit::Progress };
    let look = || m.dev_load(channel.flag(unit), Access::FlagLoad);
    wait_for(m, channel, Access::FlagLoad, awaited, look).map(drop)
}

/// Refresh all flags. One thread of the last workgroup, in calls that restamp.
pub(crate) fn stamp<M: Memory + ?Sized>(m: &M, channel: &Channel, call: Call) {
    for unit in 0..channel.flag_count {
        m.dev_store(channel.flag(unit), call.number(), Access::FlagStamp);
    }
}
