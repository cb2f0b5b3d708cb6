//! Rank 0 gathers the processes of a world: who comes, who is refused, who is missing.

use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use super::frames::Frame;
use super::mailbox::{AGAIN, open_files};
use super::notice::{Patience, notice};
use super::peer::{Peer, wait};
use super::rendezvous::{Place, check_user};
use crate::error::{Error, Result, list_ranks};

/// How many may be connected that have not said who they are. It also bounds what those can have
/// stored here: 64 times 8 KiB.
const STRANGERS: usize = 64;
/// How long a stranger may be silent where the place is wanted.
const SILENCE: Duration = Duration::from_secs(1);
/// How long rank 0 may have no descriptor for those that connect, before it gives up.
const NO_DESCRIPTOR: Duration = Duration::from_secs(2);

/// A world whose processes have not all come.
pub(super) struct Gathering {
    place: Place,
    size: usize,
    /// By rank, once it has said hello.
    peers: Vec<Option<Peer>>,
    /// Connected, but silent so far; who came first is first.
    strangers: Vec<Peer>,
}

impl Gathering {
    /// Gathers a world of `size`; `own` is the connection of rank 0 itself. The peers by rank, or
    /// nothing if the world came to nothing: then all are told why.
    pub(super) fn run(
        place: Place,
        listener: &UnixListener,
        own: UnixStream,
        size: usize,
        deadline: Instant,
    ) -> Option<Vec<Peer>> {
        let peers = (0..size).map(|_| None).collect();
        let mut gathering = Gathering { place, size, peers, strangers: Vec::new() };
        let gathered =
            Peer::new(own).map_err(|e| Error::system("socket of rank 0", e)).and_then(|own| {
                gathering.strangers.push(own);
                gathering.gather(listener, deadline)
            });
        match gathered {
            Ok(()) => {
                gathering.place.clear(None);
                let complete = format!("the world of {size} ranks is complete without this one");
                let complete = gathering.place.error(complete);
                gathering.refuse(listener, &complete);
                Some(gathering.peers.into_iter().flatten().collect())
            }
            Err(error) => {
                gathering.give_up(listener, &error);
                None
            }
        }
    }

    /// Tells all why the world comes to nothing.
    fn give_up(&mut self, listener: &UnixListener, error: &Error) {
        tracing::debug!(%error, "the world comes to nothing");
        let refusal = Frame::Refuse(error.clone()).pack();
        // Rank 0 last: its process may end when it has read this. The others' connections are
        // closed before a note is written, which may need their descriptors.
        let own = self.peers[0].take();
        for mut peer in self.peers.drain(..).rev().flatten() {
            peer.send(refusal.clone());
        }
        self.refuse(listener, error);
        self.place.clear(Some(error));
        // Those that connected until the socket was unlinked.
        self.refuse(listener, error);
        if let Some(mut own) = own {
            own.send(refusal);
        }
    }

    /// Tells those why that are connected, or just about to be, and are not of the world.
    fn refuse(&mut self, listener: &UnixListener, error: &Error) {
        let refusal = Frame::Refuse(error.clone()).pack();
        for mut stranger in self.strangers.drain(..) {
            stranger.send(refusal.clone());
        }
        // More may wait to be accepted.
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
            // All that was sent is read before anybody is judged: this process may have been stopped
            // for longer than the deadline, and the others have come in time.
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
                let (what, files) = (format!("rendezvous at {}", self.place), open_files());
                let message = format!("accepting another rank: {error}; the limit is {files}");
                return Err(Error::PeerFailed { rank: 0, what, message });
            }
            if let Some(rank) = self.place.lost(&missing) {
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
            let mut until = deadline.min(patience.until);
            if full.is_some() {
                until = until.min(now + AGAIN);
            } else if self.strangers.len() >= STRANGERS {
                until = until.min(now + SILENCE);
            }
            if let Some(pause) = self.place.asks_for_lost() {
                until = until.min(now + pause);
            }
            let heed = full.is_none() && self.strangers.len() < STRANGERS;
            let peers = self.strangers.iter().chain(self.peers.iter().flatten());
            wait(peers, heed.then_some(listener), Some(until.saturating_duration_since(now)));
        }
    }

    /// Takes in who has connected. An error is one of this process: it can have no more descriptors.
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
                // That connection came to nothing.
                Err(_) => continue,
            };
            match check_user(&socket) {
                Ok(()) => self.strangers.push(Peer::new(socket)?),
                Err(problem) => tracing::warn!(problem, "a connection is refused"),
            }
        }
    }

    /// Reads what strangers and those that wait have sent.
    fn hear(&mut self) -> Result<()> {
        for mut stranger in std::mem::take(&mut self.strangers) {
            let mut frames = stranger.read_if_ready().into_iter();
            match frames.next() {
                None if stranger.gone => {}
                None => self.strangers.push(stranger),
                Some(frame) => match self.greet(frame) {
                    Greeting::Rank(rank) => {
                        stranger.inbox.trust();
                        self.peers[rank] = Some(stranger);
                        self.heed(frames)?;
                    }
                    Greeting::Stranger(error) => {
                        tracing::warn!(%error, "a connection is refused");
                        stranger.send(Frame::Refuse(error).pack());
                    }
                    Greeting::Wrong(error) => {
                        // It is told, too.
                        self.strangers.push(stranger);
                        return Err(error);
                    }
                },
            }
        }
        for rank in 0..self.size {
            // Not for ever: a process that never stops sending must not keep the others waiting.
            for _ in 0..16 {
                let Some(peer) = self.peers[rank].as_mut().filter(|p| p.is_ready()) else { break };
                let frames = peer.read();
                self.heed(frames.into_iter())?;
            }
            if self.peers[rank].as_ref().is_some_and(|p| p.gone) {
                return Err(Error::PeerLost { rank });
            }
        }
        Ok(())
    }

    /// What a rank can say before all have come: that it gave up.
    fn heed(&mut self, mut frames: impl Iterator<Item = Frame>) -> Result<()> {
        let gave_up = frames.find_map(|frame| match frame {
            Frame::GaveUp { error, .. } => Some(error),
            _ => None,
        });
        gave_up.map_or(Ok(()), Err)
    }

    /// The ranks that have not said hello.
    fn missing(&self) -> Vec<usize> {
        (0..self.size).filter(|&r| self.peers[r].is_none()).collect()
    }

    /// Whether a process that says this belongs here, and as which rank. Who says anything else than
    /// hello, or is of another job, does not concern this world; who is of this job and differs from
    /// it makes it impossible.
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

/// What becomes of a connection whose first frame was read.
enum Greeting {
    Rank(usize),
    Stranger(Error),
    Wrong(Error),
}

/// Whether this process or the system can have no more descriptors.
fn is_full(error: &std::io::Error) -> bool {
    use rustix::io::Errno;
    let code = Errno::from_io_error(error);
    code.is_some_and(|c| [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM].contains(&c))
}
