// The body of ops that move data without adding: all-gather, all-to-all, broadcast, and all-gather
// of a product.
#ifndef IRIS_BODY_DELIVER_H
#define IRIS_BODY_DELIVER_H

#include "iris/body/partial.h"

namespace iris {

/// Every rank's rows to all: C has the rows of all ranks.
struct AllGatherPlan {
    SplitGrid split_grid;
    u32 me;
    IRIS_DEVICE explicit AllGatherPlan(const OpArgs& args)
        : split_grid(split_of(args)), me(args.channel.rank) {}
    IRIS_DEVICE u32 produced() const { return split_grid.part(me).tiles(); }
    IRIS_DEVICE u32 sent(u32 from, u32) const { return split_grid.part(from).tiles(); }
    /// The rectangle, counted from the first row that `from` sends to `to`.
    IRIS_DEVICE Tile area(u32 from, u32, u32 tile) const { return split_grid.part(from).tile(tile); }
    /// The first row in A of what a rank sends to `to`.
    IRIS_DEVICE u32 source_row(u32) const { return 0; }
    /// The first row in C of `to` of what `from` sends.
    IRIS_DEVICE u32 target_row(u32 from, u32) const {
        return split(split_grid.grid.rows, split_grid.size, from).start;
    }
    /// Whether this rank itself wants `tile` of what it sends.
    IRIS_DEVICE bool own(u32) const { return true; }
    /// The source's place in an inbox.
    IRIS_DEVICE u32 place(u32 source) const { return source; }
    /// Whether what this rank sends is what it got, which lies in C.
    IRIS_DEVICE bool relays() const { return false; }
};

/// Block `to` of every rank's rows to rank `to`: C has one such block a source.
struct AllToAllPlan {
    SplitGrid split_grid;
    u32 me;
    IRIS_DEVICE explicit AllToAllPlan(const OpArgs& args)
        : split_grid(split_of(args)), me(args.channel.rank) {}
    /// The first parts are the largest.
    IRIS_DEVICE u32 produced() const { return split_grid.part(0).tiles(); }
    IRIS_DEVICE u32 sent(u32, u32 to) const { return split_grid.part(to).tiles(); }
    IRIS_DEVICE Tile area(u32, u32 to, u32 tile) const { return split_grid.part(to).tile(tile); }
    IRIS_DEVICE u32 source_row(u32 to) const {
        return split(split_grid.grid.rows, split_grid.size, to).start;
    }
    IRIS_DEVICE u32 target_row(u32 from, u32 to) const { return from * split_grid.part(to).rows; }
    IRIS_DEVICE bool own(u32 tile) const { return tile < split_grid.part(me).tiles(); }
    IRIS_DEVICE u32 place(u32 source) const { return source; }
    IRIS_DEVICE bool relays() const { return false; }
};

/// The root's matrix to all.
struct BroadcastPlan {
    Grid grid;
    u32 me, root;
    IRIS_DEVICE explicit BroadcastPlan(const OpArgs& args)
        : grid(grid_of(args)), me(args.channel.rank), root(args.root) {}
    IRIS_DEVICE u32 produced() const { return root == me ? grid.tiles() : 0; }
    IRIS_DEVICE u32 sent(u32 from, u32) const { return root == from ? grid.tiles() : 0; }
    IRIS_DEVICE Tile area(u32, u32, u32 tile) const { return grid.tile(tile); }
    IRIS_DEVICE u32 source_row(u32) const { return 0; }
    IRIS_DEVICE u32 target_row(u32, u32) const { return 0; }
    IRIS_DEVICE bool own(u32) const { return true; }
    /// A tile comes from one rank.
    IRIS_DEVICE u32 place(u32) const { return 0; }
    IRIS_DEVICE bool relays() const { return root != me; }
};

/// PRODUCT: what is sent is this rank's product, which goes through its own C.
template <class Plan, class Producer, bool PRODUCT> class DeliverBody {
  public:
    IRIS_DEVICE DeliverBody(const OpArgs& args, typename Producer::Shared& shared)
        : plan(args), args(args), places{args}, producer(args, shared) {}

    const Plan plan;

    IRIS_DEVICE void produce(u32 tile) {
        if (!plan.own(tile)) return;
        const Tile area = plan.area(me(), me(), tile);
        const View c = own_c(tile, area);
        if constexpr (PRODUCT) {
            producer.produce(area);
            producer.emit([&](u32 row, u32 col, u32 count, Values& values) {
                finish_values(args, area.col + col, count, values);
                c.store(row, col, count, values);
            });
        } else {
            copy_view(c, own_a(me(), area), area.rows, area.cols);
        }
    }

    IRIS_DEVICE void push(u32 peer, u32 tile, u32 parity, bool direct) {
        const Tile area = plan.area(me(), peer, tile);
        const View to =
            direct ? places.peers_c(peer).from(plan.target_row(me(), peer) + area.row, area.col)
                   : places.slot(peer, plan.place(me()), tile, parity, args.c.dtype);
        if constexpr (PRODUCT) {
            // The product, which other threads have written to C.
            port::barrier(Site::Body);
            copy_view(to, own_c(tile, area), area.rows, area.cols);
        } else {
            // What this rank got, other threads may have copied to C.
            if (plan.relays()) port::barrier(Site::Body);
            const View from = plan.relays() ? own_c(tile, area) : own_a(peer, area);
            copy_view(to, from, area.rows, area.cols);
        }
        count_bytes(args, Counter::Pushed, bytes_of(area, args.c.dtype));
    }

    /// The part of what the peer gets, straight into its C.
    IRIS_DEVICE void copy(u32 peer, u32 part) { push(peer, part, 0, true); }

    IRIS_DEVICE void take(u32 source, u32 tile, u32 parity) {
        const Tile area = plan.area(source, me(), tile);
        const View c = View::of(args.c).from(plan.target_row(source, me()) + area.row, area.col);
        copy_view(c, places.slot(me(), plan.place(source), tile, parity, args.c.dtype), area.rows,
                  area.cols);
    }

  private:
    IRIS_DEVICE u32 me() const { return args.channel.rank; }
    IRIS_DEVICE View own_c(u32, const Tile& area) const {
        return View::of(args.c).from(plan.target_row(me(), me()) + area.row, area.col);
    }
    IRIS_DEVICE View own_a(u32 to, const Tile& area) const {
        return View::of(args.a).from(plan.source_row(to) + area.row, area.col);
    }

    const OpArgs& args;
    const Places places;
    Producer producer;
};

template <class Plan, class Producer, bool PRODUCT>
IRIS_DEVICE void run_deliver(const OpArgs& args, typename Producer::Shared& shared) {
    DeliverBody<Plan, Producer, PRODUCT> body(args, shared);
    // What a product is pushed from is C.
    const u32 senders = PRODUCT ? 0 : args.movers;
    flow::deliver(launch_of(args, Producer::DIES), body.plan, senders, body);
}

/// A broadcast by one of those that get a tile.
IRIS_DEVICE void run_relay(const OpArgs& args, LoadProducer::Shared& none) {
    DeliverBody<BroadcastPlan, LoadProducer, false> body(args, none);
    const flow::Relays relays{body.plan.grid.tiles(), args.root, args.channel.size};
    flow::relay(launch_of(args), relays, body);
}

/// What copy engines move, by workgroups; `first` is the number of its first signal. This rank's own rows
/// go to itself, too, where they are gathered with those of others by columns, since by rows they are read
/// where they lie.
template <class Plan> IRIS_DEVICE void run_copies(const OpArgs& args, u32 first) {
    LoadProducer::Shared none;
    DeliverBody<Plan, LoadProducer, false> body(args, none);
    const Launch launch = launch_of(args);
    const u32 parts = args.shard == 1 ? body.plan.produced() : 0;
    for (u32 part = launch.index; part < parts; part += launch.count) body.produce(part);
    flow::copies(launch, first, body.plan, body);
}

/// What copies of blocks have signals for: those of results are behind them.
IRIS_DEVICE u32 signals_of_blocks(const OpArgs& args) { return split_of(args).part(0).tiles(); }

} // namespace iris

#endif
