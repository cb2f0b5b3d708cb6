use crate::{
    ABORT_WORD, Aborted, Access, Call, Channel, Fault, FaultKind, LINE_WORDS, Limit, Memory,
    PEER_LOST, SymWord,
};

/// Description of a wait: the awaited call number, and values for the fault record if the wait
/// fails.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Awaited {
    /// Call that this workgroup is in.
    pub call: Call,
    /// Call whose number ends the wait; the number of a later call ends it too.
    pub want: Call,
    /// Rank that has to set the word.
    pub rank: u32,
    /// Number of the tile waited for; -1 if the wait is not for a tile.
    pub tile: i32,
    /// Choice of the deadline after which the wait fails.
    pub limit: Limit,
}

impl Awaited {
    fn fault(&self, kind: FaultKind, channel: &Channel, rank: u32, seen: i32) -> Fault {
        Fault {
            kind,
            op: channel.op as i32,
            call: self.call.number(),
            tile: self.tile,
            rank: rank as i32,
            seen,
            wanted: self.want.number(),
            field: -1,
        }
    }
}

/// Whether this rank's host has aborted its kernels, or a peer has given up.
///
/// If so, this function tells all peers to give up, and records a fault that names the rank that
/// the abort word or the host's code names. An earlier fault of this rank is kept.
pub fn stopped<M: Memory + ?Sized>(m: &M, channel: &Channel, awaited: &Awaited) -> bool {
    let host = m.host_abort();
    let peer = m.load(abort_word(channel.rank), Access::AbortLoad);
    let (kind, rank, seen) = match (host, peer) {
        (0, 0) => return false,
        (0, PEER_LOST..) => (FaultKind::PeerLost, peer - PEER_LOST, peer),
        // An abort word may hold an invalid value, so the subtraction wraps. The fault record keeps
        // the value as `seen`.
        (0, _) => (FaultKind::PeerGaveUp, peer.wrapping_sub(1), peer),
        (PEER_LOST.., _) => (FaultKind::PeerLost, host - PEER_LOST, host),
        _ => (FaultKind::HostAbort, channel.rank as i32, host),
    };
    m.record(&awaited.fault(kind, channel, rank as u32, seen));
    if host != 0 {
        // The abort word of this rank is set too, because later launches check only this word, not
        // the host's code.
        let code = if host >= PEER_LOST { host } else { channel.rank as i32 + 1 };
        m.store(abort_word(channel.rank), code, Access::AbortStore);
        pass_on(m, channel, code);
    } else {
        pass_on(m, channel, peer);
    }
    true
}

/// Copy the value of this rank's abort word to all peers except a lost one, whose memory may be
/// gone.
///
/// A rank that gives up because of its host or a peer cannot know whether the other ranks have been
/// told. It tells all peers before it leaves the call, because later work on its stream may
/// overwrite memory that a peer still reads: the shard that the peer reads from this rank, or data
/// that a copy engine sends to the peer.
fn pass_on<M: Memory + ?Sized>(m: &M, channel: &Channel, code: i32) {
    let lost = code.checked_sub(PEER_LOST);
    for peer in channel.peers().filter(|&peer| lost != Some(peer as i32)) {
        m.store(abort_word(peer), code, Access::AbortStore);
    }
}

/// Store `fault` in this rank's fault record, and set the abort word of every rank, this one
/// included. After a missed deadline the word names the awaited rank, so that all ranks name the
/// same culprit. Otherwise the word names this rank, whose fault record has the details.
pub(crate) fn give_up<M: Memory + ?Sized>(m: &M, channel: &Channel, fault: &Fault) {
    m.record(fault);
    let named = match fault.kind {
        FaultKind::NotEntered | FaultKind::NoProgress => fault.rank,
        _ => channel.rank as i32,
    };
    for rank in 0..channel.size {
        m.store(abort_word(rank), named + 1, Access::AbortStore);
    }
}

/// Whether this rank has given up, or a peer has told it to give up. The abort word is never reset,
/// so the answer stays true.
pub(crate) fn has_given_up<M: Memory + ?Sized>(m: &M, channel: &Channel) -> bool {
    m.load(abort_word(channel.rank), Access::AbortCheck) != 0
}

fn abort_word(rank: u32) -> SymWord {
    SymWord { rank, index: ABORT_WORD }
}

/// Poll the value that `look` returns until the wanted call or a later one has set it. Returns the
/// value.
///
/// One thread calls this function. It fails if the deadline passes, or if a rank or the host gave
/// up. After a missed deadline it records a fault and tells all ranks. The progress deadline
/// applies only if all ranks have entered the call. If a rank has not entered, the awaited rank may
/// itself wait for that rank, so the fault then names the rank that has not entered, and only after
/// the longer entry deadline.
pub fn wait_for<M: Memory + ?Sized>(
    m: &M,
    channel: &Channel,
    access: Access,
    awaited: Awaited,
    look: impl Fn() -> i32,
) -> Result<i32, Aborted> {
    let mut found = 0;
    poll(m, channel, awaited, || {
        found = look();
        let Awaited { want, rank, tile, .. } = awaited;
        (!m.reached(access, want, found)).then_some(Missing { rank, tile, seen: found })
    })?;
    Ok(found)
}

/// Wait for `word`, which rank `rank` sets as the signal of `tile`. Only one thread calls this.
pub(crate) fn wait_signal<M: Memory + ?Sized>(
    m: &M,
    channel: &Channel,
    call: Call,
    word: SymWord,
    (rank, tile): (u32, u32),
) -> Result<(), Aborted> {
    let tile = tile as i32;
    let awaited = Awaited { call, want: call, rank, tile, limit: Limit::Progress };
    let look = || m.load(word, Access::SignalLoad);
    wait_for(m, channel, Access::SignalLoad, awaited, look).map(drop)
}

/// Store this call's number into `word` (release). It is the signal for everything that this thread
/// has stored, or has acquired from other threads.
pub(crate) fn raise_signal<M: Memory + ?Sized>(m: &M, call: Call, word: SymWord) {
    m.store(word, call.number(), Access::SignalStore);
}

/// Report of an unsuccessful poll: the awaited rank, the tile, and the value found instead.
pub(crate) struct Missing {
    pub(crate) rank: u32,
    pub(crate) tile: i32,
    pub(crate) seen: i32,
}

/// Poll until `look` reports nothing missing. `poll` fails in the same cases as [`wait_for`], which
/// is the version for a single word.
pub(crate) fn poll<M: Memory + ?Sized>(
    m: &M,
    channel: &Channel,
    mut awaited: Awaited,
    mut look: impl FnMut() -> Option<Missing>,
) -> Result<(), Aborted> {
    let mut spins = 0;
    let mut late = false;
    loop {
        let Some(Missing { rank, tile, seen }) = look() else { return Ok(()) };
        (awaited.rank, awaited.tile) = (rank, tile);
        if stopped(m, channel, &awaited) {
            return Err(Aborted);
        }
        if m.expired(awaited.limit, spins) {
            let absent = match awaited.limit {
                Limit::Entry => Some((awaited.rank, seen)),
                Limit::Progress => absent(m, channel, awaited.call),
            };
            let fault = match absent {
                Some((rank, seen)) if m.expired(Limit::Entry, spins) => {
                    Some(awaited.fault(FaultKind::NotEntered, channel, rank, seen))
                }
                None if !late => {
                    Some(awaited.fault(FaultKind::NoProgress, channel, awaited.rank, seen))
                }
                _ => None,
            };
            if let Some(fault) = fault {
                give_up(m, channel, &fault);
                return Err(Aborted);
            }
            if absent.is_none() {
                // The late rank has now entered the call. This wait continues, and its progress
                // deadline starts anew.
                (late, spins) = (false, 0);
                continue;
            }
            late = true;
        }
        m.pause(spins);
        spins = spins.saturating_add(1);
    }
}

/// Returns the first peer that has not entered this call, with the value of its entry word; `None`
/// if all peers have entered.
fn absent<M: Memory + ?Sized>(m: &M, channel: &Channel, call: Call) -> Option<(u32, i32)> {
    channel.peers().find_map(|peer| {
        let record = channel.entry(channel.rank, peer, call.parity());
        let number = SymWord { index: record.index + LINE_WORDS - 1, ..record };
        let seen = m.load(number, Access::EntryLoad);
        (!call.reached_by(seen)).then_some((peer, seen))
    })
}

/// Give up, with a fault which says that the awaited rank makes no progress.
pub(crate) fn no_progress<M: Memory + ?Sized>(
    m: &M,
    channel: &Channel,
    awaited: &Awaited,
    seen: i32,
) {
    give_up(m, channel, &awaited.fault(FaultKind::NoProgress, channel, awaited.rank, seen));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Shape;
    use crate::memory::tests::Words;

    /// Tests the rank that the abort word names: after a missed deadline the awaited rank; after a
    /// mismatch this rank, whose fault record has the differing values.
    #[test]
    fn an_abort_word_names_the_rank_that_stands_still() {
        let shape = Shape { op: 0, size: 3, tiles: 1, ..Shape::default() };
        let (channel, _) = Channel::lay_out(shape, 0, 1024, 0);
        let call = Call::new(1);
        let awaited = Awaited { call, want: call, rank: 2, tile: -1, limit: Limit::Entry };
        use FaultKind::{Mismatch, NoProgress, NotEntered};
        for (kind, named) in [(NotEntered, 2), (NoProgress, 2), (Mismatch, 0)] {
            let m = Words::default();
            give_up(&m, &channel, &awaited.fault(kind, &channel, 2, 0));
            assert_eq!([0, 1, 2].map(|rank| m.abort(rank)), [named + 1; 3], "{kind:?}");
        }
    }

    /// Tests that an abort word whose value names no valid rank still ends the wait, and that the
    /// fault record shows the value.
    #[test]
    fn whatever_an_abort_word_holds_is_recorded() {
        let shape = Shape { op: 0, size: 2, tiles: 1, ..Shape::default() };
        let (channel, _) = Channel::lay_out(shape, 0, 1024, 0);
        let call = Call::new(1);
        let awaited = Awaited { call, want: call, rank: 1, tile: -1, limit: Limit::Entry };
        for value in [i32::MIN, -1, 1, 2, 3, PEER_LOST, i32::MAX] {
            for (word, host) in [(value, 0), (0, value), (value, value)] {
                let m = Words { host, ..Words::default() };
                m.put(abort_word(0), word);
                assert!(stopped(&m, &channel, &awaited));
                assert_eq!(m.fault.get().map(|fault| fault.seen), Some(value));
            }
        }
    }
}
