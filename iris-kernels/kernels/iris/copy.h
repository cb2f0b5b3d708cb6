// Copies by all lanes of a workgroup, in 16-byte vectors where both ends allow it.
#ifndef IRIS_COPY_H
#define IRIS_COPY_H

#include "iris/port.h"

namespace iris {

/// Copy `count` items of T from one address to the other; both are multiples of sizeof(T).
template <class T> IRIS_DEVICE void copy_items(u64 to, u64 from, u64 count) {
    for (u64 i = port::lane(); i < count; i += port::lanes()) {
        port::write(to + i * sizeof(T), port::read<T>(from + i * sizeof(T)));
    }
}

/// Copy `bytes` bytes, a multiple of `item` (2, 4, 8 or 16), as are both addresses. No barrier.
IRIS_DEVICE void copy_bytes(u64 to, u64 from, u64 bytes, u32 item) {
    if (((to | from) & 15) == 0) {
        // Four vectors of a lane are in flight at once: a link to a peer is long.
        constexpr u32 DEPTH = 4;
        const u64 vectors = bytes / 16, step = port::lanes();
        u64 i = port::lane();
        for (; i + (DEPTH - 1) * step < vectors; i += DEPTH * step) {
            Vec16 held[DEPTH];
            IRIS_UNROLL
            for (u32 d = 0; d < DEPTH; ++d) held[d] = port::read<Vec16>(from + (i + d * step) * 16);
            IRIS_UNROLL
            for (u32 d = 0; d < DEPTH; ++d) port::write(to + (i + d * step) * 16, held[d]);
        }
        for (; i < vectors; i += step) port::write(to + i * 16, port::read<Vec16>(from + i * 16));
        to += vectors * 16;
        from += vectors * 16;
        bytes -= vectors * 16;
    }
    if (item == 2) copy_items<u16>(to, from, bytes / 2);
    else if (item == 4) copy_items<u32>(to, from, bytes / 4);
    else copy_items<u64>(to, from, bytes / 8);
}

/// Copy a rectangle of `rows` rows of `cols` items; row strides in items. No barrier.
IRIS_DEVICE void copy_rect(u64 to, u64 to_ld, u64 from, u64 from_ld, u32 rows, u32 cols, u32 item) {
    const bool wide = ((to | from | to_ld * item | from_ld * item) & 15) == 0;
    const u32 per_vector = wide ? 16 / item : 1;
    const u32 across = cols / per_vector, tail = cols - across * per_vector;
    // A lane goes on along a row, so that a warp covers whole rows.
    const u64 pieces = u64(rows) * across;
    for (u64 i = port::lane(); i < pieces; i += port::lanes()) {
        const u64 row = i / across, col = i % across * per_vector;
        const u64 target = to + (row * to_ld + col) * item, source = from + (row * from_ld + col) * item;
        if (wide) port::write(target, port::read<Vec16>(source));
        else if (item == 2) port::write(target, port::read<u16>(source));
        else port::write(target, port::read<u32>(source));
    }
    if (tail != 0) {
        for (u64 i = port::lane(); i < u64(rows) * tail; i += port::lanes()) {
            const u64 row = i / tail, col = u64(across) * per_vector + i % tail;
            const u64 target = to + (row * to_ld + col) * item;
            const u64 source = from + (row * from_ld + col) * item;
            if (item == 2) port::write(target, port::read<u16>(source));
            else port::write(target, port::read<u32>(source));
        }
    }
}

} // namespace iris

#endif
