// The sum over ranks of their messages, at every rank, with a residual, ahead of the norm of its rows; and with
// the norm, of words that carry their data. Kernels of their own, as those of plain sums have not the registers
// for it.
#include "iris/body/ll.h"
#include "iris/body/reduce.h"

using namespace iris;

IRIS_KERNEL iris_one_shot(IRIS_ARGS OpArgs args) {
    port::let_next_begin();
    LoadProducer::Shared none;
    run_one_shot<LoadProducer, true>(args, none);
}

IRIS_KERNEL iris_two_shot(IRIS_ARGS OpArgs args) {
    port::let_next_begin();
    LoadProducer::Shared none;
    run_two_shot<LoadProducer, true>(args, none);
}

IRIS_KERNEL iris_one_shot_ll(IRIS_ARGS OpArgs args) { run_exchange_norm(args); }
