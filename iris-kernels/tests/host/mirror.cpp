// Functions by which a test compares definitions in the headers with those in Rust.
#include "iris/args.h"
#include "iris/body/deliver.h"
#include "iris/body/gather.h"
#include "iris/gemm/producer.h"
#include "iris/body/accumulate.h"
#include "iris/body/reduce.h"
#include "iris/tiles.h"

using namespace iris;

namespace {
struct Row {
    const char* name;
    int order, scope;
};
constexpr Row ROWS[] = {
#define IRIS_ROW(name, order, scope)                                                               \
    {#name, static_cast<int>(Order::order), static_cast<int>(Scope::scope)},
    IRIS_ACCESSES(IRIS_ROW)
#undef IRIS_ROW
};
} // namespace

extern "C" {

u32 mirror_access(u32 index, const char** name, int* order, int* scope) {
    if (index < sizeof(ROWS) / sizeof(Row)) {
        *name = ROWS[index].name;
        *order = ROWS[index].order;
        *scope = ROWS[index].scope;
    }
    return sizeof(ROWS) / sizeof(Row);
}

/// Returns name, code and size of element type number `index`, and the number of types.
u32 mirror_dtype(u32 index, const char** name, u32* code, u32* bytes) {
    constexpr struct {
        const char* name;
        u32 code, bytes;
    } rows[] = {
#define IRIS_ROW(name, code, bytes) {#name, code, bytes},
        IRIS_DTYPES(IRIS_ROW)
#undef IRIS_ROW
    };
    constexpr u32 count = sizeof(rows) / sizeof(rows[0]);
    if (index < count) {
        *name = rows[index].name;
        *code = rows[index].code;
        *bytes = rows[index].bytes;
    }
    return count;
}

u32 mirror_dealt(u32 workgroup, u32 count, u32 dies) { return die_swizzle(workgroup, count, dies); }

void mirror_split(u32 total, u32 parts, u32 part, u32* out) {
    const Range range = split(total, parts, part);
    out[0] = range.start;
    out[1] = range.end;
}

/// Position of tile `tile` in a SplitGrid with `shape` = {rows, cols, tile_m, tile_n, size}. Stores
/// {owner, row, col, rows, cols} in `out`; returns the number of tiles.
u32 mirror_split_grid(const u32* shape, u32 tile, u32* out) {
    const SplitGrid grid{Grid{shape[0], shape[1], shape[2], shape[3]}, shape[4]};
    if (tile < grid.tiles()) {
        const Tile at = grid.tile(tile);
        const u32 values[] = {grid.owner(tile), at.row, at.col, at.rows, at.cols};
        for (u32 i = 0; i < 5; ++i) out[i] = values[i];
    }
    return grid.tiles();
}

u32 mirror_grid(const u32* shape, u32 tile, u32* out) {
    const Grid grid{shape[0], shape[1], shape[2], shape[3]};
    if (tile < grid.tiles()) {
        const Tile at = grid.tile(tile);
        const u32 values[] = {owner_of(tile, shape[4]), at.row, at.col, at.rows, at.cols};
        for (u32 i = 0; i < 5; ++i) out[i] = values[i];
    }
    return grid.tiles();
}

namespace {
Units units_from(const u32* s) {
    return Units{s[0] == 0 ? Shard::Rows : Shard::Columns, s[1], s[2], s[3], s[4], s[5], s[6] == 1};
}
} // namespace

/// Source and area of unit `unit` of Units with `shape` = {shard, size, m, k, tile_m, k_group,
/// m_contiguous}. Stores {source, row, col, rows, cols} in `out`; returns the number of units.
u32 mirror_unit(const u32* shape, u32 unit, u32* out) {
    const Units units = units_from(shape);
    if (unit < units.units()) {
        const Tile at = units.area(unit);
        const u32 values[] = {units.source(unit), at.row, at.col, at.rows, at.cols};
        for (u32 i = 0; i < 5; ++i) out[i] = values[i];
    }
    return units.units();
}

/// Row block `block` of Units: stores {row, rows, source, within, row_block_at} in `out`, and in
/// `need` the i-th unit that the block needs, or ~0 after the last. Returns the number of row
/// blocks.
u32 mirror_block(const u32* shape, u32 block, u32 rank, u32 i, u32* out, u32* need) {
    const Units units = units_from(shape);
    if (block < units.row_blocks()) {
        const Units::Block at = units.row_block(block);
        const u32 values[] = {at.row, at.rows, at.source, at.within, units.row_block_at(block, rank)};
        for (u32 j = 0; j < 5; ++j) out[j] = values[j];
        *need = i < units.needs(block) ? units.need(block, rank, i) : ~0u;
    }
    return units.row_blocks();
}

u32 mirror_fetched(const u32* shape, u32 position, u32 rank) {
    return units_from(shape).unit_at(position, rank);
}

float mirror_erf(float x) { return erf(x); }
u16 mirror_narrow(u32 dtype, float value) { return narrow(dtype, value); }
float mirror_widen(u32 dtype, u16 bits) { return widen(dtype, bits); }

/// Offset of field number `field` of OpArgs; the test numbers the fields in the order of this list.
u64 mirror_offset(u32 field) {
    const u64 offsets[] = {
        IRIS_OFFSET_OF(OpArgs, channel),     IRIS_OFFSET_OF(OpArgs, record),
        IRIS_OFFSET_OF(OpArgs, a),           IRIS_OFFSET_OF(OpArgs, epsilon),
        IRIS_OFFSET_OF(OpArgs, bias),        IRIS_OFFSET_OF(OpArgs, residual),
        IRIS_OFFSET_OF(OpArgs, weight),      IRIS_OFFSET_OF(OpArgs, normed),
        IRIS_OFFSET_OF(OpArgs, inbox),       IRIS_OFFSET_OF(OpArgs, slot),
        IRIS_OFFSET_OF(OpArgs, results),     IRIS_OFFSET_OF(OpArgs, result_slot),
        IRIS_OFFSET_OF(OpArgs, workspace),   IRIS_OFFSET_OF(OpArgs, pulled),
        IRIS_OFFSET_OF(OpArgs, pulled_ld),   IRIS_OFFSET_OF(OpArgs, trace),
        IRIS_OFFSET_OF(OpArgs, counters),    IRIS_OFFSET_OF(OpArgs, m),
        IRIS_OFFSET_OF(OpArgs, tile_m),      IRIS_OFFSET_OF(OpArgs, k_group),
        IRIS_OFFSET_OF(OpArgs, max_tiles),   IRIS_OFFSET_OF(OpArgs, max_results),
        IRIS_OFFSET_OF(OpArgs, wire),        IRIS_OFFSET_OF(OpArgs, epilogue),
        IRIS_OFFSET_OF(OpArgs, producer),    IRIS_OFFSET_OF(OpArgs, root),
        IRIS_OFFSET_OF(OpArgs, dedicated_workgroups),    IRIS_OFFSET_OF(OpArgs, shard),
        IRIS_OFFSET_OF(OpArgs, m_contiguous), IRIS_OFFSET_OF(OpArgs, trace_spans),
        IRIS_OFFSET_OF(OpArgs, sources),     sizeof(OpArgs),
        IRIS_OFFSET_OF(TileView, channel),   IRIS_OFFSET_OF(TileView, record),
        IRIS_OFFSET_OF(TileView, rows),      IRIS_OFFSET_OF(TileView, tile_m),
        IRIS_OFFSET_OF(TileView, arrival),   IRIS_OFFSET_OF(TileView, root),
        IRIS_OFFSET_OF(TileView, groups),    sizeof(TileView),
    };
    return field < sizeof(offsets) / sizeof(u64) ? offsets[field] : 0;
}
}
