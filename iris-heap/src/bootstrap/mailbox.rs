//! Framing over a socket: queues of unsent frames and of partly read frames, with file descriptors
//! passed beside the bytes.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

use super::frames::{Frame, HEADER, HELLO, LONGEST, Packet, broken, read_header};
use super::socket::is_remote;
use super::tcp::seal::{Keys, Opener, Sealer};
use crate::error::{Error, Result};
use crate::limits::open_files;

/// Largest number of descriptors per message, below Linux's limit of 253.
const DESCRIPTORS: usize = 128;

/// Queue of frames to be written to a socket.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    packets: VecDeque<Packet>,
    /// Number of bytes and number of descriptors of the first packet that have been sent.
    bytes_sent: usize,
    descriptors_sent: usize,
    /// Encrypts the frames; `None` on a Unix socket, whose frames are not encrypted.
    sealer: Option<Sealer>,
    /// Number of the first chunk of the first packet, if that packet is encrypted. Later packets
    /// are not encrypted before it is their turn, so that chunk numbers have no gaps even if a
    /// packet is removed.
    sealed_from: Option<u64>,
}

impl Outbox {
    /// Makes an outbox whose frames are encrypted with `keys`.
    pub(crate) fn sealed(keys: &Keys) -> Outbox {
        Outbox { sealer: Some(keys.sealer()), ..Outbox::default() }
    }

    pub(crate) fn push(&mut self, packet: Packet) {
        self.packets.push_back(packet);
    }

    /// Drops all waiting frames; called when nothing more is sent on the stream.
    pub(crate) fn clear(&mut self) {
        self.packets.clear();
        (self.bytes_sent, self.descriptors_sent, self.sealed_from) = (0, 0, None);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }

    /// Removes the first packet if no part of it has been sent, so that the peer understands later
    /// packets. Returns false if a part was sent; the stream then ends in the middle of a frame.
    pub(crate) fn take_back(&mut self) -> bool {
        if self.bytes_sent > 0 || self.descriptors_sent > 0 || self.packets.pop_front().is_none() {
            return false;
        }
        if let (Some(sealer), Some(number)) = (&mut self.sealer, self.sealed_from.take()) {
            sealer.go_back_to(number);
        }
        true
    }

    /// Writes until everything is sent or the socket is full. After an error that is [`crowded`] or
    /// `WouldBlock`, the unsent bytes can be sent by a later call.
    pub(crate) fn flush(&mut self, socket: &impl AsFd) -> std::io::Result<()> {
        self.flush_until(socket, None)
    }

    /// Writes as [`Outbox::flush`] does, but fails with `TimedOut` if frames are left at `until`,
    /// even if the peer still reads, slowly.
    pub(crate) fn flush_until(
        &mut self,
        socket: &impl AsFd,
        until: Option<Instant>,
    ) -> std::io::Result<()> {
        while let Some(packet) = self.packets.front_mut() {
            if let (Some(sealer), None) = (&mut self.sealer, self.sealed_from) {
                self.sealed_from = Some(sealer.next());
                packet.bytes = sealer.seal(&packet.bytes).into();
            }
            let descriptors: Vec<BorrowedFd<'_>> = packet.descriptors[self.descriptors_sent..]
                .iter()
                .take(DESCRIPTORS)
                .map(OwnedFd::as_fd)
                .collect();
            let last = self.descriptors_sent + descriptors.len() == packet.descriptors.len();
            let mut rest = &packet.bytes[self.bytes_sent..];
            if !last {
                // A message with descriptors needs at least one byte of data, so send one byte per
                // message while more descriptors remain.
                rest = &rest[..1];
            }
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !descriptors.is_empty() {
                control.push(SendAncillaryMessage::ScmRights(&descriptors));
            }
            let slices = [IoSlice::new(rest)];
            match rustix::net::sendmsg(socket, &slices, &mut control, SendFlags::NOSIGNAL) {
                Ok(sent) => {
                    self.bytes_sent += sent;
                    self.descriptors_sent += descriptors.len();
                }
                Err(Errno::AGAIN) => return Err(std::io::ErrorKind::WouldBlock.into()),
                Err(Errno::INTR) => continue,
                Err(e) => return Err(e.into()),
            }
            if self.bytes_sent == packet.bytes.len() {
                self.packets.pop_front();
                (self.bytes_sent, self.descriptors_sent, self.sealed_from) = (0, 0, None);
            }
            if !self.packets.is_empty() && until.is_some_and(|until| Instant::now() >= until) {
                return Err(std::io::ErrorKind::TimedOut.into());
            }
        }
        Ok(())
    }
}

/// Interval between attempts to send a message for which the system had no room.
pub(crate) const AGAIN: Duration = Duration::from_millis(10);

/// Whether an error means that the system currently has no room for a message: the number of
/// descriptors in transit is limited per user (by the limit of open files), and socket memory is
/// limited too.
pub(crate) fn crowded(error: &std::io::Error) -> bool {
    let code = Errno::from_io_error(error);
    code.is_some_and(|code| [Errno::TOOMANYREFS, Errno::NOBUFS, Errno::NOMEM].contains(&code))
}

/// Text of an error for which [`crowded`] is true, with the limit that was reached.
pub(crate) fn explain_crowded(error: &std::io::Error) -> String {
    format!(
        "{error}: descriptors that are on their way are limited for all processes of a user \
         together, by the limit of open files, {}",
        open_files()
    )
}

/// Bytes and descriptors that were read from a socket, but not yet taken as whole frames.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    bytes: Vec<u8>,
    descriptors: VecDeque<OwnedFd>,
    /// Whether the peer has not said hello yet; until then its frames must be short and have no
    /// descriptors.
    stranger: bool,
    /// Decrypts the frames; `None` on a Unix socket, whose frames are not encrypted.
    opener: Option<Opener>,
}

impl Inbox {
    /// Makes an inbox for a connection that has not said hello: frames must be short and have no
    /// descriptors.
    pub(crate) fn of_stranger() -> Inbox {
        Inbox { stranger: true, ..Inbox::default() }
    }

    /// Makes an inbox for encrypted frames of a connection that has not sent a hello yet.
    pub(crate) fn sealed(keys: &Keys) -> Inbox {
        Inbox { opener: Some(keys.opener()), ..Inbox::of_stranger() }
    }

    /// Allows frames of full size and file descriptors from now on; called after a valid hello.
    pub(crate) fn trust(&mut self) {
        self.stranger = false;
    }

    /// Reads from the socket once. Returns false if the peer has closed its end.
    pub(crate) fn fill(&mut self, socket: &impl AsFd) -> Result<bool> {
        let room =
            if self.stranger { HEADER + HELLO - self.bytes.len().min(HELLO) } else { 1 << 16 };
        let mut buffer = vec![0; room];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let got = loop {
            let mut slices = [IoSliceMut::new(&mut buffer)];
            match rustix::net::recvmsg(socket, &mut slices, &mut control, RecvFlags::CMSG_CLOEXEC) {
                Ok(got) => break got,
                Err(Errno::INTR) => {}
                Err(e) if is_remote(e) => return Ok(false),
                Err(e) => return Err(Error::system("recvmsg", e)),
            }
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                self.descriptors.extend(descriptors);
            }
        }
        let truncated = got.flags.contains(ReturnFlags::CTRUNC);
        if self.stranger && (truncated || !self.descriptors.is_empty()) {
            return Err(broken("descriptors came before a hello"));
        }
        if truncated {
            return Err(Error::system("receiving descriptors", Errno::MFILE));
        }
        match &mut self.opener {
            None => self.bytes.extend_from_slice(&buffer[..got.bytes]),
            Some(opener) => opener.open(&buffer[..got.bytes], &mut self.bytes)?,
        }
        Ok(got.bytes > 0)
    }

    /// Takes the next whole frame; `None` if none has arrived completely.
    pub(crate) fn take(&mut self) -> Result<Option<Frame>> {
        let Some((header, rest)) = self.bytes.split_first_chunk::<HEADER>() else {
            return Ok(None);
        };
        let (length, kind, descriptors) = read_header(header)?;
        if length > if self.stranger { HELLO as u64 } else { LONGEST } {
            return Err(broken(&format!("a frame of {length} bytes")));
        }
        let Some(body) = rest.get(..length as usize) else {
            return Ok(None);
        };
        if self.descriptors.len() < descriptors {
            return Err(broken("descriptors are missing"));
        }
        let descriptors = self.descriptors.drain(..descriptors).collect();
        let frame = Frame::unpack(kind, body, descriptors)?;
        self.bytes.drain(..HEADER + length as usize);
        Ok(Some(frame))
    }
}

#[cfg(test)]
mod tests {
    use super::super::frames::{JOB_NAME, Part};
    use super::*;
    use std::os::unix::net::UnixStream;

    fn pass(frame: Frame) -> Frame {
        let (a, b) = UnixStream::pair().unwrap();
        a.set_nonblocking(true).unwrap();
        let (mut out, mut inbox) = (Outbox::default(), Inbox::default());
        out.push(frame.pack());
        loop {
            let _ = out.flush(&a);
            if let Some(frame) = inbox.take().unwrap() {
                assert!(out.is_empty());
                return frame;
            }
            assert!(inbox.fill(&b).unwrap());
        }
    }

    #[test]
    fn a_frame_of_any_size_gets_through() {
        for len in [0, 1, 1_000_000] {
            let bytes: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
            let part = Part { bytes: bytes.clone(), descriptors: vec![] };
            match pass(Frame::Give { group: 3, number: 4, part }) {
                Frame::Give { group: 3, number: 4, part } => assert!(part.bytes == bytes),
                f => panic!("{f:?}"),
            }
        }
    }

    #[test]
    fn many_descriptors_get_through_in_order() {
        use rustix::fs::{MemfdFlags, fstat};
        let part = |rank: usize| Part {
            bytes: vec![rank as u8],
            descriptors: (0..100 * rank)
                .map(|i| {
                    let fd = rustix::fs::memfd_create("iris-test", MemfdFlags::CLOEXEC).unwrap();
                    rustix::fs::ftruncate(&fd, (1000 * rank + i) as u64).unwrap();
                    fd
                })
                .collect(),
        };
        let parts = (0..4).map(part).collect();
        let Frame::All { parts, .. } = pass(Frame::All { group: 0, number: 1, parts }) else {
            panic!("another frame");
        };
        for (rank, part) in parts.iter().enumerate() {
            assert_eq!(part.bytes, [rank as u8]);
            assert_eq!(part.descriptors.len(), 100 * rank);
            for (i, fd) in part.descriptors.iter().enumerate() {
                assert_eq!(fstat(fd).unwrap().st_size as usize, 1000 * rank + i);
            }
        }
    }

    /// Tests that a connection which has not said hello gets no room for a long frame, and may send
    /// no descriptors.
    #[test]
    fn strangers_send_short_frames_without_descriptors() {
        let send = |bytes: usize, descriptors: usize| {
            let (a, b) = UnixStream::pair().unwrap();
            let (mut out, mut inbox) = (Outbox::default(), Inbox::of_stranger());
            let descriptors = (0..descriptors).map(|_| b.try_clone().unwrap().into()).collect();
            let part = Part { bytes: vec![0; bytes], descriptors };
            out.push(Frame::Give { group: 0, number: 0, part }.pack());
            out.flush(&a).unwrap();
            inbox.fill(&b).and_then(|_| inbox.take())
        };
        assert!(send(100, 0).unwrap().is_some());
        let text = |outcome: Result<Option<Frame>>| outcome.unwrap_err().to_string();
        let long = text(send(HELLO + 1, 0));
        assert!(long.contains("a frame of"), "{long}");
        let with_descriptor = text(send(1, 1));
        assert!(with_descriptor.contains("before a hello"), "{with_descriptor}");
        let hello = Frame::Hello { job: "x".repeat(JOB_NAME), rank: 1, size: 2 };
        assert_eq!(hello.pack().bytes.len(), HEADER + HELLO, "the longest name fits");
    }

    #[test]
    fn errors_keep_their_numbers() {
        let waited = Duration::from_millis(1234);
        let error = Error::Absent { ranks: vec![1, 5], what: "barrier".into(), waited };
        let text = error.to_string();
        match pass(Frame::Broken { group: 7, error }) {
            Frame::Broken { group: 7, error } => assert_eq!(error.to_string(), text),
            f => panic!("{f:?}"),
        }
        let f = pass(Frame::Refuse { error: Error::PeerLost { rank: 3 } });
        assert!(matches!(f, Frame::Refuse { error: Error::PeerLost { rank: 3 } }));
    }

    #[test]
    fn garbage_is_an_error() {
        for garbage in [vec![0xff; 64], [vec![0; 8], vec![99, 0, 0, 0, 0, 0, 0, 0]].concat()] {
            let mut inbox = Inbox { bytes: garbage, ..Inbox::default() };
            assert!(matches!(inbox.take(), Err(Error::Wire { .. })));
        }
    }
}
