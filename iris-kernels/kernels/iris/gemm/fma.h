// GEMM of a tile by multiply-add in f32, for every compiler and element type. Included by gemm/product.h.
#ifndef IRIS_GEMM_FMA_H
#define IRIS_GEMM_FMA_H

#include "iris/gemm_config.h"
#include "iris/view.h"

namespace iris {

/// GEMM of a tile by multiply-add in f32. Each thread has the sums of some vectors of the tile.
class MultiplyAdd {
  public:
    struct alignas(16) Shared {
        // A padding word puts adjacent rows of A into different banks. Rows of B stay aligned for vector
        // accesses.
        float a[TILE_M][TILE_K + 1];
        alignas(16) float b[TILE_K][TILE_N];
    };

    IRIS_DEVICE explicit MultiplyAdd(Shared& shared) : shared(shared) {}

    IRIS_DEVICE void clear() {
        IRIS_UNROLL
        for (u32 i = 0; i < VECTORS; ++i) {
            IRIS_UNROLL
            for (u32 j = 0; j < WIDTH; ++j) sums[i].v[j] = 0.0f;
        }
    }

    IRIS_DEVICE void multiply(const View& a, const View& b, u32 rows, u32 cols, u32 depth) {
        for (u32 k = 0; k < depth; k += TILE_K) {
            port::barrier(Site::Body);
            load(a, b, rows, cols, k, depth);
            port::barrier(Site::Body);
            IRIS_NO_UNROLL
            for (u32 d = 0; d < min_of(TILE_K, depth - k); ++d) {
                IRIS_UNROLL
                for (u32 i = 0; i < VECTORS; ++i) {
                    const u32 vector = port::thread() + i * THREADS;
                    if (vector / ACROSS >= rows) continue;
                    const float left = shared.a[vector / ACROSS][d];
                    IRIS_UNROLL
                    for (u32 j = 0; j < WIDTH; ++j) {
                        sums[i].v[j] += left * shared.b[d][vector % ACROSS * WIDTH + j];
                    }
                }
            }
        }
    }

    static constexpr bool KEEPS = false;
    template <class Sink> IRIS_DEVICE void emit(Sink sink) {
        // The outer loop is not unrolled, so that the code contains the sink only once. The inner loop
        // selects the sums, because registers can be indexed only by constants.
        IRIS_NO_UNROLL
        for (u32 i = 0; i < VECTORS; ++i) {
            const u32 vector = port::thread() + i * THREADS;
            if (TOTAL % THREADS != 0 && vector >= TOTAL) continue;
            Values values{};
            if constexpr (VECTORS > 16) {
                // So many sums (host builds only) are not in registers anyway, so the index need not be a
                // constant.
                values = sums[i];
            } else {
                IRIS_UNROLL
                for (u32 j = 0; j < VECTORS; ++j) {
                    if (i == j) values = sums[j];
                }
            }
            sink(vector / ACROSS, vector % ACROSS * WIDTH, values);
        }
    }

  private:
    static constexpr u32 ACROSS = TILE_N / WIDTH, TOTAL = TILE_M * ACROSS;
    static constexpr u32 VECTORS = (TOTAL + THREADS - 1) / THREADS;

    /// Loads TILE_K columns of A and rows of B, from `k` on, to shared memory. Elements beyond an edge are 0.
    IRIS_DEVICE void load(const View& a, const View& b, u32 rows, u32 cols, u32 k, u32 depth) {
        for (u32 i = port::thread(); i < TILE_M * TILE_K; i += THREADS) {
            // Adjacent threads load adjacent elements of the dimension that is contiguous in memory.
            const u32 m = a.transposed ? i % TILE_M : i / TILE_K;
            const u32 d = a.transposed ? i / TILE_M : i % TILE_K;
            const bool in = m < rows && k + d < depth;
            shared.a[m][d] = in ? load_element(a.at(m, k + d), FACTOR) : 0.0f;
        }
        for (u32 i = port::thread(); i < TILE_K * TILE_N; i += THREADS) {
            const u32 d = b.transposed ? i % TILE_K : i / TILE_N;
            const u32 n = b.transposed ? i / TILE_K : i % TILE_N;
            const bool in = n < cols && k + d < depth;
            shared.b[d][n] = in ? load_element(b.at(k + d, n), FACTOR) : 0.0f;
        }
    }

    Shared& shared;
    Values sums[VECTORS];
};

} // namespace iris

#endif
