//! Schedules: assignment of tiles, and of units (pieces of a staged gather), to ranks and
//! workgroups, as pure functions of shape, tile size and number of ranks. The device header
//! `kernels/iris/schedule.h` has the same functions. Except for [`die_swizzle`], no schedule
//! depends on the number of workgroups.
//!
//! This file is long because all schedules are here, as in the device header.

use std::ops::Range;

use iris_sync::flow::Parts;
use iris_sync::ll::PACK_LANES;

/// Range of part number `part` when `total` items are split into `parts` parts as evenly as
/// possible. The first parts get one item more if there is a remainder.
///
/// If there are fewer items than parts, the last parts are empty.
pub fn split(total: u32, parts: u32, part: u32) -> Range<u32> {
    let (each, more) = (total / parts, total % parts);
    let start = part * each + part.min(more);
    start..start + each + u32::from(part < more)
}

/// Number of the part that contains item `at`, if [`split`] divides `total` items into `parts`
/// parts.
pub fn part_of(total: u32, parts: u32, at: u32) -> u32 {
    let (each, more) = (total / parts, total % parts);
    let long = more * (each + 1);
    if at < long { at / (each + 1) } else { more + (at - long) / each }
}

/// Returns the logical number of the workgroup with number `workgroup` out of `count`, on a device
/// that assigns workgroups round-robin to `dies` dies (for example the 8 XCDs of an MI300X).
///
/// Workgroups on one die get consecutive logical numbers, so they work on neighbouring tiles, which
/// share operands in the die's L2 cache. The result is a permutation of the workgroups' numbers;
/// workgroup 0 keeps number 0. Peers need not know the permutation, because signals belong to
/// tiles, not to workgroups.
pub fn die_swizzle(workgroup: u32, count: u32, dies: u32) -> u32 {
    if dies <= 1 {
        return workgroup;
    }
    split(count, dies, workgroup % dies).start + workgroup / dies
}

/// Rectangle of a matrix, in elements from element (0, 0).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "row, column, rows, columns")]
pub struct Tile {
    pub row: u32,
    pub col: u32,
    pub rows: u32,
    pub cols: u32,
}

/// Matrix of `rows` x `cols` divided into tiles, numbered in row-major order; tiles at the edge are
/// smaller.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "as the type says")]
pub struct Grid {
    pub rows: u32,
    pub cols: u32,
    pub tile_m: u32,
    pub tile_n: u32,
}

impl Grid {
    /// Number of tiles in a row of tiles.
    pub fn across(&self) -> u32 {
        self.cols.div_ceil(self.tile_n)
    }

    /// Number of tiles of the matrix.
    pub fn tiles(&self) -> u32 {
        self.rows.div_ceil(self.tile_m) * self.across()
    }

    /// Position and size of tile number `tile`; tiles at the edges of the matrix are smaller.
    pub fn tile(&self, tile: u32) -> Tile {
        let (row, col) = (tile / self.across() * self.tile_m, tile % self.across() * self.tile_n);
        Tile {
            row,
            col,
            rows: self.tile_m.min(self.rows - row),
            cols: self.tile_n.min(self.cols - col),
        }
    }
}

/// Rank that reduces tile `tile` of a two-shot or accumulating all-reduce.
pub fn owner(tile: u32, size: u32) -> u32 {
    tile % size
}

/// Tiles of a matrix whose rows are split over `size` ranks; no tile crosses a boundary between
/// ranks. Tiles are numbered rank by rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "as the type says")]
pub struct SplitGrid {
    pub grid: Grid,
    pub size: u32,
}

impl SplitGrid {
    /// Grid of the rows of `rank` alone, in which row 0 is the first row of `rank`.
    pub fn part(&self, rank: u32) -> Grid {
        let rows = split(self.grid.rows, self.size, rank);
        Grid { rows: rows.end - rows.start, ..self.grid }
    }

    /// Parts in which the rows of `rank` are sent, each of one row of tiles; rows are counted from
    /// the first row of `rank`.
    pub fn parts(&self, rank: u32) -> impl Iterator<Item = Range<u32>> + use<> {
        let Grid { rows, tile_m, .. } = self.part(rank);
        (0..rows.div_ceil(tile_m)).map(move |at| at * tile_m..rows.min((at + 1) * tile_m))
    }

    /// Number of the first tile of `rank`; tiles are numbered rank by rank.
    pub fn first(&self, rank: u32) -> u32 {
        (0..rank).map(|before| self.part(before).tiles()).sum()
    }

    /// Number of tiles of all ranks.
    pub fn tiles(&self) -> u32 {
        self.first(self.size)
    }

    /// Rank that owns the rows of tile number `tile`.
    pub fn owner(&self, tile: u32) -> u32 {
        let mut after = 0;
        for rank in 0..self.size {
            after += self.part(rank).tiles();
            if tile < after {
                return rank;
            }
        }
        self.size - 1
    }

    /// Position of tile `tile` in the whole matrix.
    pub fn tile(&self, tile: u32) -> Tile {
        let owner = self.owner(tile);
        let part = self.part(owner).tile(tile - self.first(owner));
        Tile { row: part.row + split(self.grid.rows, self.size, owner).start, ..part }
    }
}

/// Dimension of A that is split over the ranks, for an all-gather before the product.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Shard {
    /// A is split by rows: rank r has the rows `split(m, size, r)`.
    #[default]
    Rows,
    /// A is split by columns: rank r has the columns `split(k, size, r)`. Each rank multiplies its
    /// own part of K before the parts of its peers.
    Columns,
}

/// Units of a staged gather: the pieces of A (`m` x `k`) that a rank fetches one by one from its
/// peers while it multiplies. Also the tiles of C that need each unit.
///
/// A unit is `tile_m` rows by one group of `k_group` columns; at the boundary of a shard it may be
/// smaller in both dimensions. Units are numbered source by source. Within a source, they are
/// numbered along M first if `m_contiguous`, otherwise along K first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "as the type says")]
pub struct Units {
    pub shard: Shard,
    pub size: u32,
    pub m: u32,
    pub k: u32,
    pub tile_m: u32,
    pub k_group: u32,
    pub m_contiguous: bool,
}

impl Units {
    /// Ranges of rows and columns of A in the shard of rank `source`.
    pub fn shard_of(&self, source: u32) -> (Range<u32>, Range<u32>) {
        match self.shard {
            Shard::Rows => (split(self.m, self.size, source), 0..self.k),
            Shard::Columns => (0..self.m, split(self.k, self.size, source)),
        }
    }

    /// Number of row blocks, and number of groups of columns, into which the shard of `source` is
    /// divided.
    pub fn blocks(&self, source: u32) -> (u32, u32) {
        let (rows, cols) = self.shard_of(source);
        let rows = (rows.end - rows.start).div_ceil(self.tile_m);
        let cols = (cols.end - cols.start).div_ceil(self.k_group);
        (rows, cols)
    }

    /// Number of the first unit of `source`; units are numbered rank by rank.
    pub fn first(&self, source: u32) -> u32 {
        (0..source)
            .map(|before| {
                let (rows, cols) = self.blocks(before);
                rows * cols
            })
            .sum()
    }

    /// Number of units of all ranks together, this rank's own included.
    pub fn units(&self) -> u32 {
        self.first(self.size)
    }

    /// Returns the rank whose shard contains `unit`.
    pub fn source(&self, unit: u32) -> u32 {
        (0..self.size).find(|&rank| unit < self.first(rank + 1)).unwrap_or(self.size - 1)
    }

    /// Number of the unit at row block `row` and column group `group` of the shard of rank
    /// `source`.
    pub fn unit(&self, source: u32, row: u32, group: u32) -> u32 {
        let (rows, groups) = self.blocks(source);
        let within = if self.m_contiguous { group * rows + row } else { row * groups + group };
        self.first(source) + within
    }

    /// Rows and columns of A that `unit` covers; `col` and `cols` are along K.
    pub fn area(&self, unit: u32) -> Tile {
        let source = self.source(unit);
        let (rows, groups) = self.blocks(source);
        let within = unit - self.first(source);
        let (row, group) = if self.m_contiguous {
            (within % rows, within / rows)
        } else {
            (within / groups, within % groups)
        };
        let (m, k) = self.shard_of(source);
        let (row, col) = (m.start + row * self.tile_m, k.start + group * self.k_group);
        Tile { row, col, rows: self.tile_m.min(m.end - row), cols: self.k_group.min(k.end - col) }
    }

    /// Number of row blocks of C over all ranks. If rows are split, row blocks end at the
    /// boundaries of shards, so that no tile of C needs rows of two ranks.
    pub fn row_blocks(&self) -> u32 {
        match self.shard {
            Shard::Rows => (0..self.size).map(|source| self.blocks(source).0).sum(),
            Shard::Columns => self.m.div_ceil(self.tile_m),
        }
    }

    /// Returns (first row, number of rows, rank, index) of row block `block` of C. `rank` is the
    /// rank whose shard has these rows of A (0 if A is split by columns), and `index` is the index
    /// of the block in that shard.
    pub fn row_block(&self, block: u32) -> (u32, u32, u32, u32) {
        let mut before = 0;
        let mut source = 0;
        if self.shard == Shard::Rows {
            while block >= before + self.blocks(source).0 {
                before += self.blocks(source).0;
                source += 1;
            }
        }
        let rows = self.shard_of(source).0;
        let row = rows.start + (block - before) * self.tile_m;
        (row, self.tile_m.min(rows.end - row), source, block - before)
    }

    /// Order in which `rank` takes row blocks or units of all other ranks, round-robin. Returns the
    /// one at `position` as (source rank, index among those of the source). `of(source)` is their
    /// number at a rank.
    ///
    /// Each round begins with the rank after `rank`, so that all links are busy at once. Some ranks
    /// may have more items than the rest, all by the same number. The additional items come last.
    fn in_turns(&self, rank: u32, position: u32, of: impl Fn(u32) -> u32) -> (u32, u32) {
        let others = || (1..self.size).map(|step| (rank + step) % self.size);
        let least = others().map(&of).min().unwrap_or(0);
        let rounds = least * (self.size - 1);
        if position < rounds {
            let step = 1 + position % (self.size - 1);
            return ((rank + step) % self.size, position / (self.size - 1));
        }
        let more = || others().filter(|&source| of(source) > least);
        let (turn, longer) = (position - rounds, more().count().max(1) as u32);
        (more().nth((turn % longer) as usize).unwrap_or(rank), least + turn / longer)
    }

    /// Returns the row block of C that `rank` computes at `position` in its order: first the row
    /// blocks whose rows of A are in the shard of `rank`, which need no wait, then the row blocks
    /// of its peers round-robin.
    pub fn row_block_at(&self, position: u32, rank: u32) -> u32 {
        if self.shard == Shard::Columns {
            return position;
        }
        let rows = |source| self.blocks(source).0;
        let own = rows(rank);
        let (source, within) = match position.checked_sub(own) {
            Some(position) => self.in_turns(rank, position, rows),
            None => (rank, position),
        };
        (0..source).map(rows).sum::<u32>() + within
    }

    /// Returns the unit that `rank` fetches at `position` of its order: the units of all other
    /// ranks round-robin, then the units of `rank` itself.
    pub fn unit_at(&self, position: u32, rank: u32) -> u32 {
        let of = |source| self.first(source + 1) - self.first(source);
        let others = self.units() - of(rank);
        let (source, within) = match position.checked_sub(others) {
            Some(within) => (rank, within),
            None => self.in_turns(rank, position, of),
        };
        self.first(source) + within
    }

    /// Returns the units of A that row block `block` of C needs as input, in the order in which
    /// `rank` multiplies them: the units of `rank` first, then the units of its peers round-robin.
    pub fn needs(&self, block: u32, rank: u32) -> impl Iterator<Item = u32> + use<> {
        let units = *self;
        let (_, _, source, row) = units.row_block(block);
        let groups = move |source| units.blocks(source).1;
        let (own, others) = match units.shard {
            Shard::Rows => (groups(source), 0),
            Shard::Columns => {
                let own = groups(rank);
                (own, (0..units.size).map(groups).sum::<u32>() - own)
            }
        };
        let first = if units.shard == Shard::Rows { source } else { rank };
        let own = (0..own).map(move |group| units.unit(first, row, group));
        own.chain((0..others).map(move |at| {
            let (source, group) = units.in_turns(rank, at, groups);
            units.unit(source, row, group)
        }))
    }
}

/// Collectives for small messages. Each determines which data a rank sends to which ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Collective {
    /// Each rank's whole message goes to all ranks, which add the messages in the order of ranks.
    AllReduce,
    /// Block `to` of each rank's rows goes to rank `to`, which adds the blocks.
    ReduceScatter,
    /// Each rank's rows go to all ranks.
    AllGather,
    /// Block `to` of each rank's rows goes to rank `to`, which stores the blocks in the order of
    /// their sources.
    AllToAll,
    /// The root's message goes to all ranks.
    Broadcast {
        /// Rank that sends its message.
        root: u32,
    },
    /// All-reduce, or broadcast of the root's message, in two hops: each rank owns one of the
    /// [`Parts`] of the message. A part goes first to its owner, and from there to all ranks.
    TwoShot {
        /// Rank that sends its message; `None` for an all-reduce.
        root: Option<u32>,
    },
}

impl Collective {
    /// Whether data of several ranks is added up.
    pub fn reduces(self) -> bool {
        match self {
            Collective::AllReduce | Collective::ReduceScatter => true,
            Collective::TwoShot { root } => root.is_none(),
            Collective::AllGather | Collective::AllToAll | Collective::Broadcast { .. } => false,
        }
    }
}

/// Division of a message into items of the LL protocol. The rows are concatenated, and every eight
/// bytes form an item; the last item of a part may be shorter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Items {
    /// Collective that determines which data goes where.
    pub collective: Collective,
    /// Number of ranks.
    pub size: u32,
    /// Number of rows of the whole message.
    pub rows: u32,
    /// Number of columns of the whole message.
    pub cols: u32,
    /// Number of elements in an item: 8 bytes divided by the element size. In a gather of a list it
    /// is 1, and `cols` is the number of items in a row of the message.
    pub per_item: u32,
}

/// Number of packs of a message of `items` items of eight bytes. A pack is three vectors of 16
/// bytes; vectors of [`PACK_LANES`] packs are interleaved, so that a wave's accesses are
/// contiguous.
pub fn packs(items: u32) -> u32 {
    let vectors = items.div_ceil(2);
    let block = 3 * PACK_LANES;
    vectors / block * PACK_LANES + (vectors % block).min(PACK_LANES)
}

impl Items {
    fn part(&self, rank: u32) -> Range<u32> {
        split(self.rows, self.size, rank)
    }

    /// Returns the number of rows that `from` sends to `to`. If `from == to`, the number of rows
    /// that the rank keeps for itself.
    pub fn rows_sent(&self, from: u32, to: u32) -> u32 {
        match self.collective {
            Collective::AllReduce | Collective::TwoShot { .. } => self.rows,
            Collective::ReduceScatter | Collective::AllToAll => self.part(to).len() as u32,
            Collective::AllGather => self.part(from).len() as u32,
            Collective::Broadcast { root } if root == from => self.rows,
            Collective::Broadcast { .. } => 0,
        }
    }

    /// Number of items that `from` sends to `to`. A larger number is returned as `u32::MAX`, which
    /// every plan refuses.
    pub fn sent(&self, from: u32, to: u32) -> u32 {
        if let Some(parts) = self.parts() {
            return parts.sent(from, to);
        }
        self.of_rows(self.rows_sent(from, to))
    }

    /// Number of items in `rows` rows; saturates at `u32::MAX`.
    fn of_rows(&self, rows: u32) -> u32 {
        let elements = u64::from(rows) * u64::from(self.cols);
        u32::try_from(elements.div_ceil(u64::from(self.per_item))).unwrap_or(u32::MAX)
    }

    /// Parts of the message, each owned by one rank, for a collective in two hops; otherwise
    /// `None`.
    pub fn parts(&self) -> Option<Parts> {
        let Collective::TwoShot { root } = self.collective else { return None };
        Some(Parts { size: self.size, items: self.of_rows(self.rows), root })
    }

    /// Number of items that are divided among the threads of a rank: those for one peer, or in two
    /// hops those of one part. A thread has the same share for each peer, or of each part.
    pub fn shared(&self) -> u32 {
        self.parts().map_or_else(|| self.most(), |parts| parts.longest())
    }

    /// Largest number of items that any rank sends to another rank.
    pub fn most(&self) -> u32 {
        if let Some(parts) = self.parts() {
            return parts.longest().saturating_mul(2);
        }
        let root = match self.collective {
            Collective::Broadcast { root } => root,
            _ => 0,
        };
        // No rank's part is larger than that of rank 0, because `split` gives the remainder to the
        // first ranks.
        self.sent(root, 0)
    }

    /// Like [`Items::shared`], but counted in packs (48 bytes), for a message that consists of
    /// packs.
    pub fn shared_packs(&self) -> u32 {
        match self.parts() {
            Some(parts) => packs(parts.items).div_ceil(self.size),
            None => packs(self.most()),
        }
    }

    /// Largest number of packs that any rank sends to another rank.
    pub fn most_packs(&self) -> u32 {
        let times = if self.parts().is_some() { 2 } else { 1 };
        self.shared_packs().saturating_mul(times)
    }

    /// First row, in this rank's matrix, of the data that this rank sends to `to`.
    pub fn source_row(&self, to: u32) -> u32 {
        match self.collective {
            Collective::ReduceScatter | Collective::AllToAll => self.part(to).start,
            _ => 0,
        }
    }

    /// First row, in the result of `to`, of the data from `from`.
    pub fn target_row(&self, from: u32, to: u32) -> u32 {
        match self.collective {
            Collective::AllGather => self.part(from).start,
            Collective::AllToAll => from * self.rows_sent(from, to),
            _ => 0,
        }
    }
}

/// Order in which a rank multiplies the tiles of a GEMM with reduce-scatter: `tiles` tiles for each
/// of `ranks` owners, in rounds of `span` tiles per owner.
///
/// The first round computes tiles that peers own, beginning with the next rank's tiles. Each later
/// round computes further tiles of the peers, and then this rank's own tiles of the previous round;
/// by then the peers have had time to store their partials of these tiles. The own tiles of the
/// last round come last.
///
/// The waits of different ranks form no cycle, whatever `span` each rank has. All workgroups run at
/// once, each takes tiles in this order, and stores a tile at the latest during the product of its
/// next tile, before it waits there. The order has tile j of a peer after own tiles of smaller
/// index only, and own tile j after the tiles j of all peers. So tile j for a peer is stored after
/// waits for own tiles of smaller index at most, and induction over j ends all waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "as the type says")]
pub struct Rounds {
    pub tiles: u32,
    pub span: u32,
    pub ranks: u32,
}

impl Rounds {
    /// Returns (owner, tile) of the tile that is multiplied at `position`. `owner` is counted from
    /// the next rank on: 0 is the next rank, and `ranks - 1` is this rank. `tile` is an index among
    /// the owner's tiles.
    pub fn at(&self, position: u32) -> (u32, u32) {
        let Self { tiles, span, ranks } = *self;
        let (others, first, last) = (ranks - 1, span.min(tiles), (tiles - 1) / span * span);
        let end = ranks * tiles - (tiles - last);
        if position >= end {
            return (others, last + position - end);
        }
        if position < others * first {
            return (position / first, position % first);
        }
        let behind = position - others * first;
        let begin = (behind / (ranks * span) + 1) * span;
        let (within, width) = (behind % (ranks * span), span.min(tiles - begin));
        if within < others * width {
            return (within / width, begin + within % width);
        }
        (others, begin - span + within - others * width)
    }
}

/// Order in which rows of A arrive from all ranks at a GEMM that multiplies them meanwhile. Each
/// rank has `rows` rows and sends them in parts of `part` rows; the last part may be smaller.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "as the type says")]
pub struct Arriving {
    pub rows: u32,
    pub part: u32,
    pub size: u32,
    pub rank: u32,
}

impl Arriving {
    /// Returns the row that arrives at position `turn`. This rank's own rows come first, then the
    /// rows of its peers part by part. Each round of parts begins with the preceding rank, because
    /// that rank sends to this rank first.
    pub fn row(&self, turn: u32) -> u32 {
        let Self { rows, part, size, rank } = *self;
        if turn < rows {
            return rank * rows + turn;
        }
        let (others, behind) = (size - 1, turn - rows);
        let number = (behind / (part * others)).min(rows / part);
        let begin = number * part;
        let (height, within) = (part.min(rows - begin), behind - begin * others);
        let source = (rank + size - 1 - within / height) % size;
        source * rows + begin + within % height
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_evenly_and_finds_its_way_back() {
        for (total, parts) in [(107, 4), (4, 2), (3, 8), (0, 3), (1, 1), (1000, 7)] {
            let mut next = 0;
            for part in 0..parts {
                let range = split(total, parts, part);
                assert_eq!(range.start, next);
                range.clone().for_each(|at| assert_eq!(part_of(total, parts, at), part));
                next = range.end;
            }
            assert_eq!(next, total);
        }
        assert_eq!(
            (0..4).map(|part| split(107, 4, part).len()).collect::<Vec<_>>(),
            [27, 27, 27, 26]
        );
    }

    #[test]
    fn a_round_of_a_rank_comes_behind_two_of_the_others() {
        for (tiles, span, ranks) in
            [(64, 16, 2), (7, 3, 2), (10, 4, 3), (3, 8, 4), (1, 1, 2), (9, 4, 1), (100, 33, 8)]
        {
            let rounds = Rounds { tiles, span, ranks };
            let all: Vec<_> = (0..ranks * tiles).map(|position| rounds.at(position)).collect();
            let mut sorted = all.clone();
            sorted.sort_unstable();
            let each = (0..ranks).flat_map(|rank| (0..tiles).map(move |tile| (rank, tile)));
            assert_eq!(sorted, each.collect::<Vec<_>>(), "{rounds:?}");
            for (position, &(rank, tile)) in all.iter().enumerate() {
                // Before an own tile, all tiles of other ranks must come, up to the round after the
                // own tile's round. Before a tile of another rank, only own tiles may come whose
                // index is smaller by `span` or more.
                let before = &all[..position];
                if rank == ranks - 1 {
                    let needed = ((tile / span + 2) * span).min(tiles) * (ranks - 1);
                    let stored = before.iter().filter(|(rank, _)| *rank < ranks - 1).count();
                    assert!(stored as u32 >= needed, "{rounds:?} at {position}");
                } else {
                    let own = before.iter().filter(|(rank, _)| *rank == ranks - 1);
                    assert!(
                        own.clone().all(|(_, own)| own + span <= tile),
                        "{rounds:?} at {position}"
                    );
                }
            }
        }
    }

    #[test]
    fn rows_are_taken_as_they_arrive() {
        for (rows, part, size) in [(8, 4, 2), (8, 8, 4), (7, 3, 3), (5, 2, 8), (3, 3, 2)] {
            for rank in 0..size {
                let arriving = Arriving { rows, part, size, rank };
                let all: Vec<_> = (0..size * rows).map(|turn| arriving.row(turn)).collect();
                assert!(all[..rows as usize].iter().all(|row| row / rows == rank));
                let parts = all[rows as usize..].iter().map(|row| row % rows / part);
                assert!(parts.is_sorted(), "{arriving:?}: {all:?}");
                let mut sorted = all.clone();
                sorted.sort_unstable();
                assert_eq!(sorted, (0..size * rows).collect::<Vec<_>>(), "{arriving:?}");
            }
        }
    }
}
