//! Gathering of a world's processes by rank 0, which reports ranks that do not arrive.

use std::os::unix::net::UnixStream;
use std::time::Instant;

use super::entrance::Entrance;
use super::frames::Frame;
use super::held::Held;
use super::mailbox::AGAIN;
use super::notice::MeetingWait;
use super::peer::{Peer, wait};
use super::rendezvous::{Door, LOOK, Place, Watch};
use crate::error::{Error, Result};

/// World that is being formed: some of its processes have not arrived yet.
pub(super) struct Gathering {
    entrance: Entrance,
    /// Processes that have said hello, by rank. Rank 0's own connection is known without a hello.
    peers: Vec<Option<Peer>>,
}

impl Gathering {
    /// Gathers a world of `size` ranks; `own` is rank 0's own connection. Returns the peers by
    /// rank; `None` if the world could not be formed, after telling all processes the reason.
    pub(super) fn run(
        place: Place,
        door: Door,
        own: Held<UnixStream>,
        size: usize,
        deadline: Instant,
    ) -> Option<Vec<Peer>> {
        let peers = (0..size).map(|_| None).collect();
        let entrance = Entrance::new(place, door, size, 0);
        let mut gathering = Gathering { entrance, peers };
        let gathered = Peer::new(own).map_err(|e| Error::system("ioctl", e)).and_then(|mut own| {
            own.inbox.trust();
            gathering.peers[0] = Some(own);
            gathering.gather(deadline)
        });
        match gathered {
            Ok(()) => {
                gathering.entrance.close();
                Some(gathering.peers.into_iter().flatten().collect())
            }
            Err(error) => {
                gathering.give_up(&error);
                None
            }
        }
    }

    /// Tells all processes why the world cannot be formed.
    fn give_up(mut self, error: &Error) {
        tracing::debug!(%error, "the world comes to nothing");
        let refusal = Frame::Refuse { error: error.clone() }.pack();
        // Rank 0 gets the reason last, because its process may end after reading it. The other
        // connections are closed before the note is written, because writing may need the
        // descriptors of these connections.
        let own = self.peers[0].take();
        for mut peer in self.peers.drain(..).rev().flatten() {
            peer.send(refusal.clone());
        }
        self.entrance.give_up(error);
        if let Some(mut own) = own {
            own.send(refusal);
        }
    }

    fn gather(&mut self, deadline: Instant) -> Result<()> {
        let mut meeting = MeetingWait::new(0, self.peers.len(), deadline);
        let mut watch = Watch::new();
        loop {
            // All messages that were sent are read before the deadline is checked: this process may
            // have been stopped past the deadline while the other ranks arrived in time.
            self.entrance.accept();
            self.hear()?;
            let missing = self.entrance.missing();
            if missing.is_empty() {
                return Ok(());
            }
            let place = &self.entrance.place;
            let waited = meeting.check(&missing, place, None);
            self.entrance.check_full(waited.is_err())?;
            place.lost(&missing, &mut watch).map_or(waited, Err)?;
            let limit = if self.entrance.is_full() { AGAIN } else { LOOK };
            let peers = self.entrance.strangers().chain(self.peers.iter().flatten());
            wait(peers, self.entrance.listener(), Some(meeting.rest(limit)));
        }
    }

    /// Reads messages of strangers (connections without a hello) and of ranks that wait for the
    /// world.
    fn hear(&mut self) -> Result<()> {
        let peers = &mut self.peers;
        self.entrance.hear(|rank, peer, frames| {
            peers[rank] = Some(peer);
            heed(frames.into_iter())
        })?;
        for rank in 0..self.peers.len() {
            // The number of reads is bounded, so that a process that never stops sending does not
            // delay other processes.
            for _ in 0..16 {
                let Some(peer) = self.peers[rank].as_mut().filter(|p| p.is_ready()) else { break };
                let frames = peer.read();
                heed(frames.into_iter())?;
            }
            if let Some(peer) = self.peers[rank].as_ref().filter(|peer| peer.gone) {
                return Err(peer.loss(rank, 0));
            }
        }
        Ok(())
    }
}

/// Returns a rank's reason as an error if one of `frames` says that the rank gave up. Other frames
/// are ignored, because a rank that waits for the world can send nothing else.
pub(super) fn heed(mut frames: impl Iterator<Item = Frame>) -> Result<()> {
    let gave_up = frames.find_map(|frame| match frame {
        Frame::GaveUp { error, .. } => Some(error),
        _ => None,
    });
    gave_up.map_or(Ok(()), Err)
}

#[cfg(test)]
pub(super) mod tests {
    use std::time::Duration;

    use super::super::held::pair;
    use super::super::mailbox::Inbox;
    use super::*;

    /// Error by which the hub refuses a rank, read from the rank's end of the connection; `None` if
    /// the connection ends without one.
    pub(in super::super) fn refusal(socket: &UnixStream) -> Option<Error> {
        let mut inbox = Inbox::default();
        loop {
            match inbox.take().unwrap() {
                Some(Frame::Refuse { error }) => return Some(error),
                Some(frame) => panic!("{frame:?}"),
                None if inbox.fill(socket).unwrap() => {}
                None => return None,
            }
        }
    }

    #[test]
    fn one_wrong_hello_is_told_to_all_and_to_rank_0_last() {
        let temp = tempfile::tempdir().unwrap();
        let place = Place::at(temp.path().join("iris"), true, "job".into());
        let door = place.listen().unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        // Ranks say hello in this order. Rank 1, whose hello is read first, has the wrong world
        // size.
        let come = |rank: usize| {
            let size = if rank == 1 { 3 } else { 4 };
            place.connect(rank, size, deadline, None).unwrap()
        };
        let ranks = [1, 2, 3].map(come);
        let (own, at_hub) = pair().unwrap();
        let note = place.clone();
        let rank_0 = std::thread::spawn(move || (refusal(&own), note.came_to_nothing(None)));
        assert!(Gathering::run(place.clone(), door, at_hub, 4, deadline).is_none());
        let (own, note) = rank_0.join().unwrap();
        let told = ranks.iter().map(|socket| refusal(socket)).chain([own, note]);
        for (at, told) in told.enumerate() {
            let told = told.map(|error| error.to_string()).unwrap_or_default();
            assert!(told.contains("4 on rank 0, 3 on rank 1"), "{at}: {told:?}");
        }
    }
}
