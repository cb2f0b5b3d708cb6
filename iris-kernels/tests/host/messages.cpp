// The kernels of small messages as host code, in one library.
#include "hooks.cpp"

#include "../../kernels/all_gather.cu"
#include "../../kernels/all_reduce.cu"
#include "../../kernels/all_to_all.cu"
#include "../../kernels/broadcast.cu"
#include "../../kernels/reduce_scatter.cu"
