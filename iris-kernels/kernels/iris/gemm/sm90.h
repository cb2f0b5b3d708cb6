// Products on the tensor cores of sm_90a: wgmma m64n128k16 of f16 or bf16 with f32 sums, straight from
// shared memory, which cp.async fills. Included by
// gemm/product.h.
//
// The layouts are those of PTX's "asynchronous warpgroup level matrix instructions" with the 128-byte
// swizzle: lines of 128 bytes, whose 16-byte vectors change places by the number of the line in its
// eight, so that neither copies nor products meet in a bank.
#ifndef IRIS_GEMM_SM90_H
#define IRIS_GEMM_SM90_H

#include "iris/gemm/sm80_ptx.h"
#include "iris/gemm/sm90_wgmma.h"

namespace iris {

class WgMma {
    // Two warpgroups, each with one half of the rows.
    static constexpr u32 GROUP = 128, GROUP_M = 64;
    // What one line of a block holds, and so the depth of a stage.
    static constexpr u32 LINE = TILE_K;
    static_assert(SLAB_BYTES == 128, "lines are as long as the swizzle");
    // Stages that are on their way while one is multiplied.
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

    template <class Sink> IRIS_DEVICE void emit(Sink sink) {
        port::barrier(Site::Body);
        // A warp has 16 rows of the tile.
        const u32 warp = port::thread() / 32;
        WarpTile<TILE_N>::emit(shared.out[warp], sums, warp * 16, 0, sink);
    }

  private:
    /// ACROSS: the depth goes from line to line, not along a line.
    template <bool A_ACROSS, bool B_ACROSS>
    IRIS_DEVICE void run(const View& a, const View& b, u32 rows, u32 cols, u32 depth) {
        const u32 steps = div_up(depth, LINE);
        const u32 group = port::thread() / GROUP;
        // The last product or sink may still read.
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
            // What was copied is now read by the asynchronous proxy.
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
            // The stage that this fills was read by the last product, which both warpgroups had
            // waited for when they came to the barrier. Beside this workgroup there is another: one
            // multiplies while the other waits.
            if (step + AHEAD < steps) {
                load<A_ACROSS, B_ACROSS>(next, a, b, rows, cols, step + AHEAD, depth);
            }
            AsyncCopy::commit();
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            next = next + 1 == STAGES ? 0 : next + 1;
        }
    }

    /// What the depth of one product is apart, in 16 bytes: 16 lines, or 32 bytes of each.
    template <bool ACROSS> IRIS_DEVICE static constexpr u32 advance() {
        return ACROSS ? 16 * LINE * 2 / 16 : 2;
    }

    /// A block in shared memory, as the low word of what the instruction wants said has it: where it begins,
    /// in 16 bytes, and where the depth goes from line to line, that the next 64 rows or columns are a block
    /// further on. Another block is so many times 16 bytes more: none is above the 14 bits there are.
    template <bool ACROSS> IRIS_DEVICE static u32 describe(const u16* block) {
        constexpr u32 BLOCK = ACROSS ? LINE * LINE * 2 / 16 : 1;
        return (shared_address(block) >> 4 & 0x3fff) | BLOCK << 16;
    }

    template <bool A_ACROSS, bool B_ACROSS>
    IRIS_DEVICE static void multiply_add(float (&d)[SUMS], u32 left, u32 right) {
        // The high word: eight lines are 1024 bytes, swizzled by 128.
        constexpr u64 LINES = u64(1024 / 16 | 1u << 30) << 32;
        const u64 a = LINES | left, b = LINES | right;
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

    /// A matrix of `OUTER` lines of `INNER` items that lie side by side; `outer`, `inner` exist, the
    /// others are 0. In shared memory it is in blocks of LINE items a line.
    template <u32 OUTER, u32 INNER>
    IRIS_DEVICE static void load_lines(u16* to, u64 from, u64 ld, u32 outer, u32 inner) {
        constexpr u32 ACROSS = INNER / WIDTH, STEP = THREADS / ACROSS;
        static_assert(THREADS % ACROSS == 0 && OUTER % STEP == 0 && STEP % 8 == 0,
                      "a thread keeps its place in a line, and that in the eight");
        const u32 item = port::thread() % ACROSS * WIDTH, first = port::thread() / ACROSS;
        const u32 vector = item / WIDTH % 8 ^ first % 8, block = item / LINE * OUTER * LINE;
        const u32 there = item < inner ? min_of(inner - item, WIDTH) : 0;
        u16* const place = to + block + first * LINE + vector * WIDTH;
        const u64 start = from + (first * ld + item) * 2, apart = STEP * ld * 2;
        // Chosen once for all lines: beside a product there is little room for instructions.
        if (((from | ld * 2) & 15) == 0 && there % WIDTH == 0) {
            IRIS_UNROLL
            for (u32 i = 0; i < OUTER / STEP; ++i) {
                const bool exists = there != 0 && first + i * STEP < outer;
                AsyncCopy::vector_or_zero(place + i * STEP * LINE, start + i * apart,
                                          exists ? WIDTH * 2 : 0);
            }
        } else {
            IRIS_NO_UNROLL
            for (u32 i = 0; i < OUTER / STEP; ++i) {
                AsyncCopy::items(place + i * STEP * LINE, start + i * apart,
                                 first + i * STEP < outer ? there : 0);
            }
        }
    }

    Shared& shared;
    float sums[SUMS];
};

} // namespace iris

#endif
