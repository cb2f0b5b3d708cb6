// Partials that are products of A and B.
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

    /// Write the partial to a view, rounded to its type: once, since it is in registers.
    static constexpr bool REPEATS = false;
    /// Or as often, where the product says so.
    static constexpr bool KEEPS = Product::KEEPS;
    /// Tiles that follow each other share rows of A: a die takes them.
    static constexpr u32 DIES = iris::DIES;
    IRIS_DEVICE void write_to(const View& to) {
        emit([&](u32 row, u32 col, u32 count, Values& values) { to.store(row, col, count, values); });
    }

    /// Call `sink(row, col, count, values)` for all vectors of the partial, counted from its corner.
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
