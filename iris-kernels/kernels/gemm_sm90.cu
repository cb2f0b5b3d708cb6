// Whole-matrix GEMM with an optional bias, without communication.
#include "iris/gemm/whole.h"

using namespace iris::gemm;

IRIS_GEMM_KERNEL iris_gemm(IRIS_ARGS TensorMap a, IRIS_ARGS TensorMap b, IRIS_ARGS TensorMap c,
                           IRIS_ARGS Arguments args) {
    multiply_whole(Whole(args, a, c), b, args.deadline_ns);
}
