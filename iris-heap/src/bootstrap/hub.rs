//! Hub: rank 0's thread that carries the exchanges of processes. A star topology suffices, since a
//! node has few processes and their host messages are small.
//!
//! The hub never blocks on a process: sockets are non-blocking, with one queue each, so a stopped
//! process does not delay errors to the others.

use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::frames::{Frame, Part};
use super::gather::Gathering;
use super::mailbox::AGAIN;
use super::peer::{Peer, wait};
use super::rendezvous::{Door, Place};
use crate::error::Error;
use crate::limits::open_files;

/// Time limit for sending the last messages after the world was closed; it is reached only if a
/// process is stopped.
const DRAIN: Duration = Duration::from_secs(10);

pub(crate) struct Hub {
    size: usize,
    /// Connections to the ranks, indexed by rank.
    peers: Vec<Peer>,
    groups: BTreeMap<u64, Group>,
    /// Ranks whose deadline has passed, with their reports. They are handled only after all
    /// messages that were sent have been read.
    late: Vec<Late>,
    /// Time at which rank 0 left after a collective close; `None` before that.
    draining: Option<Instant>,
}

struct Late {
    rank: usize,
    group: u64,
    number: u64,
    what: String,
    waited: Duration,
}

struct Group {
    /// Members, as ranks of the launched world.
    members: Vec<usize>,
    /// Number of the exchange in progress in this group.
    number: u64,
    given: Vec<Option<Part>>,
    has_left: Vec<bool>,
    broken: bool,
}

impl Group {
    fn new(members: Vec<usize>) -> Group {
        let size = members.len();
        Group {
            members,
            number: 1,
            given: (0..size).map(|_| None).collect(),
            has_left: vec![false; size],
            broken: false,
        }
    }

    /// Indices of the members that have not contributed to the exchange in progress.
    fn missing(&self) -> Vec<usize> {
        (0..self.given.len()).filter(|&i| self.given[i].is_none()).collect()
    }

    /// Error that the group receives for a failure of rank 0's process, with rank 0's number in
    /// this group.
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

impl Hub {
    /// Gathers the processes of a world of `size` ranks, then carries their exchanges until all
    /// have left. `own` is rank 0's own connection.
    pub(crate) fn run(
        place: Place,
        mut door: Door,
        own: UnixStream,
        size: usize,
        deadline: Instant,
    ) {
        let gathered = Gathering::run(place, &mut door, own, size, deadline);
        drop(door);
        if let Some(peers) = gathered {
            Hub::carry(peers);
        }
    }

    /// Carries the exchanges of `peers`, the connections by rank, until all ranks have left.
    pub(super) fn carry(peers: Vec<Peer>) {
        let size = peers.len();
        let groups = BTreeMap::from([(0, Group::new((0..size).collect()))]);
        let mut hub = Hub { size, peers, groups, late: Vec::new(), draining: None };
        hub.broadcast(Frame::Welcome);
        hub.serve();
    }

    fn serve(&mut self) {
        loop {
            if self.peers.iter().all(|p| p.gone) {
                return;
            }
            let mut timeout = None;
            if let Some(until) = self.draining {
                let now = Instant::now();
                let rest = self.peers.iter().any(|p| !p.gone && !p.outbox.is_empty());
                if !rest || now >= until {
                    return;
                }
                timeout = Some(until - now);
            }
            if !self.late.is_empty() {
                timeout = Some(Duration::ZERO);
            } else if self.peers.iter().any(|p| !p.gone && p.crowded.is_some()) {
                timeout = Some(timeout.map_or(AGAIN, |t| t.min(AGAIN)));
            }
            wait(self.peers.iter(), None, timeout);
            for rank in 0..self.size {
                let peer = &mut self.peers[rank];
                if peer.gone {
                    continue;
                }
                peer.flush();
                let frames = peer.read_if_ready();
                for frame in frames {
                    self.handle(rank, frame);
                }
                if self.peers[rank].gone {
                    let groups: Vec<u64> = self.groups.keys().copied().collect();
                    for group in groups {
                        self.leave(rank, group, false);
                    }
                }
            }
            // A stop of this process may have lasted past a deadline. So first read all messages
            // that other ranks sent during the stop, and only then decide which ranks are late.
            if !self.peers.iter().any(Peer::is_ready) {
                for late in std::mem::take(&mut self.late) {
                    self.judge(late);
                }
            }
        }
    }

    fn broadcast(&mut self, frame: Frame) {
        let packet = frame.pack();
        for peer in self.peers.iter_mut().rev() {
            peer.send(packet.clone());
        }
    }

    /// Sends a frame to the members of a group that have not left. Rank 0 is always last: its
    /// process, and with it this thread, may end when it has read an error.
    fn send_to_group(&mut self, group: u64, frame: Frame) {
        let packet = frame.pack();
        if let Some(group) = self.groups.get(&group) {
            let here = group.members.iter().zip(&group.has_left).filter(|(_, left)| !**left);
            let mut here: Vec<usize> = here.map(|(&member, _)| member).collect();
            here.sort_unstable();
            for member in here.into_iter().rev() {
                self.peers[member].send(packet.clone());
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
        let dead = group.members.iter().position(|&m| self.peers[m].gone);
        if let Some(dead) = dead {
            group.broken = true;
            self.send_to_group(
                id,
                Frame::Broken { group: id, error: Error::PeerLost { rank: dead } },
            );
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
            self.send_to_group(id, Frame::All { group: id, number, parts });
        }
    }

    /// Handles a rank that waited past its deadline: blames the ranks that have not contributed to
    /// the exchange. If all ranks have contributed, the cause is that the system had no room to
    /// send the answer.
    fn judge(&mut self, Late { rank, group: id, number, what, waited }: Late) {
        let Some(group) = self.groups.get_mut(&id).filter(|g| !g.broken) else {
            return;
        };
        let crowded = self.peers[rank].crowded.clone();
        let error = match crowded {
            _ if number == group.number => Error::Absent { ranks: group.missing(), what, waited },
            Some(message) => group.fault_of_hub(format!("{what}, passing descriptors on"), message),
            // The exchange has completed since the rank's deadline, and its answer has been sent.
            None => return,
        };
        group.broken = true;
        for member in group.members.clone() {
            self.peers[member].make_room();
        }
        self.send_to_group(id, Frame::Broken { group: id, error });
    }

    /// Handles a rank that cannot continue and has sent its reason: breaks the group with `error`.
    fn give_up(&mut self, rank: usize, id: u64, error: Error) {
        if let Some(group) = self.groups.get_mut(&id)
            && group.members.contains(&rank)
            && !std::mem::replace(&mut group.broken, true)
        {
            self.send_to_group(id, Frame::Broken { group: id, error });
        }
    }

    /// Tells a rank that has waited for a while in exchange `number` which ranks are missing.
    fn answer(&mut self, rank: usize, id: u64, number: u64) {
        let Some(group) = self.groups.get(&id).filter(|g| !g.broken && g.number == number) else {
            return;
        };
        let ranks = group.missing();
        let here = (0..group.given.len()).find(|i| !ranks.contains(i));
        if let Some(teller) = here {
            let (ranks, teller) = (ranks.iter().map(|&r| r as u64).collect(), teller as u64);
            self.peers[rank].send(Frame::Missing { group: id, number, ranks, teller }.pack());
        }
    }

    fn leave(&mut self, rank: usize, id: u64, clean: bool) {
        let Some(group) = self.groups.get_mut(&id) else {
            return;
        };
        let Some(index) = group.members.iter().position(|&m| m == rank) else {
            return;
        };
        if std::mem::replace(&mut group.has_left[index], true) {
            return;
        }
        if !clean {
            group.broken = true;
        }
        if group.has_left.iter().all(|&left| left) {
            self.groups.remove(&id);
        } else if !clean {
            // If this process could not read the connection, the failure is on this side, so the
            // rank is not blamed.
            let error = match &self.peers[rank].fault {
                Some(fault) => group.fault_of_hub(
                    format!("messages of rank {rank}"),
                    format!("{fault}; the limit of open files is {}", open_files()),
                ),
                None => Error::PeerLost { rank: index },
            };
            self.send_to_group(id, Frame::Broken { group: id, error });
        }
    }
}
