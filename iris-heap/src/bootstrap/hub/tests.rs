//! Tests of the hub, with simulated relays.

use super::super::mailbox::{Inbox, Outbox};
use super::super::peer::Peer;
use super::super::unix::withdraw;
use super::*;

/// Simulated relay: the test's end of a link of the hub.
struct Relay {
    socket: UnixStream,
    inbox: Inbox,
}

impl Relay {
    /// Makes a relay of `ranks` and the hub's link to it.
    fn new(ranks: &[usize]) -> (Relay, Link) {
        let (socket, at_hub) = UnixStream::pair().unwrap();
        let mut peer = Peer::new(at_hub).unwrap();
        peer.inbox.trust();
        let mut link = Link::to_relay(ranks[0], peer, Vec::new());
        link.ranks = ranks.to_vec();
        (Relay { socket, inbox: Inbox::default() }, link)
    }

    /// Sends the hub a frame of `rank`.
    fn send(&self, rank: usize, frame: Frame) {
        let mut outbox = Outbox::default();
        outbox.push(Frame::Relayed { ranks: vec![rank], packet: frame.pack() }.pack());
        outbox.flush(&self.socket).unwrap();
    }

    /// Waits for the message by which the hub ends the exchanges of `group`, and returns its
    /// error.
    fn broken(&mut self, group: u64) -> Error {
        loop {
            match self.inbox.take().unwrap() {
                Some(Frame::Relayed { packet, .. }) => match packet.open().unwrap() {
                    Frame::Broken { group: id, error } if id == group => return error,
                    _ => {}
                },
                Some(_) => {}
                None => assert!(self.inbox.fill(&self.socket).unwrap(), "the hub has ended"),
            }
        }
    }
}

#[test]
fn only_the_rank_of_a_relay_that_ended_is_named() {
    let (own, link_of_0) = Relay::new(&[0]);
    let (relay, link_of_1) = Relay::new(&[1, 2]);
    let (mut other, link_of_3) = Relay::new(&[3]);
    let links = vec![link_of_0, link_of_1, link_of_3];
    let hub = std::thread::spawn(move || Hub::carry(links));
    // Rank 1 has left this group by the time its process, with the relay, ends.
    other.send(3, Frame::Group { group: 5, members: vec![1, 2, 3] });
    relay.send(1, Frame::Group { group: 5, members: vec![1, 2, 3] });
    relay.send(1, Frame::Leave { group: 5, clean: true });
    // This exchange shows that the hub knows the group before the relay ends.
    relay.send(1, Frame::GaveUp { group: 5, error: Error::PeerLost { rank: 7 } });
    let told = other.broken(5);
    assert!(matches!(told, Error::PeerLost { rank: 7 }), "{told}");
    drop(relay);
    let told = other.broken(5);
    assert!(matches!(told, Error::PeerLost { rank: 0 }), "{told}");
    // These groups are made after the relay's end. Rank 2, whose process has not ended, is a
    // member.
    for (group, members) in [(6, vec![2, 1, 3]), (7, vec![2, 3])] {
        other.send(3, Frame::Group { group, members });
        let told = other.broken(group);
        match group {
            6 => assert!(matches!(told, Error::PeerLost { rank: 1 }), "{told}"),
            _ => assert!(matches!(told, Error::HubLost { rank: 1 }), "{told}"),
        }
    }
    drop((other, own));
    hub.join().unwrap();
}

/// Tests a rank 0 that gives up when all ranks have met: it waits for the hub, which ends although
/// no connection does.
#[test]
fn a_rank_0_that_withdraws_ends_the_hub() {
    let (own, at_hub) = UnixStream::pair().unwrap();
    let mut peer = Peer::new(at_hub).unwrap();
    peer.inbox.trust();
    let (mut other, link_of_1) = Relay::new(&[1]);
    let links = vec![Link::to_rank(0, peer), link_of_1];
    let (ended, end) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        Hub::carry(links);
        ended.send(()).unwrap();
    });
    let own = own.into();
    let error = Error::PeerAborted { rank: 0, host: None, reason: "no descriptors".into() };
    withdraw(&own, error);
    end.recv_timeout(Duration::from_secs(60)).expect("the hub ends");
    let told = other.broken(0);
    assert!(matches!(told, Error::PeerAborted { rank: 0, .. }), "{told}");
}

/// Tests a group that an absence has broken: if a rank leaves it with a reason, the other ranks
/// get the reason before the loss of the rank.
#[test]
fn a_rank_that_leaves_a_broken_group_may_say_why() {
    let (own, link_of_0) = Relay::new(&[0]);
    let (relay, link_of_1) = Relay::new(&[1]);
    let (mut other, link_of_2) = Relay::new(&[2]);
    let links = vec![link_of_0, link_of_1, link_of_2];
    let hub = std::thread::spawn(move || Hub::carry(links));
    let absent = Error::Absent { ranks: vec![0], what: "a".into(), waited: Duration::ZERO };
    relay.send(1, Frame::GaveUp { group: 0, error: absent });
    let told = other.broken(0);
    assert!(matches!(told, Error::Absent { .. }), "{told}");
    let reason = Error::PeerAborted { rank: 1, host: None, reason: "no rank 0".into() };
    relay.send(1, Frame::GaveUp { group: 0, error: reason });
    relay.send(1, Frame::Leave { group: 0, clean: false });
    let told = other.broken(0);
    assert!(matches!(told, Error::PeerAborted { rank: 1, .. }), "{told}");
    drop((own, relay, other));
    hub.join().unwrap();
}
