//! Gathering of a world's processes by rank 0: accepts connections, refuses those that do not
//! belong to the world, and names missing ranks.

use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use super::frames::Frame;
use super::mailbox::AGAIN;
use super::notice::{Patience, notice};
use super::peer::{Peer, wait};
use super::rendezvous::{Door, LOOK, Place, check_user};
use crate::error::{Error, Result, list_ranks};
use crate::limits::{explain, is_full};

/// Largest number of connections that have not said hello. This limit also bounds the memory of
/// these connections in rank 0: 64 times 8 KiB.
const STRANGERS: usize = 64;
/// Time after which a connection that has sent no hello may be dropped to make room for another.
const SILENCE: Duration = Duration::from_secs(1);
/// Time for which rank 0 may lack file descriptors for new connections before it gives up.
const NO_DESCRIPTOR: Duration = Duration::from_secs(2);

/// World that is being formed: some of its processes have not arrived yet.
pub(super) struct Gathering {
    place: Place,
    size: usize,
    /// Processes that have said hello, by rank. Rank 0's own connection is known without a hello.
    peers: Vec<Option<Peer>>,
    /// Connections that have not said hello, oldest first.
    strangers: Vec<Peer>,
}

impl Gathering {
    /// Gathers a world of `size` ranks; `own` is rank 0's own connection. Returns the peers by
    /// rank, or `None` if the world could not be formed; then all processes get the reason.
    pub(super) fn run(
        place: Place,
        door: &mut Door,
        own: UnixStream,
        size: usize,
        deadline: Instant,
    ) -> Option<Vec<Peer>> {
        let peers = (0..size).map(|_| None).collect();
        let mut gathering = Gathering { place, size, peers, strangers: Vec::new() };
        let gathered =
            Peer::new(own).map_err(|e| Error::system("socket of rank 0", e)).and_then(|mut own| {
                own.inbox.trust();
                gathering.peers[0] = Some(own);
                gathering.gather(&door.listener, deadline)
            });
        match gathered {
            Ok(()) => {
                gathering.place.clear(None);
                let complete = format!("the world of {size} ranks is complete without this one");
                let complete = gathering.place.error(complete);
                gathering.refuse(&door.listener, &complete);
                Some(gathering.peers.into_iter().flatten().collect())
            }
            Err(error) => {
                gathering.give_up(door, &error);
                None
            }
        }
    }

    /// Tells all processes why the world cannot be formed.
    fn give_up(&mut self, door: &mut Door, error: &Error) {
        tracing::debug!(%error, "the world comes to nothing");
        let refusal = Frame::Refuse(error.clone()).pack();
        // Rank 0 gets the reason last, because its process may end after reading it. The other
        // connections are closed before the note is written, because writing may need the
        // descriptors of these connections.
        let own = self.peers[0].take();
        for mut peer in self.peers.drain(..).rev().flatten() {
            peer.send(refusal.clone());
        }
        self.refuse(&door.listener, error);
        door.make_room();
        self.place.clear(Some(error));
        // Processes that connected before the socket was unlinked, and were not accepted, are
        // refused here.
        self.refuse(&door.listener, error);
        if let Some(mut own) = own {
            own.send(refusal);
        }
    }

    /// Tells connections that do not belong to the world, including those not yet accepted, why
    /// they are refused.
    fn refuse(&mut self, listener: &UnixListener, error: &Error) {
        let refusal = Frame::Refuse(error.clone()).pack();
        for mut stranger in self.strangers.drain(..) {
            stranger.send(refusal.clone());
        }
        // Further connections may be waiting in the listener's queue.
        for _ in 0..2 * STRANGERS {
            let Ok((socket, _)) = listener.accept() else { break };
            if check_user(&socket).is_ok()
                && let Ok(mut stranger) = Peer::new(socket)
            {
                stranger.send(refusal.clone());
            }
        }
    }

    fn gather(&mut self, listener: &UnixListener, deadline: Instant) -> Result<()> {
        let started = Instant::now();
        let mut patience = Patience::new(started, deadline);
        let mut full: Option<(Instant, std::io::Error)> = None;
        loop {
            // All messages that were sent are read before the deadline is checked: this process may
            // have been stopped past the deadline while the other ranks arrived in time.
            match self.accept(listener) {
                Ok(()) => full = None,
                Err(e) => full = Some((full.map_or_else(Instant::now, |(since, _)| since), e)),
            }
            self.hear()?;
            let missing = self.missing();
            if missing.is_empty() {
                return Ok(());
            }
            let now = Instant::now();
            if let Some((since, error)) = &full
                && (now >= deadline || now - *since >= NO_DESCRIPTOR)
            {
                let (what, error) = (format!("rendezvous at {}", self.place), explain(error));
                let message = format!("accepting another rank: {error}");
                return Err(Error::PeerFailed { rank: 0, what, message });
            }
            if let Some(rank) = self.place.lost(&missing, started) {
                return Err(Error::PeerLost { rank });
            }
            if now >= deadline {
                return Err(Error::Absent {
                    ranks: missing,
                    what: format!("rank 0 at {}", self.place),
                    waited: now - started,
                });
            }
            if let Some(waited) = patience.is_over() {
                let missing = list_ranks(&missing);
                notice(format_args!(
                    "rank 0 of {} waits for rank {missing} at {}: {waited:.1?} of {:.1?}",
                    self.size,
                    self.place,
                    deadline - started
                ));
            }
            let mut until = deadline.min(patience.until).min(now + LOOK);
            if full.is_some() {
                until = until.min(now + AGAIN);
            } else if self.strangers.len() >= STRANGERS {
                until = until.min(now + SILENCE);
            }
            let heed = full.is_none() && self.strangers.len() < STRANGERS;
            let peers = self.strangers.iter().chain(self.peers.iter().flatten());
            wait(
                peers,
                heed.then_some(listener.as_fd()),
                Some(until.saturating_duration_since(now)),
            );
        }
    }

    /// Accepts new connections. An error means that this process is out of file descriptors.
    fn accept(&mut self, listener: &UnixListener) -> std::io::Result<()> {
        loop {
            if self.strangers.len() >= STRANGERS {
                let silent = |s: &Peer| s.since.elapsed() >= SILENCE;
                self.strangers.retain(|s| !silent(s));
                if self.strangers.len() >= STRANGERS {
                    return Ok(());
                }
            }
            let socket = match listener.accept() {
                Ok((socket, _)) => socket,
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return Ok(()),
                Err(e) if is_full(&e) => return Err(e),
                // The connection was aborted by its peer.
                Err(_) => continue,
            };
            match check_user(&socket) {
                Ok(()) => self.strangers.push(Peer::new(socket)?),
                Err(problem) => tracing::warn!(problem, "a connection is refused"),
            }
        }
    }

    /// Reads messages of strangers and of waiting ranks. If a message makes the world impossible,
    /// the remaining strangers are still read and kept, so that they can be sent the reason.
    fn hear(&mut self) -> Result<()> {
        let mut outcome = Ok(());
        for mut stranger in std::mem::take(&mut self.strangers) {
            let mut frames = stranger.read_if_ready().into_iter();
            match frames.next() {
                None if stranger.gone => {}
                None => self.strangers.push(stranger),
                Some(frame) => match self.greet(frame) {
                    Greeting::Rank(rank) => {
                        stranger.inbox.trust();
                        self.peers[rank] = Some(stranger);
                        outcome = outcome.and_then(|()| heed(frames));
                    }
                    Greeting::Stranger(error) => {
                        tracing::warn!(%error, "a connection is refused");
                        stranger.send(Frame::Refuse(error).pack());
                    }
                    Greeting::Wrong(error) => {
                        self.strangers.push(stranger);
                        outcome = outcome.and(Err(error));
                    }
                },
            }
        }
        outcome?;
        for rank in 0..self.size {
            // The number of reads is bounded, so that a process that never stops sending does not
            // delay the others.
            for _ in 0..16 {
                let Some(peer) = self.peers[rank].as_mut().filter(|p| p.is_ready()) else { break };
                let frames = peer.read();
                heed(frames.into_iter())?;
            }
            if self.peers[rank].as_ref().is_some_and(|p| p.gone) {
                return Err(Error::PeerLost { rank });
            }
        }
        Ok(())
    }

    /// Ranks that have not said hello yet.
    fn missing(&self) -> Vec<usize> {
        (0..self.size).filter(|&r| self.peers[r].is_none()).collect()
    }

    /// Decides whether the sender of `frame` belongs to this world, and as which rank. A process of
    /// another job, or whose first frame is no hello, is ignored; a process of this job that
    /// contradicts the world makes the world impossible.
    fn greet(&self, frame: Frame) -> Greeting {
        let Frame::Hello { job, rank, size } = frame else {
            return Greeting::Stranger(
                self.place.error("a process says something else than hello"),
            );
        };
        if job != self.place.job {
            return Greeting::Stranger(self.place.error(format!("a process is of the job {job}")));
        }
        let problem = if size != self.size as u64 {
            format!("the size of the world is {} on rank 0, {size} on rank {rank}", self.size)
        } else if rank >= size {
            format!("a process has rank {rank}, expected 0 to {}", self.size - 1)
        } else if self.peers[rank as usize].is_some() {
            format!("two processes have rank {rank}")
        } else {
            return Greeting::Rank(rank as usize);
        };
        Greeting::Wrong(self.place.error(problem))
    }
}

/// Fails if one of `frames` says that a rank gave up, with the rank's reason; a waiting rank can
/// send nothing else before all ranks have arrived.
pub(super) fn heed(mut frames: impl Iterator<Item = Frame>) -> Result<()> {
    let gave_up = frames.find_map(|frame| match frame {
        Frame::GaveUp { error, .. } => Some(error),
        _ => None,
    });
    gave_up.map_or(Ok(()), Err)
}

/// Result of reading the first frame of a connection.
enum Greeting {
    Rank(usize),
    Stranger(Error),
    Wrong(Error),
}

#[cfg(test)]
mod tests {
    use super::super::mailbox::{Inbox, Outbox};
    use super::*;

    /// Error by which the hub refuses a rank, read from the rank's end of the connection; `None` if
    /// the connection ends without one.
    fn refusal(socket: &UnixStream) -> Option<Error> {
        let mut inbox = Inbox::default();
        loop {
            match inbox.take().unwrap() {
                Some(Frame::Refuse(error)) => return Some(error),
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
        let mut door = place.listen().unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        // Ranks say hello in this order; rank 1, whose hello is read first, names the wrong size.
        let come = |rank: u64| {
            let socket = place.connect(rank as usize, 4, deadline).unwrap();
            let size = if rank == 1 { 3 } else { 4 };
            let mut outbox = Outbox::default();
            outbox.push(Frame::Hello { job: place.job.clone(), rank, size }.pack());
            outbox.flush(&socket).unwrap();
            socket
        };
        let ranks = [1, 2, 3].map(come);
        let (own, at_hub) = UnixStream::pair().unwrap();
        let note = place.clone();
        let rank_0 = std::thread::spawn(move || (refusal(&own), note.came_to_nothing(None)));
        assert!(Gathering::run(place.clone(), &mut door, at_hub, 4, deadline).is_none());
        let (own, note) = rank_0.join().unwrap();
        let told = ranks.iter().map(refusal).chain([own, note]);
        for (at, told) in told.enumerate() {
            let told = told.map(|error| error.to_string()).unwrap_or_default();
            assert!(told.contains("4 on rank 0, 3 on rank 1"), "{at}: {told:?}");
        }
    }
}
