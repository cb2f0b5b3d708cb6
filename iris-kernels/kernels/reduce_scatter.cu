// The sum over ranks of their messages, its rows split over the ranks.
#include "iris/body/deliver.h"
#include "iris/body/ll.h"
#include "iris/body/reduce.h"

using namespace iris;

IRIS_KERNEL iris_reduce_scatter(IRIS_ARGS OpArgs args) {
    port::take_turn();
    LoadProducer::Shared none;
    run_reduce_scatter<LoadProducer>(args, none);
}

// Where a copy engine moves the blocks, or workgroups in its place, for what adds them up.
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
    port::take_turn();
    run_exchange<Collective::ReduceScatter>(args);
}

IRIS_KERNEL iris_reduce_scatter_ll_pair(IRIS_ARGS OpArgs args) {
    port::take_turn();
    run_exchange_of_pair<Collective::ReduceScatter>(args);
}
