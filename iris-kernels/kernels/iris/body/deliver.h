// Bodies of ops that move data without adding: all-gather, all-to-all, broadcast, and product then
// all-gather.
#ifndef IRIS_BODY_DELIVER_H
#define IRIS_BODY_DELIVER_H

#include "iris/body/partial.h"

namespace iris {

/// Plan of an all-gather: each rank's rows go to all ranks; C has the rows of all ranks.
struct AllGatherPlan {
    SplitGrid split_grid;
    u32 me;
    IRIS_DEVICE explicit AllGatherPlan(const OpArgs& args)
        : split_grid(split_of(args)), me(args.channel.rank) {}
    IRIS_DEVICE u32 produced() const { return split_grid.part(me).tiles(); }
    IRIS_DEVICE u32 sent(u32 from, u32) const { return split_grid.part(from).tiles(); }
    /// Position of `tile` in the data that rank `from` sends, with rows counted from the first row
    /// of that data.
    IRIS_DEVICE Tile area(u32 from, u32, u32 tile) const { return split_grid.part(from).tile(tile); }
    /// First row, in this rank's A, of the data that it sends to rank `to`.
    IRIS_DEVICE u32 source_row(u32) const { return 0; }
    /// First row, in C of rank `to`, of the data from rank `from`.
    IRIS_DEVICE u32 target_row(u32 from, u32) const {
        return split(split_grid.grid.rows, split_grid.size, from).start;
    }
    /// Whether this rank itself needs `tile` of the data that it sends.
    IRIS_DEVICE bool own(u32) const { return true; }
    /// Index of the slots of `source` within an inbox.
    IRIS_DEVICE u32 place(u32 source) const { return source; }
    /// Whether this rank is a relay: it forwards data that it has received into its C.
    IRIS_DEVICE bool relays() const { return false; }
};

/// Plan of an all-to-all: block `to` of each rank's rows goes to rank `to`. C has one block per
/// source rank.
struct AllToAllPlan {
    SplitGrid split_grid;
    u32 me;
    IRIS_DEVICE explicit AllToAllPlan(const OpArgs& args)
        : split_grid(split_of(args)), me(args.channel.rank) {}
    /// Largest number of tiles of any part; no part has more tiles than part 0.
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

/// Plan of a broadcast: the root's matrix goes to all ranks.
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
    /// Index of the source's slots within an inbox: 0, since a broadcast has one source only.
    IRIS_DEVICE u32 place(u32) const { return 0; }
    IRIS_DEVICE bool relays() const { return root != me; }
};

/// Body of an op that moves data. If PRODUCT, the moved data is this rank's matrix product, which
/// the body first writes to this rank's own C.
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
            // The product is read from C, where other threads of this workgroup have written it.
            // The barrier makes their stores visible.
            port::barrier(Site::Body);
            copy_view(to, own_c(tile, area), area.rows, area.cols);
        } else {
            // If this rank relays, the received data is read from C, where other threads of this
            // workgroup have copied it. The barrier makes their stores visible.
            if (plan.relays()) port::barrier(Site::Body);
            const View from = plan.relays() ? own_c(tile, area) : own_a(peer, area);
            copy_view(to, from, area.rows, area.cols);
        }
        count_bytes(args, Counter::Pushed, bytes_of(area, args.c.dtype));
    }

    /// Copies part `part` of the data for `peer` directly into C of `peer`.
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
    // A product has no dedicated senders: the workgroup that has written a tile to C must also push
    // it.
    const u32 senders = PRODUCT ? 0 : args.dedicated_workgroups;
    flow::deliver(launch_of(args, Producer::DIES), body.plan, senders, body);
}

/// Broadcast in which one receiver of each tile, the relay, forwards the tile to the other ranks.
IRIS_DEVICE void run_relay(const OpArgs& args, LoadProducer::Shared& none) {
    DeliverBody<BroadcastPlan, LoadProducer, false> body(args, none);
    const flow::Relays relays{body.plan.grid.tiles(), args.root, args.channel.size};
    flow::relay(launch_of(args), relays, body);
}

/// Lets workgroups do the copies of a transfer in place of copy engines; `first` is the number of the
/// transfer's first signal. If A is gathered by columns, this rank's own part is copied too. If A is gathered
/// by rows, later kernels read the own part from A in place.
template <class Plan> IRIS_DEVICE void run_copies(const OpArgs& args, u32 first) {
    LoadProducer::Shared none;
    DeliverBody<Plan, LoadProducer, false> body(args, none);
    const Launch launch = launch_of(args);
    const u32 parts = args.shard == 1 ? body.plan.produced() : 0;
    for (u32 part = launch.index; part < parts; part += launch.count) body.produce(part);
    flow::copies(launch, first, body.plan, body);
}

/// Number of signals that iris_blocks uses (copies of partials to their owners). iris_results numbers its
/// signals after these.
IRIS_DEVICE u32 signals_of_blocks(const OpArgs& args) { return split_of(args).part(0).tiles(); }

} // namespace iris

#endif
