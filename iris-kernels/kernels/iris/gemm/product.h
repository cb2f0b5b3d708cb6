// The product of a tile: IRIS_TILE_M x IRIS_TILE_N sums in f32 of factors of type IRIS_DTYPE, by
// all lanes of a workgroup. Product is what kernels use: on tensor cores where there is a header for
// them, named after the oldest architecture that has them, else by multiply-add. As
// iris_kernels::gemm_config::Core chooses on the host.
//
// A product has: Shared, its shared memory; clear(); multiply(a, b, rows, cols, depth), which adds
// a[rows x depth] * b[depth x cols] of views that begin at the tile's first elements;
// emit(sink), which calls sink(row, col, values) for vectors of WIDTH sums that cover the whole
// tile, each once; and KEEPS, whether to do that again costs no more than to read what was written. The sink
// leaves out what is beyond the edge.
#ifndef IRIS_GEMM_PRODUCT_H
#define IRIS_GEMM_PRODUCT_H

#include "iris/gemm_config.h"
#include "iris/view.h"

static_assert(iris::TILE_N % iris::WIDTH == 0, "a row of a tile is whole vectors");

#if IRIS_HAS_WGMMA && IRIS_DTYPE != 0 && IRIS_TILE_M == 128 && IRIS_TILE_N == 128
#include "iris/gemm/sm90.h"
namespace iris {
using Product = WgMma;
constexpr u32 SHARED_BYTES = sizeof(Product::Shared) + port::SHARED_ALIGNMENT;
}
#elif IRIS_HAS_WGMMA && IRIS_DTYPE != 0 && IRIS_TILE_M == 64 && IRIS_TILE_N == 64
#include "iris/gemm/sm90_flipped.h"
namespace iris {
using Product = FlippedWgMma;
constexpr u32 SHARED_BYTES = sizeof(Product::Shared) + port::SHARED_ALIGNMENT;
}
#elif IRIS_HAS_MMA_SYNC && IRIS_DTYPE != 0
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

// Beyond what a kernel gets without asking.
#ifdef IRIS_SHARED_BYTES
static_assert(iris::SHARED_BYTES == IRIS_SHARED_BYTES, "what the host asks for");
#endif

#endif
