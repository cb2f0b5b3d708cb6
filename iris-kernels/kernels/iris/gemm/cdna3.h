// GEMM of a tile on the matrix cores of gfx90a, gfx942 and gfx950: MFMA of f16, bf16 or f32 with f32 sums,
// in blocks of 32 x 32, or of 16 x 16 for the smallest tile. Included by gemm/product.h.
//
// Shared memory holds two stages, each with a slab of A and a slab of B. A line of a slab (a row of A or a
// column of B) is contiguous along K. The next slabs are loaded into registers while the current stage is
// multiplied.
//
// The product is computed transposed: columns of B are the rows of the instruction, so that four sums of a
// lane are adjacent in a row of C. Each wave writes its finished sums to its own part of shared memory and
// reads them back as whole vectors, adjacent vectors by adjacent lanes. bench/notes/amd-static.md compares
// this with an exchange of halves between lanes.
//
// Operands and sums of lane l of 64, for blocks of S x S, where S is 32 or 16:
//
//     left  [l % S][l / S * G + j]    j from 0 to G - 1; G is 4 for f16 and bf16, 8 on gfx950, 1 for f32
//     right [l / S * G + j][l % S]
//     sums  [r / 4 * 8 + l / S * 4 + r % 4][l % S]    r from 0 to 15, or to 3 if S is 16
//
// A lane reads 16 bytes of a line at a time: one, two or four operands. So the K indices of one instruction
// are not contiguous. That changes nothing, because both factors use the same K indices.
//
// On a host, Mfma calls a hook that emulates the instruction with this layout.
#ifndef IRIS_GEMM_CDNA3_H
#define IRIS_GEMM_CDNA3_H

#include "iris/gemm_config.h"
#include "iris/view.h"

#if IRIS_PORT_HOST
extern "C" {
/// Emulates one MFMA instruction; all lanes of a wave call it. The block is `size` x `size` (32 or 16). Each
/// lane passes `count` elements of type `dtype` of each factor, and has size * size / 64 sums.
void iris_hook_mfma(iris::u32 size, iris::u32 dtype, iris::u32 count, const void* left,
                    const void* right, float* sums);
}
#endif

namespace iris {

/// MFMA instructions of a wave for a block of SIZE x SIZE sums. One multiply_add() multiplies 16 bytes of
/// each factor per lane.
template <u32 SIZE> struct Mfma {
    static_assert(SIZE == 32 || SIZE == 16, "MFMA has blocks of 32 x 32 and 16 x 16");
    static constexpr u32 SUMS = SIZE * SIZE / 64;
    /// Number of bytes of a line (along K) that one multiply_add() multiplies.
    static constexpr u32 BYTES = 64 / SIZE * 16;
    using Of = MfmaOf<FACTOR>;

#if IRIS_PORT_HIP
    using Sums = float __attribute__((ext_vector_type(SUMS)));

    using Lane = typename Of::Lane;

    /// Operand of an instruction that begins with word `i` of a vector.
    template <class To> IRIS_DEVICE static To lane(const Vec16& vector, u32 i) {
        if constexpr (sizeof(To) == 4) return __builtin_bit_cast(To, vector.word[i]);
        else if constexpr (sizeof(To) == 8) return __builtin_bit_cast(To, vector.word[i] | u64(vector.word[i + 1]) << 32);
        else return __builtin_bit_cast(To, vector);
    }
    IRIS_DEVICE static void multiply_add(Sums& sums, const Vec16& left, const Vec16& right) {
        IRIS_UNROLL
        for (u32 i = 0; i < 4; i += sizeof(Lane) / 4) {
            Of::template multiply_add<SIZE>(sums, lane<Lane>(left, i), lane<Lane>(right, i));
        }
    }

    /// Makes shared memory that lanes of the wave have written visible to all lanes of the wave. No workgroup
    /// barrier is needed, because a wave runs in lockstep and its accesses to shared memory complete in
    /// order.
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
        for (u32 i = 0; i < 4; i += Of::COUNT * ELEMENT_BYTES / 4) {
            iris_hook_mfma(SIZE, FACTOR, Of::COUNT, left.word + i, right.word + i, sums.v);
        }
    }
    static void meet() { port::barrier(Site::Body); }
#endif
};

class MfmaCore {
    // Four waves, 2 x 2, each for a quarter of the tile.
    static constexpr u32 WAVE = 64, WAVES_M = 2, WAVES_N = 2;
    static constexpr u32 WAVE_M = TILE_M / WAVES_M, WAVE_N = TILE_N / WAVES_N;
    static constexpr u32 SIZE = WAVE_M % 32 == 0 && WAVE_N % 32 == 0 ? 32 : 16;
    using Instruction = Mfma<SIZE>;
    static constexpr u32 BLOCKS_M = WAVE_M / SIZE, BLOCKS_N = WAVE_N / SIZE;
    static_assert(THREADS == WAVE * WAVES_M * WAVES_N, "each thread must belong to one wave of the tile");
    static_assert(WAVE_M % SIZE == 0 && WAVE_N % SIZE == 0,
                  "a wave's part must consist of whole MFMA blocks");

    // Number of elements in a vector of 16 bytes, and number of vectors in a line of a slab.
    static constexpr u32 ITEMS = 16 / ELEMENT_BYTES, VECTORS = SLAB_BYTES / 16;
    // ROUND: number of lines that span all banks of shared memory (128 bytes). ROW: stride in floats of a row
    // of sums in shared memory; the 4 extra floats spread rows over the banks.
    static constexpr u32 ROUND = 128 / SLAB_BYTES, ROW = SIZE + 4;
    static_assert(SLAB_BYTES % Instruction::BYTES == 0, "a slab must consist of whole MFMA steps");
    static_assert(STAGES == 2, "the loop is written for two stages");

  public:
    union alignas(16) Shared {
        struct Stage {
            u8 a[TILE_M * SLAB_BYTES];
            u8 b[TILE_N * SLAB_BYTES];
        } stage[STAGES];
        float out[WAVES_M * WAVES_N][SIZE * ROW];
    };
    static_assert(sizeof(Shared) <= 20 * 1024,
                  "three workgroups must fit into the shared memory of a compute unit");

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
        // A previous multiply() or emit() may still be reading shared memory.
        port::barrier(Site::Body);
        // The loop has one iteration more than there are slabs, so that the code for loads and products
        // appears only once. One stage is filled while the other is multiplied; all threads that have read
        // the filled one have passed a barrier since.
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
        // `out` overlaps the stages, which no thread may read any more.
        port::barrier(Site::Body);
        // The outer loop is not unrolled, so that the code contains the sink, which stores the result,
        // only once. The inner loop is unrolled and selects the sums of the block, because registers
        // can be indexed only by constants.
        IRIS_NO_UNROLL
        for (u32 block = 0; block < BLOCKS_M * BLOCKS_N; ++block) {
            typename Instruction::Sums own = sums[0];
            IRIS_UNROLL
            for (u32 i = 1; i < BLOCKS_M * BLOCKS_N; ++i) {
                if (i == block) own = sums[i];
            }
            // A lane writes to one row, four adjacent columns at a time.
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
    /// Data of a slab that a lane holds in registers between memory and shared memory. If K is contiguous
    /// in memory, the lane holds one vector along K. Otherwise it holds vectors across adjacent lines (rows
    /// of A, columns of B), one vector for f32 and two for 16-bit types, from which put() makes one
    /// word per line.
    struct Held {
        Vec16 vector[2];
    };

    /// Loads 16 bytes of adjacent elements. Only the first `count` elements exist; the others are 0.
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

    /// Position of this lane's vectors in a slab: its first line, and its first element along K. Consecutive
    /// lanes go along K first. `across`: K is strided in memory.
    struct Place {
        u32 line, k;
        IRIS_DEVICE explicit Place(bool across) {
            constexpr u32 WORDS = SLAB_BYTES / 4;
            line = across ? port::thread() / WORDS * ITEMS : port::thread() / VECTORS;
            k = across ? port::thread() % WORDS * (4 / ELEMENT_BYTES) : port::thread() % VECTORS * ITEMS;
        }
    };

    /// Loads this lane's part of a slab of LINES lines (rows of A or columns of B) with TILE_K elements each,
    /// of which `lines` lines and `depth` elements exist. `across`: K is strided in memory, and adjacent
    /// lines are contiguous.
    template <u32 LINES>
    IRIS_DEVICE static Held fetch(u64 from, u64 ld, bool across, u32 lines, u32 depth) {
        static_assert(LINES * VECTORS <= THREADS, "a thread loads at most one vector");
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

    /// Byte offset of 16-byte vector `vector` of a line in a slab. Vectors are permuted by the line's number
    /// divided by ROUND, so that equal vectors of eight adjacent lines have no bank conflict.
    IRIS_DEVICE static u32 offset(u32 line, u32 vector) {
        return line * SLAB_BYTES + (vector ^ line / ROUND % VECTORS) * 16;
    }

    /// Writes the data that fetch() has loaded to shared memory.
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
        // All blocks begin at a full period of the permutation, so one offset serves all of them.
        static_assert(SIZE % (ROUND * VECTORS) == 0, "a block must consist of whole rounds");
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
