// Access to elements of matrices as f32, in vectors of eight adjacent elements of a row.
#ifndef IRIS_VIEW_H
#define IRIS_VIEW_H

#include "iris/args.h"
#include "iris/schedule.h"

namespace iris {

/// Number of elements of a vector, which has 16 bytes for a 16-bit type.
constexpr u32 WIDTH = VECTOR_WIDTH;

IRIS_DEVICE u64 bytes_of(const Tile& tile, u32 dtype) {
    return u64(tile.rows) * tile.cols * element_bytes(dtype);
}

/// Whether `count` elements at `address` fill one aligned vector, which can be accessed as a whole.
IRIS_DEVICE bool is_whole(u64 address, u32 count) { return count == WIDTH && (address & 15) == 0; }

/// Loads `count` elements one by one, because they do not fill an aligned vector.
IRIS_COLD Values load_pieces(u64 address, u32 dtype, u32 count) {
    Values values;
    IRIS_UNROLL
    for (u32 i = 0; i < WIDTH; ++i) {
        values.v[i] = i < count ? load_element(address + i * element_bytes(dtype), dtype) : 0.0f;
    }
    return values;
}
IRIS_COLD void store_pieces(u64 address, u32 dtype, u32 count, Values values) {
    IRIS_UNROLL
    for (u32 i = 0; i < WIDTH; ++i) {
        if (i < count) store_element(address + i * element_bytes(dtype), dtype, values.v[i]);
    }
}

/// Loads `count` (1 to WIDTH) elements from `address` on; the remaining values are 0.
IRIS_DEVICE Values load_row(u64 address, u32 dtype, u32 count) {
    if (is_whole(address, count)) return values_of(load_raw(address, dtype), dtype);
    return load_pieces(address, dtype, count);
}

IRIS_DEVICE void store_row(u64 address, u32 dtype, u32 count, const Values& values) {
    if (is_whole(address, count)) store_whole(address, dtype, values);
    else store_pieces(address, dtype, count, values);
}

/// Matrix or part of a matrix, given by the address of its first element and its leading dimension.
struct View {
    u64 address, ld;
    u32 dtype;
    bool transposed;

    IRIS_DEVICE static View of(const Matrix& matrix) {
        return View{matrix.address, matrix.ld, matrix.dtype, matrix.transposed == 1};
    }
    /// Returns the view of a tile in a slot, with row stride `tile_n`.
    IRIS_DEVICE static View slot(u64 address, u32 tile_n, u32 dtype) {
        return View{address, tile_n, dtype, false};
    }
    IRIS_DEVICE u64 at(u32 row, u32 col) const {
        const u64 index = transposed ? col * ld + row : row * ld + col;
        return address + index * element_bytes(dtype);
    }
    /// Returns the part that begins at element (row, col).
    IRIS_DEVICE View from(u32 row, u32 col) const {
        return View{at(row, col), ld, dtype, transposed};
    }
    /// Loads elements (row, col) to (row, col + count - 1) as f32.
    IRIS_DEVICE Values load(u32 row, u32 col, u32 count) const {
        if (!transposed) return load_row(at(row, col), dtype, count);
        Values values;
        IRIS_UNROLL
        for (u32 i = 0; i < WIDTH; ++i) {
            values.v[i] = i < count ? load_element(at(row, col + i), dtype) : 0.0f;
        }
        return values;
    }
    IRIS_DEVICE void store(u32 row, u32 col, u32 count, const Values& values) const {
        if (!transposed) return store_row(at(row, col), dtype, count, values);
        IRIS_UNROLL
        for (u32 i = 0; i < WIDTH; ++i) {
            if (i < count) store_element(at(row, col + i), dtype, values.v[i]);
        }
    }
};

/// Calls `each(row, col, count)` for all vectors of a rectangle, distributed over the threads.
template <class Each> IRIS_DEVICE void for_each_vector(u32 rows, u32 cols, Each each) {
    const u32 across = div_up(cols, WIDTH);
    for (u32 i = port::thread(); i < rows * across; i += port::threads()) {
        const u32 row = i / across, col = i % across * WIDTH;
        each(row, col, min_of(WIDTH, cols - col));
    }
}

/// Copies `rows` x `cols` elements from `from` to `to`, converted to the type of `to`. No barrier
/// is included.
IRIS_COLD void copy_view(View to, View from, u32 rows, u32 cols) {
    if (to.dtype == from.dtype && to.transposed == from.transposed) {
        // In place there is nothing to copy.
        if (to.address == from.address && to.ld == from.ld) return;
        const u32 runs = to.transposed ? cols : rows, len = to.transposed ? rows : cols;
        copy_rect(to.address, to.ld, from.address, from.ld, runs, len, element_bytes(to.dtype));
        return;
    }
    for_each_vector(rows, cols, [&](u32 row, u32 col, u32 count) {
        to.store(row, col, count, from.load(row, col, count));
    });
}

} // namespace iris

#endif
