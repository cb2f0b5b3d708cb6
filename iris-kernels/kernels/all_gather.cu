// All-gather of messages: every rank gets all ranks' rows.
#include "iris/body/deliver.h"
#include "iris/body/ll.h"
#include "iris/body/ll_list.h"

using namespace iris;

IRIS_KERNEL iris_all_gather(IRIS_ARGS OpArgs args) {
    port::take_turn();
    LoadProducer::Shared none;
    run_deliver<AllGatherPlan, LoadProducer, false>(args, none);
}

IRIS_KERNEL iris_all_gather_ll(IRIS_ARGS OpArgs args) {
    run_exchange<Collective::AllGather>(args);
}

IRIS_KERNEL iris_all_gather_list_ll(IRIS_ARGS OpArgs args) {
    run_gather_list(args);
}

#if IRIS_HAS_QUADS
IRIS_KERNEL iris_all_gather_ll_packs(IRIS_ARGS OpArgs args) {
    run_exchange_packs<Collective::AllGather>(args);
}
#endif
