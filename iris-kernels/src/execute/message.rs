//! The rows that go from rank to rank, in parts: who sends which, the words that say that they came, and the copies
//! that an engine makes.

use std::ops::Range;

use iris_heap::DeviceCopy;

use crate::args::{Matrix, OpArgs};
use crate::schedule::{Grid, SplitGrid, split};

/// Rows of each rank's A, in parts, to places in C of others.
pub(super) struct Message {
    /// Arguments of the kernels that would move them.
    pub(super) args: OpArgs,
    /// The number of the first signal.
    pub(super) first: u32,
    way: Way,
}

/// Which rows.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// A has a rank's own rows, which all get; C has those of all.
    Gather,
    /// A has all rows, of which each rank gets those that it owns; C has such a block from each source.
    Scatter,
}

/// A row of tiles of what one rank sends another, counted from the first of it.
#[derive(Clone)]
pub(super) struct Part {
    pub(super) tiles: Range<u32>,
    pub(super) rows: Range<u32>,
}

impl Message {
    pub(super) fn gather(args: OpArgs) -> Self {
        Self { args, first: 0, way: Way::Gather }
    }

    pub(super) fn scatter(args: OpArgs) -> Self {
        Self { args, first: 0, way: Way::Scatter }
    }

    /// The same, with its signals behind those of another.
    pub(super) fn behind(self, other: &Self) -> Self {
        Self { first: other.signals(), ..self }
    }

    fn grid(&self) -> SplitGrid {
        grid(&self.args)
    }

    /// Tiles side by side.
    pub(super) fn across(&self) -> u32 {
        self.grid().part(0).across()
    }

    /// Whose part of the rows travels from one rank to another.
    fn whose(&self, from: u32, to: u32) -> u32 {
        match self.way {
            Way::Gather => from,
            Way::Scatter => to,
        }
    }

    /// How many signals a source has: the first parts are the largest.
    fn signals(&self) -> u32 {
        self.grid().part(0).tiles()
    }

    /// What this rank sends to `to`.
    pub(super) fn sent(&self, to: u32) -> impl Iterator<Item = Part> + use<> {
        parts(&self.grid(), self.whose(self.args.channel.rank, to))
    }

    /// What comes from `source`.
    pub(super) fn comes(&self, source: u32) -> impl Iterator<Item = Part> + use<> {
        parts(&self.grid(), self.whose(source, self.args.channel.rank))
    }

    /// All tiles that come from `source`.
    pub(super) fn all(&self, source: u32) -> Range<u32> {
        0..self.grid().part(self.whose(source, self.args.channel.rank)).tiles()
    }

    /// The rows of this rank's A that `to` gets as these rows, counted from the first that it gets.
    fn taken(&self, to: u32, rows: &Range<u32>) -> Range<u32> {
        let first = match self.way {
            Way::Gather => 0,
            Way::Scatter => split(self.args.m, self.args.channel.size, to).start,
        };
        first + rows.start..first + rows.end
    }

    /// The rows of a peer's C that these rows of this rank's become.
    fn placed(&self, peer: u32, rows: &Range<u32>) -> Range<u32> {
        let (size, rank) = (self.args.channel.size, self.args.channel.rank);
        let first = match self.way {
            Way::Gather => split(self.args.m, size, rank).start,
            Way::Scatter => {
                let block = split(self.args.m, size, peer);
                rank * (block.end - block.start)
            }
        };
        first + rows.start..first + rows.end
    }

    /// Whether its elements have one type, and lie in the same order on both sides.
    pub(super) fn is_alike(&self) -> bool {
        let OpArgs { a, c, .. } = self.args;
        a.transposed == c.transposed && a.dtype == c.dtype
    }

    /// The copies of an engine for a part: its tiles, each followed by the word that says that it came.
    pub(super) fn copies(&self, peer: u32, part: Part) -> impl Iterator<Item = DeviceCopy> {
        let OpArgs { ref heap, ref channel, n, tile_n, .. } = self.args;
        let (own, rank) = (heap.data[heap.rank as usize], channel.rank);
        let allowed = heap.device_words + 4 * u64::from(channel.flag(0).index);
        let from = self.taken(peer, &part.rows);
        let to = self.placed(peer, &part.rows);
        part.tiles.zip(0..).flat_map(move |(tile, at)| {
            let cols = at * tile_n..n.min((at + 1) * tile_n);
            let rows = self.copy((&to, &from), &cols);
            let signal = channel.signal(peer, rank, self.first + tile);
            let word = heap.signal[peer as usize] + 4 * u64::from(signal.index);
            let to = rows.to - own + heap.data[peer as usize];
            [DeviceCopy { to, ..rows }, DeviceCopy::signal(word, allowed)]
        })
    }

    /// The copy of these columns of some rows of A to rows of this rank's own C.
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
            apart: [c.ld * bytes, a.ld * bytes],
            signal: false,
        }
    }
}

/// The tiles of a message with these arguments.
pub(super) fn grid(args: &OpArgs) -> SplitGrid {
    let OpArgs { m, n, tile_m, tile_n, .. } = *args;
    SplitGrid { grid: Grid { rows: m, cols: n, tile_m, tile_n }, size: args.channel.size }
}

/// The part of the rows that falls to `rank`, a row of tiles at a time.
pub(super) fn parts(grid: &SplitGrid, rank: u32) -> impl Iterator<Item = Part> + use<> {
    let part = grid.part(rank);
    let across = part.across();
    (0..part.rows.div_ceil(part.tile_m)).map(move |at| {
        // Without columns there are rows still, and no tile.
        let row = at * part.tile_m;
        let rows = row..part.rows.min(row + part.tile_m);
        Part { tiles: at * across..(at + 1) * across, rows }
    })
}
