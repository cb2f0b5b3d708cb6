//! Connection of rank 0's hub to one process, with its queues of unsent and partly read frames.

use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::frames::{Frame, Packet};
use super::mailbox::{Inbox, Outbox, crowded, explain_crowded};
use super::socket::{Socket, is_own};
use crate::error::Error;

pub(super) struct Peer {
    pub(super) socket: Socket,
    pub(super) inbox: Inbox,
    pub(super) outbox: Outbox,
    pub(super) since: Instant,
    /// Reason why the system has no room for the first message in the outbox; `None` if the system
    /// has room.
    pub(super) crowded: Option<String>,
    pub(super) gone: bool,
    /// Reason why this process gave up the connection: a failed read, or bytes that are no frame.
    /// `None` if it did not, for example because the peer ended the connection.
    pub(super) fault: Option<Error>,
}

/// Whether a descriptor is readable now; does not wait.
pub(crate) fn is_readable(fd: impl AsFd) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)];
    matches!(poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(n) if n > 0)
}

impl Peer {
    pub(super) fn new(socket: impl Into<Socket>) -> std::io::Result<Peer> {
        let socket = socket.into();
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

    /// Sends a packet, unless the peer has ended the connection. On a connection that this process
    /// gave up, the reason can still be sent.
    pub(super) fn send(&mut self, packet: Packet) {
        if !self.gone || self.fault.is_some() {
            self.outbox.push(packet);
            self.flush();
        }
    }

    /// Writes as much as the socket accepts. Messages for which the system has no room stay in the
    /// outbox.
    pub(super) fn flush(&mut self) {
        self.crowded = None;
        match self.outbox.flush(&self.socket) {
            Ok(()) => {}
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(e) if crowded(&e) => self.crowded = Some(explain_crowded(&e)),
            Err(e) => {
                // After an error no further frame is sent: a part of a frame may have been sent,
                // and the peer could not understand later frames. Shutting down the write side
                // tells the peer. If the peer has closed its end, this process notices when it
                // reads, after the peer's last messages.
                self.outbox.clear();
                let mut how = Shutdown::Write;
                if is_own(&e) {
                    // The error is this process's own, and the peer need not notice it, so log it.
                    tracing::warn!(error = %e, "sendmsg failed, so a connection is given up");
                    self.fault.get_or_insert(Error::system("sendmsg", e));
                    how = Shutdown::Both;
                }
                let _ = self.socket.shutdown(how);
            }
        }
    }

    /// Drops the first unsent message, for which the system has no room, so that a message with the
    /// reason can be sent.
    pub(super) fn make_room(&mut self) {
        if self.crowded.take().is_some() && !self.outbox.take_back() {
            self.outbox.clear();
            let _ = self.socket.shutdown(Shutdown::Write);
        }
    }

    /// Reads the available frames. Sets `gone` on an error or at the end of the stream.
    pub(super) fn read(&mut self) -> Vec<Frame> {
        let mut frames = Vec::new();
        match self.inbox.fill(&self.socket) {
            Ok(true) => {}
            Ok(false) => self.gone = true,
            Err(error) => {
                self.give_up(error);
                return frames;
            }
        }
        loop {
            match self.inbox.take() {
                Ok(Some(frame)) => frames.push(frame),
                Ok(None) => return frames,
                Err(error) => {
                    self.give_up(error);
                    return frames;
                }
            }
        }
    }

    fn give_up(&mut self, error: Error) {
        tracing::warn!(%error, "a connection is given up");
        self.gone = true;
        self.fault.get_or_insert(error);
    }

    /// Error for the end of the connection to `rank`, from the view of rank `own`, this process.
    /// The error names `own` if this process could not read the connection, no rank if bytes were
    /// changed on their way, and otherwise `rank`.
    pub(super) fn loss(&self, rank: usize, own: usize) -> Error {
        let what = format!("messages of rank {rank}");
        match &self.fault {
            None => Error::PeerLost { rank },
            Some(Error::Wire { problem, .. }) => Error::Wire { what, problem: problem.clone() },
            Some(fault) => Error::PeerFailed { rank: own, what, message: fault.to_string() },
        }
    }

    /// Whether the connection is open and has data to read.
    pub(super) fn is_ready(&self) -> bool {
        !self.gone && is_readable(&self.socket)
    }

    /// Reads available frames, if there is data. Sets `gone` at the end of the stream, or on an error.
    pub(super) fn read_if_ready(&mut self) -> Vec<Frame> {
        if self.is_ready() { self.read() } else { Vec::new() }
    }
}

/// Waits until the socket of one of `peers` is readable (or writable, if it has unsent frames),
/// `listener` has a connection, or `timeout` is over.
pub(super) fn wait<'a>(
    peers: impl Iterator<Item = &'a Peer>,
    listener: Option<BorrowedFd<'_>>,
    timeout: Option<Duration>,
) {
    let mut fds = Vec::new();
    if let Some(listener) = listener {
        fds.push(PollFd::from_borrowed_fd(listener, PollFlags::IN));
    }
    for peer in peers {
        if !peer.gone {
            let mut events = PollFlags::IN;
            // While the system lacks room for a message, a writable socket does not mean that the
            // message can be sent. So do not wait for a writable socket then.
            if !peer.outbox.is_empty() && peer.crowded.is_none() {
                events |= PollFlags::OUT;
            }
            fds.push(PollFd::from_borrowed_fd(peer.socket.as_fd(), events));
        }
    }
    let timeout = timeout.map(|t| Timespec {
        tv_sec: i64::try_from(t.as_secs()).unwrap_or(i64::MAX),
        // The timeout is at least one nanosecond, so that the full time has passed when the wait
        // ends.
        tv_nsec: i64::from(t.subsec_nanos().max(1)),
    });
    if let Err(error) = poll(&mut fds, timeout.as_ref())
        && error != rustix::io::Errno::INTR
    {
        tracing::error!(%error, "poll failed");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    /// Tests that an error of this process's own send is reported as such, and an ended peer as a
    /// loss. A file that is no socket stands for a socket on which the system forbids the call.
    #[test]
    fn a_call_that_fails_here_is_no_loss_of_the_peer() {
        let (_reader, writer) = std::io::pipe().unwrap();
        let mut own = Peer::new(UnixStream::from(OwnedFd::from(writer))).unwrap();
        own.send(Frame::Probe.pack());
        let told = own.loss(2, 0).to_string();
        let expected = "rank 0 failed in messages of rank 2, which all ranks must do: sendmsg: Socket operation on \
                        non-socket (os error 88)";
        assert!(told.starts_with(expected), "{told}");
        let mut ended = Peer::new(UnixStream::pair().unwrap().0).unwrap();
        ended.send(Frame::Probe.pack());
        assert!(matches!(ended.loss(2, 0), Error::PeerLost { rank: 2 }));
    }
}
