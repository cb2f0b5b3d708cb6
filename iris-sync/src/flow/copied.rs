//! Shards that no workgroup moves, but a copy engine. It cannot wait, look at a word or stop: what it
//! may do is said ahead of it, and what it has done is looked at behind it.

use super::{Delivery, Launch};
use crate::barrier::Members;
use crate::wait::{has_given_up, raise_signal, wait_signal};
use crate::{Access, Call, Channel, DevWord, End, Memory, Record, Stop, entry};

/// The parts of what this rank sends.
pub trait CopiedTiles {
    /// Write `part` of what `peer` gets to it, where it is wanted.
    fn copy(&mut self, peer: u32, part: u32);
}

/// The first launch, of one workgroup: when all peers are in the call, so that what they read in the
/// one before may be overwritten, it leaves the number of the call in flag 0 for the copies behind it.
///
/// A launch that fails leaves the number that was there: copies that cannot be stopped then raise no
/// signal that was not raised before.
pub fn open<M: Memory + ?Sized>(launch: &Launch<'_, M>) -> Result<(), Stop> {
    launch.run(End::Keep, |wg| {
        wg.enter()?;
        wg.wait_entries(Members::all(wg.channel.size))?;
        wg.raise_flag(0);
        Ok(())
    })
}

/// The copies, by workgroups where no engine makes them: each part to its peers, each followed by
/// what [`open`] has left, as its signal, of which the first has number `first`. They go on if the rank
/// has given up, as an engine does.
pub fn copies<M: Memory + ?Sized>(
    launch: &Launch<'_, M>,
    first: u32,
    plan: &impl Delivery,
    body: &mut impl CopiedTiles,
) -> Result<(), Stop> {
    launch.run(End::Keep, |wg| {
        for part in wg.share(plan.produced()) {
            for peer in wg.channel.peers_in_turn(part) {
                if part < plan.sent(wg.channel.rank, peer) {
                    body.copy(peer, part);
                    wg.push_copied(peer, first + part);
                }
            }
        }
        Ok(())
    })
}

/// In front of what reads `parts` parts of `source`, from number `first` on: one workgroup.
pub fn gate<M: Memory + ?Sized>(
    launch: &Launch<'_, M>,
    source: u32,
    (first, parts): (u32, u32),
) -> Result<(), Stop> {
    launch.run(End::Keep, |wg| wg.wait_parts(source, first, parts))
}

/// The same within a launch that reads what is copied while it runs, for one thread of a workgroup, which
/// waits alone: for itself, and for copies that it starts then. Such a launch lies between [`open`], which
/// has come to agree with all peers, and [`close`]: it counts nobody out, and ends no call.
pub struct Arrivals<'a, M: Memory + ?Sized> {
    m: &'a M,
    channel: &'a Channel,
    call: Call,
    lost: bool,
}

impl<'a, M: Memory + ?Sized> Arrivals<'a, M> {
    /// Reads the number of the call.
    pub fn begin(launch: &Launch<'a, M>) -> Self {
        let Launch { m, channel, .. } = *launch;
        let call = Call::new(m.dev_load(DevWord { index: channel.call }, Access::CallLoad));
        Self { m, channel, call, lost: false }
    }

    /// Wait for this part of `source`. When one wait has failed nothing more is waited for: the call has
    /// failed, and what the launch still reads is of no use, but it must come to its end.
    pub fn wait_part(&mut self, source: u32, part: u32) -> Result<(), Stop> {
        if self.lost {
            return Err(Stop);
        }
        let word = self.channel.signal(self.channel.rank, source, part);
        let passed = wait_signal(self.m, self.channel, self.call, word, (source, part));
        self.lost = passed.is_err();
        passed
    }
}

/// What one thread of a workgroup sends from within such a launch, without meeting the others: it says that
/// what it has stored itself is there. Nothing may be stored by a rank that had given up before, since peers
/// may still read what they got in an earlier call.
pub struct Departures<'a, M: Memory + ?Sized> {
    m: &'a M,
    channel: &'a Channel,
    record: &'a Record,
    call: Call,
    muted: bool,
}

impl<'a, M: Memory + ?Sized> Departures<'a, M> {
    /// Reads the number of the call, and whether this rank has given up.
    pub fn begin(launch: &Launch<'a, M>) -> Self {
        let Launch { m, channel, record, .. } = *launch;
        let call = Call::new(m.dev_load(DevWord { index: channel.call }, Access::CallLoad));
        Self { m, channel, record, call, muted: has_given_up(m, channel) }
    }

    /// Whether anything may be stored to peers.
    pub fn may_store(&self) -> bool {
        !self.muted
    }

    /// Whether results go straight into C, between this rank and `peer`: both sides come to the same answer.
    pub fn is_direct(&self, peer: u32) -> bool {
        entry::is_direct(self.m, self.channel, self.call, self.record, peer)
    }

    /// Say that this thread's stores of this part are done at `peer`.
    pub fn signal_part(&self, peer: u32, part: u32) {
        raise_signal(self.m, self.call, self.channel.signal(peer, self.channel.rank, part));
    }
}

/// The last launch, of one workgroup, behind the copies and all that read what peers copied: fails if a
/// peer gave up, whose copies may have come too early for what was read here.
pub fn close<M: Memory + ?Sized>(launch: &Launch<'_, M>) -> Result<(), Stop> {
    launch.run(End::Advance, |wg| wg.go_on())
}
