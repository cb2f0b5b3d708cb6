// Kernel of the baseline of an all-reduce with RMSNorm: C += residual, and the RMSNorm of the rows
// of C, one workgroup per row.
#include "iris/body/norm.h"
#include "iris/body/partial.h"

using namespace iris;

IRIS_KERNEL add_norm(IRIS_ARGS OpArgs args) {
    for (u32 row = port::workgroup(); row < args.m; row += port::workgroups()) {
        LoadProducer::Shared none;
        LoadProducer sum(args, none);
        sum.produce(Tile{row, 0, 1, args.n});
        sum.emit([&](u32, u32 col, u32 count, Values& values) {
            add_residual(args, row, col, count, values);
            View::of(args.c).store(row, col, count, values);
        });
        norm_row(args, row);
    }
}
