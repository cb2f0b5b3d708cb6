// Every rank's rows, at every rank.
#include "iris/body/deliver.h"

using namespace iris;

IRIS_KERNEL iris_all_gather(IRIS_ARGS OpArgs args) {
    LoadProducer::Shared none;
    run_deliver<AllGatherPlan, LoadProducer, false>(args, none);
}
