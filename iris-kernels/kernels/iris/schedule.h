// Schedules: assignment of tiles, and of units (pieces of a staged gather), to ranks and
// workgroups. All functions are pure functions of shape, tile size and world, and give the same
// results as iris_kernels::schedule. Only die_swizzle() depends on the number of workgroups.
#ifndef IRIS_SCHEDULE_H
#define IRIS_SCHEDULE_H

#include "iris/port.h"

namespace iris {

IRIS_DEVICE u32 min_of(u32 a, u32 b) { return a < b ? a : b; }
IRIS_DEVICE u32 div_up(u32 a, u32 b) { return a / b + (a % b != 0); }

/// Range of rows or columns; `end` is excluded.
struct Range {
    u32 start, end;
    IRIS_DEVICE u32 len() const { return end - start; }
};

/// Range of part number `part` when `total` items are split into `parts` parts as evenly as
/// possible. The first parts get one item more if there is a remainder.
IRIS_DEVICE Range split(u32 total, u32 parts, u32 part) {
    const u32 each = total / parts, more = total % parts;
    const u32 start = part * each + min_of(part, more);
    return Range{start, start + each + (part < more)};
}

/// Number of the part of split(total, parts, ...) that contains item `at`.
IRIS_DEVICE u32 part_of(u32 total, u32 parts, u32 at) {
    const u32 each = total / parts, more = total % parts;
    const u32 longer = more * (each + 1);
    return at < longer ? at / (each + 1) : more + (at - longer) / each;
}

/// Returns the logical number of a workgroup on a device that distributes workgroups round-robin
/// over `dies` dies (chiplets with an L2 cache each). Workgroups on one die get consecutive logical
/// numbers, so that their tiles share operands in the die's L2 cache. The result is a permutation
/// of the workgroups' numbers; workgroup 0 keeps number 0.
IRIS_DEVICE u32 die_swizzle(u32 workgroup, u32 count, u32 dies) {
    if (dies <= 1) return workgroup;
    return split(count, dies, workgroup % dies).start + workgroup / dies;
}

/// Rectangle of a matrix, in elements.
struct Tile {
    u32 row, col, rows, cols;
};

/// Matrix divided into tiles, numbered in row-major order; tiles at the edge are smaller.
struct Grid {
    u32 rows, cols, tile_m, tile_n;

    IRIS_DEVICE u32 across() const { return div_up(cols, tile_n); }
    IRIS_DEVICE u32 tiles() const { return div_up(rows, tile_m) * across(); }
    IRIS_DEVICE Tile tile(u32 tile) const {
        const u32 wide = across();
        const u32 row = tile / wide * tile_m, col = tile % wide * tile_n;
        return Tile{row, col, min_of(tile_m, rows - row), min_of(tile_n, cols - col)};
    }
};

/// Rank that reduces tile `tile` of a two-shot or accumulating all-reduce.
IRIS_DEVICE u32 owner_of(u32 tile, u32 size) { return tile % size; }

/// Number of items (tiles, row blocks or units) of each rank; items are numbered rank by rank. The first
/// `more` of the `size` ranks have `longer` items each, the other ranks `shorter`.
struct Shares {
    u32 size, more, longer, shorter;

    /// Shares if rank r has part r of split(total, size, r), cut into items of `per`; the last item
    /// of a part may be smaller.
    IRIS_DEVICE static Shares of_split(u32 total, u32 size, u32 per) {
        const u32 each = total / size;
        return Shares{size, total % size, div_up(each + 1, per), div_up(each, per)};
    }
    /// Shares of `count` items for every rank.
    IRIS_DEVICE static Shares even(u32 size, u32 count) { return Shares{size, 0, count, count}; }
    /// Shares in which each rank's number of items is the product of its numbers in this value and in
    /// `other`. One of the two values must be even().
    IRIS_DEVICE Shares times(const Shares& other) const {
        return Shares{size, more + other.more, longer * other.longer, shorter * other.shorter};
    }

    /// Number of items of `rank`.
    IRIS_DEVICE u32 of(u32 rank) const { return rank < more ? longer : shorter; }
    /// Number of the first item of `rank`.
    IRIS_DEVICE u32 first(u32 rank) const {
        return rank * shorter + min_of(rank, more) * (longer - shorter);
    }
    /// Number of items of all ranks.
    IRIS_DEVICE u32 total() const { return first(size); }
    /// Rank that has item `item`.
    IRIS_DEVICE u32 owner(u32 item) const {
        const u32 before = more * longer;
        return item < before ? item / longer : more + (item - before) / shorter;
    }

    /// Result of a round-robin order over ranks: a rank, and the index of an item of that rank.
    struct Turn {
        u32 source, within;
    };
    /// Returns the item at `position` when the items of all ranks except `rank` are taken
    /// round-robin. Each round begins with the rank after `rank`, so that all links are busy at once.
    /// If some ranks have more items than the others, these additional items come last.
    IRIS_DEVICE Turn in_turns(u32 rank, u32 position) const {
        const u32 others = size - 1, longer_others = more - (rank < more);
        const u32 least = longer_others == others ? longer : shorter;
        if (position < least * others) {
            return Turn{(rank + 1 + position % others) % size, position / others};
        }
        const u32 turn = position - least * others, skip = turn % longer_others;
        return Turn{rank < more ? (rank + 1 + skip) % more : skip, least + turn / longer_others};
    }
};

/// Tiles of a matrix whose rows are split over `size` ranks; no tile crosses a boundary between
/// ranks. Tiles are numbered rank by rank.
struct SplitGrid {
    Grid grid;
    u32 size;

    /// Numbers of tiles of the ranks.
    IRIS_DEVICE Shares shares() const {
        return Shares::of_split(grid.rows, size, grid.tile_m).times(Shares::even(size, grid.across()));
    }
    /// Grid of the rows of `rank` alone, in which row 0 is the first row of `rank`.
    IRIS_DEVICE Grid part(u32 rank) const {
        return Grid{split(grid.rows, size, rank).len(), grid.cols, grid.tile_m, grid.tile_n};
    }
    /// Number of the first tile of `rank`; tiles are numbered rank by rank.
    IRIS_DEVICE u32 first(u32 rank) const { return shares().first(rank); }
    IRIS_DEVICE u32 tiles() const { return shares().total(); }
    /// Rank that owns tile `tile`.
    IRIS_DEVICE u32 owner(u32 tile) const { return shares().owner(tile); }
    /// Position of tile `tile` in the whole matrix.
    IRIS_DEVICE Tile tile(u32 tile) const {
        const u32 rank = owner(tile);
        Tile at = part(rank).tile(tile - first(rank));
        at.row += split(grid.rows, size, rank).start;
        return at;
    }
};

/// Dimension of A that is split over the ranks in an all-gather before a product.
enum class Shard : u32 { Rows, Columns };

/// Units in which a staged all-gather-matmul fetches A (`m` x `k`) from the peers of a rank:
/// rectangles of `tile_m` x `k_group` of one rank's shard. Units are numbered source by source.
/// Within a source, they are numbered along M first if `m_contiguous`, otherwise along K first.
struct Units {
    Shard shard;
    u32 size, m, k, tile_m, k_group;
    bool m_contiguous;

    IRIS_DEVICE Range shard_rows(u32 source) const {
        return shard == Shard::Rows ? split(m, size, source) : Range{0, m};
    }
    IRIS_DEVICE Range shard_cols(u32 source) const {
        return shard == Shard::Rows ? Range{0, k} : split(k, size, source);
    }
    /// Numbers of row blocks, of K groups and of units in the shards of the ranks.
    IRIS_DEVICE Shares row_block_shares() const {
        return shard == Shard::Rows ? Shares::of_split(m, size, tile_m)
                                    : Shares::even(size, div_up(m, tile_m));
    }
    IRIS_DEVICE Shares group_shares() const {
        return shard == Shard::Rows ? Shares::even(size, div_up(k, k_group))
                                    : Shares::of_split(k, size, k_group);
    }
    IRIS_DEVICE Shares shares() const { return row_block_shares().times(group_shares()); }
    /// Number of units of all ranks; units are numbered rank by rank.
    IRIS_DEVICE u32 units() const { return shares().total(); }
    /// Returns the rank whose shard contains `unit`.
    IRIS_DEVICE u32 source(u32 unit) const { return shares().owner(unit); }
    /// Number of the unit at row block `row` and column group `group` of the shard of rank `source`.
    IRIS_DEVICE u32 unit(u32 source, u32 row, u32 group) const {
        const u32 rows = row_block_shares().of(source), groups = group_shares().of(source);
        const u32 within = m_contiguous ? group * rows + row : row * groups + group;
        return shares().first(source) + within;
    }
    /// Rows and columns of A that `unit` covers.
    IRIS_DEVICE Tile area(u32 unit) const {
        const u32 from = source(unit), within = unit - shares().first(from);
        const u32 rows = row_block_shares().of(from), groups = group_shares().of(from);
        const u32 block = m_contiguous ? within % rows : within / groups;
        const u32 group = m_contiguous ? within / rows : within % groups;
        const Range m_range = shard_rows(from), k_range = shard_cols(from);
        const u32 row = m_range.start + block * tile_m, col = k_range.start + group * k_group;
        return Tile{row, col, min_of(tile_m, m_range.end - row), min_of(k_group, k_range.end - col)};
    }

    /// Number of row blocks of C over all ranks; no tile of C needs rows of two ranks.
    IRIS_DEVICE u32 row_blocks() const {
        return shard == Shard::Rows ? row_block_shares().total() : div_up(m, tile_m);
    }
    /// Row block of C: its first row (`row`), its number of rows (`rows`), the rank whose shard has
    /// these rows of A (`source`; 0 if A is split by columns), and the index of the row block in
    /// that shard (`within`).
    struct Block {
        u32 row, rows, source, within;
    };
    IRIS_DEVICE Block row_block(u32 block) const {
        const Shares blocks = row_block_shares();
        const u32 from = shard == Shard::Rows ? blocks.owner(block) : 0;
        const u32 within = block - blocks.first(from);
        const Range rows = shard_rows(from);
        const u32 row = rows.start + within * tile_m;
        return Block{row, min_of(tile_m, rows.end - row), from, within};
    }
    /// Returns the row block of C that `rank` computes at `position` in its order: first the row
    /// blocks whose rows of A are in the shard of `rank`, then the row blocks of its peers
    /// round-robin.
    IRIS_DEVICE u32 row_block_at(u32 position, u32 rank) const {
        if (shard == Shard::Columns) return position;
        const Shares blocks = row_block_shares();
        const u32 own = blocks.of(rank);
        const Shares::Turn at =
            position < own ? Shares::Turn{rank, position} : blocks.in_turns(rank, position - own);
        return blocks.first(at.source) + at.within;
    }
    /// Returns the unit that `rank` fetches at `position` of its order: the units of all other
    /// ranks round-robin, then the units of `rank` itself.
    IRIS_DEVICE u32 unit_at(u32 position, u32 rank) const {
        const Shares all = shares();
        const u32 others = all.total() - all.of(rank);
        const Shares::Turn at =
            position < others ? all.in_turns(rank, position) : Shares::Turn{rank, position - others};
        return all.first(at.source) + at.within;
    }
    /// Number of units that row block `block` of C needs as input.
    IRIS_DEVICE u32 needs(u32 block) const {
        const Shares groups = group_shares();
        return shard == Shard::Rows ? groups.of(row_block(block).source) : groups.total();
    }
    /// Returns the unit that row block `block` of C needs as number `i`, in the order in which
    /// `rank` multiplies the units: its own units first, then the units of its peers round-robin.
    IRIS_DEVICE u32 need(u32 block, u32 rank, u32 i) const {
        const Block at = row_block(block);
        if (shard == Shard::Rows) return unit(at.source, at.within, i);
        const Shares groups = group_shares();
        const u32 own = groups.of(rank);
        if (i < own) return unit(rank, at.within, i);
        const Shares::Turn from = groups.in_turns(rank, i - own);
        return unit(from.source, at.within, from.within);
    }
};

/// Collective operation of an LL message; same values as iris_kernels::schedule::Collective.
enum class Collective : u32 { AllReduce, ReduceScatter, AllGather, AllToAll, Broadcast };

/// Division of a message into items of the LL protocol. The rows are concatenated, and every eight
/// bytes form an item; the last item of a part may be shorter.
struct Items {
    Collective collective;
    u32 size, rows, cols, root;
    /// Binary logarithm of the number of elements per item.
    u32 shift;
    /// Number of rows of the smallest part, and number of parts that have one row more, as split()
    /// computes them.
    u32 each, more;
    /// Number of items in the whole message (`whole`), in a part of `each` rows (`of_part`), and in
    /// a part of `each` + 1 rows (`of_longer`).
    u32 whole, of_part, of_longer;

    IRIS_DEVICE Items(Collective collective, u32 size, u32 rows, u32 cols, u32 per_item, u32 root)
        : collective(collective), size(size), rows(rows), cols(cols), root(root),
          shift(per_item / 2), each(parted(collective) ? rows / size : rows),
          more(parted(collective) ? rows % size : 0), whole(items_of(rows)),
          of_part(items_of(each)), of_longer(items_of(each + 1)) {}

    /// Returns the number of rows that `from` sends to `to`. If both are the same rank, the number
    /// of rows that the rank keeps for itself.
    IRIS_DEVICE u32 rows_sent(u32 from, u32 to) const {
        switch (collective) {
        case Collective::AllReduce: return rows;
        case Collective::ReduceScatter:
        case Collective::AllToAll: return part(to);
        case Collective::AllGather: return part(from);
        case Collective::Broadcast: break;
        }
        return root == from ? rows : 0;
    }
    /// Number of items that `from` sends to `to`.
    IRIS_DEVICE u32 sent(u32 from, u32 to) const {
        switch (collective) {
        case Collective::AllReduce: return whole;
        case Collective::ReduceScatter:
        case Collective::AllToAll: return to < more ? of_longer : of_part;
        case Collective::AllGather: return from < more ? of_longer : of_part;
        case Collective::Broadcast: break;
        }
        return root == from ? whole : 0;
    }
    /// First row, in this rank's matrix, of the data that this rank sends to `to`.
    IRIS_DEVICE u32 source_row(u32 to) const {
        return collective == Collective::ReduceScatter || collective == Collective::AllToAll
                   ? before(to)
                   : 0;
    }
    /// First row, in the result of `to`, of the data from `from`.
    IRIS_DEVICE u32 target_row(u32 from, u32 to) const {
        if (collective == Collective::AllGather) return before(from);
        return collective == Collective::AllToAll ? from * rows_sent(from, to) : 0;
    }

  private:
    /// Whether each rank sends a different part of its rows to each peer, instead of all its rows
    /// to all peers.
    IRIS_DEVICE static bool parted(Collective collective) {
        return collective != Collective::AllReduce && collective != Collective::Broadcast;
    }
    IRIS_DEVICE u32 items_of(u32 rows) const {
        return static_cast<u32>((u64(rows) * cols + (1u << shift) - 1) >> shift);
    }
    IRIS_DEVICE u32 part(u32 rank) const { return each + (rank < more); }
    IRIS_DEVICE u32 before(u32 rank) const { return rank * each + min_of(rank, more); }
};

/// Order in which a rank multiplies the tiles of a product whose rows are owned by `ranks` ranks,
/// `tiles` tiles per rank. Tiles are multiplied in rounds of `span` tiles for each owner. The first
/// round has only tiles that other ranks own, beginning with the tiles of the next rank. Each later
/// round has tiles of the other ranks, and also this rank's own tiles of the previous round; by
/// then the other ranks have stored their partials of these tiles. The own tiles of the last round
/// come at the end.
///
/// The waits of different ranks form no cycle, whatever `span` each rank has. All workgroups run at
/// once, each takes tiles in this order, and stores a tile at the latest during the product of its
/// next tile, before it waits there. The order has tile j of another owner after own tiles with
/// smaller index only, and own tile j after the tiles j of all other owners. So tile j for a peer is
/// stored after waits for own tiles of smaller index at most, and induction over j ends all waits.
struct Rounds {
    u32 tiles, span, ranks;
    /// Result of Rounds::at: the owner of a tile, as its distance from the next rank (0: the next
    /// rank, `ranks - 1`: this rank), and the index of the tile among those of its owner.
    struct Turn {
        u32 rank, tile;
    };
    IRIS_DEVICE Turn at(u32 position) const {
        const u32 others = ranks - 1, first = min_of(span, tiles), last = (tiles - 1) / span * span;
        const u32 end = ranks * tiles - (tiles - last);
        if (position >= end) return Turn{others, last + position - end};
        if (position < others * first) return Turn{position / first, position % first};
        const u32 behind = position - others * first, begin = (behind / (ranks * span) + 1) * span;
        const u32 within = behind % (ranks * span), width = min_of(span, tiles - begin);
        if (within < others * width) return Turn{within / width, begin + within % width};
        return Turn{others, begin - span + within - others * width};
    }
};

/// Order in which rows of A arrive from all ranks at a GEMM that multiplies them meanwhile. Each rank has
/// `rows` rows and sends them in parts of `part` rows; the last part may be smaller.
struct Arriving {
    u32 rows, part, size, rank;
    /// Returns the row that arrives at position `turn`. This rank's own rows come first, then the
    /// rows of its peers part by part. Each round of parts begins with the preceding rank, because
    /// that rank sends to this rank first.
    IRIS_DEVICE u32 row(u32 turn) const {
        if (turn < rows) return rank * rows + turn;
        const u32 others = size - 1, behind = turn - rows;
        const u32 number = min_of(behind / (part * others), rows / part), begin = number * part;
        const u32 height = min_of(part, rows - begin), within = behind - begin * others;
        const u32 source = (rank + size - 1 - within / height) % size;
        return source * rows + begin + within % height;
    }
};

} // namespace iris

#endif
