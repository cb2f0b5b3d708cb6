//! Relay of a node in a world over several hosts: a thread in the process of one rank, which has
//! the node's only connection to rank 0's hub.
//!
//! The ranks of the node are connected to the relay by Unix sockets. The relay passes their frames
//! to the hub, each with the number of its sender, and passes the hub's frames to the ranks that
//! they name. An answer for all ranks thus crosses the network once per node. On node 0 the relay
//! runs beside the hub in rank 0's process. A relay decides nothing about exchanges. It tells the
//! hub which of its processes has ended, and tells its ranks if the hub is lost.
//!
//! The relay never blocks on a process: sockets are non-blocking, with one queue each.

use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::entrance::Entrance;
use super::frames::{Frame, Packet};
use super::held::Held;
use super::mailbox::AGAIN;
use super::peer::{Peer, wait};
use super::rendezvous::{Door, LOOK, Place, Watch};
use crate::error::{Error, Result};
use crate::util::spawn;

/// Time limit for sending the last messages; it is reached only if a process is stopped.
const DRAIN: Duration = Duration::from_secs(10);

pub(super) struct Relay {
    /// Rank whose process this is.
    rank: usize,
    hub: Peer,
    /// Connections to the ranks of the node that have said hello, and to this process's own rank.
    ranks: BTreeMap<usize, Peer>,
    /// Entrance for ranks of the node; `None` once the world is formed or has failed.
    entrance: Option<Entrance>,
    /// Observations so far of the node's ranks that have not connected to the relay yet.
    watch: Watch,
    /// Ranks whose deadline has passed, with their reports. The reports are passed on only after
    /// all messages that the ranks sent have been read.
    late: Vec<(usize, Packet)>,
    /// Whether the hub has asked whether this relay runs. The answer is also sent only after all
    /// messages that the ranks sent have been read.
    is_probed: bool,
    /// Deadline for sending the last messages; `None` before the end of the world.
    ending: Option<Instant>,
}

impl Relay {
    /// Starts the relay in the process of `rank`; `own` is this rank's own connection to it. Ranks
    /// of the node connect to the socket `door` of the meeting place `place`; `watch` has what is
    /// known of them so far. `size` is the number of ranks of the world.
    pub(super) fn start(
        (place, door, watch): (Place, Door, Watch),
        (rank, size): (usize, usize),
        own: Held<UnixStream>,
        hub: Peer,
    ) -> Result<JoinHandle<()>> {
        let mut own =
            Peer::new(own).map_err(|e| Error::system("ioctl on the socket of the relay", e))?;
        own.inbox.trust();
        let mut relay = Relay {
            rank,
            hub,
            ranks: BTreeMap::from([(rank, own)]),
            entrance: Some(Entrance::new(place, door, size, rank)),
            watch,
            late: Vec::new(),
            is_probed: false,
            ending: None,
        };
        spawn("iris-relay", move || relay.serve())
    }

    fn serve(&mut self) {
        while !self.is_done() {
            self.wait();
            self.welcome_ranks();
            // This process's own rank is read last: it may leave only because another rank has
            // ended, and that end is to be seen first.
            let others = self.ranks.keys().copied().filter(|&rank| rank != self.rank);
            for rank in others.collect::<Vec<_>>().into_iter().chain([self.rank]) {
                self.hear(rank);
            }
            if !self.ranks.values().any(Peer::is_ready) {
                for (rank, packet) in std::mem::take(&mut self.late) {
                    self.pass_on(rank, packet);
                    self.send([rank], &Frame::Forwarded.pack());
                }
                if std::mem::take(&mut self.is_probed) {
                    self.hub.send(Frame::Probe.pack());
                }
            }
            self.hear_hub();
        }
        self.give_up(&Error::PeerLost { rank: self.rank });
    }

    /// Whether no rank is left, or the last messages have been sent.
    fn is_done(&self) -> bool {
        let open = || self.ranks.values().chain([&self.hub]).filter(|peer| !peer.gone);
        let sent = open().all(|peer| peer.outbox.is_empty());
        match self.ending {
            Some(until) => sent || Instant::now() >= until,
            None => false,
        }
    }

    fn wait(&self) {
        let peers = || self.ranks.values().chain([&self.hub]);
        let strangers = self.entrance.iter().flat_map(Entrance::strangers);
        let mut timeout = self.ending.map(|until| until.saturating_duration_since(Instant::now()));
        let mut at_most = |limit: Duration| timeout = Some(timeout.map_or(limit, |t| t.min(limit)));
        if !self.late.is_empty() || self.is_probed {
            at_most(Duration::ZERO);
        }
        if peers().any(|peer| !peer.gone && peer.crowded.is_some()) {
            at_most(AGAIN);
        }
        if let Some(entrance) = &self.entrance {
            at_most(if entrance.is_full() { AGAIN } else { LOOK });
        }
        let listener = self.entrance.as_ref().and_then(Entrance::listener);
        wait(peers().chain(strangers), listener, timeout);
    }

    /// Accepts ranks of the node and tells the hub about them. If a process contradicts the world
    /// in its hello (another size, or a rank that has arrived already), or ends before it has
    /// entered, this rank sends the hub the reason.
    fn welcome_ranks(&mut self) {
        let Some(mut entrance) = self.entrance.take() else { return };
        entrance.accept();
        let mut arrived = Vec::new();
        let heard = entrance.hear(|rank, peer, frames| {
            arrived.push((rank, peer, frames));
            Ok(())
        });
        let full = entrance.check_full(false);
        let lost = entrance.place.lost(&entrance.missing(), &mut self.watch).map_or(Ok(()), Err);
        let (job, size) = (entrance.place.job.clone(), entrance.size());
        self.entrance = Some(entrance);
        for (rank, peer, frames) in arrived {
            self.ranks.insert(rank, peer);
            let hello = Frame::Hello { job: job.clone(), rank, size };
            self.pass_on(rank, hello.pack());
            self.send([rank], &Frame::Forwarded.pack());
            frames.into_iter().for_each(|frame| self.handle(rank, frame));
        }
        if let Err(error) = heard.and(full).and(lost) {
            self.pass_on(self.rank, Frame::GaveUp { group: 0, error }.pack());
        }
    }

    /// Passes on the frames that a rank has sent, and tells the hub if the rank's process has
    /// ended.
    fn hear(&mut self, rank: usize) {
        let Some(peer) = self.ranks.get_mut(&rank).filter(|peer| !peer.gone) else { return };
        peer.flush();
        for frame in peer.read_if_ready() {
            self.handle(rank, frame);
        }
        let Some(peer) = self.ranks.get_mut(&rank).filter(|peer| peer.gone) else { return };
        if peer.fault.is_some() {
            let error = peer.loss(rank, self.rank);
            self.pass_on(self.rank, Frame::GaveUp { group: 0, error }.pack());
        }
        self.hub.send(Frame::Gone { rank }.pack());
        if self.ranks.values().all(|peer| peer.gone) {
            self.end();
        }
    }

    fn handle(&mut self, rank: usize, frame: Frame) {
        let (asks, late) =
            (matches!(frame, Frame::Ask { .. }), matches!(frame, Frame::Late { .. }));
        let closes = matches!(frame, Frame::Leave { group: 0, clean: true });
        if late {
            self.late.push((rank, frame.pack()));
            return;
        }
        self.pass_on(rank, frame.pack());
        if asks {
            self.send([rank], &Frame::Forwarded.pack());
        }
        if closes && rank == self.rank {
            self.say_goodbye();
        }
    }

    /// Tells the hub that all ranks of the node leave, and tells the ranks that the world is
    /// closed, because this process may end now. No message is lost by that: the close is
    /// collective, so the only message that a rank could still send is that it leaves.
    fn say_goodbye(&mut self) {
        let leave = Frame::Leave { group: 0, clean: true }.pack();
        for rank in self.ranks.keys().copied().collect::<Vec<_>>() {
            if rank != self.rank && !self.ranks[&rank].gone {
                self.pass_on(rank, leave.clone());
            }
        }
        self.broadcast(Frame::Goodbye);
        self.end();
    }

    fn hear_hub(&mut self) {
        if self.hub.gone {
            return;
        }
        self.hub.flush();
        for frame in self.hub.read_if_ready() {
            match frame {
                Frame::Relayed { ranks, packet } => {
                    self.send(ranks, &packet);
                }
                Frame::Welcome => {
                    if let Some(entrance) = self.entrance.take() {
                        entrance.close();
                    }
                    self.broadcast(Frame::Welcome);
                }
                Frame::Refuse { error } => {
                    self.give_up(&error);
                    self.broadcast(Frame::Refuse { error });
                    self.end();
                }
                Frame::Goodbye => {
                    self.broadcast(Frame::Goodbye);
                    self.end();
                }
                Frame::Probe => self.is_probed = true,
                other => tracing::warn!(frame = ?other, "an unexpected frame is ignored"),
            }
        }
        if self.hub.gone && self.ending.is_none() {
            let error = self.hub.loss(0, self.rank);
            self.give_up(&error);
            if self.hub.fault.is_some() {
                let gave_up = Frame::GaveUp { group: 0, error: error.clone() };
                self.pass_on(self.rank, gave_up.pack());
                self.broadcast(Frame::Refuse { error });
            }
            self.broadcast(Frame::Gone { rank: 0 });
            self.end();
        }
    }

    /// Closes the entrance, if it is open, because the world cannot be formed.
    fn give_up(&mut self, error: &Error) {
        if let Some(entrance) = self.entrance.take() {
            entrance.give_up(error);
        }
    }

    /// Ends this relay once the last messages are sent.
    fn end(&mut self) {
        self.ending.get_or_insert_with(|| Instant::now() + DRAIN);
    }

    /// Sends the hub a packet of `rank`.
    fn pass_on(&mut self, rank: usize, packet: Packet) {
        self.hub.send(Frame::Relayed { ranks: vec![rank], packet }.pack());
    }

    /// Sends a packet to ranks of the node. This process's own rank is last, because this process,
    /// and with it the relay, may end when its rank has read an error.
    fn send(&mut self, ranks: impl IntoIterator<Item = usize>, packet: &Packet) {
        let mut own = false;
        for rank in ranks {
            own |= rank == self.rank;
            if rank != self.rank
                && let Some(peer) = self.ranks.get_mut(&rank)
            {
                peer.send(packet.clone());
            }
        }
        if let Some(peer) = self.ranks.get_mut(&self.rank).filter(|_| own) {
            peer.send(packet.clone());
        }
    }

    fn broadcast(&mut self, frame: Frame) {
        let ranks: Vec<usize> = self.ranks.keys().copied().collect();
        self.send(ranks, &frame.pack());
    }
}
