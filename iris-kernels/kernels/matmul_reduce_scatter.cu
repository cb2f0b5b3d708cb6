// Matrix product followed by a reduce-scatter: each rank gets its rows of the sum of all ranks'
// products.
#include "iris/gemm/producer.h"
#include "iris/body/reduce.h"

using namespace iris;

IRIS_KERNEL iris_reduce_scatter(IRIS_ARGS OpArgs args) {
    port::take_turn();
    IRIS_SHARED(Product::Shared, shared);
    run_reduce_scatter<GemmProducer>(args, shared);
}
