//! Flags of the staged all-gather: a workgroup tells others on the same device that a unit of the
//! staging buffer is filled. A flag holds the number of the call that filled the unit and is never
//! reset.

use crate::wait::{Awaited, wait_for};
use crate::{Access, Call, Channel, Limit, Memory, Stop};

/// Raise the flag of `unit`: it is filled. Called by one thread, after the barrier of the workgroup
/// that filled the unit.
pub fn raise<M: Memory + ?Sized>(m: &M, channel: &Channel, call: Call, unit: u32) {
    m.dev_store(channel.flag(unit), call.number(), Access::FlagStore);
}

/// Wait until `unit`, whose data comes from rank `source`, is filled. Called by one thread.
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

/// Refresh all flags with the number of this call. Called by one thread of the last workgroup, in
/// calls that refresh.
pub(crate) fn stamp<M: Memory + ?Sized>(m: &M, channel: &Channel, call: Call) {
    for unit in 0..channel.flag_count {
        m.dev_store(channel.flag(unit), call.number(), Access::FlagStamp);
    }
}
