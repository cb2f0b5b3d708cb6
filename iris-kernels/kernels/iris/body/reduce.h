// Bodies of all-reduce (one_shot, two_shot) and reduce-scatter. A Producer class makes this rank's partials,
// its contributions to the sums.
#ifndef IRIS_BODY_REDUCE_H
#define IRIS_BODY_REDUCE_H

#include "iris/body/sums.h"

namespace iris {

/// Plan of a one-shot all-reduce, that is, which ranks reduce a tile and where the tile lies: every rank
/// reduces every tile.
struct OneShotPlan {
    /// Whether a single rank, the owner, reduces a tile. Here every rank reduces every tile.
    static constexpr bool ONE_OWNER = false;
    Grid grid;
    IRIS_DEVICE explicit OneShotPlan(const OpArgs& args) : grid(grid_of(args)) {}
    IRIS_DEVICE u32 tiles() const { return grid.tiles(); }
    IRIS_DEVICE Tile tile(u32 tile) const { return grid.tile(tile); }
    IRIS_DEVICE Tile result(u32 tile) const { return grid.tile(tile); }
    IRIS_DEVICE u32 place(u32 tile) const { return tile; }
};

/// Plan of a two-shot all-reduce: tiles are owned round-robin.
struct TwoShotPlan {
    static constexpr bool ONE_OWNER = true;
    Grid grid;
    flow::Turns turns;
    IRIS_DEVICE explicit TwoShotPlan(const OpArgs& args)
        : grid(grid_of(args)), turns{grid.tiles(), args.channel.size} {}
    IRIS_DEVICE u32 most() const { return turns.most(); }
    IRIS_DEVICE bool owned(u32 owner, u32 place, u32& tile) const {
        return turns.owned(owner, place, tile);
    }
    IRIS_DEVICE Tile tile(u32 tile) const { return grid.tile(tile); }
    IRIS_DEVICE Tile result(u32 tile) const { return grid.tile(tile); }
    IRIS_DEVICE u32 place(u32 tile) const { return tile / turns.owners; }
};

/// Plan of a reduce-scatter: each rank owns (reduces) all tiles of one block of rows.
struct ScatterPlan {
    static constexpr bool ONE_OWNER = true;
    SplitGrid split;
    IRIS_DEVICE explicit ScatterPlan(const OpArgs& args) : split(split_of(args)) {}
    /// Largest number of tiles of any rank; no part has more tiles than part 0.
    IRIS_DEVICE u32 most() const { return split.part(0).tiles(); }
    IRIS_DEVICE bool owned(u32 owner, u32 place, u32& tile) const {
        tile = split.first(owner) + place;
        return place < split.part(owner).tiles();
    }
    /// Position of tile number `tile` in the whole product.
    IRIS_DEVICE Tile tile(u32 tile) const { return split.tile(tile); }
    /// Position of tile number `tile` in C of the rank that reduces it.
    IRIS_DEVICE Tile result(u32 tile) const {
        return split.part(split.owner(tile)).tile(place(tile));
    }
    /// Slot index of tile number `tile` in an inbox.
    IRIS_DEVICE u32 place(u32 tile) const { return tile - split.first(split.owner(tile)); }
};

/// Body of a reduction. RESIDUAL: if the call has a residual, it is added. Kernels built without
/// RESIDUAL need fewer registers.
template <class Plan, class Producer, bool RESIDUAL = false> class ReduceBody {
  public:
    IRIS_DEVICE ReduceBody(const OpArgs& args, typename Producer::Shared& shared)
        : plan(args), args(args), places{args}, producer(args, shared), from_a(reads_a()) {}

    const Plan plan;
    static constexpr bool AT_ONCE = Producer::REPEATS;

    IRIS_DEVICE void produce(u32 tile) { producer.produce(plan.tile(tile)); }

    IRIS_DEVICE void keep(u32 tile, u32 parity) {
        // This rank's partial need not be stored in the inbox if reduce() reads it from A.
        if (!from_a) put(me(), tile, parity);
    }

    IRIS_DEVICE void push(u32 peer, u32 tile, u32 parity) {
        if constexpr (Plan::ONE_OWNER || Producer::KEEPS) {
            put(peer, tile, parity);
        } else {
            // The partial is copied to the peer from this rank's own slot, where keep() has stored
            // it. The barrier makes the stores of the other threads visible.
            port::barrier(Site::Body);
            const Tile area = plan.tile(tile);
            copy_view(slot(peer, me(), tile, parity), slot(me(), me(), tile, parity), area.rows,
                      area.cols);
        }
        count_bytes(args, Counter::Pushed, bytes_of(plan.tile(tile), args.wire));
    }

    /// Adds up the partials in the order of ranks. This rank's own partial is rounded to the transfer
    /// type as well, so that the bits do not depend on which rank owns the tile.
    IRIS_DEVICE void reduce(u32 tile, u32 parity) {
        // The partial is read from this rank's own slot, where other threads of this workgroup have
        // written it. The barrier makes their stores visible.
        port::barrier(Site::Body);
        const Tile at = plan.result(tile);
        const View c = View::of(args.c).from(at.row, at.col);
        const u32 size = args.channel.size;
        const View slots = slot(me(), 0, tile, parity);
        const u64 stride = places.stride();
        const u32 wire = args.wire;
        if (from_a) {
            const Tile from = plan.tile(tile);
            const View own = View::of(args.a).from(from.row, from.col);
            const Matrix& residual = args.residual;
            const u64 on_top = residual.address == 0 ? 0 : View::of(residual).at(at.row, at.col);
            const Sources sources{own.address, own.ld, slots.address, slots.ld,   stride,
                                  me(),        size,   on_top,        residual.ld};
            return add_whole<RESIDUAL>(c, sources, at.rows, at.cols);
        }
        for_each_vector(at.rows, at.cols, [&](u32 row, u32 col, u32 count) {
            Values sum;
            // All loads of a batch are issued before the first value is used, so that their
            // latencies overlap.
            for (u32 begin = 0; begin < size; begin += BATCH) {
                Raw raw[BATCH];
                u64 place[BATCH];
                IRIS_UNROLL
                for (u32 i = 0; i < BATCH; ++i) {
                    if (begin + i >= size) break;
                    place[i] = slots.at(row, col) + u64(begin + i) * stride;
                    if (is_whole(place[i], count)) raw[i] = load_raw(place[i], wire);
                }
                IRIS_UNROLL
                for (u32 i = 0; i < BATCH; ++i) {
                    if (begin + i >= size) break;
                    const Values part = is_whole(place[i], count)
                                            ? values_of(raw[i], wire)
                                            : load_row(place[i], wire, count);
                    if (begin + i == 0) sum = part;
                    else add_to(sum, part);
                }
            }
            finish_values(args, at.col + col, count, sum);
            if constexpr (RESIDUAL) {
                add_residual(args, at.row + row, at.col + col, count, sum);
            }
            c.store(row, col, count, sum);
        });
    }

    IRIS_DEVICE void push_result(u32 peer, u32 tile, u32 parity, bool direct) {
        // The result is read from C, where other threads of this workgroup have written it. The
        // barrier makes their stores visible.
        port::barrier(Site::Body);
        const Tile area = plan.tile(tile);
        const View to = direct ? places.peers_c(peer).from(area.row, area.col)
                               : places.result(peer, tile, parity);
        copy_view(to, View::of(args.c).from(area.row, area.col), area.rows, area.cols);
        count_bytes(args, Counter::Pushed, bytes_of(area, args.c.dtype));
    }

    IRIS_DEVICE void take_result(u32 tile, u32 parity) {
        const Tile area = plan.tile(tile);
        copy_view(View::of(args.c).from(area.row, area.col), places.result(me(), tile, parity),
                  area.rows, area.cols);
    }

  private:
    IRIS_DEVICE u32 me() const { return args.channel.rank; }
    IRIS_DEVICE View slot(u32 at, u32 source, u32 tile, u32 parity) const {
        return places.slot(at, source, plan.place(tile), parity, args.wire);
    }
    /// Whether the reduction only adds complete vectors of the transfer type. If so, this rank's
    /// own partial is read from A, whose elements already have the bits that would be sent.
    IRIS_DEVICE bool reads_a() const {
        if (!Producer::REPEATS) return false;
        const Matrix &a = args.a, &c = args.c;
        const u64 starts = a.address | c.address | slot(me(), 0, 0, 0).address | places.stride() | args.slot;
        const u64 widths = a.ld | c.ld | args.n | args.tile_n;
        const bool whole = a.dtype == args.wire && c.dtype == args.wire &&
                           (a.transposed | c.transposed) == 0 && args.bias.address == 0 &&
                           args.epilogue == 0 && (starts & 15) == 0 && widths % WIDTH == 0;
        if constexpr (RESIDUAL) {
            // A call without a residual passes the other conditions too: the residual's address and
            // leading dimension are then 0.
            const Matrix& residual = args.residual;
            return whole && (residual.address == 0 || residual.dtype == args.wire) &&
                   residual.transposed == 0 && (residual.address & 15) == 0 &&
                   residual.ld % WIDTH == 0;
        }
        return whole;
    }
    /// Writes this rank's partial of `tile`, rounded to the transfer type, to the slot for this
    /// rank in the inbox of rank `at`.
    IRIS_DEVICE void put(u32 at, u32 tile, u32 parity) {
        producer.write_to(slot(at, me(), tile, parity));
    }

    /// Number of partials that a thread loads at once.
    static constexpr u32 BATCH = 4;

    const OpArgs& args;
    const Places places;
    Producer producer;
    /// Whether this rank's own partials are read from A in this call: the result of reads_a().
    const bool from_a;
};

/// Code of the kernels one_shot, two_shot and reduce_scatter. Producer makes the partials: by a GEMM, or by
/// loading the message.
template <class Producer, bool RESIDUAL = false>
IRIS_DEVICE void run_one_shot(const OpArgs& args, typename Producer::Shared& shared) {
    ReduceBody<OneShotPlan, Producer, RESIDUAL> body(args, shared);
    flow::one_shot(launch_of(args, Producer::DIES), body.plan.tiles(), body);
}

template <class Producer, bool RESIDUAL = false>
IRIS_DEVICE void run_two_shot(const OpArgs& args, typename Producer::Shared& shared) {
    ReduceBody<TwoShotPlan, Producer, RESIDUAL> body(args, shared);
    flow::two_shot(launch_of(args, Producer::DIES), body.plan, args.dedicated_workgroups, body);
}

template <class Producer>
IRIS_DEVICE void run_reduce_scatter(const OpArgs& args, typename Producer::Shared& shared) {
    ReduceBody<ScatterPlan, Producer> body(args, shared);
    flow::reduce_scatter(launch_of(args, Producer::DIES), body.plan, args.dedicated_workgroups, body);
}

} // namespace iris

#endif
