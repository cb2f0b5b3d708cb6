// GEMM of a tile with few rows (64 x 64) on sm_90a, transposed: 64 columns of C are the 64 rows of a wgmma,
// so no work is spent on rows that do not exist. A tile reads few columns of B, so workgroups on all
// multiprocessors load B at the same time. Loads limit such GEMMs, so enough slabs are in flight to keep
// memory busy. Included by gemm/product.h.
#ifndef IRIS_GEMM_SM90_FLIPPED_H
#define IRIS_GEMM_SM90_FLIPPED_H

#include "iris/gemm/sm90_lines.h"
#include "iris/gemm/sm90_ptx.h"
#include "iris/gemm/sm90_wgmma.h"

namespace iris {

class FlippedWgMma {
    // Two warpgroups, each for half of the rows of C.
    static constexpr u32 GROUP = 128, HALF = TILE_M / 2, SUMS = HALF / 2;
    // Number of stages that are being loaded while one is multiplied.
    static constexpr u32 AHEAD = STAGES - 1;
    static_assert(TILE_N == 64 && TILE_M == 64 && THREADS == 2 * GROUP, "one shape");
    static_assert(SLAB_BYTES == 128, "lines are as long as the swizzle");
    // Stride in floats of a row of sums in shared memory. The 4 extra floats avoid bank conflicts of writes
    // and reads.
    static constexpr u32 LD = TILE_N + 4;

  public:
    union alignas(1024) Shared {
        struct Stage {
            u16 a[TILE_M * LINE];
            u16 b[TILE_N * LINE];
        } stage[STAGES];
        float out[TILE_M * LD];
    };

    IRIS_DEVICE explicit FlippedWgMma(Shared& shared) : shared(shared), is_out(false) {}

    IRIS_DEVICE void clear() {
        IRIS_UNROLL
        for (u32 i = 0; i < SUMS; ++i) sums[i] = 0.0f;
    }

    IRIS_DEVICE void multiply(const View& a, const View& b, u32 rows, u32 cols, u32 depth) {
        is_out = false;
        if (depth == 0) return;
        if (a.transposed) {
            if (b.transposed) run<true, false>(a, b, rows, cols, depth);
            else run<true, true>(a, b, rows, cols, depth);
        } else {
            if (b.transposed) run<false, false>(a, b, rows, cols, depth);
            else run<false, true>(a, b, rows, cols, depth);
        }
    }

    /// True: the first emit() leaves the sums in shared memory until the next multiply().
    static constexpr bool KEEPS = true;
    template <class Sink> IRIS_DEVICE void emit(Sink sink) {
        if (!is_out) lay_out();
        constexpr u32 ACROSS = TILE_N / WIDTH;
        IRIS_NO_UNROLL
        for (u32 vector = port::thread(); vector < TILE_M * ACROSS; vector += THREADS) {
            const u32 row = vector / ACROSS, col = vector % ACROSS * WIDTH;
            const float* from = shared.out + row * LD + col;
            Values values;
            IRIS_UNROLL
            for (u32 e = 0; e < WIDTH; ++e) values.v[e] = from[e];
            sink(row, col, values);
        }
    }

  private:
    /// Writes the sums to shared memory for all threads.
    IRIS_DEVICE void lay_out() {
        // `out` overlaps the stages, which the last products read.
        port::barrier(Site::Body);
        const u32 group = port::thread() / GROUP, warp = port::thread() / 32 % 4, lane = port::thread() % 32;
        float* first = shared.out + (group * HALF + lane % 4 * 2) * LD + warp * 16 + lane / 4;
        IRIS_UNROLL
        for (u32 j = 0; j < HALF / 8; ++j) {
            float* at = first + j * 8 * LD;
            at[0] = sums[4 * j];
            at[LD] = sums[4 * j + 1];
            at[8] = sums[4 * j + 2];
            at[LD + 8] = sums[4 * j + 3];
        }
        port::barrier(Site::Body);
        is_out = true;
    }

    /// A_ACROSS, B_ACROSS: K is the strided dimension of the factor, so K goes from line to line.
    template <bool A_ACROSS, bool B_ACROSS>
    IRIS_DEVICE void run(const View& a, const View& b, u32 rows, u32 cols, u32 depth) {
        const u32 steps = div_up(depth, LINE);
        const u32 group = port::thread() / GROUP;
        // The previous product or sink may still read shared memory.
        port::barrier(Site::Body);
        IRIS_UNROLL
        for (u32 step = 0; step < AHEAD; ++step) {
            if (step < steps) load<A_ACROSS, B_ACROSS>(step, a, b, rows, cols, step, depth);
            AsyncCopy::commit();
        }
        const u32 left = describe<B_ACROSS>(shared.stage[0].b);
        // This warpgroup's half of the rows of A: a part of each line if A_ACROSS, otherwise half of the
        // lines.
        const u32 right = describe<A_ACROSS>(shared.stage[0].a + group * HALF * (A_ACROSS ? 1 : LINE));
        u32 stage = 0, next = AHEAD;
        for (u32 step = 0; step < steps; ++step) {
            AsyncCopy::wait<AHEAD - 1>();
            // wgmma reads the copied data by the asynchronous proxy, so a proxy fence is needed.
            gemm::publish_to_copies();
            port::barrier(Site::Body);
            gemm::begin_products();
            const u32 from = stage * (sizeof(Shared::Stage) / 16);
            IRIS_UNROLL
            for (u32 d = 0; d < LINE / 16; ++d) {
                gemm::multiply_add<B_ACROSS, A_ACROSS>(sums, in_lines(left + from + d * advance<B_ACROSS>()),
                                                       in_lines(right + from + d * advance<A_ACROSS>()), 1);
            }
            gemm::end_products();
            // The load below refills the stage of the previous product, for which both warpgroups waited
            // before the barrier above.
            if (step + AHEAD < steps) {
                load<A_ACROSS, B_ACROSS>(next, a, b, rows, cols, step + AHEAD, depth);
            }
            AsyncCopy::commit();
            gemm::await_products<0>();
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            next = next + 1 == STAGES ? 0 : next + 1;
        }
    }

    template <bool A_ACROSS, bool B_ACROSS>
    IRIS_DEVICE void load(u32 stage, const View& a, const View& b, u32 rows, u32 cols, u32 step,
                          u32 depth) {
        const u32 k = step * LINE, left = depth - k;
        auto& to = shared.stage[stage];
        // B is loaded first, because it comes from memory and A from the L2 cache.
        if constexpr (B_ACROSS) load_lines<LINE, TILE_N>(to.b, b.at(k, 0), b.ld, left, cols);
        else load_lines<TILE_N, LINE>(to.b, b.at(k, 0), b.ld, cols, left);
        if constexpr (A_ACROSS) load_lines<LINE, TILE_M>(to.a, a.at(0, k), a.ld, left, rows);
        else load_lines<TILE_M, LINE>(to.a, a.at(0, k), a.ld, rows, left);
    }

    Shared& shared;
    float sums[SUMS];
    /// Whether the sums are in shared memory.
    bool is_out;
};

} // namespace iris

#endif
