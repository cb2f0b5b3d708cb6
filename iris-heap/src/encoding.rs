//! Encoding of the messages that ranks exchange: little-endian numbers and length-prefixed bytes.

use crate::error::{Error, Result};

#[derive(Default)]
pub(crate) struct Writer(Vec<u8>);

impl Writer {
    pub(crate) fn u64(&mut self, value: u64) -> &mut Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.u64(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
        self
    }

    pub(crate) fn text(&mut self, text: &str) -> &mut Self {
        self.bytes(text.as_bytes())
    }

    pub(crate) fn finish(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.0)
    }
}

pub(crate) struct Reader<'a> {
    what: &'static str,
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(crate) fn new(what: &'static str, bytes: &'a [u8]) -> Self {
        Reader { what, rest: bytes }
    }

    pub(crate) fn u64(&mut self) -> Result<u64> {
        match self.rest.split_first_chunk::<8>() {
            Some((number, rest)) => {
                self.rest = rest;
                Ok(u64::from_le_bytes(*number))
            }
            None => Err(self.broken(format!("{} bytes where a number should be", self.rest.len()))),
        }
    }

    pub(crate) fn bytes(&mut self) -> Result<&'a [u8]> {
        let len = self.u64()?;
        let split = usize::try_from(len).ok().and_then(|n| self.rest.split_at_checked(n));
        match split {
            Some((bytes, rest)) => {
                self.rest = rest;
                Ok(bytes)
            }
            None => Err(self.broken(format!("{len} bytes promised, {} there", self.rest.len()))),
        }
    }

    pub(crate) fn text(&mut self) -> Result<String> {
        let bytes = self.bytes()?;
        match std::str::from_utf8(bytes) {
            Ok(text) => Ok(text.into()),
            Err(e) => Err(self.broken(e.to_string())),
        }
    }

    fn broken(&self, problem: String) -> Error {
        Error::Wire { what: self.what.into(), problem }
    }
}

/// FNV-1a hash of 128 bits over parts and their lengths, so that two different sequences of parts
/// do not collide by concatenation. The hash names files, heaps and compiled kernels. It does not
/// protect against deliberate collisions, so folders with names of this hash must be private.
pub fn hash(parts: &[&[u8]]) -> u128 {
    let mut h: u128 = 0x6c62272e07bb014262b821756295c58d;
    for part in parts {
        let len = (part.len() as u64).to_le_bytes();
        for &byte in len.iter().chain(part.iter()) {
            h = (h ^ byte as u128).wrapping_mul(0x0000000001000000000000000000013b);
        }
    }
    h
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let m = Writer::default().u64(7).text("seven").bytes(&[1, 2]).finish();
        let mut r = Reader::new("test", &m);
        assert_eq!(r.u64().unwrap(), 7);
        assert_eq!(r.text().unwrap(), "seven");
        assert_eq!(r.bytes().unwrap(), [1, 2]);
        assert!(matches!(r.u64(), Err(Error::Wire { .. })));
        for cut in 0..m.len() {
            let mut r = Reader::new("test", &m[..cut]);
            assert!(r.u64().and_then(|_| r.text()).and_then(|_| r.bytes()).is_err());
        }
    }

    #[test]
    fn parts_do_not_run_together() {
        assert_ne!(hash(&[b"ab", b"c"]), hash(&[b"a", b"bc"]));
    }
}
