//! Frames that processes exchange over a socket: header and body, with file descriptors passed
//! alongside.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;
use std::vec;

use crate::encoding::{Reader, Writer};
use crate::error::{Error, Result};

/// Size of a header in bytes: length of the body, kind, number of descriptors.
pub(super) const HEADER: usize = 16;
/// Largest length of a frame in bytes; a larger length in a header means that the sender does not
/// use this protocol.
pub(super) const LONGEST: u64 = 1 << 30;
/// Maximum number of bytes that all ranks together contribute to an exchange: a frame's maximum
/// length, less room for the lengths of the parts.
pub(super) const EXCHANGED: u64 = LONGEST - (1 << 20);
/// Largest body of a hello in bytes. Together with the maximum number of connections without a
/// hello, it bounds the memory that unidentified processes can occupy in rank 0.
pub(super) const HELLO: usize = 8 << 10;
/// Longest name of a job in bytes. A hello consists of the name, the name's length, a rank and a
/// size.
pub(super) const JOB_NAME: usize = HELLO - 3 * size_of::<u64>();

/// Contribution of one rank to an exchange: bytes, and file descriptors.
#[derive(Debug, Default)]
pub(crate) struct Part {
    pub(crate) bytes: Vec<u8>,
    pub(crate) descriptors: Vec<OwnedFd>,
}

/// Checks that the contributions of all ranks to an exchange fit one frame.
pub(super) fn check_exchanged<'a>(parts: impl IntoIterator<Item = &'a Part>) -> Result<()> {
    let bytes: u64 = parts.into_iter().map(|part| part.bytes.len() as u64).sum();
    match bytes <= EXCHANGED {
        true => Ok(()),
        false => Err(Error::invalid(
            "size of an exchange between ranks",
            format!("{bytes} bytes"),
            format!("at most {EXCHANGED} bytes of all ranks together"),
        )),
    }
}

/// Declares the messages between a process and the hub, each with the number of its kind and its
/// fields in the order in which they are sent.
macro_rules! frames {
    ($($(#[$doc:meta])* $kind:literal $name:ident $({ $($field:ident: $type:ty),* })?)*) => {
        /// Message between a process and the hub. `group` is 0 for the world of all launched ranks,
        /// otherwise the id of a world that was split off it.
        #[derive(Debug)]
        pub(crate) enum Frame { $($(#[$doc])* $name $({ $($field: $type),* })?,)* }

        impl Frame {
            /// Adds the fields to a packet, and returns the number of the kind.
            fn put(self, to: &mut Packing) -> u32 {
                match self {
                    $(Frame::$name { $($($field),*)? } => {
                        $($($field.put(to);)*)?
                        $kind
                    })*
                }
            }

            fn take(kind: u32, from: &mut Unpacking<'_>) -> Result<Frame> {
                Ok(match kind {
                    $($kind => Frame::$name { $($($field: PacketField::take(from)?),*)? },)*
                    other => return Err(broken(&format!("a frame of kind {other}"))),
                })
            }
        }
    };
}

frames! {
    /// Process to hub: names the job and rank of the sender, and the size of its world.
    1 Hello { job: String, rank: usize, size: usize }
    /// Hub to process: all ranks have arrived.
    2 Welcome
    /// Hub to process: the world cannot be formed, for this reason. After the world has formed, hub
    /// or relay to process: the sender gave up the connection, for this reason.
    3 Refuse { error: Error }
    /// Process to hub: the sender is a member of `group`; `members` are numbers of ranks in the
    /// world of all launched ranks.
    4 Group { group: u64, members: Vec<usize> }
    /// Process to hub: the sender's contribution to an exchange.
    5 Give { group: u64, number: u64, part: Part }
    /// Hub to process: the contributions of all members.
    6 All { group: u64, number: u64, parts: Vec<Part> }
    /// Process to hub: the sender's deadline for an exchange has passed.
    7 Late { group: u64, number: u64, what: String, waited: Duration }
    /// Hub to process: the group can make no further exchange, for this reason.
    8 Broken { group: u64, error: Error }
    /// Process to hub: the sender leaves a group. If `clean` is false, all members get `Broken`,
    /// including the sender.
    9 Leave { group: u64, clean: bool }
    /// Hub to process: all ranks have closed the world.
    10 Goodbye
    /// Process to hub: the sender cannot continue in a group, for this reason.
    11 GaveUp { group: u64, error: Error }
    /// Process to hub: asks which ranks are missing in an exchange.
    12 Ask { group: u64, number: u64 }
    /// Hub to process: the ranks of the group that are missing; `teller` is the waiting rank that
    /// prints the notice for the user.
    13 Missing { group: u64, number: u64, ranks: Vec<usize>, teller: usize }
    /// Hub to relay: the relay must pass `packet` on to the ranks `ranks`. Relay to hub: `packet`
    /// comes from the only rank in `ranks`.
    14 Relayed { ranks: Vec<usize>, packet: Packet }
    /// Relay to hub: the process of `rank`, which is connected to the relay, has ended. Relay to
    /// process: the relay has lost `rank`, whose process runs the hub.
    15 Gone { rank: usize }
    /// Relay to process: the relay has forwarded this process's hello, or its last question, to the
    /// hub.
    16 Forwarded
    /// Hub to relay: asks whether the relay runs. Relay to hub, in answer: the relay has forwarded
    /// all messages that its ranks had sent.
    17 Probe
}

/// Encoded frame; cheap to clone, as needed to send one frame to many processes.
#[derive(Clone, Debug)]
pub(crate) struct Packet {
    pub(super) bytes: Arc<[u8]>,
    pub(super) descriptors: Arc<Vec<OwnedFd>>,
}

/// Packet that is being made.
#[derive(Default)]
struct Packing {
    body: Writer,
    descriptors: Vec<OwnedFd>,
}

/// Packet that is being read.
struct Unpacking<'a> {
    body: Reader<'a>,
    descriptors: vec::IntoIter<OwnedFd>,
}

/// Value that a packet can carry.
trait PacketField: Sized {
    fn put(self, to: &mut Packing);
    fn take(from: &mut Unpacking<'_>) -> Result<Self>;
}

/// Implements [`PacketField`] for types that are sent as another type, given both conversions.
macro_rules! fields {
    ($($type:ty as $form:ty: $to:expr, $of:expr;)*) => {
        $(impl PacketField for $type {
            fn put(self, to: &mut Packing) {
                let form: fn($type) -> $form = $to;
                form(self).put(to);
            }

            fn take(from: &mut Unpacking<'_>) -> Result<$type> {
                <$form>::take(from).map($of)
            }
        })*
    };
}

fields! {
    usize as u64: |number| number as u64, |number| number as usize;
    bool as u64: u64::from, |number| number == 1;
    Duration as u64: |time| time.as_nanos() as u64, Duration::from_nanos;
    Option<String> as String: Option::unwrap_or_default, |text| Some(text).filter(|it| !it.is_empty());
}

impl PacketField for u64 {
    fn put(self, to: &mut Packing) {
        to.body.u64(self);
    }

    fn take(from: &mut Unpacking<'_>) -> Result<u64> {
        from.body.u64()
    }
}

impl PacketField for String {
    fn put(self, to: &mut Packing) {
        to.body.text(&self);
    }

    fn take(from: &mut Unpacking<'_>) -> Result<String> {
        from.body.text()
    }
}

impl<T: PacketField> PacketField for Vec<T> {
    fn put(self, to: &mut Packing) {
        self.len().put(to);
        self.into_iter().for_each(|it| it.put(to));
    }

    fn take(from: &mut Unpacking<'_>) -> Result<Vec<T>> {
        (0..u64::take(from)?).map(|_| T::take(from)).collect()
    }
}

impl PacketField for Part {
    fn put(self, to: &mut Packing) {
        to.body.bytes(&self.bytes).u64(self.descriptors.len() as u64);
        to.descriptors.extend(self.descriptors);
    }

    fn take(from: &mut Unpacking<'_>) -> Result<Part> {
        let (bytes, count) = (from.body.bytes()?.to_vec(), usize::take(from)?);
        if count > from.descriptors.len() {
            return Err(broken("descriptors are missing"));
        }
        Ok(Part { bytes, descriptors: from.descriptors.by_ref().take(count).collect() })
    }
}

impl PacketField for Packet {
    fn put(self, to: &mut Packing) {
        to.body.bytes(&self.bytes);
    }

    fn take(from: &mut Unpacking<'_>) -> Result<Packet> {
        Ok(Packet { bytes: from.body.bytes()?.into(), descriptors: Arc::default() })
    }
}

/// Declares the errors that arrive at another process as the same variant, each with the number of
/// its kind, its fields, and after `but` a field that the receiver adds. Other errors arrive as
/// texts.
macro_rules! errors {
    ($($kind:literal $name:ident { $($field:ident),* } $(but $added:ident)?;)*) => {
        impl PacketField for Error {
            fn put(self, to: &mut Packing) {
                match self {
                    $(Error::$name { $($field,)* $($added: _)? } => {
                        u64::put($kind, to);
                        $($field.put(to);)*
                    })*
                    other => {
                        u64::put(0, to);
                        other.to_string().put(to);
                    }
                }
            }

            fn take(from: &mut Unpacking<'_>) -> Result<Error> {
                Ok(match u64::take(from)? {
                    $($kind => Error::$name { $($field: PacketField::take(from)?,)* $($added: None)? },)*
                    _ => Error::Wire { what: "world".into(), problem: PacketField::take(from)? },
                })
            }
        }
    };
}

errors! {
    1 PeerLost { rank };
    2 Absent { ranks, what, waited };
    3 Rendezvous { place, problem };
    4 PeerFailed { rank, what, message };
    5 HubLost { rank };
    6 Invalid { what, value, expected };
    7 Wire { what, problem };
    8 PeerAborted { rank, reason } but host;
    9 GaveUp { rank, reason } but host;
    10 LauncherLost { rank, launcher };
    11 Revoked {};
}

/// Encodes an error as bytes for a note file, which a process can read without a connection.
pub(crate) fn error_to_bytes(error: &Error) -> Vec<u8> {
    let mut packing = Packing::default();
    error.clone().put(&mut packing);
    packing.body.finish()
}

pub(crate) fn error_of_bytes(bytes: &[u8]) -> Result<Error> {
    let body = Reader::new("note", bytes);
    Error::take(&mut Unpacking { body, descriptors: Vec::new().into_iter() })
}

impl Frame {
    pub(crate) fn pack(self) -> Packet {
        let mut packing = Packing::default();
        let kind = self.put(&mut packing);
        let (body, descriptors) = (packing.body.finish(), packing.descriptors);
        let mut bytes = Vec::with_capacity(HEADER + body.len());
        bytes.extend_from_slice(&(body.len() as u64).to_le_bytes());
        bytes.extend_from_slice(&kind.to_le_bytes());
        bytes.extend_from_slice(&(descriptors.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&body);
        Packet { bytes: bytes.into(), descriptors: Arc::new(descriptors) }
    }

    pub(super) fn unpack(kind: u32, body: &[u8], descriptors: Vec<OwnedFd>) -> Result<Frame> {
        let body = Reader::new("world", body);
        Frame::take(kind, &mut Unpacking { body, descriptors: descriptors.into_iter() })
    }
}

impl Packet {
    /// Decodes a packet that was relayed, which has no descriptors.
    pub(super) fn open(&self) -> Result<Frame> {
        let Some((header, body)) = self.bytes.split_first_chunk::<HEADER>() else {
            return Err(broken("a relayed frame without a header"));
        };
        let (length, kind, _) = read_header(header)?;
        if length != body.len() as u64 {
            return Err(broken("a relayed frame of another length"));
        }
        // A frame that needs descriptors fails, because relays pass none on.
        Frame::unpack(kind, body, Vec::new())
    }
}

/// Length of the body, kind and number of descriptors of a frame with this header.
pub(super) fn read_header(header: &[u8; HEADER]) -> Result<(u64, u32, usize)> {
    let mut r = Reader::new("header", header);
    let (length, both) = (r.u64()?, r.u64()?);
    Ok((length, both as u32, (both >> 32) as usize))
}

pub(super) fn broken(problem: &str) -> Error {
    Error::Wire { what: "world".into(), problem: problem.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_that_fit_no_frame_are_refused_by_size_and_every_rank_can_be_told() {
        // The zeroed memory is never written, so it occupies no physical memory.
        let part = |bytes: u64| Part { bytes: vec![0; bytes as usize], descriptors: vec![] };
        check_exchanged([&part(EXCHANGED)]).unwrap();
        let halves = [part(EXCHANGED / 2), part(EXCHANGED / 2 + 1)];
        let error = check_exchanged(&halves).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(&format!("{} bytes: expected at most", EXCHANGED + 1)), "{text}");
        assert_eq!(error_of_bytes(&error_to_bytes(&error)).unwrap().to_string(), text);
    }
}
