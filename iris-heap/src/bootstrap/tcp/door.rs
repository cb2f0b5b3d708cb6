//! Listening port of rank 0 while the ranks of a job gather: the relay of each node connects to it.
//! Any host may connect; without the key a connection gets no further than a greeting.
//!
//! A connection counts as a stranger until it has sent a sealed hello. The number of strangers and
//! their memory are limited. A new stranger over the limit replaces the oldest stranger, so slow
//! connections cannot keep relays out: a relay whose connection was closed connects again.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::Meeting;
use super::seal::GREETING;
use super::user_key::KeyDesk;
use crate::bootstrap::entrance::{arrive, differing};
use crate::bootstrap::frames::Frame;
use crate::bootstrap::held::Held;
use crate::bootstrap::link::Link;
use crate::bootstrap::mailbox::{Inbox, Outbox};
use crate::bootstrap::notice::MeetingWait;
use crate::bootstrap::peer::Peer;
use crate::bootstrap::socket::{FailedCall, Jam, cannot_meet, is_own, is_permanent};
use crate::error::{Error, Result};
use crate::limits::explain;

/// Maximum number of connections at a time that have not sent an encrypted hello.
const STRANGERS: usize = 256;
/// Time limit for a new connection (stranger) to send its hello.
const PATIENCE: Duration = Duration::from_secs(20);
/// Age at which a stranger may be closed to make room for another connection; long enough for a
/// rank's hello, which needs two round trips.
const SETTLED: Duration = Duration::from_millis(500);
/// Maximum number of connections that are accepted in a row before data of accepted connections is
/// read.
const IN_A_ROW: usize = 64;
/// Longest time that one poll for connections and data waits.
const LOOK: Duration = Duration::from_millis(250);
/// Time for which rank 0 may lack file descriptors for new connections before it gives up.
const NO_DESCRIPTOR: Duration = Duration::from_secs(10);

pub(super) struct Door {
    meeting: Meeting,
    /// Sockets at which processes of this user get the key, if the job has no secret.
    desk: Option<KeyDesk>,
    /// Sockets that listen at the addresses of rank 0.
    listeners: Vec<Held<TcpListener>>,
    /// Links to relays that have said hello. The first link leads to node 0's relay, which needs no
    /// hello.
    links: Vec<Link>,
    /// Whether each rank has arrived at its relay, by rank.
    arrived: Vec<bool>,
    /// Connections that have not sent an encrypted hello, the oldest first.
    strangers: VecDeque<Stranger>,
    /// Number of connections that were refused.
    turned_away: usize,
}

struct Stranger {
    since: Instant,
    state: State,
}

enum State {
    /// State while the greeting is read: stream, buffer, and number of bytes received so far.
    Greeting(Held<TcpStream>, [u8; GREETING], usize),
    /// The stranger's greeting was answered. It claims to be the relay in the process of the rank
    /// with this number.
    Answered(usize, Box<Peer>),
    /// The stranger has been sent the reason why it is refused. Its data is read to the end,
    /// because closing a socket with unread bytes would make the system discard the reason.
    Refused(Box<Peer>),
    /// The connection is to be closed.
    Over,
}

impl Door {
    pub(super) fn new(
        meeting: Meeting,
        desk: Option<KeyDesk>,
        listeners: Vec<Held<TcpListener>>,
    ) -> Door {
        let arrived = (0..meeting.terms.size).map(|rank| rank == 0).collect();
        let (links, strangers) = (Vec::new(), VecDeque::new());
        Door { meeting, desk, listeners, links, arrived, strangers, turned_away: 0 }
    }

    /// Gathers all ranks and returns the links to their relays; `own` is the connection to the
    /// relay in rank 0's process. On failure returns `None`, after telling the reason to all ranks
    /// that have arrived and to all strangers whose greeting was answered.
    pub(super) fn gather(mut self, own: Held<UnixStream>, deadline: Instant) -> Option<Vec<Link>> {
        let own = Peer::new(own).map_err(|e| Error::system("ioctl", e));
        let gathered = own.and_then(|mut own| {
            own.inbox.trust();
            self.links.push(Link::to_relay(0, own, Vec::new()));
            self.gather_others(deadline)
        });
        if self.turned_away > 0 {
            tracing::warn!(count = self.turned_away, at = %self.meeting, "connections were turned away");
        }
        match gathered {
            Ok(()) => Some(self.links),
            Err(error) => {
                tracing::debug!(%error, "the world comes to nothing");
                let refusal = Frame::Refuse { error }.pack();
                for stranger in &mut self.strangers {
                    if let State::Answered(_, peer) = &mut stranger.state {
                        peer.send(refusal.clone());
                    }
                }
                // Rank 0 gets the refusal last, because its process may end once it has read it.
                for link in self.links.iter_mut().rev() {
                    link.broadcast(&refusal);
                }
                None
            }
        }
    }

    pub(super) fn gather_others(&mut self, deadline: Instant) -> Result<()> {
        let mut meeting = MeetingWait::new(0, self.arrived.len(), deadline);
        let mut jam = None;
        loop {
            Jam::follow(&mut jam, self.accept());
            self.hear()?;
            let missing: Vec<_> =
                (0..self.arrived.len()).filter(|&rank| !self.arrived[rank]).collect();
            if missing.is_empty() {
                return Ok(());
            }
            Jam::check(&jam, (0, &self.meeting), NO_DESCRIPTOR, false)?;
            let away = format!("{} connections were turned away", self.turned_away);
            meeting.check(&missing, &self.meeting, (self.turned_away > 0).then_some(&away))?;
            self.wait(jam.is_none(), meeting.rest(LOOK));
        }
    }

    /// Accepts pending connections. Fails only if a system call of this process fails; the error
    /// has the name of that call.
    fn accept(&mut self) -> Result<(), FailedCall> {
        self.desk.as_ref().map_or(Ok(()), KeyDesk::serve)?;
        let mut idle = 0;
        for at in (0..self.listeners.len()).cycle().take(IN_A_ROW) {
            if !self.has_room() || idle == self.listeners.len() {
                return Ok(());
            }
            idle += 1;
            let stream = match Held::new(|| self.listeners[at].accept().map(|(stream, _)| stream)) {
                Ok(stream) => stream,
                Err(e) if e.kind() == ErrorKind::WouldBlock => continue,
                Err(e) if is_own(&e) => return Err(("accept", e)),
                // An error here means that the client closed the connection before it was accepted.
                Err(_) => continue,
            };
            idle = 0;
            stream.set_nonblocking(true).map_err(|e| ("ioctl", e))?;
            self.meeting.prepare(&stream).map_err(|e| ("setsockopt", e))?;
            let state = State::Greeting(stream, [0; GREETING], 0);
            self.strangers.push_back(Stranger { since: Instant::now(), state });
        }
        Ok(())
    }

    /// Whether another stranger (connection without a hello) may be accepted. At the limit, tries
    /// to close the oldest stranger first.
    fn has_room(&mut self) -> bool {
        if self.strangers.len() < STRANGERS {
            return true;
        }
        let old = self.strangers.front().is_some_and(|it| it.since.elapsed() >= SETTLED);
        if old {
            self.strangers.pop_front();
            self.turned_away += 1;
        }
        old
    }

    /// Reads pending data of connections without a hello, and of relays whose ranks wait for the
    /// world to be formed.
    fn hear(&mut self) -> Result<()> {
        let mut strangers = std::mem::take(&mut self.strangers);
        while let Some(mut stranger) = strangers.pop_front() {
            stranger.state = match self.advance(stranger.state) {
                Ok(state) => state,
                Err(error) => {
                    // Keep the other strangers, so that they are told the reason too.
                    self.strangers.append(&mut strangers);
                    return Err(error);
                }
            };
            let over = matches!(stranger.state, State::Over);
            if !over && stranger.since.elapsed() < PATIENCE {
                self.strangers.push_back(stranger);
            } else if !over {
                self.turned_away += 1;
            }
        }
        for at in 0..self.links.len() {
            self.links[at].peer.flush();
            for (rank, frame) in self.links[at].read_if_ready() {
                match frame {
                    Frame::Hello { .. } => {
                        self.arrive(rank)?;
                        self.links[at].ranks.push(rank);
                    }
                    Frame::GaveUp { error, .. } => return Err(error),
                    Frame::Gone { .. } => return Err(Error::PeerLost { rank }),
                    // Other frames are ignored, because a rank that waits for all ranks to arrive sends
                    // none but those above.
                    _ => {}
                }
            }
            let link = &self.links[at];
            if link.peer.gone {
                return Err(link.peer.loss(link.ranks[0], 0));
            }
        }
        Ok(())
    }

    /// Counts a rank as arrived.
    fn arrive(&mut self, rank: usize) -> Result<()> {
        arrive(&mut self.arrived, rank).map_err(|problem| self.meeting.error(problem))
    }

    /// Reads what a stranger (connection without a hello) has sent, and returns its next state. An
    /// error makes the whole world fail, for example if a rank with the right key has another
    /// number of ranks.
    fn advance(&mut self, state: State) -> Result<State> {
        match state {
            State::Over => Ok(State::Over),
            State::Greeting(stream, greeting, got) => self.greeted(stream, greeting, got),
            State::Answered(rank, mut peer) => {
                let mut frames = peer.read_if_ready().into_iter();
                match frames.next() {
                    None if peer.gone => {
                        if let Some(fault @ Error::System { .. }) = &peer.fault {
                            return Err(cannot_meet(0, &self.meeting, fault.to_string()));
                        }
                        self.turned_away += 1;
                        Ok(State::Over)
                    }
                    None => Ok(State::Answered(rank, peer)),
                    Some(frame) => self.admit(rank, frame, peer, frames.collect()),
                }
            }
            State::Refused(mut peer) => {
                peer.read_if_ready();
                Ok(if peer.gone { State::Over } else { State::Refused(peer) })
            }
        }
    }

    /// Reads a greeting, and answers it once it is complete.
    fn greeted(
        &mut self,
        mut stream: Held<TcpStream>,
        mut bytes: [u8; GREETING],
        mut got: usize,
    ) -> Result<State> {
        let own = |call: &str, error| {
            cannot_meet(0, &self.meeting, format!("{call}: {}", explain(&error)))
        };
        while got < GREETING {
            match stream.read(&mut bytes[got..]) {
                Ok(count) if count > 0 => got += count,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    return Ok(State::Greeting(stream, bytes, got));
                }
                Err(e) if is_permanent(&e) => return Err(own("recv", e)),
                _ => {
                    self.turned_away += 1;
                    return Ok(State::Over);
                }
            }
        }
        let size = self.arrived.len() as u32;
        let answer = self.meeting.terms.answer(&bytes);
        let answer = answer.ok().filter(|(_, rank, _)| (1..size).contains(rank));
        let Some((reply, rank, keys)) = answer else {
            // A failed write is ignored, because the refusal is only a hint to the other end.
            let _ = stream.write_all(&self.meeting.terms.refusal());
            self.turned_away += 1;
            return Ok(State::Over);
        };
        match stream.write_all(&reply) {
            Ok(()) => {}
            Err(e) if is_permanent(&e) => return Err(own("send", e)),
            Err(_) => return Ok(State::Over),
        }
        let mut peer = Peer::new(stream).map_err(|e| own("ioctl", e))?;
        peer.inbox = Inbox::sealed(&keys);
        peer.outbox = Outbox::sealed(&keys);
        Ok(State::Answered(rank as usize, Box::new(peer)))
    }

    /// Admits the relay of a rank that has proved that it has the key, if `frame` is a hello;
    /// `more` are frames that the relay has sent after it. A relay of another job is refused
    /// without failing this world.
    fn admit(
        &mut self,
        rank: usize,
        frame: Frame,
        mut peer: Box<Peer>,
        more: Vec<Frame>,
    ) -> Result<State> {
        let Frame::Hello { job, size, .. } = frame else {
            return Err(self.meeting.error(format!("rank {rank} says something else than hello")));
        };
        let (own_job, all) = (&self.meeting.terms.job, self.arrived.len());
        let is_ours = job == *own_job;
        let arrived = match is_ours && size == all {
            true => self.arrive(rank),
            false => {
                let problem = differing((0, own_job, all), (rank, &job, size));
                Err(self.meeting.error(problem))
            }
        };
        if let Err(error) = arrived {
            peer.send(Frame::Refuse { error: error.clone() }.pack());
            if is_ours {
                return Err(error);
            }
            self.turned_away += 1;
            return Ok(State::Refused(peer));
        }
        peer.inbox.trust();
        self.links.push(Link::to_relay(rank, *peer, more));
        Ok(State::Over)
    }

    fn wait(&self, heed_listener: bool, timeout: Duration) {
        let readable = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        let mut fds = Vec::new();
        if heed_listener {
            let desk = self.desk.iter().flat_map(|desk| &desk.sockets);
            fds.extend(desk.map(|socket| readable(socket.as_fd())));
        }
        if heed_listener && self.strangers.len() < STRANGERS {
            fds.extend(self.listeners.iter().map(|listener| readable(listener.as_fd())));
        }
        for stranger in &self.strangers {
            match &stranger.state {
                State::Greeting(stream, ..) => fds.push(readable(stream.as_fd())),
                State::Answered(_, peer) | State::Refused(peer) => {
                    fds.push(readable(peer.socket.as_fd()));
                }
                State::Over => {}
            }
        }
        let links = self.links.iter().filter(|link| !link.peer.gone);
        fds.extend(links.map(|link| readable(link.peer.socket.as_fd())));
        let timeout = Timespec {
            tv_sec: timeout.as_secs() as i64,
            tv_nsec: i64::from(timeout.subsec_nanos().max(1)),
        };
        // The result of the poll is ignored, because the caller's loop checks all connections
        // anyway.
        let _ = poll(&mut fds, Some(&timeout));
    }
}
