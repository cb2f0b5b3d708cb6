// All-reduce of messages: every rank gets the sum of all ranks' messages.
#include "iris/body/accumulate.h"
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

IRIS_KERNEL iris_one_shot_ll(IRIS_ARGS OpArgs args) {
    run_exchange<Collective::AllReduce>(args);
}

IRIS_KERNEL iris_one_shot_combine_ll(IRIS_ARGS OpArgs args) {
    run_combine<Collective::AllReduce>(args);
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
