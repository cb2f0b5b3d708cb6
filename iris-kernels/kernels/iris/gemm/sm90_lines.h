// Slabs of factors in shared memory, as wgmma reads them and cp.async fills them: what the products of tiles on
// sm_90a have in common.
//
// The layouts are those of PTX's "asynchronous warpgroup level matrix instructions" with the 128-byte
// swizzle: lines of 128 bytes, whose 16-byte vectors change places by the number of the line in its
// eight, so that neither copies nor products meet in a bank.
#ifndef IRIS_GEMM_SM90_LINES_H
#define IRIS_GEMM_SM90_LINES_H

#include "iris/gemm/sm80_ptx.h"

namespace iris {

/// What one line of a block holds, and so the depth of a stage.
constexpr u32 LINE = TILE_K;

/// What the depth of one product is apart, in 16 bytes: 16 lines, or 32 bytes of each.
template <bool ACROSS> IRIS_DEVICE constexpr u32 advance() {
    return ACROSS ? 16 * LINE * 2 / 16 : 2;
}

/// A block in shared memory, as the low word of what the instruction wants said has it: where it begins,
/// in 16 bytes, and where the depth goes from line to line, that the next 64 rows or columns are a block
/// further on. Another block is so many times 16 bytes more: none is above the 14 bits there are.
template <bool ACROSS> IRIS_DEVICE u32 describe(const u16* block) {
    constexpr u32 BLOCK = ACROSS ? LINE * LINE * 2 / 16 : 1;
    return (shared_address(block) >> 4 & 0x3fff) | BLOCK << 16;
}

/// What is said of a block to an instruction: the high word has that eight lines are 1024 bytes, swizzled by 128.
IRIS_DEVICE u64 in_lines(u32 block) { return u64(1024 / 16 | 1u << 30) << 32 | block; }

/// A matrix of `OUTER` lines of `INNER` items that lie side by side; `outer`, `inner` exist, the
/// others are 0. In shared memory it is in blocks of LINE items a line.
template <u32 OUTER, u32 INNER>
IRIS_DEVICE void load_lines(u16* to, u64 from, u64 ld, u32 outer, u32 inner) {
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

} // namespace iris

#endif
