use iris_sync::flow::{GatherTiles, StagedTiles, Staging};

use crate::args::{Matrix, counter, element_bytes};
use crate::cpu::body::partial::{Partial, bytes};
use crate::cpu::view;
use crate::cpu::words::Words;
use crate::schedule::{Shard, Tile, Units};

pub(crate) struct Gather<'a> {
    pub(crate) partial: Partial<'a>,
    pub(crate) words: &'a Words<'a>,
    pub(crate) units: Units,
    /// Whether A is read from the peers' own memory (variant `pull`), not from the inbox.
    pub(crate) pulls: bool,
    /// Whether the accumulator already contains a part of the current tile, so that the next
    /// product is added to that part.
    pub(crate) begun: bool,
}

impl Gather<'_> {
    pub(crate) fn tiles(&self) -> u32 {
        self.units.row_blocks() * self.across()
    }

    /// Number of tiles in a row of tiles of C.
    pub(crate) fn across(&self) -> u32 {
        self.partial.args.n.div_ceil(self.partial.args.tile_n)
    }

    /// Position of tile `tile` of C, and the number of its row block (one row of tiles). Tiles are
    /// numbered row block by row block, in the order in which this rank processes the row blocks.
    fn tile(&self, tile: u32) -> (Tile, u32) {
        let args = self.partial.args;
        let block = self.units.row_block_at(tile / self.across(), args.channel.rank);
        let (row, rows, _, _) = self.units.row_block(block);
        let col = tile % self.across() * args.tile_n;
        (Tile { row, col, rows, cols: args.tile_n.min(args.n - col) }, block)
    }

    /// Shard of A that rank `source` has, in the memory from which this rank reads it: this rank's
    /// own A, the peer's A, or the inbox.
    fn shard(&self, source: u32, parity: u32) -> Matrix {
        let args = self.partial.args;
        let (rows, cols) = self.units.shard_of(source);
        let (rows_len, cols_len) = (rows.end - rows.start, cols.end - cols.start);
        if source == args.channel.rank && self.pulls {
            return args.a;
        }
        if self.pulls {
            let address = args.heap.data[source as usize] + args.pulled;
            return Matrix {
                address,
                ld: if args.pulled_ld == 0 { u64::from(cols_len) } else { args.pulled_ld },
                rows: rows_len,
                cols: cols_len,
                ..args.a
            };
        }
        self.inbox(args.channel.rank, source, parity)
    }

    /// Part of rank `at`'s inbox that holds the shard of `source`, as a matrix.
    fn inbox(&self, at: u32, source: u32, parity: u32) -> Matrix {
        let args = self.partial.args;
        let size = element_bytes(args.a.dtype) as u64;
        let (rows, cols) = self.units.shard_of(source);
        let ld = u64::from(args.k);
        let first = u64::from(rows.start) * ld + u64::from(cols.start);
        let half = u64::from(parity) * args.slot;
        Matrix {
            address: args.heap.data[at as usize] + args.inbox + half + first * size,
            ld,
            rows: rows.end - rows.start,
            cols: cols.end - cols.start,
            dtype: args.a.dtype,
            transposed: 0,
        }
    }

    /// Staging buffer as a matrix, with the rows and columns of the whole gathered A.
    fn staging(&self) -> Matrix {
        let args = self.partial.args;
        let across = args.m_contiguous == 1;
        Matrix {
            address: args.heap.data[args.heap.rank as usize] + args.workspace,
            ld: u64::from(if across { args.m } else { args.k }),
            rows: args.m,
            cols: args.k,
            dtype: args.a.dtype,
            transposed: u32::from(across),
        }
    }

    /// Multiply `left`, a rectangle of `a`, by the rows of B from `depth` on, and add the product
    /// to the sum of `tile`.
    fn add(&mut self, a: &Matrix, left: Tile, depth: u32, tile: Tile) {
        let right = Tile { row: depth, rows: left.cols, ..tile };
        let ld = self.partial.ld();
        let Partial { args, scratch, sum } = &mut self.partial;
        view::multiply((a, left), (&args.b, right), sum, ld, !self.begun, scratch);
        self.begun = true;
    }

    fn finish(&mut self, tile: Tile) {
        if !self.begun {
            self.partial.sum.fill(0.0);
        }
        self.begun = false;
        self.partial.finish(tile);
    }
}

impl GatherTiles for Gather<'_> {
    fn push_part(&mut self, peer: u32, part: u32, parity: u32) {
        let args = self.partial.args;
        let me = args.channel.rank;
        let target = self.inbox(peer, me, parity);
        let row = part * args.tile_m;
        let rows = args.tile_m.min(target.rows - row);
        let area = Tile { row, col: 0, rows, cols: target.cols };
        let copied = view::copy(&args.a, area, &target, area, &mut self.partial.scratch);
        if peer != me {
            self.words.count(counter::PUSHED, copied);
        }
    }

    fn multiply(&mut self, tile: u32, source: u32, parity: u32) {
        let (area, block) = self.tile(tile);
        let (_, _, owner, _) = self.units.row_block(block);
        if self.units.shard == Shard::Rows && owner != source {
            return;
        }
        let a = self.shard(source, parity);
        let (rows, cols) = self.units.shard_of(source);
        let left = Tile { row: area.row - rows.start, col: 0, rows: area.rows, cols: a.cols };
        self.add(&a, left, cols.start, area);
        if self.pulls && source != self.partial.args.channel.rank {
            self.words.count(counter::PULLED, bytes(left, a.dtype));
        }
    }

    fn store(&mut self, tile: u32) {
        let (area, _) = self.tile(tile);
        self.finish(area);
    }
}

impl StagedTiles for Gather<'_> {
    fn fetch(&mut self, unit: u32) {
        let area = self.units.area(unit);
        let source = self.units.source(unit);
        let (rows, cols) = self.units.shard_of(source);
        let from = Tile { row: area.row - rows.start, col: area.col - cols.start, ..area };
        let shard = self.shard(source, 0);
        let copied = view::copy(&shard, from, &self.staging(), area, &mut self.partial.scratch);
        self.words.count(counter::PULLED, copied);
    }

    fn multiply_unit(&mut self, tile: u32, unit: u32) {
        let (area, _) = self.tile(tile);
        let part = self.units.area(unit);
        let source = self.units.source(unit);
        // Units of this rank's own shard are not staged. They are read from A in place.
        let (a, left) = if source == self.partial.args.channel.rank {
            let (rows, cols) = self.units.shard_of(source);
            let from = Tile { row: part.row - rows.start, col: part.col - cols.start, ..part };
            (self.partial.args.a, from)
        } else {
            (self.staging(), part)
        };
        self.add(&a, left, part.col, area);
    }

    fn store(&mut self, tile: u32) {
        let (area, _) = self.tile(tile);
        self.finish(area);
    }
}

/// Assignment of staging units (pieces of the gathered A) to tiles, for
/// [`flow::staged`](iris_sync::flow::staged).
pub(crate) struct StagedUnits {
    pub(crate) units: Units,
    pub(crate) rank: u32,
    pub(crate) across: u32,
}

impl Staging for StagedUnits {
    fn units(&self) -> u32 {
        self.units.units()
    }

    fn source(&self, unit: u32) -> u32 {
        self.units.source(unit)
    }

    fn tiles(&self) -> u32 {
        self.units.row_blocks() * self.across
    }

    fn unit_at(&self, position: u32) -> u32 {
        self.units.unit_at(position, self.rank)
    }

    fn needs(&self, tile: u32) -> impl Iterator<Item = u32> {
        self.units.needs(self.units.row_block_at(tile / self.across, self.rank), self.rank)
    }
}
