// Copies by all threads of a workgroup, in 16-byte vectors if source and target are aligned.
#ifndef IRIS_COPY_H
#define IRIS_COPY_H

#include "iris/port.h"

namespace iris {

/// Copies, item by item, the columns of a rectangle that do not fill a 16-byte vector: the columns
/// from `first` on. Items have 2, 4 or 8 bytes; `to_ld` and `from_ld` are row strides in items.
IRIS_COLD void copy_pieces(u64 to, u64 to_ld, u64 from, u64 from_ld, u32 rows, u64 first, u64 cols,
                           u32 item) {
    const u64 rest = cols - first;
    for (u64 i = port::thread(); i < rows * rest; i += port::threads()) {
        const u64 row = i / rest, col = first + i % rest;
        const u64 target = to + (row * to_ld + col) * item;
        const u64 source = from + (row * from_ld + col) * item;
        if (item == 2) port::write(target, port::read<u16>(source));
        else if (item == 4) port::write(target, port::read<u32>(source));
        else port::write(target, port::read<u64>(source));
    }
}

/// Number of vectors that a thread loads before it stores the first one, to hide the latency of a
/// link to a peer.
constexpr u32 COPY_DEPTH = 4;

/// Copies `count` vectors of 16 bytes: vector i from address `from(i)` to address `to(i)`.
template <class From, class To> IRIS_DEVICE void copy_vectors(u32 count, From from, To to) {
    const u32 step = port::threads();
    for (u32 i = port::thread(); i < count; i += COPY_DEPTH * step) {
        Vec16 held[COPY_DEPTH];
        IRIS_UNROLL
        for (u32 d = 0; d < COPY_DEPTH; ++d) {
            const u32 at = i + d * step;
            if (at < count) held[d] = port::read<Vec16>(from(at));
        }
        IRIS_UNROLL
        for (u32 d = 0; d < COPY_DEPTH; ++d) {
            const u32 at = i + d * step;
            if (at < count) port::write(to(at), held[d]);
        }
    }
}

/// Copies `bytes` bytes by all threads of the workgroup. `bytes` and both addresses are multiples
/// of `item` (2, 4, 8 or 16). The caller must add a barrier if other threads read the copy.
IRIS_DEVICE void copy_bytes(u64 to, u64 from, u64 bytes, u32 item) {
    // Largest number of vectors per pass of the loop, so that 32-bit indices suffice.
    constexpr u64 MOST = u64(1) << 30;
    while (((to | from) & 15) == 0 && bytes >= 16) {
        const u32 vectors = static_cast<u32>(bytes / 16 < MOST ? bytes / 16 : MOST);
        copy_vectors(
            vectors, [=](u32 i) { return from + u64(i) * 16; },
            [=](u32 i) { return to + u64(i) * 16; });
        to += u64(vectors) * 16;
        from += u64(vectors) * 16;
        bytes -= u64(vectors) * 16;
    }
    if (bytes > 0) {
        const u32 part = item < 8 ? item : 8;
        copy_pieces(to, 0, from, 0, 1, 0, bytes / part, part);
    }
}

/// Copies a rectangle of `rows` rows of `cols` items of 2 or 4 bytes, fewer than 2^30 columns and at
/// most 2^31 vectors of 16 bytes in all; row strides are in items. The caller must add a barrier if
/// other threads read the copy.
IRIS_DEVICE void copy_rect(u64 to, u64 to_ld, u64 from, u64 from_ld, u32 rows, u32 cols, u32 item) {
    // If the rows are contiguous in source and target, all rows are copied as one run.
    if (rows <= 1 || (to_ld == cols && from_ld == cols)) {
        return copy_bytes(to, from, u64(rows) * cols * item, item);
    }
    u32 done = 0;
    if (((to | from | to_ld * item | from_ld * item) & 15) == 0) {
        const u32 across = cols * item / 16;
        // Consecutive threads copy consecutive vectors of a row, so that a warp covers whole rows.
        const auto at = [=](u64 start, u64 ld, u32 i) {
            return start + i / across * ld * item + u64(i % across) * 16;
        };
        copy_vectors(
            rows * across, [=](u32 i) { return at(from, from_ld, i); },
            [=](u32 i) { return at(to, to_ld, i); });
        done = across * 16 / item;
    }
    if (done < cols) copy_pieces(to, to_ld, from, from_ld, rows, done, cols, item);
}

} // namespace iris

#endif
