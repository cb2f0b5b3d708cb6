// Kernels of small messages compiled as host code into one library.
#include "hooks.cpp"

#include "../../kernels/all_gather.cu"
#include "../../kernels/all_to_all.cu"
#include "../../kernels/broadcast.cu"

// Rename the kernels that serve copy engines, because several sources define kernels with these
// names.
#define iris_open OF(open)
#define iris_blocks OF(blocks)
#define iris_results OF(results)
#define iris_gate OF(gate)
#define iris_sums OF(sums)
#define iris_close OF(close)

#define OF(kernel) all_reduce_##kernel
#include "../../kernels/all_reduce.cu"
#undef OF

#define OF(kernel) reduce_scatter_##kernel
#include "../../kernels/reduce_scatter.cu"
#undef OF

// Rename the kernels with an RMSNorm, because the kernels without one have the same names.
#define iris_one_shot iris_one_shot_norm
#define iris_two_shot iris_two_shot_norm
#define iris_one_shot_ll iris_one_shot_ll_norm
#define OF(kernel) all_reduce_norm_##kernel
#include "../../kernels/all_reduce_norm.cu"
#undef OF
#include "../../kernels/copy.cu"
