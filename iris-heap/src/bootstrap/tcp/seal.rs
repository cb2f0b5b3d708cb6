//! Sealed frames: Noise NNpsk0 between the relay of each node and rank 0, with a key that the ranks
//! of a job share.
//!
//! A relay sends [`GREETING`] bytes: a magic number, the rank in whose process the relay runs, and
//! the first message of the handshake. Rank 0 answers with the second message, [`REPLY`] bytes.
//! From then on both send chunks: the length of the sealed bytes (16 bits), an increasing number
//! (64 bits), and the sealed bytes. The first frame is a hello with the sender's job and number of
//! ranks, so two jobs with the same key do not accept each other's ranks, and each job is told the
//! difference. Whoever replays a greeting gets only a reply, because only the greeting's original
//! sender can seal the hello.

use std::sync::Arc;

use snow::{Builder, HandshakeState, StatelessTransportState};

use crate::bootstrap::frames::broken;
use crate::error::{Error, Result};

/// Largest size of a Noise message (LONGEST), and size of the authentication tag at its end (TAG),
/// in bytes.
const LONGEST: usize = 65535;
const TAG: usize = 16;
/// Size of a chunk's header in bytes: length (16 bits) and number (64 bits).
const HEAD: usize = 2 + 8;
const MAGIC: &[u8; 4] = b"IRS3";
/// Size of a handshake message without payload in bytes: a public key and a tag.
const MESSAGE: usize = 32 + TAG;
/// Size of a rank's first message in bytes: magic number, rank and handshake message.
pub(crate) const GREETING: usize = 4 + 4 + MESSAGE;
/// Size of rank 0's answer to a greeting in bytes.
pub(crate) const REPLY: usize = MESSAGE;

/// Key by which the ranks of a job authenticate each other.
#[derive(Clone, Copy)]
pub(crate) enum Key {
    /// No key: anybody who can connect to the port can join.
    Open,
    /// Secret that all ranks have a copy of.
    Secret([u8; 32]),
    /// Random key of this process. Processes of rank 0's user get the key of rank 0, and use that key
    /// instead of their own.
    OfUser([u8; 32]),
}

/// Parameters that both ends of a connection must agree on.
#[derive(Clone)]
pub(crate) struct Terms {
    pub(crate) key: Key,
    pub(crate) job: String,
    pub(crate) size: usize,
}

impl Terms {
    fn builder<'a>(&'a self, prologue: &'a [u8]) -> Result<Builder<'a>> {
        let pattern = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s".parse().map_err(failed)?;
        let key = match &self.key {
            Key::Open => &[0; 32],
            Key::Secret(key) | Key::OfUser(key) => key,
        };
        Builder::new(pattern).psk(0, key).and_then(|b| b.prologue(prologue)).map_err(failed)
    }

    fn prologue(rank: u32) -> Vec<u8> {
        format!("iris rank {rank} to rank 0").into_bytes()
    }

    /// Rank 0's answer to a greeting with another key or protocol: the kind of rank 0's key. It is not
    /// authenticated, so it is only a hint.
    pub(crate) fn refusal(&self) -> [u8; REPLY] {
        let kind = match self.key {
            Key::Open => 0,
            Key::Secret(_) => 1,
            Key::OfUser(_) => 2,
        };
        [kind; REPLY]
    }

    /// Text that tells how the key of `rank`, this rank, differs from rank 0's key, if rank 0's
    /// answer `reply` is a refusal; otherwise `None`.
    pub(crate) fn refused(&self, reply: &[u8; REPLY], rank: usize) -> Option<String> {
        let ours = self.refusal();
        let set = |refusal: &[u8; REPLY]| {
            let kinds = ["not set, with IRIS_TRUST_NETWORK=1,", "set", "not set"];
            kinds
                .into_iter()
                .zip(0..)
                .find_map(|(set, kind)| (*refusal == [kind; REPLY]).then_some(set))
        };
        let (theirs, own) = (set(reply)?, set(&ours)?);
        Some(match self.key {
            _ if ours != *reply => {
                format!("IRIS_SECRET_FILE is {theirs} on rank 0, {own} on rank {rank}")
            }
            Key::Open => "no rank has a secret, so rank 0 has another version of iris".into(),
            Key::Secret(_) => {
                format!("IRIS_SECRET_FILE on rank 0 has another secret than on rank {rank}")
            }
            Key::OfUser(_) => format!(
                "no rank has a secret, and rank 0 gives its key only to processes of its user on its host, which \
                 rank {rank} is not"
            ),
        })
    }

    /// Creates a rank's greeting and the state that reads the answer.
    pub(crate) fn greet(&self, rank: u32) -> Result<(Vec<u8>, HandshakeState)> {
        let prologue = Terms::prologue(rank);
        let mut state = self.builder(&prologue)?.build_initiator().map_err(failed)?;
        let mut message = [0; MESSAGE];
        state.write_message(&[], &mut message).map_err(failed)?;
        let greeting = [&MAGIC[..], &rank.to_le_bytes(), &message].concat();
        Ok((greeting, state))
    }

    /// Answers a greeting, on rank 0. Returns the answer, the rank that the greeting claims, and
    /// the connection's keys; an error if the key differs from rank 0's.
    pub(crate) fn answer(&self, greeting: &[u8; GREETING]) -> Result<(Vec<u8>, u32, Keys)> {
        let (head, message) = greeting.split_at(8);
        if head[..4] != MAGIC[..] {
            return Err(broken("a connection that does not speak this protocol"));
        }
        let rank = u32::from_le_bytes([head[4], head[5], head[6], head[7]]);
        let prologue = Terms::prologue(rank);
        let mut state = self.builder(&prologue)?.build_responder().map_err(failed)?;
        state.read_message(message, &mut []).map_err(failed)?;
        let mut reply = vec![0; REPLY];
        state.write_message(&[], &mut reply).map_err(failed)?;
        Ok((reply, rank, Keys::of(state)?))
    }
}

/// Keys of a connection after its handshake.
#[derive(Clone)]
pub(crate) struct Keys(Arc<StatelessTransportState>);

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Keys(..)")
    }
}

impl Keys {
    /// Derives the keys from a completed handshake.
    fn of(state: HandshakeState) -> Result<Keys> {
        Ok(Keys(Arc::new(state.into_stateless_transport_mode().map_err(failed)?)))
    }

    /// Derives the keys on a rank that has received rank 0's answer `reply`.
    pub(crate) fn of_reply(mut state: HandshakeState, reply: &[u8; REPLY]) -> Result<Keys> {
        state.read_message(reply, &mut []).map_err(failed)?;
        Keys::of(state)
    }

    pub(crate) fn sealer(&self) -> Sealer {
        Sealer { keys: self.clone(), next: 0 }
    }

    pub(crate) fn opener(&self) -> Opener {
        Opener { keys: self.clone(), next: 0, raw: Vec::new() }
    }
}

/// Encrypts the data that one end of a connection sends.
#[derive(Debug)]
pub(crate) struct Sealer {
    keys: Keys,
    next: u64,
}

impl Sealer {
    /// Number of the next chunk.
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    /// Numbers the next chunk `number`. No chunk with this or a later number may have been sent,
    /// because encrypting two texts with the same number would reveal both.
    pub(crate) fn go_back_to(&mut self, number: u64) {
        self.next = number;
    }

    /// Encrypts `bytes` and returns them as a sequence of chunks.
    pub(crate) fn seal(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(bytes.len() + bytes.len() / 1024 + HEAD + TAG);
        for part in bytes.chunks(LONGEST - TAG) {
            let len = part.len() + TAG;
            out.extend_from_slice(&(len as u16).to_le_bytes());
            out.extend_from_slice(&self.next.to_le_bytes());
            let start = out.len();
            out.resize(start + len, 0);
            let sealed = self.keys.0.write_message(self.next, part, &mut out[start..]);
            // Encryption cannot fail here: it fails only for messages that are too long, which
            // `part` is not, and after 2^64 messages.
            debug_assert_eq!(sealed.ok(), Some(len));
            self.next += 1;
        }
        out
    }
}

/// Decrypts the data that one end of a connection receives.
#[derive(Debug)]
pub(crate) struct Opener {
    keys: Keys,
    /// Number of the next chunk. A smaller number is a replay; a larger number means that chunks
    /// were removed on their way.
    next: u64,
    /// Received bytes of an incomplete chunk.
    raw: Vec<u8>,
}

impl Opener {
    /// Takes received bytes, and appends the contents of complete chunks to `out`.
    ///
    /// # Errors
    /// [`Error::Wire`] for bytes that the other end did not seal, that are received a second time,
    /// or before which bytes are missing.
    pub(crate) fn open(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<()> {
        self.raw.extend_from_slice(bytes);
        let mut done = 0;
        while let Some((head, rest)) = self.raw[done..].split_first_chunk::<HEAD>() {
            let len = usize::from(u16::from_le_bytes([head[0], head[1]]));
            let number = head[2..].try_into().map_or(0, u64::from_le_bytes);
            if len < TAG || number != self.next {
                return Err(broken("a sealed frame out of order"));
            }
            let Some(sealed) = rest.get(..len) else { break };
            let start = out.len();
            out.resize(start + len - TAG, 0);
            self.keys.0.read_message(number, sealed, &mut out[start..]).map_err(failed)?;
            self.next = number + 1;
            done += HEAD + len;
        }
        self.raw.drain(..done);
        Ok(())
    }
}

fn failed(error: snow::Error) -> Error {
    Error::Wire { what: "sealed connection".into(), problem: error.to_string() }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;

    use super::super::super::frames::Packet;
    use super::super::super::mailbox::Outbox;
    use super::*;

    fn terms(key: u8) -> Terms {
        with(Key::Secret([key; 32]))
    }

    fn with(key: Key) -> Terms {
        Terms { key, job: "job".into(), size: 4 }
    }

    fn greeting(terms: &Terms, rank: u32) -> ([u8; GREETING], HandshakeState) {
        let (greeting, state) = terms.greet(rank).unwrap();
        (greeting.try_into().unwrap(), state)
    }

    fn both(rank: u32) -> (Keys, Keys) {
        let terms = terms(7);
        let (greeting, state) = greeting(&terms, rank);
        let (reply, claimed, hub) = terms.answer(&greeting).unwrap();
        assert_eq!(claimed, rank);
        (Keys::of_reply(state, &reply.try_into().unwrap()).unwrap(), hub)
    }

    #[test]
    fn what_is_sealed_is_opened_whole_and_once() {
        let (rank, hub) = both(3);
        let bytes: Vec<u8> = (0..200_000u32).map(|i| (i % 251) as u8).collect();
        let (mut sealer, mut opener) = (rank.sealer(), hub.opener());
        let sealed = sealer.seal(&bytes);
        let mut out = Vec::new();
        for part in sealed.chunks(1000) {
            opener.open(part, &mut out).unwrap();
        }
        assert!(out == bytes);
        assert!(!sealed.windows(64).any(|w| w == &bytes[..64]), "nothing is readable");
        assert!(opener.open(&sealed, &mut out).is_err(), "the same bytes a second time");
        let chunk = HEAD + LONGEST;
        let gap = [&sealed[..chunk], &sealed[2 * chunk..]].concat();
        let mut out = Vec::new();
        assert!(hub.opener().open(&gap, &mut out).is_err(), "a chunk is missing");
        assert!(out == bytes[..LONGEST - TAG]);
    }

    #[test]
    fn a_packet_that_is_taken_back_leaves_no_gap() {
        let (rank, hub) = both(1);
        let mut outbox = Outbox::sealed(&rank);
        let (socket, other) = UnixStream::pair().unwrap();
        let packet = |text: &[u8]| Packet { bytes: text.into(), descriptors: Arc::default() };
        // The first packet is already encrypted when its send fails.
        outbox.push(packet(b"one"));
        assert!(outbox.flush(&File::open("/dev/null").unwrap()).is_err());
        assert!(outbox.take_back());
        [&b"two"[..], b"three"].into_iter().for_each(|text| outbox.push(packet(text)));
        outbox.flush(&socket).unwrap();
        drop(socket);
        let mut sealed = Vec::new();
        (&other).read_to_end(&mut sealed).unwrap();
        let mut out = Vec::new();
        hub.opener().open(&sealed, &mut out).unwrap();
        assert_eq!(out, b"twothree");
    }

    #[test]
    fn a_flipped_bit_is_an_error() {
        let (rank, hub) = both(1);
        let sealed = rank.sealer().seal(b"a frame");
        for at in 0..sealed.len() {
            let mut wrong = sealed.clone();
            wrong[at] ^= 1;
            let mut out = Vec::new();
            let opened = hub.opener().open(&wrong, &mut out);
            // If the changed byte increases the length, the opener may wait for more bytes instead
            // of failing; it must not return data.
            assert!(opened.is_err() || out.is_empty(), "byte {at}");
        }
    }

    #[test]
    fn another_key_or_rank_gets_no_answer() {
        let hub = terms(7);
        let refused = |other: &Terms| hub.answer(&greeting(other, 1).0).is_err();
        assert!(!refused(&hub));
        assert!(refused(&terms(8)));
        let mut other_rank = greeting(&hub, 1).0;
        other_rank[4] = 2;
        assert!(hub.answer(&other_rank).is_err());
        let mut other_protocol = greeting(&hub, 1).0;
        other_protocol[..4].copy_from_slice(b"GET ");
        assert!(hub.answer(&other_protocol).is_err());
        assert!(hub.answer(&[0xff; GREETING]).is_err());
    }

    #[test]
    fn a_refusal_says_on_which_rank_there_is_a_secret() {
        let told = |theirs, ours| with(ours).refused(&with(theirs).refusal(), 1).unwrap();
        let (secret, user, open) = (Key::Secret([7; 32]), Key::OfUser([7; 32]), Key::Open);
        assert_eq!(told(secret, user), "IRIS_SECRET_FILE is set on rank 0, not set on rank 1");
        assert_eq!(told(user, secret), "IRIS_SECRET_FILE is not set on rank 0, set on rank 1");
        let trusts = "IRIS_SECRET_FILE is not set, with IRIS_TRUST_NETWORK=1, on rank 0, ";
        assert_eq!(told(open, secret), format!("{trusts}set on rank 1"));
        assert_eq!(told(open, user), format!("{trusts}not set on rank 1"));
        assert!(told(secret, secret).contains("another secret"));
        assert!(told(open, open).contains("another version"));
        assert!(told(user, user).contains("on its host, which rank 1 is not"));
        assert_eq!(terms(7).refused(&[3; REPLY], 1), None);
    }
}
