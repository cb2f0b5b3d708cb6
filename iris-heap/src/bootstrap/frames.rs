//! Frames that processes exchange over a socket: header and body, with file descriptors passed
//! alongside.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

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

/// Checks that the parts of an exchange fit one frame.
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

/// Message between a process and the hub. `group` is 0 for the launched world, otherwise the id of
/// a split world.
#[derive(Debug)]
pub(crate) enum Frame {
    /// Process to hub: names the job and rank of the sender, and the size of its world.
    Hello { job: String, rank: u64, size: u64 },
    /// Hub to process: all ranks have arrived.
    Welcome,
    /// Hub to process: the world cannot be formed, for this reason. After the world has formed, hub
    /// or relay to process: the sender gave up the connection, for this reason.
    Refuse(Error),
    /// Process to hub: the sender is a member of `group`; `members` are ranks of the launched
    /// world.
    Group { group: u64, members: Vec<u64> },
    /// Process to hub: the sender's contribution to an exchange.
    Give { group: u64, number: u64, part: Part },
    /// Hub to process: the contributions of all members.
    All { group: u64, number: u64, parts: Vec<Part> },
    /// Process to hub: the sender's deadline for an exchange has passed.
    Late { group: u64, number: u64, what: String, waited: Duration },
    /// Hub to process: the group can make no further exchange, for this reason.
    Broken { group: u64, error: Error },
    /// Process to hub: the sender leaves a group. If `clean` is false, all members get `Broken`,
    /// including the sender.
    Leave { group: u64, clean: bool },
    /// Hub to process: all ranks have closed the world.
    Goodbye,
    /// Process to hub: the sender cannot continue in a group, for this reason.
    GaveUp { group: u64, error: Error },
    /// Process to hub: asks which ranks are missing in an exchange.
    Ask { group: u64, number: u64 },
    /// Hub to process: the ranks of the group that are missing; `teller` is the waiting rank that
    /// prints the notice for the user.
    Missing { group: u64, number: u64, ranks: Vec<u64>, teller: u64 },
    /// Hub to relay: the relay must pass `packet` on to the ranks `ranks`. Relay to hub: `packet`
    /// comes from the only rank in `ranks`.
    Relayed { ranks: Vec<u64>, packet: Packet },
    /// Relay to hub: the process of `rank`, which is connected to the relay, has ended. Relay to
    /// process: the relay has lost `rank`, whose process runs the hub.
    Gone { rank: u64 },
    /// Relay to process: the relay has forwarded this process's hello, or its last question, to the
    /// hub.
    Forwarded,
    /// Hub to relay: asks whether the relay runs. Relay to hub, in answer: the relay has forwarded
    /// all messages that its ranks had sent.
    Probe,
}

/// Encoded frame; cheap to clone, as needed to send one frame to many processes.
#[derive(Clone, Debug)]
pub(crate) struct Packet {
    pub(super) bytes: Arc<[u8]>,
    pub(super) descriptors: Arc<Vec<OwnedFd>>,
}

fn put_error(w: &mut Writer, error: &Error) {
    match error {
        Error::PeerLost { rank } => {
            w.u64(1).u64(*rank as u64);
        }
        Error::Absent { ranks, what, waited } => {
            w.u64(2).text(what).u64(waited.as_nanos() as u64).u64(ranks.len() as u64);
            for &r in ranks {
                w.u64(r as u64);
            }
        }
        Error::Rendezvous { place, problem } => {
            w.u64(3).text(place).text(problem);
        }
        Error::PeerFailed { rank, what, message } => {
            w.u64(4).u64(*rank as u64).text(what).text(message);
        }
        Error::HubLost { rank } => {
            w.u64(5).u64(*rank as u64);
        }
        Error::LauncherLost { rank, launcher } => {
            w.u64(10).u64(*rank as u64).text(launcher);
        }
        Error::Invalid { what, value, expected } => {
            w.u64(6).text(what).text(value).text(expected);
        }
        Error::Wire { what, problem } => {
            w.u64(7).text(what).text(problem);
        }
        Error::PeerAborted { rank, reason, .. } => {
            w.u64(8).u64(*rank as u64).text(reason);
        }
        Error::GaveUp { rank, reason, .. } => {
            w.u64(9).u64(*rank as u64).text(reason.as_deref().unwrap_or_default());
        }
        other => {
            w.u64(0).text(&other.to_string());
        }
    }
}

fn take_error(r: &mut Reader<'_>) -> Result<Error> {
    Ok(match r.u64()? {
        1 => Error::PeerLost { rank: r.u64()? as usize },
        2 => {
            let (what, waited) = (r.text()?, Duration::from_nanos(r.u64()?));
            let mut ranks = Vec::new();
            for _ in 0..r.u64()? {
                ranks.push(r.u64()? as usize);
            }
            Error::Absent { ranks, what, waited }
        }
        3 => Error::Rendezvous { place: r.text()?, problem: r.text()? },
        4 => {
            let rank = r.u64()? as usize;
            Error::PeerFailed { rank, what: r.text()?, message: r.text()? }
        }
        5 => Error::HubLost { rank: r.u64()? as usize },
        6 => Error::Invalid { what: r.text()?, value: r.text()?, expected: r.text()? },
        7 => Error::Wire { what: r.text()?, problem: r.text()? },
        8 => Error::PeerAborted { rank: r.u64()? as usize, host: None, reason: r.text()? },
        9 => {
            let (rank, reason) = (r.u64()? as usize, r.text()?);
            Error::GaveUp { rank, host: None, reason: Some(reason).filter(|it| !it.is_empty()) }
        }
        10 => Error::LauncherLost { rank: r.u64()? as usize, launcher: r.text()? },
        _ => Error::Wire { what: "world".into(), problem: r.text()? },
    })
}

/// Encodes an error as bytes for a note file, which a process can read without a connection.
pub(crate) fn error_to_bytes(error: &Error) -> Vec<u8> {
    let mut w = Writer::default();
    put_error(&mut w, error);
    w.finish()
}

pub(crate) fn error_of_bytes(bytes: &[u8]) -> Result<Error> {
    take_error(&mut Reader::new("note", bytes))
}

impl Frame {
    pub(crate) fn pack(self) -> Packet {
        let mut w = Writer::default();
        let mut descriptors = Vec::new();
        let kind: u32 = match self {
            Frame::Hello { job, rank, size } => {
                w.text(&job).u64(rank).u64(size);
                1
            }
            Frame::Welcome => 2,
            Frame::Refuse(error) => {
                put_error(&mut w, &error);
                3
            }
            Frame::Group { group, members } => {
                w.u64(group).u64(members.len() as u64);
                for m in members {
                    w.u64(m);
                }
                4
            }
            Frame::Give { group, number, part } => {
                w.u64(group).u64(number).bytes(&part.bytes);
                descriptors = part.descriptors;
                5
            }
            Frame::All { group, number, parts } => {
                w.u64(group).u64(number).u64(parts.len() as u64);
                for part in parts {
                    w.bytes(&part.bytes).u64(part.descriptors.len() as u64);
                    descriptors.extend(part.descriptors);
                }
                6
            }
            Frame::Late { group, number, what, waited } => {
                w.u64(group).u64(number).text(&what).u64(waited.as_nanos() as u64);
                7
            }
            Frame::Broken { group, error } => {
                put_error(w.u64(group), &error);
                8
            }
            Frame::Leave { group, clean } => {
                w.u64(group).u64(u64::from(clean));
                9
            }
            Frame::Goodbye => 10,
            Frame::GaveUp { group, error } => {
                put_error(w.u64(group), &error);
                11
            }
            Frame::Ask { group, number } => {
                w.u64(group).u64(number);
                12
            }
            Frame::Missing { group, number, ranks, teller } => {
                w.u64(group).u64(number).u64(teller).u64(ranks.len() as u64);
                for rank in ranks {
                    w.u64(rank);
                }
                13
            }
            Frame::Relayed { ranks, packet } => {
                w.u64(ranks.len() as u64);
                for rank in ranks {
                    w.u64(rank);
                }
                w.bytes(&packet.bytes);
                14
            }
            Frame::Gone { rank } => {
                w.u64(rank);
                15
            }
            Frame::Forwarded => 16,
            Frame::Probe => 17,
        };
        let body = w.finish();
        let mut bytes = Vec::with_capacity(HEADER + body.len());
        bytes.extend_from_slice(&(body.len() as u64).to_le_bytes());
        bytes.extend_from_slice(&kind.to_le_bytes());
        bytes.extend_from_slice(&(descriptors.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&body);
        Packet { bytes: bytes.into(), descriptors: Arc::new(descriptors) }
    }

    pub(super) fn unpack(kind: u32, body: &[u8], mut descriptors: Vec<OwnedFd>) -> Result<Frame> {
        let mut r = Reader::new("world", body);
        Ok(match kind {
            1 => Frame::Hello { job: r.text()?, rank: r.u64()?, size: r.u64()? },
            2 => Frame::Welcome,
            3 => Frame::Refuse(take_error(&mut r)?),
            4 => {
                let group = r.u64()?;
                let mut members = Vec::new();
                for _ in 0..r.u64()? {
                    members.push(r.u64()?);
                }
                Frame::Group { group, members }
            }
            5 => {
                let (group, number) = (r.u64()?, r.u64()?);
                let part = Part { bytes: r.bytes()?.to_vec(), descriptors };
                Frame::Give { group, number, part }
            }
            6 => {
                let (group, number) = (r.u64()?, r.u64()?);
                let mut parts = Vec::new();
                for _ in 0..r.u64()? {
                    let bytes = r.bytes()?.to_vec();
                    let count = r.u64()? as usize;
                    if count > descriptors.len() {
                        return Err(broken("descriptors are missing"));
                    }
                    let rest = descriptors.split_off(count);
                    parts.push(Part { bytes, descriptors });
                    descriptors = rest;
                }
                Frame::All { group, number, parts }
            }
            7 => Frame::Late {
                group: r.u64()?,
                number: r.u64()?,
                what: r.text()?,
                waited: Duration::from_nanos(r.u64()?),
            },
            8 => Frame::Broken { group: r.u64()?, error: take_error(&mut r)? },
            9 => Frame::Leave { group: r.u64()?, clean: r.u64()? == 1 },
            10 => Frame::Goodbye,
            11 => Frame::GaveUp { group: r.u64()?, error: take_error(&mut r)? },
            12 => Frame::Ask { group: r.u64()?, number: r.u64()? },
            13 => {
                let (group, number, teller) = (r.u64()?, r.u64()?, r.u64()?);
                let mut ranks = Vec::new();
                for _ in 0..r.u64()? {
                    ranks.push(r.u64()?);
                }
                Frame::Missing { group, number, ranks, teller }
            }
            14 => {
                let mut ranks = Vec::new();
                for _ in 0..r.u64()? {
                    ranks.push(r.u64()?);
                }
                let packet = Packet { bytes: r.bytes()?.into(), descriptors: Arc::default() };
                Frame::Relayed { ranks, packet }
            }
            15 => Frame::Gone { rank: r.u64()? },
            16 => Frame::Forwarded,
            17 => Frame::Probe,
            other => return Err(broken(&format!("a frame of kind {other}"))),
        })
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
