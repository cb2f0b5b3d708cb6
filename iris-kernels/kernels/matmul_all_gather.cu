// Matrix product followed by an all-gather: every rank gets all ranks' rows of the product.
#include "iris/body/deliver.h"
#include "iris/gemm/producer.h"

using namespace iris;

IRIS_KERNEL iris_all_gather(IRIS_ARGS OpArgs args) {
    port::take_turn();
    IRIS_SHARED(Product::Shared, shared);
    run_deliver<AllGatherPlan, GemmProducer, true>(args, shared);
}
