// All-reduce of messages: every rank gets the sum of all ranks' messages.
#include "iris/body/accumulate.h"
#include "iris/body/deliver.h"
#include "iris/body/ll.h"
#include "iris/body/reduce.h"

using namespace iris;

IRIS_KERNEL iris_one_shot(IRIS_ARGS OpArgs args) {
    port::take_turn();
    LoadProducer::Shared none;
    run_one_shot<LoadProducer>(args, none);
}

IRIS_KERNEL iris_two_shot(IRIS_ARGS OpArgs args) {
    port::take_turn();
    LoadProducer::Shared none;
    run_two_shot<LoadProducer>(args, none);
}

// Kernels of the variants that accumulate in a workspace, in the order zero, barrier, add, barrier,
// convert.
IRIS_KERNEL iris_zero(IRIS_ARGS OpArgs args) {
    port::take_turn();
    run_zero(args);
}

IRIS_KERNEL iris_add_locked(IRIS_ARGS OpArgs args) {
    port::take_turn();
    LoadProducer::Shared none;
    run_add<LoadProducer, false>(args, none);
}

IRIS_KERNEL iris_add_atomic(IRIS_ARGS OpArgs args) {
    port::take_turn();
    LoadProducer::Shared none;
    run_add<LoadProducer, true>(args, none);
}

IRIS_KERNEL iris_convert(IRIS_ARGS OpArgs args) {
    port::take_turn();
    run_convert(args);
}

// Kernels of the all-reduce whose transfers are done by copy engines, or by workgroups in place of
// copy engines (iris_blocks, iris_results). iris_sums adds the received blocks.
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

IRIS_KERNEL iris_results(IRIS_ARGS OpArgs args) {
    port::take_turn();
    run_copies<AllGatherPlan>(args, signals_of_blocks(args));
}

IRIS_KERNEL iris_sums(IRIS_ARGS OpArgs args) {
    port::take_turn();
    run_sums<false>(args);
}

IRIS_KERNEL iris_close(IRIS_ARGS OpArgs args) {
    port::take_turn();
    flow::close(launch_of(args));
}

IRIS_KERNEL iris_one_shot_ll(IRIS_ARGS OpArgs args) {
    run_exchange<Collective::AllReduce>(args);
}

#if IRIS_HAS_QUADS
IRIS_KERNEL iris_one_shot_ll_packs(IRIS_ARGS OpArgs args) {
    run_exchange_packs<Collective::AllReduce>(args);
}
#endif

IRIS_KERNEL iris_two_shot_ll(IRIS_ARGS OpArgs args) {
    run_two_shot_ll<SumBody>(args);
}

#if IRIS_HAS_QUADS
IRIS_KERNEL iris_two_shot_ll_packs(IRIS_ARGS OpArgs args) {
    run_two_shot_packs<SumBody>(args);
}
#endif
