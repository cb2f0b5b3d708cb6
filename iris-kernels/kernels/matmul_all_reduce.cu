// Matrix product followed by an all-reduce: every rank gets the sum of all ranks' products.
#include "iris/body/accumulate.h"
#include "iris/gemm/producer.h"
#include "iris/body/reduce.h"

using namespace iris;

IRIS_KERNEL iris_one_shot(IRIS_ARGS OpArgs args) {
    port::take_turn();
    IRIS_SHARED(Product::Shared, shared);
    run_one_shot<GemmProducer>(args, shared);
}

IRIS_KERNEL iris_two_shot(IRIS_ARGS OpArgs args) {
    port::take_turn();
    IRIS_SHARED(Product::Shared, shared);
    run_two_shot<GemmProducer>(args, shared);
}

// Kernels of the variants that accumulate in a workspace, in the order zero, barrier, add, barrier,
// convert.
IRIS_KERNEL iris_zero(IRIS_ARGS OpArgs args) {
    port::take_turn();
    run_zero(args);
}

IRIS_KERNEL iris_add_locked(IRIS_ARGS OpArgs args) {
    port::take_turn();
    IRIS_SHARED(Product::Shared, shared);
    run_add<GemmProducer, false>(args, shared);
}

IRIS_KERNEL iris_add_atomic(IRIS_ARGS OpArgs args) {
    port::take_turn();
    IRIS_SHARED(Product::Shared, shared);
    run_add<GemmProducer, true>(args, shared);
}

IRIS_KERNEL iris_convert(IRIS_ARGS OpArgs args) {
    port::take_turn();
    run_convert(args);
}
