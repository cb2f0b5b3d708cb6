// Code that the tile GEMMs of sm_80 and sm_90a share: asynchronous copies to shared memory (cp.async), and
// the register layout of a warp's sums.
#ifndef IRIS_GEMM_SM80_PTX_H
#define IRIS_GEMM_SM80_PTX_H

#include "iris/gemm_config.h"
#include "iris/view.h"

namespace iris {

IRIS_DEVICE u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

/// Asynchronous copies from memory to shared memory (cp.async).
struct AsyncCopy {
    IRIS_DEVICE static void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
    /// Waits until all but the newest `PENDING` groups are complete.
    template <u32 PENDING> IRIS_DEVICE static void wait() {
        asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
    }
    /// Copies the first `bytes` bytes of a 16-byte vector; the other bytes become 0.
    IRIS_DEVICE static void vector_or_zero(u16* to, u64 from, u32 bytes) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                     "l"(from), "r"(bytes)
                     : "memory");
    }
    /// Copies eight adjacent elements from any address, synchronously. Only the first `count` exist; the
    /// others become 0.
    IRIS_DEVICE static void items(u16* to, u64 from, u32 count) {
        Vec16 all;
        IRIS_UNROLL
        for (u32 i = 0; i < 4; ++i) {
            const u32 low = 2 * i < count ? port::read<u16>(from + 4 * i) : 0;
            const u32 high = 2 * i + 1 < count ? port::read<u16>(from + 4 * i + 2) : 0;
            all.word[i] = low | high << 16;
        }
        *reinterpret_cast<Vec16*>(to) = all;
    }
};

/// Sums of a warp, 16 rows x `COLS` columns, in the register layout of mma.sync and wgmma.
template <u32 COLS> struct WarpTile {
    static constexpr u32 LD = COLS + 4, ITEMS = 16 * LD;

    /// Passes the sums to `sink` in vectors of WIDTH, adjacent vectors by adjacent lanes. The sums go through
    /// `out`, shared memory of this warp. The first sum is at (`row`, `col`) of the tile.
    template <class Sink>
    IRIS_DEVICE static void emit(float* out, const float (&sums)[COLS / 2], u32 row, u32 col,
                                 Sink sink) {
        const u32 lane = port::thread() % 32;
        float* first = out + lane / 4 * LD + lane % 4 * 2;
        IRIS_UNROLL
        for (u32 j = 0; j < COLS / 8; ++j) {
            first[j * 8] = sums[j * 4];
            first[j * 8 + 1] = sums[j * 4 + 1];
            first[j * 8 + 8 * LD] = sums[j * 4 + 2];
            first[j * 8 + 8 * LD + 1] = sums[j * 4 + 3];
        }
        __syncwarp();
        constexpr u32 ACROSS = COLS / WIDTH;
        IRIS_NO_UNROLL
        for (u32 vector = lane; vector < 16 * ACROSS; vector += 32) {
            const float* from = out + vector / ACROSS * LD + vector % ACROSS * WIDTH;
            Values values;
            IRIS_UNROLL
            for (u32 e = 0; e < WIDTH; ++e) values.v[e] = from[e];
            sink(row + vector / ACROSS, col + vector % ACROSS * WIDTH, values);
        }
        __syncwarp();
    }
};

} // namespace iris

#endif
