// Skeletons of whole ops: iris_sync::flow, operation by operation. A Body moves the tiles; its
// functions are called by all threads of a workgroup together.
//
// | skeleton | ops |
// |---|---|
// | one_shot | all-reduce with or without a product in front |
// | two_shot | the same, each tile reduced by its owner |
// | reduce_scatter | its first half |
// | deliver | all-gather, all-to-all, broadcast, product then all-gather |
// | relay | broadcast, each tile passed on by one of those that get it |
// | pull, staged | all-gather then product |
// | zero, add, convert with barrier between | all-reduce by lock or atomic |
// | exchange | the collectives without a product, of small messages |
// | open, copies beside gate, close | all-gather by a copy engine, then product |
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
