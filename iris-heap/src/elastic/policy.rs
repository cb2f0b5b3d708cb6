//! Policy of a job: how many ranks may go on, and how long a process that stands still is awaited.

use std::time::Duration;

use crate::abi::MAX_RANKS;
use crate::error::{Error, Result, list_texts};

/// Rule by which ranks go on after a loss; equal on all ranks.
///
/// ```
/// use std::time::Duration;
/// // Tensor parallelism needs a divisor of the number of heads.
/// let policy = iris_heap::Policy::new().sizes(&[8, 4, 2, 1]).patience(Duration::from_secs(5));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct Policy {
    pub(super) sizes: Vec<usize>,
    pub(super) patience: Duration,
}

impl Default for Policy {
    fn default() -> Policy {
        Policy::new()
    }
}

impl Policy {
    /// Policy by which any number of ranks goes on, with a patience of 2 s.
    pub const fn new() -> Policy {
        Policy { sizes: Vec::new(), patience: Duration::from_secs(2) }
    }

    /// Sets the numbers of ranks that a world may have, in any order. The largest one for which
    /// there are ranks is taken; ranks that are left over are spares. Default: every number.
    pub fn sizes(mut self, sizes: &[usize]) -> Policy {
        self.sizes = sizes.to_vec();
        self
    }

    /// Sets the time after which a process that is stopped, by a signal or a debugger, is left out.
    /// Default: 2 s. The same time limits each attempt of the remaining ranks to meet; later
    /// attempts have more.
    pub fn patience(mut self, patience: Duration) -> Policy {
        self.patience = patience;
        self
    }

    pub(super) fn check(&self) -> Result<()> {
        if let Some(size) = self.sizes.iter().find(|size| !(1..=MAX_RANKS).contains(*size)) {
            return Err(Error::invalid("Policy::sizes", size, format!("1 to {MAX_RANKS}")));
        }
        let limits = Duration::from_millis(200)..=Duration::from_secs(3600);
        if !limits.contains(&self.patience) {
            let value = format!("{:?}", self.patience);
            return Err(Error::invalid("Policy::patience", value, "200 ms to 1 hour"));
        }
        Ok(())
    }

    /// Items that all ranks must have in common.
    pub(super) fn items(&self) -> [(&'static str, String); 2] {
        let sizes = match &self.sizes[..] {
            [] => "any".into(),
            sizes => list_texts(sizes.iter().map(usize::to_string).collect()),
        };
        [("sizes", sizes), ("patience", format!("{:?}", self.patience))]
    }

    /// Slots of the ranks of the next world, in the order of their ranks, if those of the mask `kept`
    /// go on; empty if they are too few. All ranks choose alike.
    pub(super) fn choose(&self, kept: u64) -> Vec<usize> {
        let alive = kept.count_ones() as usize;
        let allowed = self.sizes.iter().copied().filter(|&size| size <= alive).max();
        let size = if self.sizes.is_empty() { alive } else { allowed.unwrap_or(0) };
        slots(kept).take(size).collect()
    }
}

/// Slots of a mask, in ascending order.
pub(super) fn slots(mask: u64) -> impl Iterator<Item = usize> {
    (0..u64::BITS as usize).filter(move |slot| mask >> slot & 1 == 1)
}

/// Mask of slots.
pub(super) fn mask(slots: &[usize]) -> u64 {
    slots.iter().fold(0, |mask, slot| mask | 1 << slot)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_allowed_number_goes_on() {
        let policy = Policy::new().sizes(&[2, 4, 8]);
        assert_eq!(policy.choose(0b1101), [0, 2]);
        assert_eq!(policy.choose(0b1111_0000), [4, 5, 6, 7]);
        assert_eq!(policy.choose(1 << 63), [0; 0]);
        assert_eq!(Policy::new().choose(1 << 63 | 5), [0, 2, 63]);
    }

    #[test]
    fn a_policy_that_no_world_could_keep_is_refused() {
        for (policy, expected) in [
            (Policy::new().sizes(&[4, 0]), "Policy::sizes is 0: expected 1 to 64"),
            (Policy::new().sizes(&[65]), "Policy::sizes is 65: expected 1 to 64"),
            (Policy::new().patience(Duration::ZERO), "Policy::patience is 0ns: expected 200 ms to"),
        ] {
            let text = policy.check().unwrap_err().to_string();
            assert!(text.starts_with(expected), "{text}");
        }
        Policy::new().sizes(&[64, 1]).check().unwrap();
    }
}
