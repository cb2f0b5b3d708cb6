// Products on the matrix cores of gfx90a and gfx942, and of gfx950, which has these instructions too:
// MFMA 32x32x8, or 16x16x16 in the smallest tile, of f16 or bf16 with f32 sums. Included by gemm/product.h.
//
// Slabs of A and B lie in shared memory in two stages, both with the depth along a line: four
// neighbours in depth are what a lane gives to an instruction. What comes from memory is held in
// registers while the stage before is multiplied.
//
// Multiplied is transposed: B's columns are the instruction's rows, so that four sums of a lane are
// neighbours in a row of C.
//
// A fragment, of lane l of 64, with S = 32 or 16 rows and columns:
//
//     left  [l % S][l / S * 4 + j]    j of 0 to 3
//     right [l / S * 4 + j][l % S]
//     sums  [r / 4 * 8 + l / S * 4 + r % 4][l % S]    r of 0 to 15, or to 3 where S is 16
//
// On a host port::Mfma is a hook, which does the same by those lines.
#ifndef IRIS_GEMM_CDNA3_H
#define IRIS_GEMM_CDNA3_H

#include "iris/gemm_config.h"
#include "iris/view.h"

#if IRIS_PORT_HOST
extern "C" {
/// One product of a wave, as all of its lanes call it: `size` is 32 or 16, `dtype` that of the factors;
/// four of left and right each, and size * size / 64 sums.
void iris_hook_mfma(iris::u32 size, iris::u32 dtype, iris::u64 left, iris::u64 right, float* sums);
}
#endif

namespace iris {

/// One product of a wave: 32 x 32, depth 8, or 16 x 16, depth 16.
template <u32 SIZE> struct Mfma {
    static_assert(SIZE == 32 || SIZE == 16, "the instructions there are");
    static constexpr u32 DEPTH = 256 / SIZE, SUMS = SIZE * SIZE / 64;

#if IRIS_PORT_HIP
    using Sums = float __attribute__((ext_vector_type(SUMS)));

    IRIS_DEVICE static void multiply_add(Sums& sums, u64 left, u64 right) {
        if constexpr (DTYPE == BF16) {
            using Four = short __attribute__((ext_vector_type(4)));
            const Four a = __builtin_bit_cast(Four, left), b = __builtin_bit_cast(Four, right);
            if constexpr (SIZE == 32) {
                sums = __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(a, b, sums, 0, 0, 0);
            } else {
                sums = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a, b, sums, 0, 0, 0);
            }
        } else {
            using Four = _Float16 __attribute__((ext_vector_type(4)));
            const Four a = __builtin_bit_cast(Four, left), b = __builtin_bit_cast(Four, right);
            if constexpr (SIZE == 32) {
                sums = __builtin_amdgcn_mfma_f32_32x32x8f16(a, b, sums, 0, 0, 0);
            } else {
                sums = __builtin_amdgcn_mfma_f32_16x16x16f16(a, b, sums, 0, 0, 0);
            }
        }
    }
#else
    struct Sums {
        float v[SUMS];
        float& operator[](u32 i) { return v[i]; }
    };

    static void multiply_add(Sums& sums, u64 left, u64 right) {
        iris_hook_mfma(SIZE, DTYPE, left, right, sums.v);
    }
#endif
};

class MfmaCore {
    // Four waves in two rows of two, each with a quarter of the tile.
    static constexpr u32 WAVE = 64, WAVES_M = 2, WAVES_N = 2;
    static constexpr u32 WAVE_M = TILE_M / WAVES_M, WAVE_N = TILE_N / WAVES_N;
    static constexpr u32 SIZE = WAVE_M % 32 == 0 && WAVE_N % 32 == 0 ? 32 : 16;
    using Instruction = Mfma<SIZE>;
    static constexpr u32 BLOCKS_M = WAVE_M / SIZE, BLOCKS_N = WAVE_N / SIZE;
    static_assert(LANES == WAVE * WAVES_M * WAVES_N, "four waves");
    static_assert(WAVE_M % SIZE == 0 && WAVE_N % SIZE == 0, "whole blocks");

    // The depth of a stage: two stages of the largest tile leave room for a second workgroup, which
    // multiplies while this one waits. A line is half a vector longer than its data, which spreads the
    // lines over the banks.
    static constexpr u32 DEPTH = TILE_K;
    static_assert(STAGES == 2, "one is multiplied while the other comes");
    static constexpr u32 LINE = DEPTH + 4;
    static_assert(DEPTH % Instruction::DEPTH == 0 && DEPTH % WIDTH == 0, "whole instructions");
    // A row of a block of sums, likewise.
    static constexpr u32 ROW = SIZE + 4;

  public:
    union alignas(16) Shared {
        struct Stage {
            u16 a[TILE_M * LINE];
            u16 b[TILE_N * LINE];
        } stage[STAGES];
        float out[WAVES_M * WAVES_N][SIZE * ROW];
    };
    static_assert(sizeof(Shared) <= 32 * 1024 - 1024, "room for two workgroups, and for their votes");

    IRIS_DEVICE explicit MfmaCore(Shared& shared) : shared(shared) {}

    IRIS_DEVICE void clear() {
        IRIS_UNROLL
        for (u32 i = 0; i < BLOCKS_M * BLOCKS_N; ++i) {
            IRIS_UNROLL
            for (u32 r = 0; r < Instruction::SUMS; ++r) sums[i][r] = 0.0f;
        }
    }

    IRIS_DEVICE void multiply(const View& a, const View& b, u32 rows, u32 cols, u32 depth) {
        const u32 steps = div_up(depth, DEPTH);
        if (steps == 0) return;
        // The last product or sink may still read.
        port::barrier(Site::Body);
        // One step more than there are slabs, so that each part stands in the code once. A stage is
        // filled while the other is multiplied; whoever read it has come to the barrier since.
        IRIS_NO_UNROLL
        for (u32 step = 0; step <= steps; ++step) {
            const u32 k = step * DEPTH;
            Held held_a, held_b;
            if (step < steps) {
                held_a = fetch<TILE_M>(a.at(0, k), a.ld, a.transposed, rows, depth - k);
                held_b = fetch<TILE_N>(b.at(k, 0), b.ld, !b.transposed, cols, depth - k);
            }
            if (step > 0) compute(shared.stage[(step - 1) % STAGES]);
            if (step < steps) {
                put<TILE_M>(shared.stage[step % STAGES].a, held_a, a.transposed);
                put<TILE_N>(shared.stage[step % STAGES].b, held_b, !b.transposed);
            }
            port::barrier(Site::Body);
        }
    }

    template <class Sink> IRIS_DEVICE void emit(Sink sink) {
        const u32 lane = port::lane() % WAVE, wave = port::lane() / WAVE;
        const u32 row = wave / WAVES_N * WAVE_M, col = wave % WAVES_N * WAVE_N;
        float* out = shared.out[wave];
        // The sink stands in the code once; registers need constant indices, hence the inner loop.
        IRIS_NO_UNROLL
        for (u32 block = 0; block < BLOCKS_M * BLOCKS_N; ++block) {
            // Nobody reads the stages, or the block before, any more.
            port::barrier(Site::Body);
            typename Instruction::Sums own = sums[0];
            IRIS_UNROLL
            for (u32 i = 1; i < BLOCKS_M * BLOCKS_N; ++i) {
                if (i == block) own = sums[i];
            }
            // The lane's row of C, and four neighbours in it at a time.
            float* first = out + lane % SIZE * ROW + lane / SIZE * 4;
            IRIS_UNROLL
            for (u32 r = 0; r < Instruction::SUMS; ++r) first[r / 4 * 8 + r % 4] = own[r];
            port::barrier(Site::Body);
            // Neighbouring lanes have neighbouring vectors.
            constexpr u32 ACROSS = SIZE / WIDTH;
            const u32 block_row = row + block / BLOCKS_N * SIZE;
            const u32 block_col = col + block % BLOCKS_N * SIZE;
            IRIS_NO_UNROLL
            for (u32 vector = lane; vector < SIZE * ACROSS; vector += WAVE) {
                const float* from = out + vector / ACROSS * ROW + vector % ACROSS * WIDTH;
                Values values;
                IRIS_UNROLL
                for (u32 e = 0; e < WIDTH; ++e) values.v[e] = from[e];
                sink(block_row + vector / ACROSS, block_col + vector % ACROSS * WIDTH, values);
            }
        }
    }

  private:
    /// What a lane holds of a slab on its way to shared memory: a vector along the depth, or two
    /// neighbours in depth of a vector across it.
    struct Held {
        Vec16 vector[2];
    };

    /// Eight items that lie side by side, of which `count` exist; the others are 0.
    IRIS_DEVICE static Vec16 load_vector(u64 from, u32 count) {
        if (is_whole(from, min_of(count, WIDTH))) return port::read<Vec16>(from);
        Vec16 all;
        IRIS_UNROLL
        for (u32 i = 0; i < 4; ++i) {
            const u32 low = 2 * i < count ? port::read<u16>(from + 4 * i) : 0;
            const u32 high = 2 * i + 1 < count ? port::read<u16>(from + 4 * i + 2) : 0;
            all.word[i] = low | high << 16;
        }
        return all;
    }

    /// A slab of `LINES` lines, rows of A or columns of B, of which `lines` exist, and DEPTH items of
    /// each, of which `depth` exist. ACROSS: lines are neighbours in memory, and a line is not.
    template <u32 LINES>
    IRIS_DEVICE static Held fetch(u64 from, u64 ld, bool across, u32 lines, u32 depth) {
        static_assert(LINES * DEPTH / WIDTH <= LANES, "a vector a lane");
        Held held{};
        if (across) {
            const u32 line = port::lane() % (LINES / WIDTH) * WIDTH;
            const u32 k = port::lane() / (LINES / WIDTH) * 2;
            if (k >= DEPTH) return held;
            IRIS_UNROLL
            for (u32 i = 0; i < 2; ++i) {
                const u32 count = k + i < depth && line < lines ? lines - line : 0;
                held.vector[i] = load_vector(from + ((k + i) * ld + line) * 2, count);
            }
        } else {
            const u32 line = port::lane() / (DEPTH / WIDTH);
            const u32 k = port::lane() % (DEPTH / WIDTH) * WIDTH;
            if (line >= LINES) return held;
            const u32 count = line < lines && k < depth ? depth - k : 0;
            held.vector[0] = load_vector(from + (line * ld + k) * 2, count);
        }
        return held;
    }

    /// Put what fetch has brought into shared memory.
    template <u32 LINES> IRIS_DEVICE static void put(u16* to, const Held& held, bool across) {
        if (across) {
            const u32 line = port::lane() % (LINES / WIDTH) * WIDTH;
            const u32 k = port::lane() / (LINES / WIDTH) * 2;
            if (k >= DEPTH) return;
            IRIS_UNROLL
            for (u32 i = 0; i < WIDTH; ++i) {
                const u32 low = held.vector[0].word[i / 2] >> i % 2 * 16 & 0xffff;
                const u32 high = held.vector[1].word[i / 2] >> i % 2 * 16 << 16;
                *reinterpret_cast<u32*>(to + (line + i) * LINE + k) = low | high;
            }
        } else {
            const u32 line = port::lane() / (DEPTH / WIDTH);
            const u32 k = port::lane() % (DEPTH / WIDTH) * WIDTH;
            if (line >= LINES) return;
            u64* place = reinterpret_cast<u64*>(to + line * LINE + k);
            const Vec16& all = held.vector[0];
            place[0] = all.word[0] | u64(all.word[1]) << 32;
            place[1] = all.word[2] | u64(all.word[3]) << 32;
        }
    }

    IRIS_DEVICE void compute(const typename Shared::Stage& stage) {
        const u32 lane = port::lane() % WAVE, wave = port::lane() / WAVE;
        const u32 row = wave / WAVES_N * WAVE_M, col = wave % WAVES_N * WAVE_N;
        const u16* a = stage.a + (row + lane % SIZE) * LINE + lane / SIZE * 4;
        const u16* b = stage.b + (col + lane % SIZE) * LINE + lane / SIZE * 4;
        IRIS_UNROLL
        for (u32 d = 0; d < DEPTH; d += Instruction::DEPTH) {
            u64 left[BLOCKS_N], right[BLOCKS_M];
            IRIS_UNROLL
            for (u32 j = 0; j < BLOCKS_N; ++j) left[j] = four(b + j * SIZE * LINE + d);
            IRIS_UNROLL
            for (u32 i = 0; i < BLOCKS_M; ++i) right[i] = four(a + i * SIZE * LINE + d);
            IRIS_UNROLL
            for (u32 i = 0; i < BLOCKS_M; ++i) {
                IRIS_UNROLL
                for (u32 j = 0; j < BLOCKS_N; ++j) {
                    Instruction::multiply_add(sums[i * BLOCKS_N + j], left[j], right[i]);
                }
            }
        }
    }

    IRIS_DEVICE static u64 four(const u16* from) { return *reinterpret_cast<const u64*>(from); }

    Shared& shared;
    typename Instruction::Sums sums[BLOCKS_M * BLOCKS_N];
};

} // namespace iris

#endif
