// GEMM of a 128 x 128 tile on the tensor cores of sm_90a: wgmma m64n128k16 of f16 or bf16 with f32 sums. Both
// factors are read from shared memory, which cp.async fills. Included by gemm/product.h.
#ifndef IRIS_GEMM_SM90_H
#define IRIS_GEMM_SM90_H

#include "iris/gemm/sm90_lines.h"
#include "iris/gemm/sm90_wgmma.h"

namespace iris {

class WgMma {
    // Two warpgroups, each for half of the rows.
    static constexpr u32 GROUP = 128, GROUP_M = 64;
    // Number of stages that are being loaded while one is multiplied.
    static constexpr u32 AHEAD = STAGES - 1;
    static constexpr u32 SUMS = TILE_N / 2;
    static_assert(TILE_M == 2 * GROUP_M && TILE_N == 128 && THREADS == 2 * GROUP, "one shape");

  public:
    union alignas(1024) Shared {
        struct Stage {
            u16 a[TILE_M * LINE];
            u16 b[TILE_N * LINE];
        } stage[STAGES];
        float out[THREADS / 32][WarpTile<TILE_N>::ITEMS];
    };

    IRIS_DEVICE explicit WgMma(Shared& shared) : shared(shared) {}

    IRIS_DEVICE void clear() {
        IRIS_UNROLL
        for (u32 i = 0; i < SUMS; ++i) sums[i] = 0.0f;
    }

    IRIS_DEVICE void multiply(const View& a, const View& b, u32 rows, u32 cols, u32 depth) {
        if (depth == 0) return;
        if (a.transposed) {
            if (b.transposed) run<true, false>(a, b, rows, cols, depth);
            else run<true, true>(a, b, rows, cols, depth);
        } else {
            if (b.transposed) run<false, false>(a, b, rows, cols, depth);
            else run<false, true>(a, b, rows, cols, depth);
        }
    }

    static constexpr bool KEEPS = false;
    template <class Sink> IRIS_DEVICE void emit(Sink sink) {
        port::barrier(Site::Body);
        // A warp has 16 rows of the tile.
        const u32 warp = port::thread() / 32;
        WarpTile<TILE_N>::emit(shared.out[warp], sums, warp * 16, 0, sink);
    }

  private:
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
        const u32 left = describe<A_ACROSS>(shared.stage[0].a + group * GROUP_M * LINE);
        const u32 right = describe<B_ACROSS>(shared.stage[0].b);
        u32 stage = 0, next = AHEAD;
        for (u32 step = 0; step < steps; ++step) {
            AsyncCopy::wait<AHEAD - 1>();
            // wgmma reads the copied data by the asynchronous proxy, so a proxy fence is needed.
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            port::barrier(Site::Body);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            const u32 from = stage * (sizeof(Shared::Stage) / 16);
            IRIS_UNROLL
            for (u32 d = 0; d < LINE / 16; ++d) {
                multiply_add<A_ACROSS, B_ACROSS>(sums, left + from + d * advance<A_ACROSS>(),
                                                 right + from + d * advance<B_ACROSS>());
            }
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            // The load below refills the stage of the previous product, for which both warpgroups waited
            // before the barrier above. A second workgroup on the multiprocessor multiplies while this one
            // waits.
            if (step + AHEAD < steps) {
                load<A_ACROSS, B_ACROSS>(next, a, b, rows, cols, step + AHEAD, depth);
            }
            AsyncCopy::commit();
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            next = next + 1 == STAGES ? 0 : next + 1;
        }
    }

    template <bool A_ACROSS, bool B_ACROSS>
    IRIS_DEVICE static void multiply_add(float (&d)[SUMS], u32 left, u32 right) {
        const u64 a = in_lines(left), b = in_lines(right);
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." IRIS_FACTOR "." IRIS_FACTOR " "
                     "{" IRIS_REGISTERS_64 "}, %64, %65, 1, 1, 1, %66, %67;"
                     : IRIS_SUMS_64
                     : "l"(a), "l"(b), "n"(A_ACROSS ? 1 : 0), "n"(B_ACROSS ? 1 : 0)
                     : "memory");
    }

    template <bool A_ACROSS, bool B_ACROSS>
    IRIS_DEVICE void load(u32 stage, const View& a, const View& b, u32 rows, u32 cols, u32 step,
                          u32 depth) {
        const u32 k = step * LINE, left = depth - k;
        auto& to = shared.stage[stage];
        if constexpr (A_ACROSS) load_lines<LINE, TILE_M>(to.a, a.at(0, k), a.ld, left, rows);
        else load_lines<TILE_M, LINE>(to.a, a.at(0, k), a.ld, rows, left);
        if constexpr (B_ACROSS) load_lines<LINE, TILE_N>(to.b, b.at(k, 0), b.ld, left, cols);
        else load_lines<TILE_N, LINE>(to.b, b.at(k, 0), b.ld, cols, left);
    }

    Shared& shared;
    float sums[SUMS];
};

} // namespace iris

#endif
