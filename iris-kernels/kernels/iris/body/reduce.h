// The body of all-reduce (one_shot, two_shot) and reduce-scatter, over a producer of partials.
#ifndef IRIS_BODY_REDUCE_H
#define IRIS_BODY_REDUCE_H

#include "iris/body/sums.h"

namespace iris {

/// Which tiles there are, who owns them, and in which order their partials are added.
struct OneShotPlan {
    /// All ranks add up all tiles: 0, 1, 2 ...
    static constexpr bool OWN_FIRST = false;
    Grid grid;
    IRIS_DEVICE explicit OneShotPlan(const OpArgs& args) : grid(grid_of(args)) {}
    IRIS_DEVICE u32 tiles() const { return grid.tiles(); }
    IRIS_DEVICE Tile tile(u32 tile) const { return grid.tile(tile); }
    IRIS_DEVICE Tile result(u32 tile) const { return grid.tile(tile); }
    IRIS_DEVICE u32 place(u32 tile) const { return tile; }
};

struct TwoShotPlan {
    /// Owners take turns; own partial first, then ascending.
    static constexpr bool OWN_FIRST = true;
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

struct ScatterPlan {
    /// Owners have blocks of rows; own partial first, then ascending.
    static constexpr bool OWN_FIRST = true;
    SplitGrid split;
    IRIS_DEVICE explicit ScatterPlan(const OpArgs& args) : split(split_of(args)) {}
    /// The first parts are the largest.
    IRIS_DEVICE u32 most() const { return split.part(0).tiles(); }
    IRIS_DEVICE bool owned(u32 owner, u32 place, u32& tile) const {
        tile = split.first(owner) + place;
        return place < split.part(owner).tiles();
    }
    /// Where the tile lies in the whole product.
    IRIS_DEVICE Tile tile(u32 tile) const { return split.tile(tile); }
    /// Where it lies in C of the rank that adds it up.
    IRIS_DEVICE Tile result(u32 tile) const {
        return split.part(split.owner(tile)).tile(place(tile));
    }
    /// Its place in an inbox.
    IRIS_DEVICE u32 place(u32 tile) const { return tile - split.first(split.owner(tile)); }
};

/// RESIDUAL: one is added, where there is one. The kernels that never do are not those that may.
template <class Plan, class Producer, bool RESIDUAL = false> class ReduceBody {
  public:
    IRIS_DEVICE ReduceBody(const OpArgs& args, typename Producer::Shared& shared)
        : plan(args), args(args), places{args}, producer(args, shared), from_a(reads_a()) {}

    const Plan plan;
    static constexpr bool AT_ONCE = Producer::REPEATS;

    IRIS_DEVICE void produce(u32 tile) { producer.produce(plan.tile(tile)); }

    IRIS_DEVICE void keep(u32 tile, u32 parity) {
        // In A it lies already.
        if (!from_a) put(me(), tile, parity);
    }

    IRIS_DEVICE void push(u32 peer, u32 tile, u32 parity) {
        if constexpr (Plan::OWN_FIRST || Producer::KEEPS) {
            put(peer, tile, parity);
        } else {
            // What keep has left in our own slot goes to everybody.
            port::barrier(Site::Body);
            const Tile area = plan.tile(tile);
            copy_view(slot(peer, me(), tile, parity), slot(me(), me(), tile, parity), area.rows,
                      area.cols);
        }
        count_bytes(args, Counter::Pushed, bytes_of(plan.tile(tile), args.wire));
    }

    /// In the order of the plan, this rank's own partial after its rounding too: the same bits
    /// wherever it is done.
    IRIS_DEVICE void reduce(u32 tile, u32 parity) {
        // Our own partial, which other threads have written.
        port::barrier(Site::Body);
        const Tile at = plan.result(tile);
        const View c = View::of(args.c).from(at.row, at.col);
        const u32 first = Plan::OWN_FIRST ? me() : 0, size = args.channel.size;
        const View slots = slot(me(), 0, tile, parity);
        const u64 apart = places.apart();
        const u32 wire = args.wire;
        if (from_a) {
            const Tile from = plan.tile(tile);
            const View own = View::of(args.a).from(from.row, from.col);
            const Matrix& residual = args.residual;
            const u64 on_top = residual.address == 0 ? 0 : View::of(residual).at(at.row, at.col);
            const Sources sources{own.address, own.ld, slots.address, slots.ld,
                                  apart,       me(),   first,         size,
                                  on_top,      residual.ld};
            return add_whole<RESIDUAL>(c, sources, at.rows, at.cols);
        }
        for_each_vector(at.rows, at.cols, [&](u32 row, u32 col, u32 count) {
            Values sum;
            // All of a batch are under way before the first is looked at.
            for (u32 begin = 0; begin < size; begin += BATCH) {
                Raw raw[BATCH];
                u64 place[BATCH];
                IRIS_UNROLL
                for (u32 i = 0; i < BATCH; ++i) {
                    if (begin + i >= size) break;
                    place[i] = slots.at(row, col) + source_in_turn(begin + i, first) * apart;
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
        // The result, which other threads have written to C.
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
    /// Whether sums of whole vectors of one type are all there is to do: then this rank's own partial,
    /// which has the bits that would travel, is read where it lies in A.
    IRIS_DEVICE bool reads_a() const {
        if (!Producer::REPEATS) return false;
        const Matrix &a = args.a, &c = args.c;
        const u64 starts = a.address | c.address | slot(me(), 0, 0, 0).address | places.apart() | args.slot;
        const u64 widths = a.ld | c.ld | args.n | args.tile_n;
        const bool whole = a.dtype == args.wire && c.dtype == args.wire &&
                           (a.transposed | c.transposed) == 0 && args.bias.address == 0 &&
                           args.epilogue == 0 && (starts & 15) == 0 && widths % WIDTH == 0;
        if constexpr (RESIDUAL) {
            // One that there is not has neither address nor leading dimension.
            const Matrix& residual = args.residual;
            return whole && (residual.address == 0 || residual.dtype == args.wire) &&
                   residual.transposed == 0 && (residual.address & 15) == 0 &&
                   residual.ld % WIDTH == 0;
        }
        return whole;
    }
    /// Write the partial at hand to this rank's place at `at`, rounded to the wire's type.
    IRIS_DEVICE void put(u32 at, u32 tile, u32 parity) {
        producer.write_to(slot(at, me(), tile, parity));
    }

    /// Partials that a thread reads at once.
    static constexpr u32 BATCH = 4;

    const OpArgs& args;
    const Places places;
    Producer producer;
    /// What reads_a says of this call.
    const bool from_a;
};

/// The kernels, over either producer.
template <class Producer, bool RESIDUAL = false>
IRIS_DEVICE void run_one_shot(const OpArgs& args, typename Producer::Shared& shared) {
    ReduceBody<OneShotPlan, Producer, RESIDUAL> body(args, shared);
    flow::one_shot(launch_of(args, Producer::DIES), body.plan.tiles(), body);
}

template <class Producer, bool RESIDUAL = false>
IRIS_DEVICE void run_two_shot(const OpArgs& args, typename Producer::Shared& shared) {
    ReduceBody<TwoShotPlan, Producer, RESIDUAL> body(args, shared);
    flow::two_shot(launch_of(args, Producer::DIES), body.plan, args.movers, body);
}

template <class Producer>
IRIS_DEVICE void run_reduce_scatter(const OpArgs& args, typename Producer::Shared& shared) {
    ReduceBody<ScatterPlan, Producer> body(args, shared);
    flow::reduce_scatter(launch_of(args, Producer::DIES), body.plan, args.movers, body);
}

} // namespace iris

#endif
