// Source of partial tiles for ops with a product: the tiles of A B.
#ifndef IRIS_GEMM_PRODUCER_H
#define IRIS_GEMM_PRODUCER_H

#include "iris/gemm/product.h"
#include "iris/body/partial.h"

namespace iris {

class GemmProducer {
  public:
    using Shared = Product::Shared;
    IRIS_DEVICE GemmProducer(const OpArgs& args, Shared& shared) : args(args), product(shared) {}

    IRIS_DEVICE void produce(const Tile& at) {
        area = at;
        product.clear();
        product.multiply(View::of(args.a).from(at.row, 0), View::of(args.b).from(0, at.col), at.rows,
                         at.cols, args.k);
    }

    /// Whether the partial stays in memory, so that it can be read again at no cost: false here, unlike in
    /// LoadProducer.
    static constexpr bool REPEATS = false;
    /// Whether another write_to() of the same tile costs no more than a copy of the tile that was written.
    static constexpr bool KEEPS = Product::KEEPS;
    /// Number of dies for launch_of(): consecutive tiles share rows of A, so one die gets consecutive tiles.
    static constexpr u32 DIES = iris::DIES;
    /// Writes the partial to `to`, rounded to the type of `to`.
    IRIS_DEVICE void write_to(const View& to) {
        emit([&](u32 row, u32 col, u32 count, Values& values) { to.store(row, col, count, values); });
    }

    /// Calls `sink(row, col, count, values)` for all vectors of the partial; `row` and `col` are relative to
    /// the partial.
    template <class Sink> IRIS_DEVICE void emit(Sink sink) {
        product.emit([&](u32 row, u32 col, Values& values) {
            if (row < area.rows && col < area.cols) {
                sink(row, col, min_of(WIDTH, area.cols - col), values);
            }
        });
    }

  private:
    const OpArgs& args;
    Product product;
    Tile area;
};

} // namespace iris

#endif
