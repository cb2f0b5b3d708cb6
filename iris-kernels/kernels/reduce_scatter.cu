// Reduce-scatter of messages: each rank gets its rows of the sum of all ranks' messages.
#include "iris/body/deliver.h"
#include "iris/body/ll.h"
#include "iris/body/reduce.h"

using namespace iris;

IRIS_KERNEL iris_reduce_scatter(IRIS_ARGS OpArgs args) {
    port::take_turn();
    LoadProducer::Shared none;
    run_reduce_scatter<LoadProducer>(args, none);
}

// Kernels of the reduce-scatter whose transfers are done by copy engines, or by workgroups in place
// of copy engines (iris_blocks). iris_sums adds the received blocks.
IRIS_KERNEL iris_open(IRIS_ARGS OpArgs args) {
    port::take_turn();
    flow::open(launch_of(args));
}

IRIS_KERNEL iris_blocks(IRIS_ARGS OpArgs args) {
    port::take_turn();
    run_copies<AllToAllPlan>(args, 0);
}

IRIS_KERNEL iris_gate(IRIS_ARGS OpArgs args, u32 source, u64 first, u32 parts) {
    port::take_turn();
    flow::gate(launch_of(args), source, static_cast<u32>(first), parts);
}

IRIS_KERNEL iris_sums(IRIS_ARGS OpArgs args) {
    port::take_turn();
    run_sums<false>(args);
}

IRIS_KERNEL iris_close(IRIS_ARGS OpArgs args) {
    port::take_turn();
    flow::close(launch_of(args));
}

IRIS_KERNEL iris_reduce_scatter_ll(IRIS_ARGS OpArgs args) {
    run_exchange<Collective::ReduceScatter>(args);
}

#if IRIS_HAS_QUADS
IRIS_KERNEL iris_reduce_scatter_ll_packs(IRIS_ARGS OpArgs args) {
    run_exchange_packs<Collective::ReduceScatter>(args);
}
#endif
