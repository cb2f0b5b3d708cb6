//! Connection of rank 0's hub to one rank, or to the relay through which the ranks of a node talk
//! to the hub.

use super::frames::{Frame, Packet};
use super::peer::Peer;

/// Connection of the hub to one rank, or to the relay of several.
pub(super) struct Link {
    pub(super) peer: Peer,
    /// Ranks that are reached by this connection. It ends with the process of the first one.
    pub(super) ranks: Vec<usize>,
    is_relay: bool,
    /// Frames that were read with the relay's hello and are not handled yet.
    early: Vec<Frame>,
    /// Whether the relay has not answered a probe yet.
    is_silent: bool,
}

impl Link {
    /// Makes the link to `rank` alone.
    pub(super) fn to_rank(rank: usize, peer: Peer) -> Link {
        Link { peer, ranks: vec![rank], is_relay: false, early: Vec::new(), is_silent: false }
    }

    /// Makes the link to the relay in the process of `rank`, which has sent the frames `early`
    /// since its hello. The caller adds further ranks to [`Link::ranks`] when their hellos arrive.
    pub(super) fn to_relay(rank: usize, peer: Peer, early: Vec<Frame>) -> Link {
        Link { peer, ranks: vec![rank], is_relay: true, early, is_silent: false }
    }

    /// Sends a packet to `ranks`, which must be reached by this link; crosses the connection once.
    pub(super) fn send(&mut self, ranks: &[usize], packet: &Packet) {
        if ranks.is_empty() || self.peer.gone {
            return;
        }
        self.peer.send(match self.is_relay {
            false => packet.clone(),
            true => {
                let ranks = ranks.iter().map(|&rank| rank as u64).collect();
                Frame::Relayed { ranks, packet: packet.clone() }.pack()
            }
        });
    }

    /// Sends a packet to all ranks of this link.
    pub(super) fn broadcast(&mut self, packet: &Packet) {
        self.peer.send(packet.clone());
    }

    /// Asks the relay whether it runs; a link to one rank needs no answer.
    pub(super) fn probe(&mut self) {
        if self.is_relay && !std::mem::replace(&mut self.is_silent, true) {
            self.peer.send(Frame::Probe.pack());
        }
    }

    /// Whether the relay has not answered [`Link::probe`]. If it has, all messages that its ranks
    /// had sent before have been returned by [`Link::read_if_ready`].
    pub(super) fn is_silent(&self) -> bool {
        self.is_silent && !self.peer.gone
    }

    /// Reads available frames, each with the rank that sent it. Frames of ranks that are not behind
    /// this link are dropped, except hellos. [`Frame::Gone`] is returned as a frame of the rank
    /// that has gone.
    pub(super) fn read_if_ready(&mut self) -> Vec<(usize, Frame)> {
        let mut frames = std::mem::take(&mut self.early);
        frames.extend(self.peer.read_if_ready());
        if !self.is_relay {
            return frames.into_iter().map(|frame| (self.ranks[0], frame)).collect();
        }
        frames.into_iter().filter_map(|frame| self.open(frame)).collect()
    }

    /// Opens a frame from the relay; `None` if it is not one that a relay may send.
    fn open(&mut self, frame: Frame) -> Option<(usize, Frame)> {
        let relayed = match frame {
            Frame::Probe => {
                self.is_silent = false;
                return None;
            }
            Frame::Relayed { ranks, packet } if ranks.len() == 1 => {
                packet.open().map(|frame| (ranks[0] as usize, frame))
            }
            Frame::Gone { rank } => Ok((rank as usize, Frame::Gone { rank })),
            other => Ok((usize::MAX, other)),
        };
        match relayed {
            Ok((rank, frame))
                if self.ranks.contains(&rank) || matches!(frame, Frame::Hello { .. }) =>
            {
                Some((rank, frame))
            }
            Ok((_, frame)) => {
                tracing::warn!(relay = self.ranks[0], ?frame, "an unexpected frame is ignored");
                None
            }
            Err(error) => {
                tracing::warn!(relay = self.ranks[0], %error, "a relayed frame is ignored");
                None
            }
        }
    }
}
