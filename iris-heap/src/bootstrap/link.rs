//! Connection of rank 0's hub to one rank, or to the relay through which the ranks of a node talk
//! to the hub.

use super::frames::{Frame, Packet};
use super::peer::Peer;

/// Connection of the hub to one rank, or to the relay of several ranks.
pub(super) struct Link {
    pub(super) peer: Peer,
    /// Ranks that are reached by this connection. The connection ends with the process of the first
    /// of these ranks.
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

    /// Sends a packet to `ranks`, which must be ranks of this link; the packet crosses the
    /// connection once.
    pub(super) fn send(&mut self, ranks: &[usize], packet: &Packet) {
        if ranks.is_empty() || self.peer.gone {
            return;
        }
        self.peer.send(match self.is_relay {
            false => packet.clone(),
            true => Frame::Relayed { ranks: ranks.to_vec(), packet: packet.clone() }.pack(),
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

    /// Whether the relay has not answered [`Link::probe`]. If the relay has answered,
    /// [`Link::read_if_ready`] has returned all messages that its ranks had sent before.
    pub(super) fn is_silent(&self) -> bool {
        self.is_silent && !self.peer.gone
    }

    /// Reads available frames, each with the rank that sent it. Frames of ranks that are not in
    /// [`Link::ranks`] are dropped, except hellos and frames after a hello, because a rank that has
    /// just said hello may already have ended. [`Frame::Gone`] is returned as a frame of the rank
    /// that has ended.
    pub(super) fn read_if_ready(&mut self) -> Vec<(usize, Frame)> {
        let mut frames = std::mem::take(&mut self.early);
        frames.extend(self.peer.read_if_ready());
        if !self.is_relay {
            return frames.into_iter().map(|frame| (self.ranks[0], frame)).collect();
        }
        let mut opened: Vec<(usize, Frame)> = Vec::new();
        for frame in frames {
            // The caller adds a rank to `ranks` when it handles the rank's hello.
            let is_new = |rank| opened.iter().any(|&(of, ref frame)| of == rank && is_hello(frame));
            let next = self.open(frame, is_new);
            opened.extend(next);
        }
        opened
    }

    /// Opens a frame from the relay; `None` if a relay may not send such a frame. `is_new` returns
    /// whether a rank's hello was read together with this frame.
    fn open(&mut self, frame: Frame, is_new: impl Fn(usize) -> bool) -> Option<(usize, Frame)> {
        let relayed = match frame {
            Frame::Probe => {
                self.is_silent = false;
                return None;
            }
            Frame::Relayed { ranks, packet } if ranks.len() == 1 => {
                packet.open().map(|frame| (ranks[0], frame))
            }
            Frame::Gone { rank } => Ok((rank, frame)),
            other => Ok((usize::MAX, other)),
        };
        match relayed {
            Ok((rank, frame)) if self.ranks.contains(&rank) || is_new(rank) || is_hello(&frame) => {
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

fn is_hello(frame: &Frame) -> bool {
    matches!(frame, Frame::Hello { .. })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::super::mailbox::Outbox;
    use super::*;

    /// Tests that the end of a rank is not lost when it is read together with the rank's hello,
    /// and that an end of a rank that never said hello is dropped.
    #[test]
    fn a_rank_may_be_gone_directly_after_its_hello() {
        let (hub, relay) = UnixStream::pair().unwrap();
        let mut link = Link::to_relay(1, Peer::new(hub).unwrap(), Vec::new());
        let mut outbox = Outbox::default();
        let hello = Frame::Hello { job: "job".into(), rank: 2, size: 4 }.pack();
        outbox.push(Frame::Gone { rank: 3 }.pack());
        outbox.push(Frame::Relayed { ranks: vec![2], packet: hello }.pack());
        outbox.push(Frame::Gone { rank: 2 }.pack());
        outbox.flush(&relay).unwrap();
        let frames = link.read_if_ready();
        assert!(
            matches!(frames[..], [(2, Frame::Hello { .. }), (2, Frame::Gone { rank: 2 })]),
            "{frames:?}"
        );
    }
}
