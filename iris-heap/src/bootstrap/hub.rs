//! Rank 0's thread that carries the exchanges of processes: a star, since a node has few of them
//! and what they exchange on the host is small.
//!
//! It never blocks on one of them: sockets are non-blocking, with a queue each, so that a process
//! that was stopped delays nobody's errors.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::frames::{Frame, Inbox, Outbox, Packet, Part};
use super::rendezvous::{Patience, Place, check_user};
use crate::error::{Error, Result};

/// How long the last messages may take after the world was closed: only a process that has been
/// stopped needs it.
const DRAIN: Duration = Duration::from_secs(10);

pub(crate) struct Hub {
    place: Place,
    size: usize,
    /// By rank, once it has said hello.
    peers: Vec<Option<Peer>>,
    /// Connected, but silent so far.
    strangers: Vec<Peer>,
    groups: BTreeMap<u64, Group>,
    /// Set when rank 0 has left in good order.
    draining: Option<Instant>,
}

struct Peer {
    socket: UnixStream,
    inbox: Inbox,
    outbox: Outbox,
    gone: bool,
}

struct Group {
    /// Ranks of the launched world.
    members: Vec<usize>,
    /// Number of the exchange that is going on.
    number: u64,
    given: Vec<Option<Part>>,
    left: Vec<bool>,
    broken: bool,
}

impl Group {
    fn new(members: Vec<usize>) -> Group {
        let size = members.len();
        Group {
            members,
            number: 1,
            given: (0..size).map(|_| None).collect(),
            left: vec![false; size],
            broken: false,
        }
    }
}

impl Peer {
    fn new(socket: UnixStream) -> std::io::Result<Peer> {
        socket.set_nonblocking(true)?;
        Ok(Peer { socket, inbox: Inbox::default(), outbox: Outbox::default(), gone: false })
    }

    fn send(&mut self, packet: Packet) {
        if !self.gone {
            self.outbox.push(packet);
            self.flush();
        }
    }

    fn flush(&mut self) {
        match self.outbox.flush(&self.socket) {
            Ok(()) => {}
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
            // Its end is closed; reading will tell.
            Err(_) => self.outbox = Outbox::default(),
        }
    }

    /// Reads what is there. An error or an end is `gone`.
    fn read(&mut self) -> Vec<Frame> {
        let mut frames = Vec::new();
        match self.inbox.fill(&self.socket) {
            Ok(true) => {}
            Ok(false) => self.gone = true,
            Err(error) => {
                tracing::warn!(%error, "a connection is given up");
                self.gone = true;
            }
        }
        loop {
            match self.inbox.take() {
                Ok(Some(frame)) => frames.push(frame),
                Ok(None) => return frames,
                Err(error) => {
                    tracing::warn!(%error, "a connection is given up");
                    self.gone = true;
                    return frames;
                }
            }
        }
    }
}

impl Hub {
    /// Gathers the processes of a world of `size`, then carries their exchanges until all have
    /// gone. `own` is the connection of rank 0 itself.
    pub(crate) fn run(
        place: Place,
        listener: UnixListener,
        own: UnixStream,
        size: usize,
        deadline: Instant,
    ) {
        let mut hub = Hub {
            place,
            size,
            peers: (0..size).map(|_| None).collect(),
            strangers: Vec::new(),
            groups: BTreeMap::from([(0, Group::new((0..size).collect()))]),
            draining: None,
        };
        let gathered =
            Peer::new(own).map_err(|e| Error::system("socket of rank 0", e)).and_then(|own| {
                hub.strangers.push(own);
                hub.gather(&listener, deadline)
            });
        drop(listener);
        hub.place.clear();
        hub.strangers.retain(|s| !s.gone);
        match gathered {
            Ok(()) => {
                hub.strangers.clear();
                hub.broadcast(Frame::Welcome);
                hub.serve();
            }
            Err(error) => {
                tracing::debug!(%error, "the world comes to nothing");
                let refusal = Frame::Refuse(error).pack();
                let peers = hub.peers.iter_mut().rev().flatten();
                for peer in hub.strangers.iter_mut().chain(peers) {
                    peer.send(refusal.clone());
                }
            }
        }
    }

    fn gather(&mut self, listener: &UnixListener, deadline: Instant) -> Result<()> {
        let started = Instant::now();
        let mut patience = Patience::new(started, deadline);
        while self.peers.iter().any(Option::is_none) {
            let now = Instant::now();
            if now >= deadline {
                return Err(Error::Absent {
                    ranks: self.missing(),
                    what: format!("rank 0 at {}", self.place),
                    waited: now - started,
                });
            }
            if let Some(waited) = patience.is_over() {
                let (missing, size, place) = (self.missing(), self.size, &self.place);
                tracing::warn!(?missing, size, ?waited, %place, "waiting for ranks");
            }
            self.wait(Some(listener), Some(deadline.min(patience.until) - now));
            while let Ok((socket, _)) = listener.accept() {
                match check_user(&socket) {
                    Ok(()) => {}
                    Err(problem) => {
                        tracing::warn!(problem, "a connection is refused");
                        continue;
                    }
                }
                match Peer::new(socket) {
                    Ok(peer) => self.strangers.push(peer),
                    Err(e) => return Err(Error::system("socket of a process", e)),
                }
            }
            for mut stranger in std::mem::take(&mut self.strangers) {
                match stranger.read_if_ready().into_iter().next() {
                    None if stranger.gone => {}
                    None => self.strangers.push(stranger),
                    Some(frame) => {
                        let outcome = self.greet(frame);
                        match outcome {
                            Ok(rank) => self.peers[rank] = Some(stranger),
                            Err(e) => {
                                // It is told, too.
                                self.strangers.push(stranger);
                                return Err(e);
                            }
                        }
                    }
                }
            }
            for rank in 0..self.size {
                if let Some(peer) = &mut self.peers[rank] {
                    let _ = peer.read_if_ready();
                    if peer.gone {
                        return Err(self.place.error(format!("rank {rank} has gone again")));
                    }
                }
            }
        }
        Ok(())
    }

    /// The ranks that have not said hello.
    fn missing(&self) -> Vec<usize> {
        (0..self.size).filter(|&r| self.peers[r].is_none()).collect()
    }

    /// Whether a process that says this belongs here, and as which rank.
    fn greet(&self, frame: Frame) -> Result<usize> {
        let Frame::Hello { job, rank, size } = frame else {
            return Err(self.place.error("a process says something else than hello"));
        };
        let problem = if job != self.place.job {
            format!("a process is of the job {job}")
        } else if size != self.size as u64 {
            format!("the size of the world is {} on rank 0, {size} on rank {rank}", self.size)
        } else if rank >= size {
            format!("a process has rank {rank}, expected 0 to {}", self.size - 1)
        } else if self.peers[rank as usize].is_some() {
            format!("two processes have rank {rank}")
        } else {
            return Ok(rank as usize);
        };
        Err(self.place.error(problem))
    }

    fn serve(&mut self) {
        loop {
            if self.peers.iter().flatten().all(|p| p.gone) {
                return;
            }
            let mut timeout = None;
            if let Some(until) = self.draining {
                let now = Instant::now();
                let rest = self.peers.iter().flatten().any(|p| !p.gone && !p.outbox.is_empty());
                if !rest || now >= until {
                    return;
                }
                timeout = Some(until - now);
            }
            self.wait(None, timeout);
            for rank in 0..self.size {
                let Some(peer) = self.peers[rank].as_mut().filter(|p| !p.gone) else {
                    continue;
                };
                peer.flush();
                let frames = peer.read_if_ready();
                for frame in frames {
                    self.handle(rank, frame);
                }
                if self.peers[rank].as_ref().is_some_and(|p| p.gone) {
                    let groups: Vec<u64> = self.groups.keys().copied().collect();
                    for group in groups {
                        self.leave(rank, group, false);
                    }
                }
            }
        }
    }

    /// Waits until a socket has something to say or takes more.
    fn wait(&self, listener: Option<&UnixListener>, timeout: Option<Duration>) {
        let mut fds = Vec::new();
        if let Some(listener) = listener {
            fds.push(PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN));
        }
        for peer in self.strangers.iter().chain(self.peers.iter().flatten()) {
            if !peer.gone {
                let mut events = PollFlags::IN;
                if !peer.outbox.is_empty() {
                    events |= PollFlags::OUT;
                }
                fds.push(PollFd::from_borrowed_fd(peer.socket.as_fd(), events));
            }
        }
        let timeout = timeout.map(|t| Timespec {
            tv_sec: i64::try_from(t.as_secs()).unwrap_or(i64::MAX),
            // Not zero: the caller's clock shall have passed its time.
            tv_nsec: i64::from(t.subsec_nanos().max(1)),
        });
        if let Err(error) = poll(&mut fds, timeout.as_ref())
            && error != rustix::io::Errno::INTR
        {
            tracing::error!(%error, "poll failed");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn broadcast(&mut self, frame: Frame) {
        let packet = frame.pack();
        for peer in self.peers.iter_mut().rev().flatten() {
            peer.send(packet.clone());
        }
    }

    /// To the members of a group that are still in it. To rank 0 last, here as everywhere: its
    /// process may end when it has read an error, and this thread with it.
    fn tell(&mut self, group: u64, frame: Frame) {
        let packet = frame.pack();
        if let Some(group) = self.groups.get(&group) {
            let here = group.members.iter().zip(&group.left).filter(|(_, left)| !**left);
            let mut here: Vec<usize> = here.map(|(&member, _)| member).collect();
            here.sort_unstable();
            for member in here.into_iter().rev() {
                if let Some(peer) = &mut self.peers[member] {
                    peer.send(packet.clone());
                }
            }
        }
    }

    fn handle(&mut self, rank: usize, frame: Frame) {
        match frame {
            Frame::Group { group, members } => self.enter(rank, group, members),
            Frame::Give { group, number, part } => self.give(rank, group, number, part),
            Frame::Late { group, number, what, waited } => self.late(group, number, what, waited),
            Frame::Leave { group, clean } => {
                self.leave(rank, group, clean);
                if (rank, group, clean) == (0, 0, true) {
                    self.broadcast(Frame::Goodbye);
                    self.draining = Some(Instant::now() + DRAIN);
                }
            }
            other => tracing::warn!(rank, frame = ?other, "an unexpected frame is ignored"),
        }
    }

    fn enter(&mut self, rank: usize, id: u64, members: Vec<u64>) {
        let members: Vec<usize> = members.into_iter().map(|m| m as usize).collect();
        if members.iter().any(|&m| m >= self.size) || !members.contains(&rank) {
            tracing::warn!(rank, ?members, "a group of other ranks is ignored");
            return;
        }
        let group = self.groups.entry(id).or_insert_with(|| Group::new(members));
        let dead =
            group.members.iter().position(|&m| self.peers[m].as_ref().is_none_or(|p| p.gone));
        if let Some(dead) = dead {
            group.broken = true;
            self.tell(id, Frame::Broken { group: id, error: Error::PeerLost { rank: dead } });
        }
    }

    fn give(&mut self, rank: usize, id: u64, number: u64, part: Part) {
        let Some(group) = self.groups.get_mut(&id).filter(|g| !g.broken) else {
            return;
        };
        let Some(index) = group.members.iter().position(|&m| m == rank) else {
            return;
        };
        if number != group.number {
            tracing::warn!(rank, number, expected = group.number, "an exchange is out of order");
            return;
        }
        group.given[index] = Some(part);
        if group.given.iter().all(Option::is_some) {
            let parts = group.given.iter_mut().filter_map(Option::take).collect();
            group.number += 1;
            self.tell(id, Frame::All { group: id, number, parts });
        }
    }

    fn late(&mut self, id: u64, number: u64, what: String, waited: Duration) {
        let Some(group) = self.groups.get_mut(&id) else {
            return;
        };
        // Complete meanwhile, or broken: the answer is on its way.
        if group.broken || number != group.number {
            return;
        }
        group.broken = true;
        let ranks = (0..group.given.len()).filter(|&i| group.given[i].is_none()).collect();
        self.tell(id, Frame::Broken { group: id, error: Error::Absent { ranks, what, waited } });
    }

    fn leave(&mut self, rank: usize, id: u64, clean: bool) {
        let Some(group) = self.groups.get_mut(&id) else {
            return;
        };
        let Some(index) = group.members.iter().position(|&m| m == rank) else {
            return;
        };
        if std::mem::replace(&mut group.left[index], true) {
            return;
        }
        if !clean {
            group.broken = true;
        }
        if group.left.iter().all(|&left| left) {
            self.groups.remove(&id);
        } else if !clean {
            self.tell(id, Frame::Broken { group: id, error: Error::PeerLost { rank: index } });
        }
    }
}

impl Peer {
    /// Reads if that does not block.
    fn read_if_ready(&mut self) -> Vec<Frame> {
        let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
        let ready = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        if matches!(ready, Ok(n) if n > 0) && !self.gone { self.read() } else { Vec::new() }
    }
}
