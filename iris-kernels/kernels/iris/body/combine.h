// Rows that are weighted sums of parts, such as the results of the experts of a token with the router's
// weights. A row of A has the parts of one row of the message, one after the other.
#ifndef IRIS_BODY_COMBINE_H
#define IRIS_BODY_COMBINE_H

#include "iris/view.h"

namespace iris {

/// Parts of rows, and a weight (f32) for each part. A row of the message is the sum over its parts of weight
/// times part, in f32 and in the order of the parts.
struct RowParts {
    View parts, weights;
    /// Number of parts of a row, and number of columns of a part.
    u32 count, cols;

    IRIS_DEVICE static RowParts of(const OpArgs& args) {
        return RowParts{View::of(args.a), View::of(args.factors), args.factors.cols, args.n};
    }
    /// Returns the rows from row `row` on.
    IRIS_DEVICE RowParts from(u32 row) const { return RowParts{parts.from(row, 0), weights.from(row, 0), count, cols}; }
    IRIS_DEVICE float weight(u32 row, u32 part) const { return load_element(weights.at(row, part), F32); }
    /// Whether items and vectors of `bytes` bytes, each within one part, can be accessed as a whole.
    IRIS_DEVICE bool is_whole(u32 bytes) const {
        const u32 widths = (static_cast<u32>(parts.ld) | cols) * element_bytes(parts.dtype);
        return !parts.transposed && ((static_cast<u32>(parts.address) | widths) & (bytes - 1)) == 0;
    }
};

/// Sums start from -0.0, the neutral element: starting from 0.0 would turn a sum of -0.0 into 0.0.
IRIS_DEVICE ItemValues no_values() { return ItemValues{{-0.0f, -0.0f, -0.0f, -0.0f}}; }

/// Number of parts whose loads are in flight together.
constexpr u32 PARTS_AT_ONCE = 4;

/// Weighted sum of the items (8 bytes) at column `col` of each part of row `row`, which are whole.
IRIS_COLD ItemValues combine_item(RowParts from, u32 row, u32 col) {
    const u32 dtype = from.parts.dtype;
    const u64 first = from.parts.at(row, col), step = u64(from.cols) * element_bytes(dtype);
    ItemValues sum = no_values();
    IRIS_NO_UNROLL
    for (u32 begin = 0; begin < from.count; begin += PARTS_AT_ONCE) {
        u64 items[PARTS_AT_ONCE];
        float weights[PARTS_AT_ONCE];
        IRIS_UNROLL
        for (u32 i = 0; i < PARTS_AT_ONCE; ++i) {
            // The last part is loaded again in place of parts after it, and not added.
            const u32 part = min_of(begin + i, from.count - 1);
            items[i] = port::read<u64>(first + part * step);
            weights[i] = from.weight(row, part);
        }
        IRIS_UNROLL
        for (u32 i = 0; i < PARTS_AT_ONCE; ++i) {
            if (begin + i >= from.count) break;
            const u32 data[2] = {static_cast<u32>(items[i]), static_cast<u32>(items[i] >> 32)};
            const ItemValues values = unpack_item(dtype, data);
            IRIS_UNROLL
            for (u32 v = 0; v < 4; ++v) sum.v[v] = port::fused(weights[i], values.v[v], sum.v[v]);
        }
    }
    return sum;
}

/// Weighted sums of the elements (row, col) to (row, col + count - 1) of the message, element by element. An
/// item may begin in one row and end in another; rows after row `rows` have no elements.
IRIS_COLD ItemValues combine_pieces(RowParts from, u64 first, u32 count, u32 rows) {
    ItemValues sums{};
    IRIS_UNROLL
    for (u32 i = 0; i < 4; ++i) {
        const u32 row = static_cast<u32>((first + i) / from.cols), col = static_cast<u32>((first + i) % from.cols);
        if (i >= count || row >= rows) break;
        float sum = -0.0f;
        IRIS_NO_UNROLL
        for (u32 part = 0; part < from.count; ++part) {
            const float value = load_element(from.parts.at(row, part * from.cols + col), from.parts.dtype);
            sum = port::fused(from.weight(row, part), value, sum);
        }
        sums.v[i] = sum;
    }
    return sums;
}

/// Rows of weighted sums as a sequence of items of 8 bytes.
class CombinedItems {
  public:
    static constexpr bool COMBINES = true;

    IRIS_DEVICE CombinedItems(const RowParts& from, u32 rows, u32 shift)
        : from(from), rows(rows), shift(shift),
          in_row(from.is_whole(8) && (element_bytes(from.parts.dtype) << shift) == 8 ? from.cols >> shift : 0) {}

    /// Loads an item, rounded to type `dtype`. Elements after the end of the message are 0.
    IRIS_DEVICE void load(u32 item, u32 dtype, u32 (&data)[2]) const {
        const ItemValues sums = in_row != 0 ? combine_item(from, item / in_row, item % in_row << shift)
                                            : combine_pieces(from, u64(item) << shift, 1u << shift, rows);
        pack_item(dtype, sums, data);
    }

  private:
    const RowParts from;
    const u32 rows, shift;
    /// Number of items in a row, if every item can be accessed as one 8-byte word, else 0.
    const u32 in_row;
};

/// Weighted sums of `count` vectors of a 16-bit type in row `row`. Their positions in a part, in bytes, are
/// `at` and then every `stride`.
template <u32 DTYPE, u32 MOST>
IRIS_DEVICE void combine_vectors(const RowParts& from, u32 row, u32 count, u32 at, u32 stride, Vec16 (&sums)[MOST]) {
    constexpr u32 AT_ONCE = PARTS_AT_ONCE / 2;
    const u64 first = from.parts.at(row, 0) + at, step = u64(from.cols) * element_bytes(DTYPE);
    Values values[MOST];
    IRIS_UNROLL
    for (u32 v = 0; v < MOST * WIDTH; ++v) values[v / WIDTH].v[v % WIDTH] = -0.0f;
    IRIS_NO_UNROLL
    for (u32 begin = 0; begin < from.count; begin += AT_ONCE) {
        Vec16 vectors[AT_ONCE][MOST];
        float weights[AT_ONCE];
        IRIS_UNROLL
        for (u32 p = 0; p < AT_ONCE; ++p) {
            // The last part is loaded again in place of a part after it, and not added.
            const u32 part = min_of(begin + p, from.count - 1);
            weights[p] = from.weight(row, part);
            IRIS_UNROLL
            for (u32 i = 0; i < MOST; ++i) {
                if (i < count) vectors[p][i] = port::read<Vec16>(first + part * step + i * stride);
            }
        }
        IRIS_UNROLL
        for (u32 p = 0; p < AT_ONCE; ++p) {
            if (begin + p >= from.count) break;
            IRIS_UNROLL
            for (u32 i = 0; i < MOST; ++i) {
                if (i >= count) break;
                const Values part = values_of(Raw{vectors[p][i], {}}, DTYPE);
                IRIS_UNROLL
                for (u32 v = 0; v < WIDTH; ++v) values[i].v[v] = port::fused(weights[p], part.v[v], values[i].v[v]);
            }
        }
    }
    IRIS_UNROLL
    for (u32 i = 0; i < MOST; ++i) {
        if (i < count) sums[i] = packed(DTYPE, values[i]);
    }
}

} // namespace iris

#endif
