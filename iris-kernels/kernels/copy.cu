// The message of this rank alone: what any op comes to in a world of one.
#include "iris/body/partial.h"

using namespace iris;

IRIS_KERNEL iris_local(IRIS_ARGS OpArgs args) {
    LoadProducer::Shared none;
    run_local<LoadProducer>(args, none);
}
