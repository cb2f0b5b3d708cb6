// The matrix of one rank, at every rank.
#include "iris/body/deliver.h"

using namespace iris;

IRIS_KERNEL iris_broadcast(IRIS_ARGS OpArgs args) {
    LoadProducer::Shared none;
    run_deliver<BroadcastPlan, LoadProducer, false>(args, none);
}
