//! Device barrier over a group of ranks. Every member stores the call number into its word at every
//! other member, then waits until the words of all other members at its own rank hold that number.

use crate::wait::{Awaited, wait_for};
use crate::{Aborted, Access, Call, Channel, Limit, Memory, divergent};

/// Set of ranks, as 64 bits: bit r stands for rank r.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Members(u64);

impl Members {
    /// Set of the ranks 0 to `size` - 1; `size` is at most 64.
    pub const fn all(size: u32) -> Self {
        Self(if size >= 64 { u64::MAX } else { (1 << size) - 1 })
    }

    /// Makes the set whose members are given by these bits: bit r stands for rank r.
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// Bits that represent the set: bit r stands for rank r.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Whether `rank` is in the set.
    pub const fn contains(self, rank: u32) -> bool {
        rank < 64 && self.0 >> rank & 1 == 1
    }
}

/// Arrive at a barrier of call `call` and wait for the other members. All threads of one workgroup
/// call it, each for its share of the members; afterwards the threads must pass a barrier of the
/// workgroup.
///
/// Everything that any member's device did before the barrier is visible to every member after it.
/// `phase` (0 or 1) selects one of the two barriers of a call.
pub fn arrive_and_wait<M: Memory + ?Sized>(
    m: &M,
    channel: &Channel,
    call: Call,
    phase: u32,
    members: Members,
    limit: Limit,
) -> Result<(), Aborted> {
    let me = channel.rank;
    let share = || {
        let own = channel.peers().skip(m.thread() as usize).step_by(m.threads() as usize);
        own.filter(|&peer| members.contains(peer))
    };
    // All threads of a wave store before any of these threads waits. Otherwise one thread of the
    // wave could wait for a peer that itself still waits for the store of another thread of the
    // same wave.
    divergent(m, || {
        for peer in share() {
            m.store(channel.barrier(peer, me, phase), call.number(), Access::BarrierStore);
        }
    });
    divergent(m, || {
        share().try_for_each(|peer| {
            let awaited = Awaited { call, want: call, rank: peer, tile: -1, limit };
            let look = || m.load(channel.barrier(me, peer, phase), Access::BarrierLoad);
            wait_for(m, channel, Access::BarrierLoad, awaited, look).map(drop)
        })
    })
}
