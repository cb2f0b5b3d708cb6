// GEMM of a tile: IRIS_TILE_M x IRIS_TILE_N sums in f32 of factors of type IRIS_FACTOR, by all threads of a
// workgroup. Kernels use the class Product. It uses tensor cores if there is a header for them, which is
// named after the oldest architecture that has them, and multiply-add otherwise;
// iris_kernels::gemm_config::Core makes the same choice on the host.
//
// Members of Product:
//   Shared               its shared memory
//   clear()              set all sums to 0
//   multiply(a, b, rows, cols, depth)  add a[rows x depth] * b[depth x cols], views that begin at the first
//                        elements of the tile
//   emit(sink)           call sink(row, col, values) once for each vector of WIDTH sums of the whole tile;
//                        the sink leaves out sums beyond the edge of C
//   KEEPS                whether another emit() costs no more than reading the tile from memory
#ifndef IRIS_GEMM_PRODUCT_H
#define IRIS_GEMM_PRODUCT_H

#include "iris/gemm_config.h"
#include "iris/view.h"

static_assert(iris::TILE_N % iris::WIDTH == 0, "a row of a tile must consist of whole vectors");

#if IRIS_HAS_WGMMA && IRIS_OF(IRIS_HAS_MMA_, IRIS_FACTOR) && IRIS_TILE_M == IRIS_TILE_N && IRIS_TILE_M >= 64
#include "iris/gemm/sm90.h"
namespace iris {
using Product = Wgmma<IRIS_TILE_M == 64>;
constexpr u32 SHARED_BYTES = sizeof(Product::Shared) + port::SHARED_ALIGNMENT;
}
#elif IRIS_HAS_MMA_SYNC && IRIS_OF(IRIS_HAS_MMA_, IRIS_FACTOR)
#include "iris/gemm/sm80.h"
namespace iris {
using Product = MmaSync;
constexpr u32 SHARED_BYTES = 0;
}
#elif IRIS_HAS_MFMA
#include "iris/gemm/cdna3.h"
namespace iris {
using Product = MfmaCore;
constexpr u32 SHARED_BYTES = 0;
}
#else
#include "iris/gemm/fma.h"
namespace iris {
using Product = MultiplyAdd;
constexpr u32 SHARED_BYTES = 0;
}
#endif

// Bytes of dynamic shared memory that the host requests for a launch.
#ifdef IRIS_SHARED_BYTES
static_assert(iris::SHARED_BYTES == IRIS_SHARED_BYTES, "the host requests another size of shared memory");
#endif

#endif
