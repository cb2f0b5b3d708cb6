//! Comparison of all ranks' results with a reference and with each other.

use anyhow::Result;
use iris_heap::SymmetricHeap;
use iris_ops::Topology;
use iris_testkit::matrix::{Matrix, values};
use iris_testkit::numeric::{self, compare, frobenius};
use iris_testkit::oracle::{Meaning, split};
use iris_testkit::suite::Op;
use serde::{Deserialize, Serialize};

use crate::problem::{Problem, rows_at_once};

/// Maximum number of multiply-adds that a rank spends on the reference. If a product needs more,
/// only some rows are checked: evenly spread ones, including the first and the last.
const WORK: usize = 1 << 29;

/// Result of one rank's check: its C compared with the reference, and with the C of the other
/// ranks.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Found {
    /// Sum of the squared differences from the reference; NaN if an element of C is NaN.
    #[serde(with = "crate::job::bits")]
    errors: f64,
    /// Sum of the squared elements of the reference.
    #[serde(with = "crate::job::bits")]
    wanted: f64,
    /// Largest difference between the same element on two ranks.
    #[serde(with = "crate::job::bits")]
    difference: f64,
    /// Whether the same element has different bits on two ranks.
    differs: bool,
    /// Description of the first wrong element; `None` if all elements are right.
    pub(crate) refused: Option<String>,
    /// Number of rows of C that were checked, and number of rows of C.
    pub(crate) rows: (usize, usize),
}

impl Found {
    /// Combines the results of all ranks' checks.
    pub(crate) fn merged(all: impl IntoIterator<Item = Found>) -> Found {
        let mut sum = Found::default();
        for found in all {
            sum.errors += found.errors;
            sum.wanted += found.wanted;
            sum.difference = larger(sum.difference, found.difference);
            sum.differs |= found.differs;
            sum.refused = sum.refused.or(found.refused);
            sum.rows = (sum.rows.0 + found.rows.0, sum.rows.1 + found.rows.1);
        }
        sum
    }

    /// Relative error: norm of the errors divided by that of the expected matrix.
    pub(crate) fn relative(&self) -> f64 {
        numeric::relative(self.errors.sqrt(), self.wanted.sqrt())
    }

    /// Largest difference between two ranks' results if every rank has the whole result; 0
    /// otherwise.
    pub(crate) fn difference(&self) -> f64 {
        self.difference
    }

    /// Description of the first error: a wrong element or, with `same_bits`, ranks whose bits
    /// differ; `None` if there is no error.
    pub(crate) fn wrong(&self, same_bits: bool) -> Option<String> {
        let differs = || format!("ranks differ by up to {:e}", self.difference);
        self.refused.clone().or_else(|| (same_bits && self.differs).then(differs))
    }
}

/// Larger of two numbers; a NaN counts as larger than all numbers.
fn larger(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}

/// Checks this rank's share of the results. If every rank has the whole result, the share is some
/// rows, compared on all ranks; otherwise it is this rank's own C. All ranks must have finished the
/// call.
pub(crate) fn check(heap: &SymmetricHeap, problem: &Problem, op: Op, c: &Matrix) -> Result<Found> {
    let ranks = Topology::from(heap);
    let (rows, cols) = c.shape();
    // The memory of ranks on other nodes cannot be read. So the ranks of each node check all rows,
    // on the ranks of that node.
    let (rank, size) = (heap.local_rank(), heap.local_size());
    let (rows, holders) = if Meaning::of(op).replicates() {
        let (own, first) = (heap.rank(), heap.node_ranks().start);
        let holders = (own..first + size).chain(first..own);
        (split(rows, size, rank), holders.collect())
    } else {
        (0..rows, vec![heap.rank()])
    };
    let depth = if op.multiplies() { problem.k.max(1) } else { 1 };
    let chosen = spread(rows.len(), WORK / (cols * depth).max(1));
    let mut found = Found { rows: (chosen.len(), rows.len()), ..Found::default() };
    if cols == 0 {
        return Ok(found);
    }
    let chosen: Vec<_> = chosen.into_iter().map(|row| rows.start + row).collect();
    for slab in chosen.chunks(rows_at_once(cols, ranks.size)) {
        let expected = problem.expected(op, ranks, slab);
        let (wanted, allowed) = expected.allowed(false);
        let mut first = Vec::new();
        for &holder in &holders {
            let mut bytes = Vec::new();
            for &row in slab {
                bytes.extend(c.row_of(heap, holder, row)?);
            }
            if bytes == first {
                continue;
            }
            let seen = values(problem.dtype, &bytes)?;
            if first.is_empty() {
                first = bytes;
            } else {
                found.differs = true;
                let pairs = values(problem.dtype, &first)?.into_iter().zip(&seen);
                let most = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, larger);
                found.difference = larger(found.difference, most);
            }
            let holder = ranks.rank - rank + holder;
            let what = format!("{op} on rank {holder}, rows {} and on", slab[0]);
            let errors = seen.iter().zip(wanted).map(|(seen, wanted)| seen - wanted);
            found.errors += frobenius(errors).powi(2);
            found.wanted += frobenius(wanted.iter().copied()).powi(2);
            let shape = (slab.len(), cols);
            if let Err(refused) = compare(&what, shape, &seen, wanted, allowed) {
                found.refused.get_or_insert(refused.to_string());
            }
        }
    }
    Ok(found)
}

/// Returns up to `most` (at least 2) of the numbers 0..`count`, evenly spread, including the first
/// and the last.
fn spread(count: usize, most: usize) -> Vec<usize> {
    let most = most.max(2);
    if count <= most {
        return (0..count).collect();
    }
    (0..most).map(|at| at * (count - 1) / (most - 1)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_spread_over_all() {
        assert_eq!(spread(3, 5), [0, 1, 2]);
        assert_eq!(spread(10, 4), [0, 3, 6, 9]);
        assert_eq!(spread(1000, 0), [0, 999]);
        assert!(spread(0, 4).is_empty());
    }

    #[test]
    fn a_nan_is_never_small() {
        assert!(larger(1.0, f64::NAN).is_nan() && larger(f64::NAN, 1.0).is_nan());
        let nan = Found { errors: f64::NAN, wanted: 1.0, ..Found::default() };
        assert!(Found::merged([Found::default(), nan]).relative().is_nan());
    }
}
