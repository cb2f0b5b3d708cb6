// GEMM of a tile on the tensor cores of sm_90a: wgmma of f16 or bf16 with f32 sums. Both factors are read
// from shared memory, which cp.async fills. Included by gemm/product.h.
//
// Tiles have 128 x 128 or, for GEMMs of few rows, 64 x 64 sums. The small tile is flipped: 64 columns of C
// are the 64 rows of a wgmma, so no work is spent on rows that do not exist. Such a tile reads few columns of
// B, so workgroups on all multiprocessors load B at the same time. Loads limit such GEMMs, so enough slabs
// are in flight to keep memory busy.
#ifndef IRIS_GEMM_SM90_H
#define IRIS_GEMM_SM90_H

#include "iris/gemm/sm90_lines.h"
#include "iris/gemm/sm90_ptx.h"
#include "iris/gemm/sm90_wgmma.h"

namespace iris {

/// Product of a tile by two warpgroups. If FLIPPED, the rows of a wgmma are columns of C, otherwise rows.
template <bool FLIPPED> class Wgmma {
    /// Number of threads of a warpgroup; number of rows of C for each of the two warpgroups.
    static constexpr u32 GROUP = 128, GROUP_M = TILE_M / 2;
    /// Number of sums per thread.
    static constexpr u32 SUMS = GROUP_M * TILE_N / GROUP;
    /// Number of stages that are being loaded while one is multiplied.
    static constexpr u32 AHEAD = STAGES - 1;
    /// Stride in floats of a row of sums in shared memory. The 4 extra floats avoid bank conflicts of writes
    /// and reads.
    static constexpr u32 LD = TILE_N + 4;
    static_assert(THREADS == 2 * GROUP, "Wgmma needs two warpgroups");
    static_assert((FLIPPED ? TILE_N : GROUP_M) == 64, "a wgmma has 64 rows");
    static_assert(SLAB_BYTES == 128, "lines of a slab must be as long as the swizzle, 128 bytes");

  public:
    union alignas(1024) Shared {
        struct Stage {
            u16 a[TILE_M * LINE];
            u16 b[TILE_N * LINE];
        } stage[STAGES];
        float out[TILE_M * LD];
    };

    IRIS_DEVICE explicit Wgmma(Shared& shared) : shared(shared) {}

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

    /// Whether further calls of emit() are cheap. They are if FLIPPED, because the first emit() leaves the
    /// sums in shared memory until the next multiply().
    static constexpr bool KEEPS = FLIPPED;
    template <class Sink> IRIS_DEVICE void emit(Sink sink) {
        if constexpr (FLIPPED) {
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
        } else {
            port::barrier(Site::Body);
            // A warp has 16 rows of the tile.
            const u32 row = port::thread() / 32 * 16;
            WarpTile<TILE_N>::emit(shared.out + row * LD, sums, row, 0, sink);
        }
    }

  private:
    /// Writes the sums to shared memory for all threads.
    IRIS_DEVICE void lay_out() {
        // `out` overlaps the stages, which the last products read.
        port::barrier(Site::Body);
        const u32 group = port::thread() / GROUP, warp = port::thread() / 32 % 4, lane = port::thread() % 32;
        float* first = shared.out + (group * GROUP_M + lane % 4 * 2) * LD + warp * 16 + lane / 4;
        IRIS_UNROLL
        for (u32 j = 0; j < GROUP_M / 8; ++j) {
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
        // A previous multiply() or emit() may still be reading shared memory.
        port::barrier(Site::Body);
        IRIS_UNROLL
        for (u32 step = 0; step < AHEAD; ++step) {
            if (step < steps) load<A_ACROSS, B_ACROSS>(step, a, b, rows, cols, step, depth);
            AsyncCopy::commit();
        }
        // If A_ACROSS and a line has more rows than a warpgroup, this warpgroup's rows of A are a part of
        // each line; otherwise they fill whole lines.
        constexpr u32 APART = A_ACROSS && GROUP_M < LINE ? 1 : LINE;
        const u32 in_a = describe<A_ACROSS>(shared.stage[0].a + group * GROUP_M * APART);
        const u32 in_b = describe<B_ACROSS>(shared.stage[0].b);
        u32 stage = 0, next = AHEAD;
        for (u32 step = 0; step < steps; ++step) {
            AsyncCopy::wait<AHEAD - 1>();
            // wgmma reads the copied data by the asynchronous proxy, so a proxy fence is needed.
            gemm::publish_to_copies();
            port::barrier(Site::Body);
            gemm::begin_products();
            const u32 from = stage * (sizeof(typename Shared::Stage) / 16);
            IRIS_UNROLL
            for (u32 d = 0; d < LINE / 16; ++d) {
                const u64 a_slab = in_lines(in_a + from + d * advance<A_ACROSS>());
                const u64 b_slab = in_lines(in_b + from + d * advance<B_ACROSS>());
                if constexpr (FLIPPED) gemm::multiply_add<B_ACROSS, A_ACROSS>(sums, b_slab, a_slab, 1);
                else gemm::multiply_add<A_ACROSS, B_ACROSS>(sums, a_slab, b_slab, 1);
            }
            gemm::end_products();
            // The load below refills the stage of the previous product, for which both warpgroups waited
            // before the barrier above. A second workgroup on the multiprocessor multiplies while this one
            // waits.
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
        // With few rows, B comes from memory and A from the L2 cache, so B is loaded first.
        if constexpr (FLIPPED) load_b<B_ACROSS>(to.b, b, k, left, cols);
        if constexpr (A_ACROSS) load_lines<LINE, TILE_M>(to.a, a.at(0, k), a.ld, left, rows);
        else load_lines<TILE_M, LINE>(to.a, a.at(0, k), a.ld, rows, left);
        if constexpr (!FLIPPED) load_b<B_ACROSS>(to.b, b, k, left, cols);
    }

    template <bool ACROSS>
    IRIS_DEVICE static void load_b(u16* to, const View& b, u32 k, u32 left, u32 cols) {
        if constexpr (ACROSS) load_lines<LINE, TILE_N>(to, b.at(k, 0), b.ld, left, cols);
        else load_lines<TILE_N, LINE>(to, b.at(k, 0), b.ld, cols, left);
    }

    Shared& shared;
    float sums[SUMS];
    /// Whether the sums are in shared memory.
    bool is_out = false;
};

} // namespace iris

#endif
