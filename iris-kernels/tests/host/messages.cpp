// The kernels of small messages as host code, in one library.
#include "hooks.cpp"

#include "../../kernels/all_gather.cu"
#include "../../kernels/all_to_all.cu"
#include "../../kernels/broadcast.cu"

// Beside copy engines all have kernels of the same names.
#define iris_open all_reduce_open
#define iris_blocks all_reduce_blocks
#define iris_results all_reduce_results
#define iris_gate all_reduce_gate
#define iris_sums all_reduce_sums
#define iris_close all_reduce_close
#include "../../kernels/all_reduce.cu"
#undef iris_open
#undef iris_blocks
#undef iris_results
#undef iris_gate
#undef iris_sums
#undef iris_close

#define iris_open reduce_scatter_open
#define iris_blocks reduce_scatter_blocks
#define iris_results reduce_scatter_results
#define iris_gate reduce_scatter_gate
#define iris_sums reduce_scatter_sums
#define iris_close reduce_scatter_close
#include "../../kernels/reduce_scatter.cu"
#undef iris_open
#undef iris_blocks
#undef iris_results
#undef iris_gate
#undef iris_sums
#undef iris_close
