// The product of this rank alone: no words, no call number.
#include "iris/gemm.h"

using namespace iris;

IRIS_KERNEL iris_local(IRIS_ARGS OpArgs args) {
    IRIS_SHARED(Product::Shared, shared);
    GemmProducer producer(args, shared);
    Trace trace(args.trace, args.trace_spans, args.counters, port::workgroup());
    const View c = View::of(args.c);
    const Grid grid = grid_of(args);
    for (u32 tile = port::workgroup(); tile < grid.tiles(); tile += port::workgroups()) {
        trace.begin(Span::Gemm, tile);
        const Tile area = grid.tile(tile);
        producer.produce(area);
        producer.emit([&](u32 row, u32 col, u32 count, Values& values) {
            finish_values(args, area.col + col, count, values);
            c.store(area.row + row, area.col + col, count, values);
        });
        trace.end(Span::Gemm);
    }
}
