// Every rank's rows, at every rank.
#include "iris/body/deliver.h"
#include "iris/body/ll.h"

using namespace iris;

IRIS_KERNEL iris_all_gather(IRIS_ARGS OpArgs args) {
    LoadProducer::Shared none;
    run_deliver<AllGatherPlan, LoadProducer, false>(args, none);
}

IRIS_KERNEL iris_all_gather_ll(IRIS_ARGS OpArgs args) { run_exchange<Collective::AllGather>(args); }
