// All-gather followed by a matrix product. A is split over the ranks by rows or by columns; each
// rank multiplies the gathered A by its own B.
#include "iris/body/gather.h"

using namespace iris;

// Kernels of the variant that pushes A to the peers; they run in the order iris_gather, barrier,
// iris_gathered.
IRIS_KERNEL iris_gather(IRIS_ARGS OpArgs args) {
    port::take_turn();
    GatherBody body(args);
    flow::gather(launch_of(args), body.parts(), body);
}

IRIS_KERNEL iris_gathered(IRIS_ARGS OpArgs args) {
    port::take_turn();
    IRIS_SHARED(Product::Shared, shared);
    GatheredBody<false> body(args, shared);
    flow::local(launch_of(args, DIES), body.tiles(), body);
}

IRIS_KERNEL iris_pull(IRIS_ARGS OpArgs args) {
    port::take_turn();
    IRIS_SHARED(Product::Shared, shared);
    GatheredBody<true> body(args, shared);
    flow::pull(launch_of(args, DIES), body.tiles(), body);
}

IRIS_KERNEL iris_staged(IRIS_ARGS OpArgs args) {
    port::take_turn();
    IRIS_SHARED(Product::Shared, shared);
    GatheredBody<true> body(args, shared);
    const StagingPlan staging{body.shards.units, args.channel.rank, body};
    // Workgroups are not renumbered by die in this kernel. The first workgroups fetch, and these
    // should be spread over all dies.
    flow::staged(launch_of(args), args.dedicated_workgroups, staging, body);
}
