//! Messages of whole rows between ranks, which copy engines or workgroups send in parts: which rank
//! sends which rows, the signals that a part has arrived, and the list of copies for a copy engine.

use std::ops::Range;

use iris_heap::DeviceCopy;

use crate::args::{Matrix, OpArgs};
use crate::schedule::{Grid, SplitGrid, split};

/// Message in which each rank sends rows of A, in parts, to C of other ranks. A and C are the
/// matrices in `args`.
pub(super) struct Message {
    /// Arguments for the kernels that send the message if copy engines do not.
    pub(super) args: OpArgs,
    /// Number of the first signal word that the message uses.
    pub(super) first: u32,
    pattern: Pattern,
}

/// Pattern of a message: the rows that each rank sends to each other rank.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pattern {
    /// All-gather: A has this rank's own rows, which all ranks get; C has the rows of all ranks.
    Gather,
    /// Scatter: A has all rows, and each rank gets the rows that it owns. C has one block of these
    /// rows from each source rank.
    Scatter,
}

/// Part of a message: one row of tiles. Tiles and rows are counted from the start of the rows that
/// one rank owns.
#[derive(Clone)]
pub(super) struct Part {
    pub(super) tiles: Range<u32>,
    pub(super) rows: Range<u32>,
}

impl Message {
    pub(super) fn gather(args: OpArgs) -> Self {
        Self { args, first: 0, pattern: Pattern::Gather }
    }

    pub(super) fn scatter(args: OpArgs) -> Self {
        Self { args, first: 0, pattern: Pattern::Scatter }
    }

    /// Returns the same message with its signal words numbered after those of `other`, so that one
    /// call can send both messages.
    pub(super) fn with_signals_after(self, other: &Self) -> Self {
        Self { first: other.signals(), ..self }
    }

    fn grid(&self) -> SplitGrid {
        grid(&self.args)
    }

    /// Number of tiles side by side in a row of tiles.
    pub(super) fn across(&self) -> u32 {
        self.grid().part(0).across()
    }

    /// Rank whose share of the rows is sent from `from` to `to`: the sender in an all-gather, the
    /// receiver in a scatter.
    fn share_of(&self, from: u32, to: u32) -> u32 {
        match self.pattern {
            Pattern::Gather => from,
            Pattern::Scatter => to,
        }
    }

    /// Number of signals that each source uses: one per tile of the share of rank 0, which is the
    /// largest share.
    fn signals(&self) -> u32 {
        self.grid().part(0).tiles()
    }

    /// Parts that this rank sends to rank `to`.
    pub(super) fn sent(&self, to: u32) -> impl Iterator<Item = Part> + use<> {
        parts(&self.grid(), self.share_of(self.args.channel.rank, to))
    }

    /// Parts that this rank receives from rank `source`.
    pub(super) fn received(&self, source: u32) -> impl Iterator<Item = Part> + use<> {
        parts(&self.grid(), self.share_of(source, self.args.channel.rank))
    }

    /// Numbers of all tiles that this rank receives from rank `source`.
    pub(super) fn all_received(&self, source: u32) -> Range<u32> {
        0..self.grid().part(self.share_of(source, self.args.channel.rank)).tiles()
    }

    /// Rows of this rank's A that are sent as the rows `rows` of its message to rank `to`.
    fn source_rows(&self, to: u32, rows: &Range<u32>) -> Range<u32> {
        let first = match self.pattern {
            Pattern::Gather => 0,
            Pattern::Scatter => split(self.args.m, self.args.channel.size, to).start,
        };
        first + rows.start..first + rows.end
    }

    /// Rows of C at rank `peer` that receive the rows `rows` of this rank's message.
    fn target_rows(&self, peer: u32, rows: &Range<u32>) -> Range<u32> {
        let (size, rank) = (self.args.channel.size, self.args.channel.rank);
        let first = match self.pattern {
            Pattern::Gather => split(self.args.m, size, rank).start,
            Pattern::Scatter => {
                let block = split(self.args.m, size, peer);
                rank * (block.end - block.start)
            }
        };
        first + rows.start..first + rows.end
    }

    /// Whether source and destination have the same element type and storage order, so that a copy
    /// engine can copy the rows.
    pub(super) fn has_same_layout(&self) -> bool {
        let OpArgs { a, c, .. } = self.args;
        a.transposed == c.transposed && a.dtype == c.dtype
    }

    /// Copies by which a copy engine sends a part to `peer`: the tiles, each followed by its signal
    /// word.
    pub(super) fn copies(&self, peer: u32, part: Part) -> impl Iterator<Item = DeviceCopy> {
        let OpArgs { ref heap, ref channel, n, tile_n, .. } = self.args;
        let (own, rank) = (heap.data[heap.rank as usize], channel.rank);
        let allowed = heap.device_words + 4 * u64::from(channel.flag(0).index);
        let from = self.source_rows(peer, &part.rows);
        let to = self.target_rows(peer, &part.rows);
        part.tiles.zip(0..).flat_map(move |(tile, at)| {
            let cols = at * tile_n..n.min((at + 1) * tile_n);
            let rows = self.copy((&to, &from), &cols);
            let signal = channel.signal(peer, rank, self.first + tile);
            let word = heap.signal[peer as usize] + 4 * u64::from(signal.index);
            let to = rows.to - own + heap.data[peer as usize];
            [DeviceCopy { to, ..rows }, DeviceCopy::signal(word, allowed)]
        })
    }

    /// Copies columns `cols` of the rows `from` of A to the rows `to` of C; both are on this rank.
    fn copy(&self, (to, from): (&Range<u32>, &Range<u32>), cols: &Range<u32>) -> DeviceCopy {
        let OpArgs { a, c, .. } = self.args;
        let bytes = a.element_bytes();
        let place = |matrix: Matrix, rows: &Range<u32>| {
            let first = [rows.start, cols.start].map(u64::from);
            let [line, within] = if matrix.transposed == 0 { first } else { [first[1], first[0]] };
            matrix.address + (line * matrix.ld + within) * bytes
        };
        let sizes = [from.end - from.start, cols.end - cols.start].map(u64::from);
        let [lines, len] = if a.transposed == 0 { sizes } else { [sizes[1], sizes[0]] };
        DeviceCopy {
            to: place(c, to),
            from: place(a, from),
            bytes: len * bytes,
            lines,
            strides: [c.ld * bytes, a.ld * bytes],
            signal: false,
        }
    }
}

/// Grid of tiles of a message with the arguments `args`; its rows are split over the ranks.
pub(super) fn grid(args: &OpArgs) -> SplitGrid {
    let OpArgs { m, n, tile_m, tile_n, .. } = *args;
    SplitGrid { grid: Grid { rows: m, cols: n, tile_m, tile_n }, size: args.channel.size }
}

/// Parts in which the rows of `rank` are sent: each part is one row of tiles.
fn parts(grid: &SplitGrid, rank: u32) -> impl Iterator<Item = Part> + use<> {
    // Rows are not computed from tiles, because a matrix without columns has rows but no tiles.
    let across = grid.part(rank).across();
    let tiles = (0..).map(move |at| at * across..(at + 1) * across);
    tiles.zip(grid.parts(rank)).map(|(tiles, rows)| Part { tiles, rows })
}
