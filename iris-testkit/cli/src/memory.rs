//! Check before the ranks start that the host has enough memory for them; otherwise the system
//! would kill a process later.

use anyhow::Result;
use iris_heap::host_memory::available;

use crate::errors::usage;

/// Refuses to start `ranks` ranks if together they need more memory than is available; `bytes` is
/// the need of each rank.
pub(crate) fn fits(ranks: usize, bytes: u64) -> Result<()> {
    match available() {
        Some(most) if bytes.saturating_mul(ranks as u64) > most => {
            let value = format!("{ranks} x {} MiB", bytes >> 20);
            Err(usage("memory for the ranks", value, format!("at most {} MiB", most >> 20)))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_beyond_memory_is_refused() {
        fits(4, 1 << 10).unwrap();
        for (ranks, bytes) in [(1, u64::MAX), (64, u64::MAX), (2, 1 << 62)] {
            let error = fits(ranks, bytes).unwrap_err().to_string();
            assert!(error.contains("memory for the ranks is ") && error.contains("MiB"), "{error}");
        }
    }
}
