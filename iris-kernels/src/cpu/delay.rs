//! Random delays before signals and waits, for stress tests. The variable `IRIS_DELAY` is the
//! maximum delay in microseconds; without it there are no delays.

use std::cell::Cell;
use std::sync::LazyLock;
use std::time::Duration;

static LONGEST: LazyLock<u64> =
    LazyLock::new(|| std::env::var("IRIS_DELAY").ok().and_then(|us| us.parse().ok()).unwrap_or(0));

/// Maximum delay in microseconds, from `IRIS_DELAY`; 0 means no delays.
pub(crate) fn longest() -> u64 {
    *LONGEST
}

/// Initial state of the random sequence of workgroup `group` on rank `rank`.
pub(crate) fn seed(rank: u32, group: u32) -> u64 {
    0x9e37_79b9_7f4a_7c15 ^ (u64::from(rank) << 32 | u64::from(group))
}

/// Sleeps in one of eight calls on average, for a random time up to the maximum.
pub(crate) fn sleep_sometimes(state: &Cell<u64>) {
    if *LONGEST == 0 {
        return;
    }
    // Random number generator xorshift64 (Marsaglia 2003).
    let mut x = state.get();
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    state.set(x);
    if x & 7 == 0 {
        std::thread::sleep(Duration::from_micros((x >> 8) % *LONGEST));
    }
}
