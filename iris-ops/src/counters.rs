use std::fmt;

/// Numbers of bytes, flags and waits over all calls of one operator on this rank, since the
/// operator was made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Counters {
    /// Number of bytes written to the memory of peers.
    pub pushed: u64,
    /// Number of bytes read from the memory of peers.
    pub pulled: u64,
    /// Number of signals and flags that this rank raised.
    pub flags: u64,
    /// Number of waits that this rank began, for peers or for other workgroups of this rank.
    pub waits: u64,
}

impl fmt::Display for Counters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Counters { pushed, pulled, flags, waits } = self;
        write!(f, "{pushed} bytes pushed, {pulled} pulled, {flags} signals raised, {waits} waits")
    }
}
