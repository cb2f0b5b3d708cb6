// Kernels that need no other rank: a copy of this rank's own message, which implements every
// operator without a product in a world of one rank; an RMSNorm of the rows of C; and time stamps
// before and after a launch that writes no trace itself.
#include "iris/body/norm.h"
#include "iris/body/partial.h"

using namespace iris;

IRIS_KERNEL iris_local(IRIS_ARGS OpArgs args) {
    port::take_turn();
    LoadProducer::Shared none;
    run_local<LoadProducer>(args, none);
}

IRIS_KERNEL iris_norm(IRIS_ARGS OpArgs args) {
    port::take_turn();
    run_norm(args);
}

// Writes a time stamp, by one thread, before a GEMM (`after` is 0) or after it (`after` is 1). The
// stamp after the GEMM records a span of kind `span` for workgroup 0, about `rows` rows.
IRIS_KERNEL iris_stamp(IRIS_ARGS OpArgs args, u32 after, u64 rows, u32 span) {
    port::take_turn();
    Trace trace(args.trace, args.trace_spans, args.counters, 0);
    if (after == 1) {
        trace.end_left(static_cast<Span>(span), static_cast<u32>(rows));
    } else {
        trace.leave_begin();
    }
}
