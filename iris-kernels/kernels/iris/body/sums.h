// Addition of partials that have arrived, for the tiles of a reduction and for blocks that copy
// engines moved.
#ifndef IRIS_BODY_SUMS_H
#define IRIS_BODY_SUMS_H

#include "iris/body/partial.h"

namespace iris {

IRIS_DEVICE void add_to(Values& sum, const Values& part) {
    IRIS_UNROLL
    for (u32 i = 0; i < WIDTH; ++i) sum.v[i] += part.v[i];
}

/// Locations of the partials of a tile. The partial of rank `rank` is at `own`; the partials of the
/// other ranks are at `slots`, with stride `stride` in bytes. The residual, which is added to the
/// sum, is at `residual`; 0 if there is none.
struct Sources {
    u64 own, own_ld, slots, slots_ld, stride;
    u32 rank, size;
    u64 residual, residual_ld;
};

/// Adds up a tile that consists of full vectors of one type, in the order of ranks. Each thread has
/// `DEEP` vectors in flight at once, each from two sources. This hides memory latency, because few
/// threads work on a message.
template <u32 DTYPE, u32 DEEP, bool RESIDUAL>
IRIS_DEVICE void add_vectors(u64 c, u64 c_ld, const Sources& from, u32 rows, u32 cols) {
    constexpr u32 BYTES = element_bytes(DTYPE);
    const u32 across = cols / WIDTH, vectors = rows * across, step = port::threads();
    for (u32 begin = port::thread(); begin < vectors; begin += DEEP * step) {
        u64 own[DEEP], slots[DEEP];
        Values sum[DEEP];
        IRIS_UNROLL
        for (u32 d = 0; d < DEEP; ++d) {
            // After its last vector, a thread loads its first vector again to fill the batch, and
            // does not store the result.
            const u32 vector = begin + d * step < vectors ? begin + d * step : begin;
            const u32 row = vector / across, col = vector % across * WIDTH;
            own[d] = from.own + (row * from.own_ld + col) * BYTES;
            slots[d] = from.slots + (row * from.slots_ld + col) * BYTES;
        }
        const auto load = [&](u32 source, Raw(&raw)[DEEP]) {
            const bool mine = source == from.rank;
            IRIS_UNROLL
            for (u32 d = 0; d < DEEP; ++d) {
                raw[d] = load_raw(mine ? own[d] : slots[d] + source * from.stride, DTYPE);
            }
        };
        Raw one[DEEP], two[DEEP], residual[DEEP];
        load(0, one);
        load(1, two);
        if (RESIDUAL && from.residual != 0) {
            IRIS_UNROLL
            for (u32 d = 0; d < DEEP; ++d) {
                const u32 vector = begin + d * step < vectors ? begin + d * step : begin;
                const u32 row = vector / across, col = vector % across * WIDTH;
                const u64 at = from.residual + (row * from.residual_ld + col) * BYTES;
                residual[d] = load_raw(at, DTYPE);
            }
        }
        IRIS_UNROLL
        for (u32 d = 0; d < DEEP; ++d) {
            sum[d] = values_of(one[d], DTYPE);
            add_to(sum[d], values_of(two[d], DTYPE));
        }
        for (u32 source = 2; source < from.size; ++source) {
            load(source, one);
            IRIS_UNROLL
            for (u32 d = 0; d < DEEP; ++d) add_to(sum[d], values_of(one[d], DTYPE));
        }
        if (RESIDUAL && from.residual != 0) {
            IRIS_UNROLL
            for (u32 d = 0; d < DEEP; ++d) add_to(sum[d], values_of(residual[d], DTYPE));
        }
        IRIS_UNROLL
        for (u32 d = 0; d < DEEP; ++d) {
            const u32 vector = begin + d * step;
            if (vector < vectors) {
                const u32 row = vector / across, col = vector % across * WIDTH;
                store_whole(c + (row * c_ld + col) * BYTES, DTYPE, sum[d]);
            }
        }
    }
}

/// Adds up a tile of type DTYPE, with 1 to DEEP vectors in flight per thread. A thread with fewer
/// vectors in the tile than it has in flight reads some vectors twice.
template <u32 DTYPE, bool RESIDUAL>
IRIS_DEVICE void add_deep(u64 c, u64 c_ld, const Sources& from, u32 rows, u32 cols) {
    constexpr u32 DEEP = is_one_access(DTYPE) ? 4 : 2;
    const u32 vectors = rows * (cols / WIDTH), threads = port::threads();
    if (vectors <= threads) add_vectors<DTYPE, 1, RESIDUAL>(c, c_ld, from, rows, cols);
    else if (RESIDUAL && DEEP > 2 && vectors <= 2 * threads) add_vectors<DTYPE, 2, RESIDUAL>(c, c_ld, from, rows, cols);
    else add_vectors<DTYPE, DEEP, RESIDUAL>(c, c_ld, from, rows, cols);
}

/// Calls add_deep() for the element type of `c`, which is known only at run time.
template <bool RESIDUAL>
IRIS_DEVICE void add_whole(const View& c, const Sources& from, u32 rows, u32 cols) {
#define IRIS_ROW(name, code, bytes, roles)                                                         \
    IRIS_LABEL_##name: return add_deep<name, RESIDUAL>(c.address, c.ld, from, rows, cols);
    switch (c.dtype) { IRIS_DTYPES_USED(IRIS_ROW) }
    IRIS_NO_OTHER_TYPE;
#undef IRIS_ROW
}

/// Adds the contributions of all ranks, in the order of ranks. This rank's own contribution is A. Those of
/// the other ranks are in an inbox: B is the contribution of rank 0, and that of each next rank follows
/// `slot` bytes later. If the op has a single source, the root, nothing is added: the root's results are
/// copied to C, unless the root has stored them into C directly.
template <bool RESIDUAL> IRIS_DEVICE void run_sums(const OpArgs& args) {
    if (args.sources == 1 && flow::Departures(launch_of(args)).is_direct(args.root)) return;
    const Matrix &a = args.a, &b = args.b, &c = args.c;
    const u32 me = args.channel.rank, sources = args.sources;
    const Matrix none{}, &residual = RESIDUAL ? args.residual : none;
    const u64 starts = a.address | b.address | c.address | residual.address | args.slot;
    const u64 widths = a.ld | b.ld | c.ld | residual.ld | args.n | args.tile_n;
    const bool alike = residual.address == 0 || (residual.dtype == c.dtype && residual.transposed == 0);
    const bool whole = a.dtype == c.dtype && b.dtype == c.dtype && c.transposed == 0 && alike &&
                       args.bias.address == 0 && args.epilogue == 0 && (starts & 15) == 0 &&
                       widths % WIDTH == 0;
    Trace trace(args.trace, args.trace_spans, args.counters, port::workgroup());
    const Grid grid = grid_of(args);
    for (u32 tile = port::workgroup(); tile < grid.tiles(); tile += port::workgroups()) {
        trace.begin(Span::Reduce, tile);
        const Tile at = grid.tile(tile);
        const View to = View::of(c).from(at.row, at.col), own = View::of(a).from(at.row, at.col);
        if (sources == 1) {
            copy_view(to, own, at.rows, at.cols);
        } else if (const View slots = View::of(b).from(at.row, at.col); whole) {
            const u64 on_top = residual.address == 0 ? 0 : View::of(residual).at(at.row, at.col);
            const Sources from{own.address, own.ld, slots.address, slots.ld, args.slot,
                               me,          sources, on_top,       residual.ld};
            add_whole<RESIDUAL>(to, from, at.rows, at.cols);
        } else {
            for_each_vector(at.rows, at.cols, [&](u32 row, u32 col, u32 count) {
                Values sum;
                for (u32 source = 0; source < sources; ++source) {
                    View part = source == me ? own : slots;
                    if (source != me) part.address += source * args.slot;
                    const Values values = part.load(row, col, count);
                    if (source == 0) sum = values;
                    else add_to(sum, values);
                }
                finish_values(args, at.col + col, count, sum);
                if constexpr (RESIDUAL) add_residual(args, at.row + row, at.col + col, count, sum);
                to.store(row, col, count, sum);
            });
        }
        trace.end(Span::Reduce);
    }
}

} // namespace iris

#endif
