//! A hash for names of cache entries: 128-bit FNV-1a. It need not resist anybody, since what it
//! names lies in a folder that only its user can write.

/// Hash of a sequence of parts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fnv(u128);

impl Default for Fnv {
    fn default() -> Self {
        Self(0x6c62272e07bb014262b821756295c58d)
    }
}

impl Fnv {
    /// Add a part and its length, so that no two sequences of parts run together.
    pub(crate) fn part(&mut self, bytes: &[u8]) {
        self.bytes(bytes);
        self.bytes(&(bytes.len() as u64).to_le_bytes());
    }

    fn bytes(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u128::from(byte)).wrapping_mul(0x0000000001000000000000000000013b);
        }
    }

    /// The hash.
    pub(crate) fn finish(self) -> u128 {
        self.0
    }
}

/// Hash of one part.
pub(crate) fn of(bytes: &[u8]) -> u128 {
    let mut hash = Fnv::default();
    hash.part(bytes);
    hash.finish()
}
