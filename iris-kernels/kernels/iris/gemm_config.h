// What products of tiles are built with: the largest tile, the type of A and B, the slab of K and how many
// slabs are in shared memory at a time. iris_kernels::gemm_config says which numbers a build gets.
#ifndef IRIS_GEMM_CONFIG_H
#define IRIS_GEMM_CONFIG_H

#include "iris/args.h"

#ifndef IRIS_TILE_M
#define IRIS_TILE_M 64
#endif
#ifndef IRIS_TILE_N
#define IRIS_TILE_N 64
#endif
#ifndef IRIS_DTYPE
#define IRIS_DTYPE 2
#endif
#ifndef IRIS_SLAB_BYTES
#define IRIS_SLAB_BYTES 64
#endif
#ifndef IRIS_DIES
#define IRIS_DIES 1
#endif
#ifndef IRIS_STAGES
#define IRIS_STAGES 2
#endif

namespace iris {

/// The largest tile of this build; operators may hand out any smaller one.
constexpr u32 TILE_M = IRIS_TILE_M, TILE_N = IRIS_TILE_N;
/// The type of A and B.
constexpr u32 DTYPE = IRIS_DTYPE;
/// A slab has so many bytes of each row of A and each column of B, which is a depth of TILE_K.
constexpr u32 ELEMENT_BYTES = DTYPE == F32 ? 4 : 2;
constexpr u32 SLAB_BYTES = IRIS_SLAB_BYTES, TILE_K = SLAB_BYTES / ELEMENT_BYTES;
static_assert(element_bytes(DTYPE) == ELEMENT_BYTES, "as the table");
/// Slabs in shared memory: one is multiplied while the others are on their way.
constexpr u32 STAGES = IRIS_STAGES;
/// Dies of the device, to which it hands workgroups in turns, and each of which has a cache of its own.
constexpr u32 DIES = IRIS_DIES;

} // namespace iris

#endif
