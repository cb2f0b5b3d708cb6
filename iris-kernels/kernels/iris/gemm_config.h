// Compile-time parameters of the tile GEMM (the fused kernels' own product): largest tile, element
// type of A and B (dtype.h), bytes of K per slab (the part of K loaded at a time), and number of slabs in
// shared memory. iris_kernels::gemm_config chooses the values for a build.
#ifndef IRIS_GEMM_CONFIG_H
#define IRIS_GEMM_CONFIG_H

#include "iris/args.h"

#ifndef IRIS_TILE_M
#define IRIS_TILE_M 64
#endif
#ifndef IRIS_TILE_N
#define IRIS_TILE_N 64
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

/// Largest tile size of this build; operators may use any smaller size.
constexpr u32 TILE_M = IRIS_TILE_M, TILE_N = IRIS_TILE_N;
/// Element type of A and B, and the size of an element in bytes.
constexpr u32 FACTOR = IRIS_FACTOR, ELEMENT_BYTES = Dtype<FACTOR>::BYTES;
/// Size in bytes of each row of A, and of each column of B, in a slab of K; and the depth of a slab in
/// elements.
constexpr u32 SLAB_BYTES = IRIS_SLAB_BYTES, TILE_K = SLAB_BYTES / ELEMENT_BYTES;
/// Number of slabs in shared memory: one slab is multiplied while the others are being loaded.
constexpr u32 STAGES = IRIS_STAGES;
/// Number of dies of the device, each with its own L2 cache. The device distributes workgroups over
/// the dies round-robin.
constexpr u32 DIES = IRIS_DIES;

} // namespace iris

#endif
