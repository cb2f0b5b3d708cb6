// Kernels of small messages compiled as host code into one library.
#include "hooks.cpp"

#include "../../kernels/all_gather.cu"
#include "../../kernels/all_to_all.cu"
#include "../../kernels/broadcast.cu"

#include "../../kernels/all_reduce.cu"
#include "../../kernels/copied.cu"
#include "../../kernels/copy.cu"
#include "../../kernels/reduce_scatter.cu"

// Rename the kernels with an RMSNorm, because the kernels without one have the same names.
#define iris_one_shot iris_one_shot_norm
#define iris_two_shot iris_two_shot_norm
#define iris_one_shot_ll iris_one_shot_ll_norm
#define iris_one_shot_combine_ll iris_one_shot_combine_ll_norm
#define iris_sums iris_sums_norm
#include "../../kernels/all_reduce_norm.cu"
