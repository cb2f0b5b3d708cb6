// Matrix product of this rank alone, without communication.
#include "iris/gemm/producer.h"

using namespace iris;

IRIS_KERNEL iris_local(IRIS_ARGS OpArgs args) {
    port::take_turn();
    IRIS_SHARED(Product::Shared, shared);
    run_local<GemmProducer>(args, shared);
}
