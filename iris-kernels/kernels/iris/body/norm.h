// RMSNorm of rows, each by one workgroup. The RMSNorm waits for no other rank, because the rows are
// in this rank's own memory and no peer writes there before this rank has entered the next call.
// Squares are added up in a fixed order, so that equal rows get equal bits on all ranks, in every
// run and in every variant.
#ifndef IRIS_BODY_NORM_H
#define IRIS_BODY_NORM_H

#include "iris/body/epilogue.h"

namespace iris {

/// Input rows, weights and output of an RMSNorm.
struct Norm {
    View rows, weight, normed;
    u32 cols;
    /// Whether every thread accesses only full vectors, all of the same type.
    bool whole;

    IRIS_DEVICE static Norm of(const OpArgs& args) {
        const Matrix &c = args.c, &weight = args.weight, &normed = args.normed;
        const u64 starts = c.address | weight.address | normed.address;
        const u64 widths = c.ld | normed.ld | args.n;
        const bool across = (c.transposed | weight.transposed | normed.transposed) != 0;
        return Norm{View::of(c), View::of(weight), View::of(normed), args.n,
                    !across && weight.dtype == c.dtype && (starts & 15) == 0 && widths % WIDTH == 0};
    }
};

/// Number of partial sums that one thread adds (PARTIALS), number of threads that add partial sums
/// (PARTIAL_SUMS), and number of independent additions in flight (TURNS).
constexpr u32 PARTIALS = 16, PARTIAL_SUMS = (THREADS + PARTIALS - 1) / PARTIALS, TURNS = 4;

/// Shared memory of sum_of_threads(), which adds up one number per thread.
struct Squares {
    float of_thread[THREADS];
    alignas(16) float sums[PARTIAL_SUMS];
};

/// Sum of COUNT numbers with stride `stride`, in TURNS independent chains of additions.
template <u32 COUNT> IRIS_DEVICE float sum_in_turns(const float* numbers, u32 stride) {
    float sums[TURNS] = {};
    IRIS_UNROLL
    for (u32 i = 0; i < COUNT; ++i) sums[i % TURNS] += numbers[i * stride];
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

/// Sum of one number per thread. All threads get the same bits, because the order of the additions
/// depends only on the number of threads. A second call may follow at once, because its first
/// barrier comes before any sum is overwritten.
IRIS_DEVICE float sum_of_threads(Squares& squares, float own) {
    static_assert(THREADS % PARTIAL_SUMS == 0, "each partial sum must have the same number of threads");
    const u32 thread = port::thread();
    squares.of_thread[thread] = own;
    port::barrier(Site::Body);
    if (thread < PARTIAL_SUMS) {
        constexpr u32 COUNT = THREADS / PARTIAL_SUMS;
        squares.sums[thread] = sum_in_turns<COUNT>(squares.of_thread + thread, PARTIAL_SUMS);
    }
    port::barrier(Site::Body);
    return sum_in_turns<PARTIAL_SUMS>(squares.sums, 1);
}

/// RMSNorm factor of a row, 1 / sqrt(squares / n + epsilon), where `squares` is the row's sum of
/// squares.
IRIS_DEVICE float scale_of(const OpArgs& args, float squares) {
    return 1.0f / port::root(squares / static_cast<float>(args.n) + args.epsilon);
}

/// Returns the sum of the squares of a vector.
IRIS_DEVICE float squares_of(const Values& values) {
    float sum = 0.0f;
    IRIS_UNROLL
    for (u32 i = 0; i < WIDTH; ++i) sum = port::fused(values.v[i], values.v[i], sum);
    return sum;
}

IRIS_DEVICE Values scaled(Values values, float scale, const Values& weight) {
    IRIS_UNROLL
    for (u32 i = 0; i < WIDTH; ++i) values.v[i] = values.v[i] * scale * weight.v[i];
    return values;
}

/// Normalises a row of full vectors whose weights have the same type. A thread keeps its first HELD
/// vectors of the row, with their weights, in registers from load to store; in rows of up to 8192
/// elements it has no further vectors. All loads are in flight before the first is used.
template <u32 DTYPE>
IRIS_DEVICE void norm_vectors(const OpArgs& args, u32 row, Squares& squares) {
    constexpr u32 HELD = 2, BYTES = element_bytes(DTYPE);
    const u32 step = port::threads() * WIDTH, first = port::thread() * WIDTH, cols = args.n;
    const u64 from = args.c.address + row * args.c.ld * BYTES, weight = args.weight.address;
    Raw held[HELD], weights[HELD];
    IRIS_UNROLL
    for (u32 i = 0; i < HELD; ++i) {
        const u32 col = first + i * step;
        if (col < cols) held[i] = load_raw(from + col * BYTES, DTYPE);
    }
    IRIS_UNROLL
    for (u32 i = 0; i < HELD; ++i) {
        const u32 col = first + i * step;
        if (col < cols) weights[i] = load_raw(weight + col * BYTES, DTYPE);
    }
    float sum = 0.0f;
    IRIS_UNROLL
    for (u32 i = 0; i < HELD; ++i) {
        if (first + i * step < cols) sum += squares_of(values_of(held[i], DTYPE));
    }
    IRIS_NO_UNROLL
    for (u32 col = first + HELD * step; col < cols; col += step) {
        sum += squares_of(values_of(load_raw(from + col * BYTES, DTYPE), DTYPE));
    }
    const float scale = scale_of(args, sum_of_threads(squares, sum));
    const u64 to = args.normed.address + row * args.normed.ld * BYTES;
    IRIS_UNROLL
    for (u32 i = 0; i < HELD; ++i) {
        const u32 col = first + i * step;
        if (col >= cols) break;
        const Values factors = values_of(weights[i], DTYPE);
        store_whole(to + col * BYTES, DTYPE, scaled(values_of(held[i], DTYPE), scale, factors));
    }
    IRIS_NO_UNROLL
    for (u32 col = first + HELD * step; col < cols; col += step) {
        const Values values = values_of(load_raw(from + col * BYTES, DTYPE), DTYPE);
        const Values factors = values_of(load_raw(weight + col * BYTES, DTYPE), DTYPE);
        store_whole(to + col * BYTES, DTYPE, scaled(values, scale, factors));
    }
}

/// Normalises a row of a longer type, such as f32; not inlined, to leave registers for the other types.
template <u32 DTYPE> IRIS_COLD void norm_longer(const OpArgs& args, u32 row, Squares& squares) {
    norm_vectors<DTYPE>(args, row, squares);
}
/// Normalises a row of whole vectors.
template <u32 DTYPE> IRIS_DEVICE void norm_whole(const OpArgs& args, u32 row, Squares& squares) {
    if constexpr (is_one_access(DTYPE)) norm_vectors<DTYPE>(args, row, squares);
    else norm_longer<DTYPE>(args, row, squares);
}

/// Normalises a row of any layout; adds the squares in the same order as norm_vectors().
IRIS_COLD void norm_elements(const OpArgs& args, u32 row, Squares& squares) {
    const Norm norm = Norm::of(args);
    const u32 step = port::threads() * WIDTH, first = port::thread() * WIDTH;
    float sum = 0.0f;
    IRIS_NO_UNROLL
    for (u32 col = first; col < norm.cols; col += step) {
        // load() sets elements after the end of the row to 0, so they add nothing to the sum.
        sum += squares_of(norm.rows.load(row, col, min_of(WIDTH, norm.cols - col)));
    }
    const float scale = scale_of(args, sum_of_threads(squares, sum));
    IRIS_NO_UNROLL
    for (u32 col = first; col < norm.cols; col += step) {
        const u32 count = min_of(WIDTH, norm.cols - col);
        const Values values = norm.rows.load(row, col, count);
        norm.normed.store(row, col, count, scaled(values, scale, norm.weight.load(0, col, count)));
    }
}

/// Normalises one row of C that this workgroup's threads, or an earlier launch, have written.
IRIS_DEVICE void norm_row(const OpArgs& args, u32 row) {
    IRIS_SHARED(Squares, squares);
    port::barrier(Site::Body);
    if (!Norm::of(args).whole) return norm_elements(args, row, squares);
#define IRIS_ROW(name, code, bytes, roles)                                                         \
    IRIS_LABEL_##name: return norm_whole<name>(args, row, squares);
    switch (args.c.dtype) { IRIS_DTYPES_USED(IRIS_ROW) }
    IRIS_NO_OTHER_TYPE;
#undef IRIS_ROW
}

/// Normalises all rows of C, one workgroup per row.
IRIS_DEVICE void run_norm(const OpArgs& given) {
    // Arguments in parameter memory, because functions that are not inlined take a reference to
    // them.
    const OpArgs& args = port::in_place(given);
    for (u32 row = port::workgroup(); row < args.m; row += port::workgroups()) {
        norm_row(args, row);
    }
}

} // namespace iris

#endif
