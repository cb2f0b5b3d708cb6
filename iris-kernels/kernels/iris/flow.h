// Skeletons of whole operators; transcribes iris_sync::flow operation by operation. A skeleton makes the
// waits and signals of an op. Its argument, a Body, moves the tiles. All threads of a workgroup
// call the functions of a skeleton together.
//
// | skeleton | ops |
// |---|---|
// | one_shot | all-reduce, with or without a matrix product before it |
// | two_shot | all-reduce in which each tile is reduced by its owner |
// | reduce_scatter | reduce-scatter: the first half of two_shot |
// | deliver | all-gather, all-to-all, broadcast, product then all-gather |
// | relay | broadcast in which one receiver of each tile forwards it to the others |
// | pull, staged | all-gather then product |
// | zero, add, convert with barrier between | all-reduce by lock or atomic |
// | exchange | collectives of small messages, by the LL protocol (data and flag in one word) |
// | exchange_rows, exchange_tile | the same for sums of whole rows, with RMSNorm, and for tiles of a product |
// | two_shot_ll | all-reduce and broadcast in two hops, by the LL protocol |
// | open, then copies, gates and sums, then close | messages by copy engines |
// | gather then barrier then local | all-gather, barrier, product |
#ifndef IRIS_FLOW_H
#define IRIS_FLOW_H

#include "iris/sync.h"

#include "iris/flow/accumulate.h"
#include "iris/flow/copied.h"
#include "iris/flow/deliver.h"
#include "iris/flow/gather.h"
#include "iris/flow/ll.h"
#include "iris/flow/reduce.h"

#endif
