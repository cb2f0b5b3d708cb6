// Body of the all-reduce that adds partial tiles into f32 workspaces; the workspace of a tile is in
// the memory of the tile's owner.
#ifndef IRIS_BODY_ACCUMULATE_H
#define IRIS_BODY_ACCUMULATE_H

#include "iris/body/partial.h"

namespace iris {

template <class Producer, bool ATOMIC> class AccumulateBody {
  public:
    IRIS_DEVICE AccumulateBody(const OpArgs& args, typename Producer::Shared& shared)
        : args(args), places{args}, grid(grid_of(args)), producer(args, shared) {}

    IRIS_DEVICE u32 tiles() const { return grid.tiles(); }

    IRIS_DEVICE void zero(u32 tile) {
        const View sum = places.workspace(args.channel.rank, tile);
        const Tile area = grid.tile(tile);
        for_each_vector(area.rows, area.cols, [&](u32 row, u32 col, u32 count) {
            sum.store(row, col, count, Values{});
        });
    }

    IRIS_DEVICE void produce(u32 tile) { producer.produce(grid.tile(tile)); }

    IRIS_DEVICE void add(u32 owner, u32 tile) {
        const View sum = places.workspace(owner, tile);
        producer.emit([&](u32 row, u32 col, u32 count, Values& values) {
            // Partials are rounded to the transfer type before they are added, so that the sums
            // equal those of the other variants.
            IRIS_UNROLL
            for (u32 i = 0; i < WIDTH; ++i) values.v[i] = rounded(args.wire, values.v[i]);
            if constexpr (ATOMIC) {
                IRIS_UNROLL
                for (u32 i = 0; i < WIDTH; ++i) {
                    if (i < count) port::add_f32<Scope::System>(sum.at(row, col + i), values.v[i]);
                }
            } else {
                Values all = sum.load(row, col, count);
                hold<Hold::Adding>(args.channel.rank);
                IRIS_UNROLL
                for (u32 i = 0; i < WIDTH; ++i) all.v[i] += values.v[i];
                sum.store(row, col, count, all);
            }
        });
        if (owner != args.channel.rank) {
            count_bytes(args, Counter::Pushed, bytes_of(grid.tile(tile), F32));
        }
    }

    IRIS_DEVICE void convert(u32 owner, u32 tile) {
        const View sum = places.workspace(owner, tile);
        const Tile area = grid.tile(tile);
        const View c = View::of(args.c).from(area.row, area.col);
        for_each_vector(area.rows, area.cols, [&](u32 row, u32 col, u32 count) {
            Values values = sum.load(row, col, count);
            finish_values(args, area.col + col, count, values);
            c.store(row, col, count, values);
        });
        if (owner != args.channel.rank) count_bytes(args, Counter::Pulled, bytes_of(area, F32));
    }

  private:
    const OpArgs& args;
    const Places places;
    const Grid grid;
    Producer producer;
};

template <class Producer, bool ATOMIC>
IRIS_DEVICE void run_add(const OpArgs& args, typename Producer::Shared& shared) {
    AccumulateBody<Producer, ATOMIC> body(args, shared);
    const u32 size = args.channel.size;
    flow::add(
        launch_of(args, Producer::DIES), body.tiles(),
        [=](u32 tile) { return owner_of(tile, size); }, !ATOMIC, body);
}

// Functions of the kernels that zero the workspace and that read it. They do not depend on the
// producer of partials.
IRIS_DEVICE void run_zero(const OpArgs& args) {
    LoadProducer::Shared none;
    AccumulateBody<LoadProducer, false> body(args, none);
    const u32 size = args.channel.size;
    flow::zero(
        launch_of(args), body.tiles(), [=](u32 tile) { return owner_of(tile, size); }, body);
}

IRIS_DEVICE void run_convert(const OpArgs& args) {
    LoadProducer::Shared none;
    AccumulateBody<LoadProducer, false> body(args, none);
    const u32 size = args.channel.size;
    flow::convert(
        launch_of(args), body.tiles(), [=](u32 tile) { return owner_of(tile, size); }, body);
}

} // namespace iris

#endif
