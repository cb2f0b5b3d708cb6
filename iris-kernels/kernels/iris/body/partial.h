// Parts shared by the bodies of ops: addresses of slots, and producers of partial tiles.
#ifndef IRIS_BODY_PARTIAL_H
#define IRIS_BODY_PARTIAL_H

#include "iris/body/epilogue.h"

namespace iris {

/// Addresses of an op's slots at each rank.
struct Places {
    const OpArgs& args;

    /// Slot number `place` for tiles from `source` in the inbox of rank `at`.
    IRIS_DEVICE View slot(u32 at, u32 source, u32 place, u32 parity, u32 dtype) const {
        const u64 index = (u64(parity) * args.sources + source) * args.max_tiles + place;
        const u64 address = args.heap.address(at, args.inbox + index * args.slot);
        return View::slot(address, args.tile_n, dtype);
    }
    /// Returns the stride in bytes between the slots of two consecutive sources.
    IRIS_DEVICE u64 stride() const { return u64(args.max_tiles) * args.slot; }
    /// Slot of `tile` in the result inbox of rank `at`.
    IRIS_DEVICE View result(u32 at, u32 tile, u32 parity) const {
        const u64 index = u64(parity) * args.max_results + tile;
        const u64 address = args.heap.address(at, args.results + index * args.result_slot);
        return View::slot(address, args.tile_n, args.c.dtype);
    }
    /// View of the f32 sums of `tile` in the workspace of rank `owner`.
    IRIS_DEVICE View workspace(u32 owner, u32 tile) const {
        const u64 place = tile / args.channel.size;
        const u64 bytes = u64(args.tile_m) * args.tile_n * 4;
        return View::slot(args.heap.address(owner, args.workspace + place * bytes), args.tile_n, F32);
    }
    /// C of rank `at`, at the same offset in its data segment as this rank's C.
    IRIS_DEVICE View peers_c(u32 at) const {
        View c = View::of(args.c);
        c.address = c.address - args.heap.data[args.heap.rank] + args.heap.data[at];
        return c;
    }
};

IRIS_DEVICE Grid grid_of(const OpArgs& args) {
    return Grid{args.m, args.n, args.tile_m, args.tile_n};
}
IRIS_DEVICE SplitGrid split_of(const OpArgs& args) {
    return SplitGrid{grid_of(args), args.channel.size};
}

/// Adds `bytes` to a counter of bytes written to or read from peers, if the rank has counters.
IRIS_DEVICE void count_bytes(const OpArgs& args, Counter counter, u64 bytes) {
    if (args.counters == 0 || port::thread() != 0) return;
    Trace(0, 0, args.counters, 0).add(counter, bytes);
}

/// Source of partial tiles for ops without a product: the tiles of A.
class LoadProducer {
  public:
    struct Shared {};
    IRIS_DEVICE LoadProducer(const OpArgs& args, Shared&) : args(args) {}

    IRIS_DEVICE void produce(const Tile& at) { area = at; }

    /// Properties of this producer. REPEATS: the partial stays in memory, so write_to() may be
    /// called repeatedly. KEEPS: write_to() may be called for each peer without a call of produce()
    /// in between.
    static constexpr bool REPEATS = true, KEEPS = true;
    /// Number of dies for launch_of(): 1, because tiles of a message share no operands. Renumbering
    /// the workgroups by die would have no benefit.
    static constexpr u32 DIES = 1;
    IRIS_DEVICE void write_to(const View& to) {
        copy_view(to, View::of(args.a).from(area.row, area.col), area.rows, area.cols);
    }

    template <class Sink> IRIS_DEVICE void emit(Sink sink) {
        const View from = View::of(args.a).from(area.row, area.col);
        for_each_vector(area.rows, area.cols, [&](u32 row, u32 col, u32 count) {
            Values values = from.load(row, col, count);
            sink(row, col, count, values);
        });
    }

  private:
    const OpArgs& args;
    Tile area;
};

/// Whether a producer's partials are the elements of A, without a product.
template <class Producer> inline constexpr bool LOADS = false;
template <> inline constexpr bool LOADS<LoadProducer> = true;

/// Runs only this rank's product or copy, without synchronisation words and without a call number.
template <class Producer>
IRIS_DEVICE void run_local(const OpArgs& args, typename Producer::Shared& shared) {
    Producer producer(args, shared);
    Trace trace(args.trace, args.trace_spans, args.counters, port::workgroup());
    const View c = View::of(args.c);
    const Grid grid = grid_of(args);
    const u32 index = die_swizzle(port::workgroup(), port::workgroups(), Producer::DIES);
    // Whether elements are copied as bit patterns, because a conversion to float changes the bits
    // of some NaNs.
    const bool copies = LOADS<Producer> && args.a.dtype == args.c.dtype && args.bias.address == 0
        && args.epilogue == 0 && args.residual.address == 0;
    for (u32 tile = index; tile < grid.tiles(); tile += port::workgroups()) {
        trace.begin(Span::Gemm, tile);
        const Tile area = grid.tile(tile);
        producer.produce(area);
        if (copies) {
            producer.write_to(c.from(area.row, area.col));
            trace.end(Span::Gemm);
            continue;
        }
        producer.emit([&](u32 row, u32 col, u32 count, Values& values) {
            finish_values(args, area.col + col, count, values);
            add_residual(args, area.row + row, area.col + col, count, values);
            c.store(area.row + row, area.col + col, count, values);
        });
        trace.end(Span::Gemm);
    }
}

} // namespace iris

#endif
