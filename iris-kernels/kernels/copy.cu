// The message of this rank alone, and the norm of its rows: what any op comes to in a world of one. And the times
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

// One thread before a GEMM, and one after it (`after` is 1), which is a `span` of the first workgroup's, about `rows`
// rows.
IRIS_KERNEL iris_stamp(IRIS_ARGS OpArgs args, u32 after, u64 rows, u32 span) {
    port::take_turn();
    Trace trace(args.trace, args.trace_spans, args.counters, 0);
    if (after == 1) {
        trace.end_left(static_cast<Span>(span), static_cast<u32>(rows));
    } else {
        trace.leave_begin();
    }
}
