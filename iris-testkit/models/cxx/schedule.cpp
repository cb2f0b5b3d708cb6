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

} // namespace

extern "C" {

/// Ranges into which `total` items are split for `parts` parts, and the part of each item.
u32 iris_schedule_split(u32 total, u32 parts, u32* values, u32 room) {
    Out out{values, room, 0};
    for (u32 part = 0; part < parts; ++part) {
        const Range range = split(total, parts, part);
        out.put(range.start);
        out.put(range.end);
    }
    for (u32 at = 0; at < total; ++at) out.put(part_of(total, parts, at));
    return out.count;
}

/// New numbers of `count` workgroups that are spread over `dies` dies.
u32 iris_schedule_dies(u32 count, u32 dies, u32* values, u32 room) {
    Out out{values, room, 0};
    for (u32 at = 0; at < count; ++at) out.put(die_swizzle(at, count, dies));
    return out.count;
}

/// Items of a collective, in the order of schedule::Shape::Items.
u32 iris_schedule_items(const u32 (&shape)[6], u32* values, u32 room) {
    Out out{values, room, 0};
    const Items items(static_cast<Collective>(shape[0]), shape[1], shape[2], shape[3], shape[4],
                      shape[5]);
    for (u32 from = 0; from < items.size; ++from) {
        for (u32 to = 0; to < items.size; ++to) {
            out.put(items.rows_sent(from, to));
            out.put(items.sent(from, to));
            out.put(items.source_row(to));
            out.put(items.target_row(from, to));
        }
    }
    return out.count;
}

/// Tiles of a matrix, whole and split over `size` ranks, with their owners.
u32 iris_schedule_grid(const Grid& grid, u32 size, u32* values, u32 room) {
    Out out{values, room, 0};
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
    return out.count;
}

/// Tiles of a GEMM whose rows are owned by ranks; parameters: tiles, span, ranks.
u32 iris_schedule_rounds(const u32 (&shape)[3], u32* values, u32 room) {
    Out out{values, room, 0};
    const Rounds rounds{shape[0], shape[1], shape[2]};
    for (u32 position = 0; position < rounds.tiles * rounds.ranks; ++position) {
        const Rounds::Turn turn = rounds.at(position);
        out.put(turn.rank);
        out.put(turn.tile);
    }
    return out.count;
}

/// Order in which a GEMM multiplies rows as they arrive; parameters: rows, part, size, rank.
u32 iris_schedule_arriving(const u32 (&shape)[4], u32* values, u32 room) {
    Out out{values, room, 0};
    const Arriving arriving{shape[0], shape[1], shape[2], shape[3]};
    for (u32 turn = 0; turn < arriving.rows * arriving.size; ++turn) out.put(arriving.row(turn));
    return out.count;
}

/// Units of a staged gather, and for each rank the units that it fetches, works on and needs, in
/// the rank's order.
u32 iris_schedule_units(const Units& units, u32* values, u32 room) {
    Out out{values, room, 0};
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
    return out.count;
}

}
