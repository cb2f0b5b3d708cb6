// The sum over ranks of their messages, its rows split over the ranks.
#include "iris/body/ll.h"
#include "iris/body/reduce.h"

using namespace iris;

IRIS_KERNEL iris_reduce_scatter(IRIS_ARGS OpArgs args) {
    LoadProducer::Shared none;
    run_reduce_scatter<LoadProducer>(args, none);
}

IRIS_KERNEL iris_reduce_scatter_ll(IRIS_ARGS OpArgs args) {
    run_exchange<Collective::ReduceScatter>(args);
}
