// Kernels that surround the copies of copy engines, for all operators: they open the call, wait for parts
// that have arrived, add them up, and close the call. iris_copies, iris_blocks and iris_results let
// workgroups copy in place of a copy engine. Sums with an RMSNorm are in all_reduce_norm.cu.
#include "iris/body/deliver.h"
#include "iris/body/sums.h"

using namespace iris;

IRIS_KERNEL iris_open(IRIS_ARGS OpArgs args) {
    port::take_turn();
    flow::open(launch_of(args));
}

IRIS_KERNEL iris_copies(IRIS_ARGS OpArgs args) {
    port::take_turn();
    run_copies<AllGatherPlan>(args, 0);
}

IRIS_KERNEL iris_blocks(IRIS_ARGS OpArgs args) {
    port::take_turn();
    run_copies<AllToAllPlan>(args, 0);
}

// Copies of an all-reduce that send finished rows to all ranks. Their signals are numbered after those of
// iris_blocks, which sends partials to the owners of the rows.
IRIS_KERNEL iris_results(IRIS_ARGS OpArgs args) {
    port::take_turn();
    run_copies<AllGatherPlan>(args, signals_of_blocks(args));
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
