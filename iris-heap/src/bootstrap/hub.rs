//! Hub: rank 0's thread that carries the exchanges of processes. A star topology suffices, because
//! a node has few processes and one connection, and host messages are small.
//!
//! The hub never blocks on a process: sockets are non-blocking, with one queue each, so a stopped
//! process does not delay errors for other processes.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::frames::{Frame, Packet, Part, check_exchanged};
use super::gather::Gathering;
use super::held::Held;
use super::link::Link;
use super::loss::{is_loss, loss_of_carrier};
use super::mailbox::AGAIN;
use super::peer::wait;
use super::rendezvous::{Door, Place};
use crate::error::Error;

/// Time limit for sending the last messages after the world was closed; it is reached only if a
/// process is stopped.
const DRAIN: Duration = Duration::from_secs(10);
/// Time in which a relay must answer that it runs; after that, its rank is blamed, not the ranks
/// whose messages it should forward. Ranks wait longer for the hub's verdict, at least 2 s.
const ANSWER: Duration = Duration::from_secs(1);

pub(crate) struct Hub {
    /// Connections to the ranks and relays; the first one is rank 0's own.
    links: Vec<Link>,
    /// Index in `links` of each rank's connection.
    link_of: Vec<usize>,
    /// Whether the process of each rank has ended, or cannot be reached any more.
    gone: Vec<bool>,
    groups: BTreeMap<u64, Group>,
    /// Ranks whose deadline has passed, with their reports. The reports are handled only after all
    /// messages that ranks have sent have been read.
    late: Vec<Late>,
    /// Time at which rank 0 left after a collective close; `None` before that.
    draining: Option<Instant>,
}

struct Late {
    /// Time by which relays must answer; `None` before they are asked.
    answers_until: Option<Instant>,
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

    /// Error that the group receives when the member at `index`, which is connected by `link`, is
    /// lost. If the link itself has ended, the error names the link's first rank, whose process has
    /// ended.
    fn loss(&self, index: usize, link: &Link) -> Error {
        match &link.peer.fault {
            Some(Error::Wire { .. }) => link.peer.loss(index, 0),
            // This process could not read the connection, so no rank of the link is blamed.
            Some(fault) => self.fault_of_hub(
                format!("messages of rank {}", self.members[index]),
                fault.to_string(),
            ),
            None if link.peer.gone => loss_of_carrier(&self.members, link.ranks[0]),
            None => Error::PeerLost { rank: index },
        }
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
        door: Door,
        own: Held<UnixStream>,
        size: usize,
        deadline: Instant,
    ) {
        if let Some(peers) = Gathering::run(place, door, own, size, deadline) {
            let link = |(rank, peer)| Link::to_rank(rank, peer);
            Hub::carry(peers.into_iter().enumerate().map(link).collect());
        }
    }

    /// Carries the exchanges of the ranks on `links` until all have left. The first link is rank
    /// 0's.
    pub(super) fn carry(links: Vec<Link>) {
        let size = links.iter().map(|link| link.ranks.len()).sum();
        let mut link_of = vec![0; size];
        for (at, link) in links.iter().enumerate() {
            link.ranks.iter().for_each(|&rank| link_of[rank] = at);
        }
        let groups = BTreeMap::from([(0, Group::new((0..size).collect()))]);
        let (gone, late) = (vec![false; size], Vec::new());
        let mut hub = Hub { links, link_of, gone, groups, late, draining: None };
        hub.broadcast(Frame::Welcome);
        hub.serve();
    }

    fn serve(&mut self) {
        loop {
            if self.links.iter().all(|link| link.peer.gone) {
                return;
            }
            let mut timeout = None;
            if let Some(until) = self.draining {
                let now = Instant::now();
                let rest = self.open_links().any(|link| !link.peer.outbox.is_empty());
                if !rest || now >= until {
                    return;
                }
                timeout = Some(until - now);
            }
            if let Some(late) = self.late.iter().map(|late| late.answers_until).min() {
                let rest =
                    late.map_or(Duration::ZERO, |t| t.saturating_duration_since(Instant::now()));
                timeout = Some(timeout.map_or(rest, |t| t.min(rest)));
            }
            if self.open_links().any(|link| link.peer.crowded.is_some()) {
                timeout = Some(timeout.map_or(AGAIN, |t| t.min(AGAIN)));
            }
            wait(self.links.iter().map(|link| &link.peer), None, timeout);
            // Rank 0 is read last: it may leave only because another rank has ended, and that end
            // is to be seen first.
            for at in (0..self.links.len()).rev() {
                let link = &mut self.links[at];
                if link.peer.gone {
                    continue;
                }
                link.peer.flush();
                for (rank, frame) in link.read_if_ready() {
                    self.handle(rank, frame);
                }
                let link = &mut self.links[at];
                if link.peer.gone {
                    if link.peer.fault.is_some() {
                        let error = link.peer.loss(link.ranks[0], 0);
                        link.broadcast(&Frame::Refuse { error }.pack());
                    }
                    // The first rank is handled first: the connection ended with its process.
                    for rank in self.links[at].ranks.clone() {
                        self.lose(rank);
                    }
                }
            }
            // A stop of this process may have lasted past a deadline. So first read all messages
            // that other ranks sent during the stop, and only then decide which ranks are late.
            if !self.links.iter().any(|link| link.peer.is_ready()) {
                for late in std::mem::take(&mut self.late) {
                    self.judge(late);
                }
            }
        }
    }

    /// Connections that have not ended.
    fn open_links(&self) -> impl Iterator<Item = &Link> {
        self.links.iter().filter(|link| !link.peer.gone)
    }

    fn broadcast(&mut self, frame: Frame) {
        let packet = frame.pack();
        for link in self.links.iter_mut().rev() {
            link.broadcast(&packet);
        }
    }

    fn send(&mut self, rank: usize, packet: &Packet) {
        self.links[self.link_of[rank]].send(&[rank], packet);
    }

    /// Sends a frame to the members of a group that have not left. Rank 0 is always last: its
    /// process, and with it this thread, may end when it has read an error.
    fn send_to_group(&mut self, group: u64, frame: Frame) {
        let packet = frame.pack();
        if let Some(group) = self.groups.get(&group) {
            let here = group.members.iter().zip(&group.has_left).filter(|(_, left)| !**left);
            let mut of_link: Vec<Vec<usize>> = vec![Vec::new(); self.links.len()];
            here.for_each(|(&member, _)| of_link[self.link_of[member]].push(member));
            for (link, ranks) in self.links.iter_mut().zip(of_link).rev() {
                link.send(&ranks, &packet);
            }
        }
    }

    fn handle(&mut self, rank: usize, frame: Frame) {
        match frame {
            Frame::Group { group, members } => self.enter(rank, group, members),
            Frame::Give { group, number, part } => self.give(rank, group, number, part),
            Frame::Late { group, number, what, waited } => {
                self.late.push(Late { answers_until: None, rank, group, number, what, waited });
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
            Frame::Gone { .. } => self.lose(rank),
            other => tracing::warn!(rank, frame = ?other, "an unexpected frame is ignored"),
        }
    }

    fn enter(&mut self, rank: usize, id: u64, members: Vec<usize>) {
        if members.iter().any(|&m| m >= self.gone.len()) || !members.contains(&rank) {
            tracing::warn!(rank, ?members, "a group of other ranks is ignored");
            return;
        }
        let group = self.groups.entry(id).or_insert_with(|| Group::new(members));
        let dead = group.members.iter().position(|&m| self.gone[m]);
        if let Some(dead) = dead {
            group.broken = true;
            let error = group.loss(dead, &self.links[self.link_of[group.members[dead]]]);
            self.send_to_group(id, Frame::Broken { group: id, error });
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
            if let Err(error) = check_exchanged(group.given.iter().flatten()) {
                return self.give_up(rank, id, error);
            }
            let parts = group.given.iter_mut().filter_map(Option::take).collect();
            group.number += 1;
            self.send_to_group(id, Frame::All { group: id, number, parts });
        }
    }

    /// Handles a rank that waited past its deadline: blames the ranks that have not contributed to
    /// the exchange. If all ranks have contributed, the system had no room to send the answer.
    fn judge(&mut self, mut late: Late) {
        let Some(group) = self.groups.get_mut(&late.group).filter(|g| !g.broken) else {
            return;
        };
        // Messages of the missing ranks may be held up by a relay whose process is stopped.
        let mut relays: Vec<usize> = Vec::new();
        if late.number == group.number {
            relays.extend(group.missing().iter().map(|&rank| self.link_of[group.members[rank]]));
        }
        let now = Instant::now();
        let until = *late.answers_until.get_or_insert_with(|| {
            relays.iter().for_each(|&relay| self.links[relay].probe());
            now + ANSWER
        });
        if now < until && relays.iter().any(|&relay| self.links[relay].is_silent()) {
            self.late.push(late);
            return;
        }
        let Late { rank, group: id, number, mut what, waited, .. } = late;
        let crowded = self.links[self.link_of[rank]].peer.crowded.clone();
        let error = match crowded {
            _ if number == group.number => {
                let mut ranks = group.missing();
                for (silent, link) in self.links.iter().enumerate().filter(|it| it.1.is_silent()) {
                    let is_behind = |&rank: &usize| self.link_of[group.members[rank]] == silent;
                    if !ranks.iter().any(is_behind) {
                        continue;
                    }
                    let relay = link.ranks[0];
                    match group.members.iter().position(|&m| m == relay) {
                        Some(index) => {
                            ranks.retain(|rank| !is_behind(rank));
                            ranks.push(index);
                        }
                        None => {
                            what += &format!(
                                "; rank {relay} of the launched world, which carries messages of others, does \
                             not answer: is it stopped?"
                            )
                        }
                    }
                }
                ranks.sort_unstable();
                Error::Absent { ranks, what, waited }
            }
            Some(message) => group.fault_of_hub(format!("{what}, passing descriptors on"), message),
            // The exchange has completed since the rank's deadline, and its answer has been sent.
            None => return,
        };
        group.broken = true;
        for member in group.members.clone() {
            self.links[self.link_of[member]].peer.make_room();
        }
        self.send_to_group(id, Frame::Broken { group: id, error });
    }

    /// Handles a rank that cannot continue and has sent its reason: breaks the group with `error`.
    /// A loss is sent even to a group that is broken already, because it also ends the waits of the
    /// group's kernels.
    fn give_up(&mut self, rank: usize, id: u64, error: Error) {
        if let Some(group) = self.groups.get_mut(&id)
            && group.members.contains(&rank)
            && (!std::mem::replace(&mut group.broken, true) || is_loss(&error))
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
            self.send(rank, &Frame::Missing { group: id, number, ranks, teller }.pack());
        }
    }

    /// Handles the end of a rank's process, or of the connection to it.
    fn lose(&mut self, rank: usize) {
        self.gone[rank] = true;
        // Group 0, the world, comes last: rank 0's process, and the hub, may end when it reads that.
        let groups: Vec<u64> = self.groups.keys().copied().collect();
        for group in groups.into_iter().rev() {
            self.leave(rank, group, false);
        }
    }

    fn leave(&mut self, rank: usize, id: u64, clean: bool) {
        let Some(group) = self.groups.get_mut(&id) else {
            return;
        };
        let Some(index) = group.members.iter().position(|&m| m == rank) else {
            return;
        };
        if group.has_left[index] {
            return;
        }
        if !clean {
            group.broken = true;
            let error = group.loss(index, &self.links[self.link_of[rank]]);
            // The rank that leaves gets this frame too, because its process may wait for it.
            self.send_to_group(id, Frame::Broken { group: id, error });
        }
        if let Some(group) = self.groups.get_mut(&id) {
            group.has_left[index] = true;
            if group.has_left.iter().all(|&left| left) {
                self.groups.remove(&id);
            }
        }
    }
}
