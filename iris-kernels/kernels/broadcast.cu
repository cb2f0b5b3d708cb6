// Broadcast: every rank gets the root's matrix.
#include "iris/body/deliver.h"
#include "iris/body/ll.h"

using namespace iris;

IRIS_KERNEL iris_broadcast(IRIS_ARGS OpArgs args) {
    port::take_turn();
    LoadProducer::Shared none;
    run_deliver<BroadcastPlan, LoadProducer, false>(args, none);
}

IRIS_KERNEL iris_relay(IRIS_ARGS OpArgs args) {
    port::take_turn();
    LoadProducer::Shared none;
    run_relay(args, none);
}

IRIS_KERNEL iris_broadcast_ll(IRIS_ARGS OpArgs args) {
    run_exchange<Collective::Broadcast>(args);
}

#if IRIS_HAS_QUADS
IRIS_KERNEL iris_broadcast_ll_packs(IRIS_ARGS OpArgs args) {
    run_exchange_packs<Collective::Broadcast>(args);
}
#endif

IRIS_KERNEL iris_relay_ll(IRIS_ARGS OpArgs args) {
    run_two_shot_ll<RelayBody>(args);
}

#if IRIS_HAS_QUADS
IRIS_KERNEL iris_relay_ll_packs(IRIS_ARGS OpArgs args) {
    run_two_shot_packs<RelayBody>(args);
}
#endif
