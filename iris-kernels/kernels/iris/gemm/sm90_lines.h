// Slabs of A and B in shared memory for gemm/sm90.h: filled by cp.async, read by wgmma.
//
// The layout is that of PTX's "asynchronous warpgroup level matrix instructions" with the 128-byte swizzle.
// Lines have 128 bytes; the index of a 16-byte vector in its line is XORed with the line's number modulo 8,
// so that neither copies nor wgmma have bank conflicts.
#ifndef IRIS_GEMM_SM90_LINES_H
#define IRIS_GEMM_SM90_LINES_H

#include "iris/gemm/sm80_ptx.h"

namespace iris {

/// Number of elements in a line of 128 bytes; also the depth of a stage along K.
constexpr u32 LINE = TILE_K;

/// Increment of a descriptor's start address from one K step of 16 to the next, in units of 16 bytes: 16
/// lines if ACROSS (K goes from line to line), otherwise 32 bytes of each line.
template <bool ACROSS> IRIS_DEVICE constexpr u32 advance() {
    return ACROSS ? 16 * LINE * 2 / 16 : 2;
}

/// Low word of the matrix descriptor of wgmma for a block in shared memory. Bits 0 to 13 are the start
/// address, bits 16 to 29 the leading byte offset, each divided by 16. The leading offset is the distance of
/// the blocks of 64 rows or columns if ACROSS (K is strided); otherwise it is unused. A distance / 16 may be
/// added to the word, because the start address of every block in shared memory fits into 14 bits.
template <bool ACROSS> IRIS_DEVICE u32 describe(const u16* block) {
    constexpr u32 BLOCK = ACROSS ? LINE * LINE * 2 / 16 : 1;
    return (shared_address(block) >> 4 & 0x3fff) | BLOCK << 16;
}

/// Matrix descriptor of wgmma with low word `block`. In the high word, bits 0 to 13 are the stride byte
/// offset divided by 16 (1024 bytes for eight lines), and bit 30 selects the 128-byte swizzle.
IRIS_DEVICE u64 in_lines(u32 block) { return u64(1024 / 16 | 1u << 30) << 32 | block; }

/// Copies a matrix of OUTER lines with INNER contiguous elements each to shared memory, where it consists of
/// blocks with LINE elements per line. Only `outer` lines and `inner` elements exist; the others are 0.
template <u32 OUTER, u32 INNER>
IRIS_DEVICE void load_lines(u16* to, u64 from, u64 ld, u32 outer, u32 inner) {
    constexpr u32 ACROSS = INNER / WIDTH, STEP = THREADS / ACROSS;
    static_assert(THREADS % ACROSS == 0 && OUTER % STEP == 0 && STEP % 8 == 0,
                  "each thread must copy the same vector of every line, at the same swizzle");
    const u32 item = port::thread() % ACROSS * WIDTH, first = port::thread() / ACROSS;
    const u32 vector = item / WIDTH % 8 ^ first % 8, block = item / LINE * OUTER * LINE;
    const u32 there = item < inner ? min_of(inner - item, WIDTH) : 0;
    u16* const place = to + block + first * LINE + vector * WIDTH;
    const u64 start = from + (first * ld + item) * 2, apart = STEP * ld * 2;
    // The kind of copy is chosen once for all lines, because the number of instructions per slab can limit
    // the GEMM.
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
