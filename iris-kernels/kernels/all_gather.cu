// All-gather of messages: every rank gets all ranks' rows.
#include "iris/body/deliver.h"
#include "iris/body/ll.h"
#include "iris/body/sums.h"

using namespace iris;

IRIS_KERNEL iris_all_gather(IRIS_ARGS OpArgs args) {
    port::take_turn();
    LoadProducer::Shared none;
    run_deliver<AllGatherPlan, LoadProducer, false>(args, none);
}

// Kernels of the all-gather whose transfers are done by copy engines, or by workgroups in place of
// copy engines (iris_copies). Later kernels can read the rows part by part as they arrive.
IRIS_KERNEL iris_open(IRIS_ARGS OpArgs args) {
    port::take_turn();
    flow::open(launch_of(args));
}

IRIS_KERNEL iris_copies(IRIS_ARGS OpArgs args) {
    port::take_turn();
    run_copies<AllGatherPlan>(args, 0);
}

IRIS_KERNEL iris_gate(IRIS_ARGS OpArgs args, u32 source, u64 first, u32 parts) {
    port::take_turn();
    flow::gate(launch_of(args), source, static_cast<u32>(first), parts);
}

IRIS_KERNEL iris_sums(IRIS_ARGS OpArgs args) {
    port::take_turn();
    run_sums<false>(args);
}

IRIS_KERNEL iris_close(IRIS_ARGS OpArgs args) {
    port::take_turn();
    flow::close(launch_of(args));
}

IRIS_KERNEL iris_all_gather_ll(IRIS_ARGS OpArgs args) {
    run_exchange<Collective::AllGather>(args);
}

#if IRIS_HAS_QUADS
IRIS_KERNEL iris_all_gather_ll_packs(IRIS_ARGS OpArgs args) {
    run_exchange_packs<Collective::AllGather>(args);
}
#endif
