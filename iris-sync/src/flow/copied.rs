//! Protocols for data that a copy engine moves instead of workgroups. A copy engine cannot wait,
//! poll or abort, so a launch before the copies waits for the peers, and later launches wait for
//! the arrival of the peers' copies.

use super::{Delivery, Launch};
use crate::barrier::Members;
use crate::wait::{has_given_up, raise_signal, wait_signal};
use crate::{Aborted, Access, Call, Channel, DevWord, End, Memory, Record, entry};

/// Copies by which a launch sends this rank's data, part by part.
pub trait CopiedTiles {
    /// Write `part` of the data for `peer` to its destination at the peer.
    fn copy(&mut self, peer: u32, part: u32);
}

/// Opens the call: this is the first launch, of one workgroup. It waits until all peers have
/// entered the call, because only then may data be overwritten that the peers read in the previous
/// call. Then it stores the call number in staging flag 0, and the copies that follow send that
/// number as their signal.
///
/// If the launch fails, the flag keeps the number of an older call, so that copies which are
/// enqueued already and cannot be stopped raise no signal of this call.
pub fn open<M: Memory + ?Sized>(launch: &Launch<'_, M>) -> Result<(), Aborted> {
    launch.run(End::Keep, |wg| {
        wg.enter()?;
        wg.wait_entries(Members::all(wg.channel.size))?;
        wg.raise_flag(0);
        Ok(())
    })
}

/// Copies by workgroups, used if no copy engine is available. Each part of the data goes to its
/// peers and is followed by a signal with the number that [`open`] stored. Part 0 has signal number
/// `first`. If the rank has given up, the workgroups continue to copy, as a copy engine would.
pub fn copies<M: Memory + ?Sized>(
    launch: &Launch<'_, M>,
    first: u32,
    plan: &impl Delivery,
    body: &mut impl CopiedTiles,
) -> Result<(), Aborted> {
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

/// Launch of one workgroup that waits until the parts `first..first + parts` of the data that
/// `source` sends have arrived. A later kernel then reads the parts.
pub fn gate<M: Memory + ?Sized>(
    launch: &Launch<'_, M>,
    source: u32,
    (first, parts): (u32, u32),
) -> Result<(), Aborted> {
    launch.run(End::Keep, |wg| wg.wait_parts(source, first, parts))
}

/// Waits of a single thread for parts of data that peers send, inside a kernel that reads the first
/// parts while later parts are still being copied.
///
/// The kernel must run between [`open`], which has compared the entry records of all peers, and
/// [`close`]. The kernel does not count its workgroups as finished and does not end the call.
pub struct Arrivals<'a, M: Memory + ?Sized> {
    m: &'a M,
    channel: &'a Channel,
    call: Call,
    lost: bool,
}

impl<'a, M: Memory + ?Sized> Arrivals<'a, M> {
    /// Reads the number of the current call, whose parts the thread waits for.
    pub fn begin(launch: &Launch<'a, M>) -> Self {
        let Launch { m, channel, .. } = *launch;
        let call = Call::new(m.dev_load(DevWord { index: channel.call }, Access::CallLoad));
        Self { m, channel, call, lost: false }
    }

    /// Waits until part `part` of the data of `source` has arrived. After one failed wait all later
    /// waits fail at once, because the call has failed but the launch must still run to its end.
    pub fn wait_part(&mut self, source: u32, part: u32) -> Result<(), Aborted> {
        if self.lost {
            return Err(Aborted);
        }
        let word = self.channel.signal(self.channel.rank, source, part);
        let passed = wait_signal(self.m, self.channel, self.call, word, (source, part));
        self.lost = passed.is_err();
        passed
    }
}

/// Signals that a single thread raises, inside a kernel between [`open`] and [`close`], for data
/// that this thread itself has stored at peers. A rank that has given up must not store to peers,
/// because the peers may still be reading data of an earlier call.
pub struct Departures<'a, M: Memory + ?Sized> {
    m: &'a M,
    channel: &'a Channel,
    record: &'a Record,
    call: Call,
    muted: bool,
}

impl<'a, M: Memory + ?Sized> Departures<'a, M> {
    /// Reads the number of the current call, and whether this rank has given up. A rank that has
    /// given up must not store to peers.
    pub fn begin(launch: &Launch<'a, M>) -> Self {
        let Launch { m, channel, record, .. } = *launch;
        let call = Call::new(m.dev_load(DevWord { index: channel.call }, Access::CallLoad));
        Self { m, channel, record, call, muted: has_given_up(m, channel) }
    }

    /// Whether this thread may store to peers: false if the rank had already given up when the
    /// launch began.
    pub fn may_store(&self) -> bool {
        !self.muted
    }

    /// Whether this rank and `peer` write results directly into each other's C; both ranks get the
    /// same answer.
    pub fn is_direct(&self, peer: u32) -> bool {
        entry::is_direct(self.m, self.channel, self.call, self.record, peer)
    }

    /// Raise the signal of `part` at `peer`, after this thread's own stores of that part (release).
    pub fn signal_part(&self, peer: u32, part: u32) {
        raise_signal(self.m, self.call, self.channel.signal(peer, self.channel.rank, part));
    }
}

/// Closes the call: this is the last launch, of one workgroup, enqueued after the copies and after
/// all readers of copied data. It fails if a peer gave up, because that peer's copies may have
/// overwritten data while this rank read it.
pub fn close<M: Memory + ?Sized>(launch: &Launch<'_, M>) -> Result<(), Aborted> {
    launch.run(End::Advance, |wg| wg.check_not_aborted())
}
