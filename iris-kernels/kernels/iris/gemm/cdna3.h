// Products on the matrix cores of gfx90a, gfx942 and gfx950: MFMA of f16, bf16 or f32 with f32 sums, in
// blocks of 32 x 32, or of 16 x 16 in the smallest tile. Included by gemm/product.h.
//
// Slabs of A and B lie in shared memory in two stages, both with the depth along a line. What comes from
// memory is held in registers while the stage before is multiplied.
//
// Multiplied is transposed: B's columns are the instruction's rows, so that four sums of a lane are
// neighbours in a row of C. Waves write finished sums to shared memory of their own, and read whole vectors
// of it, neighbouring lanes neighbouring ones. bench/notes/amd-static.md has the cost of exchanging halves
// between lanes.
//
// What a lane l of 64 gives to an instruction, and its sums, with S = 32 or 16 rows and columns:
//
//     left  [l % S][l / S * G + j]    j of 0 to G - 1: G = 4 of f16 or bf16, 8 on gfx950, 1 of f32
//     right [l / S * G + j][l % S]
//     sums  [r / 4 * 8 + l / S * 4 + r % 4][l % S]    r of 0 to 15, or to 3 where S is 16
//
// A lane reads 16 bytes of a line at a time, which are one, two or four such operands. So the depths of an
// instruction are not neighbours, but those of both factors are the same, and nothing else counts.
//
// On a host port::Mfma is a hook, which does the same by those lines.
#ifndef IRIS_GEMM_CDNA3_H
#define IRIS_GEMM_CDNA3_H

#include "iris/gemm_config.h"
#include "iris/view.h"

#if IRIS_PORT_HOST
extern "C" {
/// One instruction of a wave, as all of its lanes call it: `size` is 32 or 16, `dtype` that of the factors,
/// of which a lane gives `count` each; it has size * size / 64 sums.
void iris_hook_mfma(iris::u32 size, iris::u32 dtype, iris::u32 count, const void* left,
                    const void* right, float* sums);
}
#endif

namespace iris {

/// The product of what the lanes of a wave have in 16 bytes each: 32 x 32 or 16 x 16 sums.
template <u32 SIZE> struct Mfma {
    static_assert(SIZE == 32 || SIZE == 16, "the instructions there are");
    static constexpr u32 SUMS = SIZE * SIZE / 64;
    /// Bytes of a line that it multiplies.
    static constexpr u32 BYTES = 64 / SIZE * 16;

#if IRIS_PORT_HIP
    using Sums = float __attribute__((ext_vector_type(SUMS)));

#if IRIS_DTYPE == 0
    IRIS_DEVICE static void multiply_add(Sums& sums, const Vec16& left, const Vec16& right) {
        IRIS_UNROLL
        for (u32 i = 0; i < 4; ++i) {
            const float a = __builtin_bit_cast(float, left.word[i]);
            const float b = __builtin_bit_cast(float, right.word[i]);
            if constexpr (SIZE == 32) {
                sums = __builtin_amdgcn_mfma_f32_32x32x2f32(a, b, sums, 0, 0, 0);
            } else {
                sums = __builtin_amdgcn_mfma_f32_16x16x4f32(a, b, sums, 0, 0, 0);
            }
        }
    }
#elif IRIS_HAS_MFMA_16
    IRIS_DEVICE static void multiply_add(Sums& sums, const Vec16& left, const Vec16& right) {
#if IRIS_DTYPE == 2
        using Eight = __bf16 __attribute__((ext_vector_type(8)));
        const Eight a = __builtin_bit_cast(Eight, left), b = __builtin_bit_cast(Eight, right);
        if constexpr (SIZE == 32) {
            sums = __builtin_amdgcn_mfma_f32_32x32x16_bf16(a, b, sums, 0, 0, 0);
        } else {
            sums = __builtin_amdgcn_mfma_f32_16x16x32_bf16(a, b, sums, 0, 0, 0);
        }
#else
        using Eight = _Float16 __attribute__((ext_vector_type(8)));
        const Eight a = __builtin_bit_cast(Eight, left), b = __builtin_bit_cast(Eight, right);
        if constexpr (SIZE == 32) {
            sums = __builtin_amdgcn_mfma_f32_32x32x16_f16(a, b, sums, 0, 0, 0);
        } else {
            sums = __builtin_amdgcn_mfma_f32_16x16x32_f16(a, b, sums, 0, 0, 0);
        }
#endif
    }
#else
    IRIS_DEVICE static void multiply_add(Sums& sums, const Vec16& left, const Vec16& right) {
        IRIS_UNROLL
        for (u32 i = 0; i < 4; i += 2) {
            const u64 lefts = left.word[i] | u64(left.word[i + 1]) << 32;
            const u64 rights = right.word[i] | u64(right.word[i + 1]) << 32;
#if IRIS_DTYPE == 2
            using Four = short __attribute__((ext_vector_type(4)));
            const Four a = __builtin_bit_cast(Four, lefts), b = __builtin_bit_cast(Four, rights);
            if constexpr (SIZE == 32) {
                sums = __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(a, b, sums, 0, 0, 0);
            } else {
                sums = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a, b, sums, 0, 0, 0);
            }
#else
            using Four = _Float16 __attribute__((ext_vector_type(4)));
            const Four a = __builtin_bit_cast(Four, lefts), b = __builtin_bit_cast(Four, rights);
            if constexpr (SIZE == 32) {
                sums = __builtin_amdgcn_mfma_f32_32x32x8f16(a, b, sums, 0, 0, 0);
            } else {
                sums = __builtin_amdgcn_mfma_f32_16x16x16f16(a, b, sums, 0, 0, 0);
            }
#endif
        }
    }
#endif

    /// What lanes of a wave have written to its own shared memory, all of them have: they run in lockstep, and
    /// their accesses are done in order.
    IRIS_DEVICE static void meet() {
        __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
        __builtin_amdgcn_wave_barrier();
        __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
    }
#else
    struct Sums {
        float v[SUMS];
        float& operator[](u32 i) { return v[i]; }
    };

    static void multiply_add(Sums& sums, const Vec16& left, const Vec16& right) {
        // Elements that a lane gives to an instruction, and the words they are in.
#if IRIS_HAS_MFMA_16
        constexpr u32 COUNT = DTYPE == F32 ? 1 : 8;
#else
        constexpr u32 COUNT = DTYPE == F32 ? 1 : 4;
#endif
        for (u32 i = 0; i < 4; i += COUNT * ELEMENT_BYTES / 4) {
            iris_hook_mfma(SIZE, DTYPE, COUNT, left.word + i, right.word + i, sums.v);
        }
    }
    static void meet() { port::barrier(Site::Body); }
#endif
};

class MfmaCore {
    // Four waves in two rows of two, each with a quarter of the tile.
    static constexpr u32 WAVE = 64, WAVES_M = 2, WAVES_N = 2;
    static constexpr u32 WAVE_M = TILE_M / WAVES_M, WAVE_N = TILE_N / WAVES_N;
    static constexpr u32 SIZE = WAVE_M % 32 == 0 && WAVE_N % 32 == 0 ? 32 : 16;
    using Instruction = Mfma<SIZE>;
    static constexpr u32 BLOCKS_M = WAVE_M / SIZE, BLOCKS_N = WAVE_N / SIZE;
    static_assert(THREADS == WAVE * WAVES_M * WAVES_N, "four waves");
    static_assert(WAVE_M % SIZE == 0 && WAVE_N % SIZE == 0, "whole blocks");

    // Elements of 16 bytes, and such vectors of a line of a slab.
    static constexpr u32 ITEMS = 16 / ELEMENT_BYTES, VECTORS = SLAB_BYTES / 16;
    // Lines as long as all banks together; and a row of a block of sums, which is a vector longer than that.
    static constexpr u32 ROUND = 128 / SLAB_BYTES, ROW = SIZE + 4;
    static_assert(SLAB_BYTES % Instruction::BYTES == 0, "whole instructions");
    static_assert(STAGES == 2, "one is multiplied while the other comes");

  public:
    union alignas(16) Shared {
        struct Stage {
            u8 a[TILE_M * SLAB_BYTES];
            u8 b[TILE_N * SLAB_BYTES];
        } stage[STAGES];
        float out[WAVES_M * WAVES_N][SIZE * ROW];
    };
    static_assert(sizeof(Shared) <= 20 * 1024, "room for three workgroups, and for their votes");

    IRIS_DEVICE explicit MfmaCore(Shared& shared) : shared(shared) {}

    IRIS_DEVICE void clear() {
        IRIS_UNROLL
        for (u32 i = 0; i < BLOCKS_M * BLOCKS_N; ++i) {
            IRIS_UNROLL
            for (u32 r = 0; r < Instruction::SUMS; ++r) sums[i][r] = 0.0f;
        }
    }

    IRIS_DEVICE void multiply(const View& a, const View& b, u32 rows, u32 cols, u32 depth) {
        const u32 steps = div_up(depth, TILE_K);
        if (steps == 0) return;
        // The last product or sink may still read.
        port::barrier(Site::Body);
        // One step more than there are slabs, so that each part stands in the code once. A stage is
        // filled while the other is multiplied; whoever read it has come to the barrier since.
        IRIS_NO_UNROLL
        for (u32 step = 0; step <= steps; ++step) {
            const u32 k = step * TILE_K;
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

    static constexpr bool KEEPS = false;
    template <class Sink> IRIS_DEVICE void emit(Sink sink) {
        const u32 lane = port::thread() % WAVE, wave = port::thread() / WAVE;
        const u32 row = wave / WAVES_N * WAVE_M, col = wave % WAVES_N * WAVE_N;
        float* out = shared.out[wave];
        // Nobody reads the stages any more.
        port::barrier(Site::Body);
        // The sink stands in the code once; registers need constant indices, hence the inner loop.
        IRIS_NO_UNROLL
        for (u32 block = 0; block < BLOCKS_M * BLOCKS_N; ++block) {
            typename Instruction::Sums own = sums[0];
            IRIS_UNROLL
            for (u32 i = 1; i < BLOCKS_M * BLOCKS_N; ++i) {
                if (i == block) own = sums[i];
            }
            // The lane's row of C, and four neighbours in it at a time.
            float* first = out + lane % SIZE * ROW + lane / SIZE * 4;
            Instruction::meet();
            IRIS_UNROLL
            for (u32 r = 0; r < Instruction::SUMS; ++r) first[r / 4 * 8 + r % 4] = own[r];
            Instruction::meet();
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
    /// What a lane holds of a slab on its way to shared memory: a vector along the depth, or, of lines that
    /// are neighbours in memory, what is to become a word of each: one vector of f32, two of 16 bits.
    struct Held {
        Vec16 vector[2];
    };

    /// Elements that lie side by side, of which `count` exist, as 16 bytes; the others are 0.
    IRIS_DEVICE static Vec16 load_vector(u64 from, u32 count) {
        if (count >= ITEMS && (from & 15) == 0) return port::read<Vec16>(from);
        Vec16 all;
        IRIS_UNROLL
        for (u32 i = 0; i < 4; ++i) {
            if constexpr (ELEMENT_BYTES == 4) {
                all.word[i] = i < count ? port::read<u32>(from + 4 * i) : 0;
            } else {
                const u32 low = 2 * i < count ? port::read<u16>(from + 4 * i) : 0;
                const u32 high = 2 * i + 1 < count ? port::read<u16>(from + 4 * i + 2) : 0;
                all.word[i] = low | high << 16;
            }
        }
        return all;
    }

    /// Where in a slab this lane's vectors lie: the first of its lines, and its first element there. Lanes
    /// go along the depth first, in memory and in shared memory.
    struct Place {
        u32 line, k;
        IRIS_DEVICE explicit Place(bool across) {
            constexpr u32 WORDS = SLAB_BYTES / 4;
            line = across ? port::thread() / WORDS * ITEMS : port::thread() / VECTORS;
            k = across ? port::thread() % WORDS * (4 / ELEMENT_BYTES) : port::thread() % VECTORS * ITEMS;
        }
    };

    /// A slab of `LINES` lines, rows of A or columns of B, of which `lines` exist, and TILE_K items of
    /// each, of which `depth` exist. ACROSS: lines are neighbours in memory, and a line is not.
    template <u32 LINES>
    IRIS_DEVICE static Held fetch(u64 from, u64 ld, bool across, u32 lines, u32 depth) {
        static_assert(LINES * VECTORS <= THREADS, "a vector a lane");
        Held held{};
        const Place at(across);
        if (at.line >= LINES) return held;
        if (across) {
            IRIS_UNROLL
            for (u32 i = 0; i < 4 / ELEMENT_BYTES; ++i) {
                const u32 count = at.k + i < depth && at.line < lines ? lines - at.line : 0;
                held.vector[i] = load_vector(from + ((at.k + i) * ld + at.line) * ELEMENT_BYTES, count);
            }
        } else {
            const u32 count = at.line < lines && at.k < depth ? depth - at.k : 0;
            held.vector[0] = load_vector(from + (at.line * ld + at.k) * ELEMENT_BYTES, count);
        }
        return held;
    }

    /// Where vector `vector` of a line lies: they change places from one round of the banks to the next, so
    /// that those of eight neighbouring lines meet in no bank.
    IRIS_DEVICE static u32 offset(u32 line, u32 vector) {
        return line * SLAB_BYTES + (vector ^ line / ROUND % VECTORS) * 16;
    }

    /// Put what fetch has brought into shared memory.
    template <u32 LINES> IRIS_DEVICE static void put(u8* to, const Held& held, bool across) {
        const Place at(across);
        if (at.line >= LINES) return;
        const u32 vector = at.k * ELEMENT_BYTES / 16, within = at.k * ELEMENT_BYTES % 16;
        if (across) {
            IRIS_UNROLL
            for (u32 i = 0; i < ITEMS; ++i) {
                u32 word = held.vector[0].word[i * ELEMENT_BYTES / 4];
                if constexpr (ELEMENT_BYTES == 2) {
                    const u32 low = word >> i % 2 * 16 & 0xffff;
                    word = low | held.vector[1].word[i / 2] >> i % 2 * 16 << 16;
                }
                *reinterpret_cast<u32*>(to + offset(at.line + i, vector) + within) = word;
            }
        } else {
            *reinterpret_cast<Vec16*>(to + offset(at.line, vector)) = held.vector[0];
        }
    }

    IRIS_DEVICE void compute(const typename Shared::Stage& stage) {
        const u32 lane = port::thread() % WAVE, wave = port::thread() / WAVE;
        const u32 row = wave / WAVES_N * WAVE_M, col = wave % WAVES_N * WAVE_N;
        // Blocks begin where the vectors are in the same places.
        static_assert(SIZE % (ROUND * VECTORS) == 0, "whole rounds");
        const u8* a = stage.a + row * SLAB_BYTES;
        const u8* b = stage.b + col * SLAB_BYTES;
        IRIS_UNROLL
        for (u32 at = 0; at < SLAB_BYTES; at += Instruction::BYTES) {
            Vec16 left[BLOCKS_N], right[BLOCKS_M];
            const u32 place = offset(lane % SIZE, at / 16 + lane / SIZE);
            IRIS_UNROLL
            for (u32 j = 0; j < BLOCKS_N; ++j) left[j] = vector(b + j * SIZE * SLAB_BYTES + place);
            IRIS_UNROLL
            for (u32 i = 0; i < BLOCKS_M; ++i) right[i] = vector(a + i * SIZE * SLAB_BYTES + place);
            IRIS_UNROLL
            for (u32 i = 0; i < BLOCKS_M; ++i) {
                IRIS_UNROLL
                for (u32 j = 0; j < BLOCKS_N; ++j) {
                    Instruction::multiply_add(sums[i * BLOCKS_N + j], left[j], right[i]);
                }
            }
        }
    }

    IRIS_DEVICE static Vec16 vector(const u8* from) { return *reinterpret_cast<const Vec16*>(from); }

    Shared& shared;
    typename Instruction::Sums sums[BLOCKS_M * BLOCKS_N];
};

} // namespace iris

#endif
