//! Collectives that NCCL can be asked for, as an enum.

/// Collective over the ranks of a communicator. `count` is the number of elements of one rank's
/// part.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NcclCall {
    /// Sum over the ranks; input and output have `count` elements.
    AllReduce,
    /// Sum over the ranks; rank r gets part r of the input of `ranks * count` elements.
    ReduceScatter,
    /// Concatenation of the inputs of all ranks, of `count` elements each.
    AllGather,
    /// Exchange of parts: part r of each rank's input goes to rank r.
    AllToAll,
    /// Copy of `count` elements of the root's input to the output of all ranks.
    Broadcast {
        /// Rank whose input is copied.
        root: usize,
    },
    /// Steps of an all-gather or of an all-to-all. Rank i sends `count` elements to each rank (i + s)
    /// modulo the number of ranks, for s from `first` to `first + shifts - 1`. What a rank receives
    /// from rank r becomes block r of its output; the other blocks of the output stay as they are.
    Shifts {
        /// Smallest distance between sender and receiver, at least 1.
        first: usize,
        /// Number of distances.
        shifts: usize,
        /// Whether each receiver gets its own part of the input, as in an all-to-all; otherwise all
        /// receivers get the whole input.
        by_parts: bool,
    },
}

impl NcclCall {
    /// Number of parts, of `count` elements each, that the input and the output of a rank have.
    pub fn parts(self, ranks: usize) -> (usize, usize) {
        match self {
            NcclCall::AllReduce | NcclCall::Broadcast { .. } => (1, 1),
            NcclCall::ReduceScatter => (ranks, 1),
            NcclCall::AllToAll | NcclCall::Shifts { by_parts: true, .. } => (ranks, ranks),
            NcclCall::AllGather | NcclCall::Shifts { .. } => (1, ranks),
        }
    }

    /// Messages of rank `rank` of `ranks`, for a call that consists of sends and receives; none for
    /// other calls.
    pub(super) fn messages(self, rank: usize, ranks: usize) -> Vec<Message> {
        match self {
            NcclCall::AllToAll => {
                (0..ranks).map(|peer| Message { peers: [peer; 2], parts: [peer; 2] }).collect()
            }
            NcclCall::Shifts { first, shifts, by_parts } => {
                let message = |distance: usize| {
                    let (receiver, sender) = (rank + distance, rank + ranks - distance);
                    let peers = [receiver % ranks, sender % ranks];
                    let part = if by_parts { peers[0] } else { 0 };
                    Message { peers, parts: [part, peers[1]] }
                };
                (first..first + shifts).map(message).collect()
            }
            _ => Vec::new(),
        }
    }
}

/// Message that a rank sends, and one that it receives at the same time.
pub(super) struct Message {
    /// Rank to which this rank sends, and rank from which it receives.
    pub(super) peers: [usize; 2],
    /// Number of the part of the input that is sent, and of the part of the output that is
    /// received; a part has `count` elements.
    pub(super) parts: [usize; 2],
}
