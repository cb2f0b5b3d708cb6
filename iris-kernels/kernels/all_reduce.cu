// The sum over ranks of their messages, at every rank.
#include "iris/body/accumulate.h"
#include "iris/body/ll.h"
#include "iris/body/reduce.h"

using namespace iris;

IRIS_KERNEL iris_one_shot(IRIS_ARGS OpArgs args) {
    LoadProducer::Shared none;
    run_one_shot<LoadProducer>(args, none);
}

IRIS_KERNEL iris_two_shot(IRIS_ARGS OpArgs args) {
    LoadProducer::Shared none;
    run_two_shot<LoadProducer>(args, none);
}

// The accumulating variants: zero, barrier, add, barrier, convert.
IRIS_KERNEL iris_zero(IRIS_ARGS OpArgs args) { run_zero(args); }

IRIS_KERNEL iris_add_locked(IRIS_ARGS OpArgs args) {
    LoadProducer::Shared none;
    run_add<LoadProducer, false>(args, none);
}

IRIS_KERNEL iris_add_atomic(IRIS_ARGS OpArgs args) {
    LoadProducer::Shared none;
    run_add<LoadProducer, true>(args, none);
}

IRIS_KERNEL iris_convert(IRIS_ARGS OpArgs args) { run_convert(args); }

IRIS_KERNEL iris_one_shot_ll(IRIS_ARGS OpArgs args) { run_exchange<Collective::AllReduce>(args); }
