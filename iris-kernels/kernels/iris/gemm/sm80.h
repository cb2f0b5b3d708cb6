// GEMM of a tile on the tensor cores of sm_80 and later: mma.sync m16n8k16 of f16 or bf16 with f32 sums, fed
// by cp.async through two stages of shared memory. Included by gemm/product.h.
#ifndef IRIS_GEMM_SM80_H
#define IRIS_GEMM_SM80_H

#include "iris/gemm/sm80_ptx.h"

namespace iris {

class MmaSync {
    // Eight warps, 2 x 4, each for a part of the tile.
    static constexpr u32 WARP = 32, WARPS_M = 2, WARPS_N = 4;
    static constexpr u32 WARP_M = TILE_M / WARPS_M, WARP_N = TILE_N / WARPS_N;
    static constexpr u32 FRAGMENTS_M = WARP_M / 16, FRAGMENTS_N = WARP_N / 8;
    static_assert(THREADS == WARP * WARPS_M * WARPS_N, "each thread must belong to one warp of the tile");
    static_assert(WARP_M % 16 == 0 && WARP_N % 8 == 0 && TILE_K % 16 == 0,
                  "a warp's part must consist of whole fragments");
    static_assert(FRAGMENTS_N == 1 || FRAGMENTS_N % 2 == 0, "fragments of B are loaded in pairs");

    // Rows in shared memory are padded by PAD elements (16 bytes), which spreads rows over the banks. Either
    // dimension of A and B may be contiguous (WIDE: row-major, TALL: column-major); a stage has room for
    // both layouts.
    static constexpr u32 PAD = 8;
    static constexpr u32 A_WIDE = TILE_M * (TILE_K + PAD), A_TALL = TILE_K * (TILE_M + PAD);
    static constexpr u32 B_WIDE = TILE_K * (TILE_N + PAD), B_TALL = TILE_N * (TILE_K + PAD);
    static constexpr u32 A_ITEMS = A_WIDE > A_TALL ? A_WIDE : A_TALL;
    static constexpr u32 B_ITEMS = B_WIDE > B_TALL ? B_WIDE : B_TALL;
    static_assert(STAGES == 2, "the loop is written for two stages");

  public:
    union alignas(16) Shared {
        struct Stage {
            u16 a[A_ITEMS];
            u16 b[B_ITEMS];
        } stage[STAGES];
        float out[WARPS_M * WARPS_N][WarpTile<WARP_N>::ITEMS];
    };
    static_assert(sizeof(Shared) <= 48 * 1024, "static shared memory is limited to 48 KiB");

    IRIS_DEVICE explicit MmaSync(Shared& shared) : shared(shared) {}

    IRIS_DEVICE void clear() {
        IRIS_UNROLL
        for (u32 i = 0; i < FRAGMENTS_M; ++i) {
            IRIS_UNROLL
            for (u32 j = 0; j < FRAGMENTS_N; ++j) {
                IRIS_UNROLL
                for (u32 e = 0; e < 4; ++e) sums[i][j][e] = 0.0f;
            }
        }
    }

    IRIS_DEVICE void multiply(const View& a, const View& b, u32 rows, u32 cols, u32 depth) {
        const u32 steps = div_up(depth, TILE_K);
        if (steps == 0) return;
        port::barrier(Site::Body);
        load(0, a, b, rows, cols, 0, depth);
        for (u32 step = 0; step < steps; ++step) {
            if (step + 1 < steps) load((step + 1) % STAGES, a, b, rows, cols, step + 1, depth);
            else AsyncCopy::commit();
            AsyncCopy::wait<1>();
            port::barrier(Site::Body);
            compute(shared.stage[step % STAGES], a.transposed, b.transposed);
            port::barrier(Site::Body);
        }
    }

    static constexpr bool KEEPS = false;
    template <class Sink> IRIS_DEVICE void emit(Sink sink) {
        port::barrier(Site::Body);
        const u32 warp = port::thread() / WARP;
        const u32 row = warp / WARPS_N * WARP_M, col = warp % WARPS_N * WARP_N;
        // The outer loop is not unrolled, so that the code contains the sink only once. The inner loop
        // selects the sums, because registers can be indexed only by constants.
        IRIS_NO_UNROLL
        for (u32 i = 0; i < FRAGMENTS_M; ++i) {
            float own[WARP_N / 2];
            IRIS_UNROLL
            for (u32 f = 0; f < FRAGMENTS_M; ++f) {
                if (f != i) continue;
                IRIS_UNROLL
                for (u32 e = 0; e < WARP_N / 2; ++e) own[e] = sums[f][e / 4][e % 4];
            }
            WarpTile<WARP_N>::emit(shared.out[warp], own, row + i * 16, col, sink);
        }
    }

  private:
    /// Copies eight adjacent elements to shared memory. Only the first `count` exist; the others are 0.
    IRIS_DEVICE static void load_vector(u16* to, u64 from, u32 count) {
        if (count >= WIDTH && (from & 15) == 0) AsyncCopy::vector_or_zero(to, from, 16);
        else AsyncCopy::items(to, from, count);
    }

    /// Copies a matrix of OUTER lines with INNER contiguous elements each to shared memory. Only `outer`
    /// lines and `inner` elements exist; the others are 0.
    template <u32 OUTER, u32 INNER>
    IRIS_DEVICE static void load_lines(u16* to, u64 from, u64 ld, u32 outer, u32 inner) {
        constexpr u32 ACROSS = INNER / WIDTH, TOTAL = OUTER * ACROSS;
        IRIS_UNROLL
        for (u32 i = 0; i < (TOTAL + THREADS - 1) / THREADS; ++i) {
            const u32 vector = port::thread() + i * THREADS;
            if (TOTAL % THREADS != 0 && vector >= TOTAL) break;
            const u32 line = vector / ACROSS, item = vector % ACROSS * WIDTH;
            const u32 count = line < outer && item < inner ? inner - item : 0;
            load_vector(to + line * (INNER + PAD) + item, from + (line * ld + item) * 2, count);
        }
    }

    IRIS_DEVICE void load(u32 stage, const View& a, const View& b, u32 rows, u32 cols, u32 step,
                          u32 depth) {
        const u32 k = step * TILE_K, left = depth - k;
        auto& to = shared.stage[stage];
        if (a.transposed) load_lines<TILE_K, TILE_M>(to.a, a.at(0, k), a.ld, left, rows);
        else load_lines<TILE_M, TILE_K>(to.a, a.at(0, k), a.ld, rows, left);
        if (b.transposed) load_lines<TILE_N, TILE_K>(to.b, b.at(k, 0), b.ld, cols, left);
        else load_lines<TILE_K, TILE_N>(to.b, b.at(k, 0), b.ld, left, cols);
        AsyncCopy::commit();
    }

    IRIS_DEVICE static void load_matrices(u32 (&to)[4], u32 address, bool across) {
        if (across) {
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                         : "r"(address)
                         : "memory");
        } else {
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                         : "r"(address)
                         : "memory");
        }
    }

    IRIS_DEVICE static void multiply_add(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." IRIS_FACTOR_MMA "." IRIS_FACTOR_MMA ".f32 "
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }

    IRIS_DEVICE void compute(const Shared::Stage& stage, bool a_across, bool b_across) {
        const u32 lane = port::thread() % WARP, warp = port::thread() / WARP;
        const u32 row = warp / WARPS_N * WARP_M, col = warp % WARPS_N * WARP_N;
        // For ldmatrix, lane l passes the address of row l % 8 of 8 x 8 matrix l / 8. The four matrices of A
        // are rows 0 to 7 and 8 to 15 of a fragment at K = 0 to 7, then the same rows at K = 8 to 15. The
        // four matrices of B are K = 0 to 7 and K = 8 to 15 of one fragment, then the same of the next
        // fragment.
        const u32 line = lane % 8, low = lane / 8 % 2 * 8, high = lane / 16 * 8;
        // A warp with one fragment of B loads it twice, because there may be no next fragment in shared
        // memory.
        const u32 next = FRAGMENTS_N == 1 ? 0 : high;
        const u32 a_ld = a_across ? TILE_M + PAD : TILE_K + PAD;
        const u32 b_ld = b_across ? TILE_K + PAD : TILE_N + PAD;
        const u32 a_first = a_across ? (high + line) * a_ld + row + low
                                     : (row + low + line) * a_ld + high;
        const u32 b_first = b_across ? (col + next + line) * b_ld + low
                                     : (low + line) * b_ld + col + next;
        const u32 a_row = a_across ? 16 : 16 * a_ld, a_depth = a_across ? 16 * a_ld : 16;
        const u32 b_col = b_across ? 16 * b_ld : 16, b_depth = b_across ? 16 : 16 * b_ld;
        const u32 a_at = shared_address(stage.a) + a_first * 2;
        const u32 b_at = shared_address(stage.b) + b_first * 2;
        IRIS_UNROLL
        for (u32 d = 0; d < TILE_K / 16; ++d) {
            u32 left[FRAGMENTS_M][4], right[(FRAGMENTS_N + 1) / 2][4];
            IRIS_UNROLL
            for (u32 i = 0; i < FRAGMENTS_M; ++i) {
                load_matrices(left[i], a_at + (i * a_row + d * a_depth) * 2, a_across);
            }
            IRIS_UNROLL
            for (u32 j = 0; j < (FRAGMENTS_N + 1) / 2; ++j) {
                load_matrices(right[j], b_at + (j * b_col + d * b_depth) * 2, !b_across);
            }
            IRIS_UNROLL
            for (u32 i = 0; i < FRAGMENTS_M; ++i) {
                IRIS_UNROLL
                for (u32 j = 0; j < FRAGMENTS_N; ++j) {
                    multiply_add(sums[i][j], left[i], right[j / 2][j % 2 * 2],
                                 right[j / 2][j % 2 * 2 + 1]);
                }
            }
        }
    }

    Shared& shared;
    float sums[FRAGMENTS_M][FRAGMENTS_N][4];
};

} // namespace iris

#endif
