//! Issue boards: a log of the last calls that each rank of a heap has issued, in memory that all
//! ranks map.
//!
//! All ranks must issue the calls of a heap in one order. A waiting kernel cannot distinguish a
//! late peer from a peer that issued another call; the hosts can, by comparing their boards.

#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Last issued call of each rank, by rank: the call's number from 1 (0 if there is none), and the
/// id of its operator if known.
type Standing = Vec<(u64, Option<u32>)>;

use crate::error::Result;
use crate::segment::SharedMemory;

/// Number of calls that one rank's board holds. Two ranks can be compared only while one rank is
/// fewer than this number of calls ahead of the other.
const CALLS: u64 = 1024;

/// Number of 64-bit words of a board before its calls, which fill two cache lines. Word 0: number
/// of issued calls. Word 1: whether a call was captured. Word 2: number of calls whose end the host
/// has seen. Word 3: node that the rank waits for in a step between nodes ([`AwaitedNode`]). Word
/// 4: number of the host's present collective step, 0 outside a step. Word 5: number of collective
/// steps so far. Word 6: object that the rank has closed or freed ([`Ended`]). Word 7: whether the
/// rank has stored a reason for giving up.
const HEADER: u64 = 16;

/// Number of 64-bit words of a call's entry on a board. Word 0: the call's number and the id of its
/// operator, 32 bits each. Words 1 and 2: [`Pulled`].
const CALL: u64 = 3;

/// Words of a board, after the calls, that hold the text (kind and call site) of the host's
/// collective step.
const STEP: Range<u64> = HEADER + CALL * CALLS..HEADER + CALL * CALLS + 32;

/// Words of a board that hold the reason for giving up.
const REASON: Range<u64> = STEP.end..STEP.end + 128;

/// Size in bytes of one rank's board.
pub(crate) const BYTES: u64 = 8 * REASON.end;

/// Issue boards of all ranks of a heap, indexed by rank: memory in which each rank records its
/// calls.
#[derive(Clone, Debug)]
pub(crate) struct Boards {
    rank: usize,
    all: Arc<Vec<SharedMemory>>,
}

/// Node that a rank waits for in a step between nodes (exchange of data), as far as this is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AwaitedNode {
    /// Another node; the rank does not know yet which.
    Unknown,
    /// Node with this index.
    Node(usize),
}

/// Place of the matrix that peers read from a rank in a call; all zero if they read none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pulled {
    /// Offset of the matrix from the start of the data segment, in bytes.
    pub offset: u64,
    /// Leading dimension of the matrix in elements; 0 for a contiguous matrix.
    pub ld: u64,
}

/// Object that a rank has closed or freed. The rank issues no further call that uses the object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// The heap and all of its operators, because the rank closed the heap.
    Heap,
    /// The heap and all of its operators, because the rank dropped the heap without close.
    Dropped,
    /// Operator with this id.
    Operator(u32),
}

/// First call for which the boards of the ranks hold different operators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Difference {
    /// Number of the call in the heap, from 1.
    pub(crate) call: u64,
    /// Id of the operator, by rank; `None` if the rank's board does not hold that call.
    pub(crate) operators: Vec<Option<u32>>,
}

/// Call that one rank has issued and another rank can no longer issue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LeftOut {
    /// Number of the call in the heap, and each rank's operator of that call.
    pub(crate) found: Difference,
    /// Ranks that can no longer issue the call.
    pub(crate) ranks: Vec<usize>,
    /// Whether one of these ranks has dropped its heap without close, which a failing rank does.
    pub(crate) dropped: bool,
}

/// Call for which this rank waits because other ranks have not issued it, according to the boards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Behind {
    /// Number of the call, from 1: the first call that this rank has issued and another rank has
    /// not; if there is none, this rank's last call.
    pub(crate) call: u64,
    /// Id of the call's operator, if this rank's board still holds the call.
    pub(crate) operator: Option<u32>,
    /// Ranks that have not issued the call.
    pub(crate) ranks: Vec<usize>,
}

impl Boards {
    /// Makes the boards as mapped by rank number `rank`; `all` has the board of each rank,
    /// [`BYTES`] bytes each.
    pub(crate) fn new(rank: usize, all: Arc<Vec<SharedMemory>>) -> Boards {
        Boards { rank, all }
    }

    /// Records that this rank issues a call of `operator`, in which its peers read the matrix at
    /// `pulled`. Two threads must not run this function at once.
    pub(crate) fn issue(&self, operator: u32, pulled: Pulled) -> Result<()> {
        let calls = self.calls(self.rank)?;
        let number = calls.load(Ordering::Relaxed);
        let word = |index| self.call_word(self.rank, number, index);
        word(0)?.store(number << 32 | u64::from(operator), Ordering::Relaxed);
        // The fence ensures that a reader that sees a new word of the matrix's place (word 1 or 2)
        // also sees the new call number (word 0).
        fence(Ordering::Release);
        word(1)?.store(pulled.offset, Ordering::Relaxed);
        word(2)?.store(pulled.ld, Ordering::Relaxed);
        // Release: a rank that reads the new count also reads the call stored above.
        calls.store(number + 1, Ordering::Release);
        Ok(())
    }

    /// Removes the last recorded call; called if no part of that call was enqueued.
    pub(crate) fn retract(&self) -> Result<()> {
        let calls = self.calls(self.rank)?;
        calls.store(calls.load(Ordering::Relaxed).saturating_sub(1), Ordering::Release);
        Ok(())
    }

    /// Records that this rank captures calls into graphs. From now on the ranks of this heap are
    /// not compared, because boards do not count the replays of a graph.
    pub(crate) fn set_captured(&self) -> Result<()> {
        self.word(self.rank, 1)?.store(1, Ordering::Relaxed);
        Ok(())
    }

    /// Rank that has these boards mapped and records its own calls in its board.
    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks that have a board.
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

    /// Records which collective step this rank's host is in, by the step's kind and call site;
    /// `None` at the end of the step. The text is cut to the words [`STEP`]. Two threads must not
    /// run this function at once.
    pub(crate) fn set_host_step(&self, step: Option<&str>) -> Result<()> {
        let number = self.word(self.rank, 4)?;
        number.store(0, Ordering::Relaxed);
        let Some(step) = step else { return Ok(()) };
        // The fence orders the number before the text: a reader that sees any new word of the text
        // also sees that the number has changed.
        fence(Ordering::Release);
        self.set_text(STEP, step)?;
        let steps = self.word(self.rank, 5)?.fetch_add(1, Ordering::Relaxed);
        number.store(steps + 1, Ordering::Release);
        Ok(())
    }

    /// Kind and call site of the collective step of the hosts that `rank` is in; `None` if the rank
    /// is in no collective step, or enters or leaves one at this moment.
    pub(crate) fn host_step(&self, rank: usize) -> Result<Option<String>> {
        let number = self.word(rank, 4)?;
        let before = number.load(Ordering::Acquire);
        if before == 0 {
            return Ok(None);
        }
        let text = self.text(rank, STEP)?;
        fence(Ordering::Acquire);
        let is_whole = number.load(Ordering::Relaxed) == before;
        Ok(is_whole.then_some(text))
    }

    /// Records the reason for which this rank gives up. Only one thread may run this function, once.
    pub(crate) fn set_reason(&self, reason: &str) -> Result<()> {
        self.set_text(REASON, reason)?;
        self.word(self.rank, 7)?.store(1, Ordering::Release);
        Ok(())
    }

    /// Reason for which `rank` has given up; `None` if the rank has recorded none.
    pub(crate) fn reason(&self, rank: usize) -> Result<Option<String>> {
        let is_told = self.word(rank, 7)?.load(Ordering::Acquire) != 0;
        is_told.then(|| self.text(rank, REASON)).transpose()
    }

    /// Stores `text` in the words `words` of this rank's board: cut to their size, or padded with
    /// zeros.
    fn set_text(&self, words: Range<u64>, text: &str) -> Result<()> {
        let mut parts = text.as_bytes().chunks(8);
        for index in words {
            let part = parts.next().unwrap_or_default();
            let bytes = std::array::from_fn(|at| part.get(at).copied().unwrap_or(0));
            let word = self.word(self.rank, index)?;
            word.store(u64::from_le_bytes(bytes), Ordering::Relaxed);
        }
        Ok(())
    }

    /// Text in `words` of the board of `rank`.
    fn text(&self, rank: usize, words: Range<u64>) -> Result<String> {
        let mut bytes = Vec::new();
        for index in words {
            let word = self.word(rank, index)?.load(Ordering::Relaxed);
            bytes.extend(word.to_le_bytes().into_iter().filter(|&byte| byte != 0));
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Records that this rank issues no further call that uses the object `ended`; `None` withdraws
    /// that record.
    pub(crate) fn set_ended(&self, ended: Option<Ended>) -> Result<()> {
        let number = match ended {
            None => 0,
            Some(Ended::Heap) => 1,
            Some(Ended::Dropped) => 2,
            Some(Ended::Operator(id)) => 3 + u64::from(id),
        };
        // Release: a rank that reads the word also reads all calls that this rank has issued.
        self.word(self.rank, 6)?.store(number, Ordering::Release);
        Ok(())
    }

    /// Whether this rank has closed or dropped the heap.
    pub(crate) fn has_ended(&self) -> bool {
        matches!(self.ended(self.rank), Ok(Some(Ended::Heap | Ended::Dropped)))
    }

    fn ended(&self, rank: usize) -> Result<Option<Ended>> {
        Ok(match self.word(rank, 6)?.load(Ordering::Acquire) {
            0 => None,
            1 => Some(Ended::Heap),
            2 => Some(Ended::Dropped),
            number => Some(Ended::Operator((number - 3) as u32)),
        })
    }

    /// First call that one rank has issued and another rank can no longer issue, because it has
    /// closed or dropped the heap or freed the call's operator. `None` if there is no such call or
    /// calls were captured.
    pub(crate) fn left_out(&self) -> Result<Option<LeftOut>> {
        if self.is_captured()? {
            return Ok(None);
        }
        let size = self.all.len();
        // The ranks' ends are read before their numbers of calls, so that these numbers include
        // every call that a rank issued before its end.
        let ended = (0..size).map(|rank| self.ended(rank)).collect::<Result<Vec<_>>>()?;
        let calls = self.counts()?;
        let most = calls.iter().copied().max().unwrap_or(0);
        let mut nexts: Vec<u64> = calls.iter().copied().filter(|&next| next < most).collect();
        nexts.sort_unstable();
        for number in nexts {
            let operator = |rank| self.operator(rank, number, calls[rank]);
            let operators = (0..size).map(operator).collect::<Result<Vec<_>>>()?;
            let issued = operators.iter().flatten().next().copied();
            let cannot = |&rank: &usize| {
                calls[rank] == number
                    && match ended[rank] {
                        None => false,
                        Some(Ended::Heap | Ended::Dropped) => true,
                        Some(Ended::Operator(id)) => issued == Some(id),
                    }
            };
            let ranks: Vec<usize> = (0..size).filter(cannot).collect();
            if !ranks.is_empty() {
                let dropped = ranks.iter().any(|&rank| ended[rank] == Some(Ended::Dropped));
                let found = Difference { call: number + 1, operators };
                return Ok(Some(LeftOut { found, ranks, dropped }));
            }
        }
        Ok(None)
    }

    /// Number of calls whose end the host has seen, by rank.
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

    /// Finds the first call of `operator` in which the ranks' matrices lie at different places, and
    /// returns the place of the matrix that peers read from each rank, by rank. `None` if there is
    /// no such call or calls were captured.
    pub(crate) fn different_places(&self, operator: u32) -> Result<Option<Vec<Option<Pulled>>>> {
        if self.is_captured()? {
            return Ok(None);
        }
        let calls = self.counts()?;
        let most = calls.iter().copied().max().unwrap_or(0);
        for number in most.saturating_sub(CALLS)..most {
            let place = |rank| self.pulled(rank, (number, operator), calls[rank]);
            let places = (0..calls.len()).map(place).collect::<Result<Vec<_>>>()?;
            let mut known = places.iter().flatten();
            let first = known.next();
            if known.any(|place| Some(place) != first) {
                return Ok(Some(places));
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
        let word = self.call_word(rank, number, 0)?.load(Ordering::Relaxed);
        // A later call may have overwritten the entry of call `number`; the entry then holds the
        // number of that later call.
        Ok((word >> 32 == number & u64::from(u32::MAX)).then_some(word as u32))
    }

    /// Place of the matrix that peers of `rank` read in call `number`; `None` if the board does not
    /// hold that call of `operator`.
    fn pulled(
        &self,
        rank: usize,
        (number, operator): (u64, u32),
        issued: u64,
    ) -> Result<Option<Pulled>> {
        let word = |index| Ok(self.call_word(rank, number, index)?.load(Ordering::Relaxed));
        let pulled = Pulled { offset: word(1)?, ld: word(2)? };
        // The operator is read last: if the entry still holds this call, no later call had
        // overwritten the place when it was read.
        fence(Ordering::Acquire);
        let found = self.operator(rank, number, issued)?;
        Ok((found == Some(operator)).then_some(pulled))
    }

    /// Word `index` of the entry of call `number` on the board of `rank`.
    fn call_word(&self, rank: usize, number: u64, index: u64) -> Result<&AtomicU64> {
        self.word(rank, HEADER + CALL * (number % CALLS) + index)
    }

    fn calls(&self, rank: usize) -> Result<&AtomicU64> {
        self.word(rank, 0)
    }

    fn word(&self, rank: usize, index: u64) -> Result<&AtomicU64> {
        self.all[rank].long(8 * index)
    }
}
