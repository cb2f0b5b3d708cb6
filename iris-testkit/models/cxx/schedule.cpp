// Schedules of schedule.h as arrays of numbers: all results for a shape, one after the other, for
// comparison with iris_kernels::schedule.
#include "model.h"

#include "iris/schedule.h"

using namespace iris;

namespace {

struct Out {
    u32* values;
    u32 room, count;

    void put(u32 value) {
        if (count < room) values[count] = value;
        ++count;
    }
    void put(const Tile& tile) {
        put(tile.row);
        put(tile.col);
        put(tile.rows);
        put(tile.cols);
    }
};

/// Ranges into which `total` items are split for `parts` parts, and the part of each item.
void put_split(Out& out, u32 total, u32 parts) {
    for (u32 part = 0; part < parts; ++part) {
        const Range range = split(total, parts, part);
        out.put(range.start);
        out.put(range.end);
    }
    for (u32 at = 0; at < total; ++at) out.put(part_of(total, parts, at));
}

/// New numbers of `count` workgroups that are spread over `dies` dies.
void put_dies(Out& out, u32 count, u32 dies) {
    for (u32 at = 0; at < count; ++at) out.put(die_swizzle(at, count, dies));
}

/// Items of a collective.
void put_items(Out& out, const Items& items) {
    for (u32 from = 0; from < items.size; ++from) {
        for (u32 to = 0; to < items.size; ++to) {
            out.put(items.rows_sent(from, to));
            out.put(items.sent(from, to));
            out.put(items.source_row(to));
            out.put(items.target_row(from, to));
        }
    }
}

/// Tiles of a matrix, whole and split over `size` ranks, with their owners.
void put_grid(Out& out, const Grid& grid, u32 size) {
    for (u32 tile = 0; tile < grid.tiles(); ++tile) {
        out.put(grid.tile(tile));
        out.put(owner_of(tile, size));
    }
    const SplitGrid all{grid, size};
    for (u32 rank = 0; rank <= size; ++rank) out.put(all.first(rank));
    for (u32 tile = 0; tile < all.tiles(); ++tile) {
        out.put(all.owner(tile));
        out.put(all.tile(tile));
    }
}

/// Tiles of a GEMM whose rows are owned by ranks.
void put_rounds(Out& out, const Rounds& rounds) {
    for (u32 position = 0; position < rounds.tiles * rounds.ranks; ++position) {
        const Rounds::Turn turn = rounds.at(position);
        out.put(turn.rank);
        out.put(turn.tile);
    }
}

/// Order in which a GEMM multiplies rows as they arrive.
void put_arriving(Out& out, const Arriving& arriving) {
    for (u32 turn = 0; turn < arriving.rows * arriving.size; ++turn) out.put(arriving.row(turn));
}

/// Units of a staged gather, and for each rank the units that it fetches, works on and needs, in
/// the rank's order.
void put_units(Out& out, const Units& units) {
    for (u32 unit = 0; unit < units.units(); ++unit) {
        out.put(units.source(unit));
        out.put(units.area(unit));
    }
    const u32 blocks = units.row_blocks();
    for (u32 block = 0; block < blocks; ++block) {
        const Units::Block at = units.row_block(block);
        out.put(at.row);
        out.put(at.rows);
        out.put(at.source);
        out.put(at.within);
    }
    for (u32 rank = 0; rank < units.size; ++rank) {
        for (u32 i = 0; i < units.units(); ++i) out.put(units.unit_at(i, rank));
        for (u32 i = 0; i < blocks; ++i) out.put(units.row_block_at(i, rank));
        for (u32 block = 0; block < blocks; ++block) {
            const u32 needs = units.needs(block);
            out.put(needs);
            for (u32 i = 0; i < needs; ++i) out.put(units.need(block, rank, i));
        }
    }
}

} // namespace

/// Results of all functions for a shape. `kind` is the position of the shape in schedule::Shape, `s`
/// has its numbers, as schedule::Shape::numbers lists them.
extern "C" u32 iris_schedule(u32 kind, const u32* s, u32* values, u32 room) {
    Out out{values, room, 0};
    switch (kind) {
    case 0: put_split(out, s[0], s[1]); break;
    case 1: put_dies(out, s[0], s[1]); break;
    case 2: put_grid(out, Grid{s[0], s[1], s[2], s[3]}, s[4]); break;
    case 3: put_units(out, Units{static_cast<Shard>(s[0]), s[1], s[2], s[3], s[4], s[5], s[6] != 0}); break;
    case 4: put_items(out, Items(static_cast<Collective>(s[0]), s[1], s[2], s[3], s[4], s[5])); break;
    case 5: put_rounds(out, Rounds{s[0], s[1], s[2]}); break;
    case 6: put_arriving(out, Arriving{s[0], s[1], s[2], s[3]}); break;
    }
    return out.count;
}
