// All-reduce of messages with an optional residual, followed by an RMSNorm of the rows.
// iris_one_shot_ll, the LL variant, includes the RMSNorm. These kernels are not part of
// all_reduce.cu, because the RMSNorm would increase the number of registers of the kernels there.
#include "iris/body/ll.h"
#include "iris/body/reduce.h"
#include "iris/body/sums.h"

using namespace iris;

IRIS_KERNEL iris_one_shot(IRIS_ARGS OpArgs args) {
    port::take_turn();
    LoadProducer::Shared none;
    run_one_shot<LoadProducer, true>(args, none);
}

IRIS_KERNEL iris_two_shot(IRIS_ARGS OpArgs args) {
    port::take_turn();
    LoadProducer::Shared none;
    run_two_shot<LoadProducer, true>(args, none);
}

IRIS_KERNEL iris_sums(IRIS_ARGS OpArgs args) {
    port::take_turn();
    run_sums<true>(args);
}

IRIS_KERNEL iris_one_shot_ll(IRIS_ARGS OpArgs args) {
    port::take_turn();
    run_exchange_norm(args);
}

IRIS_KERNEL iris_one_shot_combine_ll(IRIS_ARGS OpArgs args) {
    run_combine_norm(args);
}
