use std::fmt;

/// Counts of bytes and words over all calls of one op on this rank, since the op was made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Counters {
    /// Bytes written to peers' memory.
    pub pushed: u64,
    /// Bytes read from peers' memory.
    pub pulled: u64,
    /// Number of signals and flags that were raised.
    pub flags: u64,
    /// Number of waits that were begun.
    pub waits: u64,
}

impl fmt::Display for Counters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Counters { pushed, pulled, flags, waits } = self;
        write!(f, "{pushed} bytes pushed, {pulled} pulled, {flags} signals raised, {waits} waits")
    }
}
