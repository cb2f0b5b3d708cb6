// Every rank's rows of the product, at every rank.
#include "iris/body/deliver.h"
#include "iris/gemm/producer.h"

using namespace iris;

IRIS_KERNEL iris_all_gather(IRIS_ARGS OpArgs args) {
    port::take_turn();
    IRIS_SHARED(Product::Shared, shared);
    run_deliver<AllGatherPlan, GemmProducer, true>(args, shared);
}
