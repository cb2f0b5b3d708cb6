//! Rank 0's thread that carries the exchanges of processes: a star, since a node has few of them
//! and what they exchange on the host is small.
//!
//! It never blocks on one of them: sockets are non-blocking, with a queue each, so that a process
//! that was stopped delays nobody's errors.

use std::collections::BTreeMap;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::frames::{
    AGAIN, Frame, Inbox, Outbox, Packet, Part, crowded, explain_crowded, open_files,
};
use super::notice::{Patience, notice};
use super::rendezvous::{Place, check_user};
use crate::error::{Error, Result, list_ranks};

/// How long the last messages may take after the world was closed: only a process that has been
/// stopped needs it.
const DRAIN: Duration = Duration::from_secs(10);

/// How many may be connected that have not said who they are. It also bounds what those can have
/// stored here: 64 times 8 KiB.
const STRANGERS: usize = 64;
/// How long a stranger may be silent where the place is wanted.
const SILENCE: Duration = Duration::from_secs(1);
/// How long rank 0 may have no descriptor for those that connect, before it gives up.
const NO_DESCRIPTOR: Duration = Duration::from_secs(2);

pub(crate) struct Hub {
    place: Place,
    size: usize,
    /// By rank, once it has said hello.
    peers: Vec<Option<Peer>>,
    /// Connected, but silent so far; who came first is first.
    strangers: Vec<Peer>,
    groups: BTreeMap<u64, Group>,
    /// Ranks that gave up waiting, with what they said. Judged when all that was sent has been read.
    late: Vec<Late>,
    /// Set when rank 0 has left in good order.
    draining: Option<Instant>,
}

struct Peer {
    socket: UnixStream,
    inbox: Inbox,
    outbox: Outbox,
    since: Instant,
    /// The system has no room for the first message in the outbox, for this reason.
    crowded: Option<String>,
    gone: bool,
    /// Why it is gone, where the reason is here and not there.
    fault: Option<Error>,
}

struct Late {
    rank: usize,
    group: u64,
    number: u64,
    what: String,
    waited: Duration,
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

    /// The members that have not come to the exchange that is going on.
    fn missing(&self) -> Vec<usize> {
        (0..self.given.len()).filter(|&i| self.given[i].is_none()).collect()
    }

    /// An error of the process of rank 0, by its rank in this group.
    fn fault_of_hub(&self, what: String, message: String) -> Error {
        match self.members.iter().position(|&m| m == 0) {
            Some(rank) => Error::PeerFailed { rank, what, message },
            None => {
                let problem = format!("rank 0 of the launched world failed in {what}: {message}");
                Error::Wire { what: "world".into(), problem }
            }
        }
    }
}

impl Peer {
    fn new(socket: UnixStream) -> std::io::Result<Peer> {
        socket.set_nonblocking(true)?;
        Ok(Peer {
            socket,
            inbox: Inbox::of_stranger(),
            outbox: Outbox::default(),
            since: Instant::now(),
            crowded: None,
            gone: false,
            fault: None,
        })
    }

    fn send(&mut self, packet: Packet) {
        if !self.gone {
            self.outbox.push(packet);
            self.flush();
        }
    }

    /// Writes what the socket takes. What the system has no room for just now stays.
    fn flush(&mut self) {
        self.crowded = None;
        match self.outbox.flush(&self.socket) {
            Ok(()) => {}
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(e) if crowded(&e) => self.crowded = Some(explain_crowded(&e)),
            Err(e) => {
                if e.kind() != std::io::ErrorKind::BrokenPipe {
                    tracing::warn!(error = %e, "a message could not be sent");
                }
                // Half a frame may be out: nothing after it would be understood. Where its end is
                // closed reading tells, after what it said before; where it is not, it is told so.
                self.outbox = Outbox::default();
                let _ = self.socket.shutdown(Shutdown::Write);
            }
        }
    }

    /// Gives up a message for which the system has no room, so that the reason can be told.
    fn make_room(&mut self) {
        if self.crowded.take().is_some() && !self.outbox.take_back() {
            self.outbox = Outbox::default();
            let _ = self.socket.shutdown(Shutdown::Write);
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
                if matches!(error, Error::System { .. }) {
                    self.fault = Some(error);
                }
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

    /// Whether there is something to read.
    fn is_ready(&self) -> bool {
        let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
        let ready = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        !self.gone && matches!(ready, Ok(n) if n > 0)
    }

    fn read_if_ready(&mut self) -> Vec<Frame> {
        if self.is_ready() { self.read() } else { Vec::new() }
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
            late: Vec::new(),
            draining: None,
        };
        let gathered =
            Peer::new(own).map_err(|e| Error::system("socket of rank 0", e)).and_then(|own| {
                hub.strangers.push(own);
                hub.gather(&listener, deadline)
            });
        match gathered {
            Ok(()) => {
                hub.place.clear(None);
                let complete = format!("the world of {size} ranks is complete without this one");
                let complete = hub.place.error(complete);
                hub.refuse(&listener, &complete);
                drop(listener);
                hub.broadcast(Frame::Welcome);
                hub.serve();
            }
            Err(error) => {
                tracing::debug!(%error, "the world comes to nothing");
                let refusal = Frame::Refuse(error.clone()).pack();
                // Rank 0 last: its process may end when it has read this. The others' connections are
                // closed before a note is written, which may need their descriptors.
                let own = hub.peers[0].take();
                for mut peer in hub.peers.drain(..).rev().flatten() {
                    peer.send(refusal.clone());
                }
                hub.refuse(&listener, &error);
                hub.place.clear(Some(&error));
                // Those that connected until the socket was unlinked.
                hub.refuse(&listener, &error);
                drop(listener);
                if let Some(mut own) = own {
                    own.send(refusal);
                }
            }
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
            self.wait(heed.then_some(listener), Some(until.saturating_duration_since(now)));
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
            while let Some(peer) = self.peers[rank].as_mut().filter(|p| p.is_ready()) {
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
            if !self.late.is_empty() {
                timeout = Some(Duration::ZERO);
            } else if self.peers.iter().flatten().any(|p| !p.gone && p.crowded.is_some()) {
                timeout = Some(timeout.map_or(AGAIN, |t| t.min(AGAIN)));
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
            // This process may have been stopped past a deadline: who is late is judged when all
            // that the others sent meanwhile has been read.
            if !self.peers.iter().flatten().any(Peer::is_ready) {
                for late in std::mem::take(&mut self.late) {
                    self.judge(late);
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
                // A socket that could take more does not help where the system has no room.
                if !peer.outbox.is_empty() && peer.crowded.is_none() {
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
            Frame::Late { group, number, what, waited } => {
                self.late.push(Late { rank, group, number, what, waited });
            }
            Frame::GaveUp { group, error } => self.give_up(rank, group, error),
            Frame::Ask { group, number } => self.answer(rank, group, number),
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

    /// A rank has waited until its deadline: who has not come to the exchange? If all have, and the
    /// system had no room to say so to the one that waits, that is why.
    fn judge(&mut self, Late { rank, group: id, number, what, waited }: Late) {
        let Some(group) = self.groups.get_mut(&id).filter(|g| !g.broken) else {
            return;
        };
        let crowded = self.peers[rank].as_ref().and_then(|peer| peer.crowded.clone());
        let error = match crowded {
            _ if number == group.number => Error::Absent { ranks: group.missing(), what, waited },
            Some(message) => group.fault_of_hub(format!("{what}, passing descriptors on"), message),
            // Complete meanwhile: the answer is on its way.
            None => return,
        };
        group.broken = true;
        for member in group.members.clone() {
            if let Some(peer) = &mut self.peers[member] {
                peer.make_room();
            }
        }
        self.tell(id, Frame::Broken { group: id, error });
    }

    /// A rank cannot go on, and says why before it leaves.
    fn give_up(&mut self, rank: usize, id: u64, error: Error) {
        if let Some(group) = self.groups.get_mut(&id)
            && group.members.contains(&rank)
            && !std::mem::replace(&mut group.broken, true)
        {
            self.tell(id, Frame::Broken { group: id, error });
        }
    }

    /// Tells a rank that has waited for a while whom it waits for.
    fn answer(&mut self, rank: usize, id: u64, number: u64) {
        let Some(group) = self.groups.get(&id).filter(|g| !g.broken && g.number == number) else {
            return;
        };
        let ranks = group.missing();
        let here = (0..group.given.len()).find(|i| !ranks.contains(i));
        if let (Some(teller), Some(peer)) = (here, &mut self.peers[rank]) {
            let (ranks, teller) = (ranks.iter().map(|&r| r as u64).collect(), teller as u64);
            peer.send(Frame::Missing { group: id, number, ranks, teller }.pack());
        }
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
            // Where this process could not read it, the fault is here.
            let fault = self.peers[rank].as_ref().and_then(|p| p.fault.as_ref());
            let error = match fault {
                Some(fault) => group.fault_of_hub(
                    format!("messages of rank {rank}"),
                    format!("{fault}; the limit of open files is {}", open_files()),
                ),
                None => Error::PeerLost { rank: index },
            };
            self.tell(id, Frame::Broken { group: id, error });
        }
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
