//! Issue boards: a log of the last calls that each rank of a heap has issued, in memory that all
//! ranks map.
//!
//! All ranks must issue the calls of a heap in one order. A waiting kernel cannot distinguish a
//! late peer from a peer that issued another call; the hosts can, by comparing their boards.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Last call of each rank, by rank: its number (0 if there is none), and its operator's id if
/// known.
type Standing = Vec<(u64, Option<u32>)>;

use crate::error::Result;
use crate::segment::SharedMemory;

/// Number of calls that a board holds. Two ranks can be compared only while one is ahead of the
/// other by fewer calls.
const CALLS: u64 = 1024;

/// Number of 64-bit words before the calls. Word 0 counts calls, word 1 tells whether a call was
/// captured, word 2 counts the calls whose end the host has seen, and word 3 is the node that the
/// rank waits for in a step between nodes. The words fill a cache line of their own.
const HEADER: u64 = 16;

/// Size of a board in bytes.
pub(crate) const BYTES: u64 = 8 * (HEADER + CALLS);

/// Issue boards of all ranks of a heap, indexed by rank: memory in which each rank records its
/// calls.
#[derive(Clone, Debug)]
pub(crate) struct Boards {
    rank: usize,
    all: Arc<Vec<SharedMemory>>,
}

/// Node that a rank waits for in a step between nodes, as far as the rank knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AwaitedNode {
    /// Some other node; it is not known yet which one is missing.
    Unknown,
    /// Node with this index.
    Node(usize),
}

/// First call for which the boards of the ranks hold different operators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Difference {
    /// Number of the call in the heap, from 1.
    pub(crate) call: u64,
    /// Id of the operator, by rank; `None` if the rank's board does not hold that call.
    pub(crate) operators: Vec<Option<u32>>,
}

/// Call that this rank waits for, according to the boards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Behind {
    /// Number from 1: the first call that this rank has issued and another rank has not, or else
    /// this rank's last call.
    pub(crate) call: u64,
    /// Id of the call's operator, if this rank's board still holds the call.
    pub(crate) operator: Option<u32>,
    /// Ranks that have not issued the call.
    pub(crate) ranks: Vec<usize>,
}

impl Boards {
    /// Makes the boards as mapped by `rank`; `all` holds one board of [`BYTES`] bytes per rank.
    pub(crate) fn new(rank: usize, all: Arc<Vec<SharedMemory>>) -> Boards {
        Boards { rank, all }
    }

    /// Records that this rank issues a call of `operator`. Two threads must not call it at once.
    pub(crate) fn issue(&self, operator: u32) -> Result<()> {
        let calls = self.calls(self.rank)?;
        let number = calls.load(Ordering::Relaxed);
        let place = self.word(self.rank, HEADER + number % CALLS)?;
        place.store(number << 32 | u64::from(operator), Ordering::Relaxed);
        // Release: a rank that reads the new count also reads the call stored above.
        calls.store(number + 1, Ordering::Release);
        Ok(())
    }

    /// Removes the last recorded call, because no part of it was enqueued.
    pub(crate) fn retract(&self) -> Result<()> {
        let calls = self.calls(self.rank)?;
        calls.store(calls.load(Ordering::Relaxed).saturating_sub(1), Ordering::Release);
        Ok(())
    }

    /// Records that this rank captures calls into graphs. Boards do not count the replays of a
    /// graph, so the ranks of this heap are not compared from now on.
    pub(crate) fn set_captured(&self) -> Result<()> {
        self.word(self.rank, 1)?.store(1, Ordering::Relaxed);
        Ok(())
    }

    /// Number of ranks.
    pub(crate) fn ranks(&self) -> usize {
        self.all.len()
    }

    /// Number of calls that this rank has issued.
    pub(crate) fn issued(&self) -> Result<u64> {
        Ok(self.calls(self.rank)?.load(Ordering::Relaxed))
    }

    /// Records that this rank's host has seen the end of its first `calls` calls.
    pub(crate) fn complete(&self, calls: u64) -> Result<()> {
        self.word(self.rank, 2)?.fetch_max(calls, Ordering::Relaxed);
        Ok(())
    }

    /// Records that this rank waits in a step between nodes, and for which node; `None` at the end
    /// of the step.
    pub(crate) fn set_step(&self, step: Option<AwaitedNode>) -> Result<()> {
        let number = match step {
            None => 0,
            Some(AwaitedNode::Unknown) => 1,
            Some(AwaitedNode::Node(node)) => 2 + node as u64,
        };
        self.word(self.rank, 3)?.store(number, Ordering::Relaxed);
        Ok(())
    }

    /// Node that `rank` waits for in a step between nodes; `None` if it is in no such step.
    pub(crate) fn step(&self, rank: usize) -> Result<Option<AwaitedNode>> {
        Ok(match self.word(rank, 3)?.load(Ordering::Relaxed) {
            0 => None,
            1 => Some(AwaitedNode::Unknown),
            number => Some(AwaitedNode::Node((number - 2) as usize)),
        })
    }

    /// Number of calls whose end its host has seen, for each rank.
    pub(crate) fn completed(&self) -> Result<Vec<u64>> {
        let completed = |rank| Ok(self.word(rank, 2)?.load(Ordering::Relaxed));
        (0..self.all.len()).map(completed).collect()
    }

    /// Last call that each rank has issued: its number from 1 (0 if there is none) and its
    /// operator. `None` if any rank captures calls.
    pub(crate) fn standing(&self) -> Result<Option<Standing>> {
        if self.is_captured()? {
            return Ok(None);
        }
        let last = |(rank, calls): (usize, u64)| {
            let operator = calls.checked_sub(1).map(|last| self.operator(rank, last, calls));
            Ok((calls, operator.transpose()?.flatten()))
        };
        self.counts()?.into_iter().enumerate().map(last).collect::<Result<_>>().map(Some)
    }

    /// Whether any rank has captured calls.
    fn is_captured(&self) -> Result<bool> {
        let captured = |rank| Ok(self.word(rank, 1)?.load(Ordering::Relaxed) != 0);
        (0..self.all.len()).try_fold(false, |any, rank| Ok(any | captured(rank)?))
    }

    /// First call for which the boards of two ranks hold different operators; `None` if there is no
    /// such call or calls were captured.
    pub(crate) fn difference(&self) -> Result<Option<Difference>> {
        if self.is_captured()? {
            return Ok(None);
        }
        let calls = self.counts()?;
        let most = calls.iter().copied().max().unwrap_or(0);
        for number in most.saturating_sub(CALLS)..most {
            let operator = |rank| self.operator(rank, number, calls[rank]);
            let operators = (0..calls.len()).map(operator).collect::<Result<Vec<_>>>()?;
            let mut known = operators.iter().flatten();
            let first = known.next();
            if known.any(|operator| Some(operator) != first) {
                return Ok(Some(Difference { call: number + 1, operators }));
            }
        }
        Ok(None)
    }

    /// Call that this rank waits for, and the ranks that have not issued it; `None` if this rank
    /// has issued no call or calls were captured.
    pub(crate) fn behind(&self) -> Result<Option<Behind>> {
        let calls = self.counts()?;
        let own = calls[self.rank];
        if own == 0 || self.is_captured()? {
            return Ok(None);
        }
        let least = calls.iter().copied().min().unwrap_or(own);
        let call = (least + 1).min(own);
        let ranks = (0..calls.len()).filter(|&rank| calls[rank] < call).collect();
        Ok(Some(Behind { call, operator: self.operator(self.rank, call - 1, own)?, ranks }))
    }

    fn counts(&self) -> Result<Vec<u64>> {
        let count = |rank| Ok(self.calls(rank)?.load(Ordering::Acquire));
        (0..self.all.len()).map(count).collect()
    }

    /// Operator of call `number` (from 0) on the board of `rank`, which has issued `issued` calls;
    /// `None` if the board does not hold the call.
    fn operator(&self, rank: usize, number: u64, issued: u64) -> Result<Option<u32>> {
        if number >= issued {
            return Ok(None);
        }
        let word = self.word(rank, HEADER + number % CALLS)?.load(Ordering::Relaxed);
        // A later call may have overwritten the entry of call `number`.
        Ok((word >> 32 == number & u64::from(u32::MAX)).then_some(word as u32))
    }

    fn calls(&self, rank: usize) -> Result<&AtomicU64> {
        self.word(rank, 0)
    }

    fn word(&self, rank: usize, index: u64) -> Result<&AtomicU64> {
        self.all[rank].long(8 * index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn boards<const N: usize>() -> [Boards; N] {
        let board = |_| SharedMemory::create("iris-test", BYTES).unwrap();
        let all = Arc::new((0..N).map(board).collect());
        std::array::from_fn(|rank| Boards::new(rank, Arc::clone(&all)))
    }

    fn issue(boards: &Boards, operators: impl IntoIterator<Item = u32>) {
        operators.into_iter().for_each(|operator| boards.issue(operator).unwrap());
    }

    #[test]
    fn the_first_difference_is_found_by_all() {
        let all = boards::<3>();
        issue(&all[0], [7, 0, 5]);
        issue(&all[1], [7]);
        issue(&all[2], [7, 1, 0]);
        let operators = vec![Some(0), None, Some(1)];
        for boards in &all {
            let found = boards.difference().unwrap();
            assert_eq!(found, Some(Difference { call: 2, operators: operators.clone() }));
        }
        let behind = |rank: usize| all[rank].behind().unwrap();
        assert_eq!(behind(0), Some(Behind { call: 2, operator: Some(0), ranks: vec![1] }));
        assert_eq!(behind(1), Some(Behind { call: 1, operator: Some(7), ranks: vec![] }));
        assert_eq!(behind(2).map(|it| it.operator), Some(Some(1)));
    }

    #[test]
    fn the_last_calls_of_all_ranks_are_told() {
        let [one, other] = boards();
        issue(&one, [4, 6]);
        one.complete(1).unwrap();
        one.complete(0).unwrap();
        assert_eq!(other.standing().unwrap(), Some(vec![(2, Some(6)), (0, None)]));
        assert_eq!((other.completed().unwrap(), one.issued().unwrap()), (vec![1, 0], 2));
    }

    #[test]
    fn a_step_between_nodes_is_told_until_it_ends() {
        let [one, other] = boards();
        assert_eq!(other.step(0).unwrap(), None);
        for step in [AwaitedNode::Unknown, AwaitedNode::Node(0), AwaitedNode::Node(4095)] {
            one.set_step(Some(step)).unwrap();
            assert_eq!((other.step(0).unwrap(), other.step(1).unwrap()), (Some(step), None));
        }
        one.set_step(None).unwrap();
        assert_eq!(other.step(0).unwrap(), None);
    }

    #[test]
    fn calls_that_one_board_no_longer_holds_are_not_compared() {
        let [ahead, late] = boards();
        issue(&ahead, (0..CALLS + 1).map(|_| 2));
        // The entry of call 1 has been overwritten by a later call.
        let behind = Behind { call: 1, operator: None, ranks: vec![1] };
        assert_eq!(ahead.behind().unwrap(), Some(behind));
        issue(&late, [1, 2]);
        assert_eq!(ahead.difference().unwrap(), None);
        issue(&late, [3]);
        assert_eq!(late.difference().unwrap().unwrap().call, 3);
    }

    #[test]
    fn a_call_that_was_taken_back_or_a_capture_is_no_difference() {
        let [one, other] = boards();
        issue(&one, [4]);
        one.retract().unwrap();
        issue(&other, [5]);
        assert_eq!(one.difference().unwrap(), None);
        issue(&one, [6]);
        assert!(other.difference().unwrap().is_some());
        one.set_captured().unwrap();
        issue(&other, [5]);
        assert_eq!((one.difference().unwrap(), other.behind().unwrap()), (None, None));
    }
}
