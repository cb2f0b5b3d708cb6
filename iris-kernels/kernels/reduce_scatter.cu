// Reduce-scatter of messages: each rank gets its rows of the sum of all ranks' messages.
#include "iris/body/ll.h"
#include "iris/body/reduce.h"

using namespace iris;

IRIS_KERNEL iris_reduce_scatter(IRIS_ARGS OpArgs args) {
    port::take_turn();
    LoadProducer::Shared none;
    run_reduce_scatter<LoadProducer>(args, none);
}

IRIS_KERNEL iris_reduce_scatter_ll(IRIS_ARGS OpArgs args) {
    run_exchange<Collective::ReduceScatter>(args);
}

IRIS_KERNEL iris_reduce_scatter_combine_ll(IRIS_ARGS OpArgs args) {
    run_combine<Collective::ReduceScatter>(args);
}

#if IRIS_HAS_QUADS
IRIS_KERNEL iris_reduce_scatter_ll_packs(IRIS_ARGS OpArgs args) {
    run_exchange_packs<Collective::ReduceScatter>(args);
}
#endif
