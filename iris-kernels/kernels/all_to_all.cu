// All-to-all: rank r gets block r of every rank's rows.
#include "iris/body/deliver.h"
#include "iris/body/ll.h"

using namespace iris;

IRIS_KERNEL iris_all_to_all(IRIS_ARGS OpArgs args) {
    port::take_turn();
    LoadProducer::Shared none;
    run_deliver<AllToAllPlan, LoadProducer, false>(args, none);
}

IRIS_KERNEL iris_all_to_all_ll(IRIS_ARGS OpArgs args) {
    run_exchange<Collective::AllToAll>(args);
}

#if IRIS_HAS_QUADS
IRIS_KERNEL iris_all_to_all_ll_packs(IRIS_ARGS OpArgs args) {
    run_exchange_packs<Collective::AllToAll>(args);
}
#endif
