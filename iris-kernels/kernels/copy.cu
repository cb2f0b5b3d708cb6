// The message of this rank alone, and the norm of its rows: what any op comes to in a world of one.
#include "iris/body/norm.h"
#include "iris/body/partial.h"

using namespace iris;

IRIS_KERNEL iris_local(IRIS_ARGS OpArgs args) {
    port::take_turn();
    LoadProducer::Shared none;
    run_local<LoadProducer>(args, none);
}

IRIS_KERNEL iris_norm(IRIS_ARGS OpArgs args) {
    port::take_turn();
    run_norm(args);
}
