// Arguments of the operators' kernels, passed by value; iris_kernels::args on the host has the same
// layout.
#ifndef IRIS_ARGS_H
#define IRIS_ARGS_H

#include "iris/dtype.h"
#include "iris/flow.h"
#include "iris/schedule.h"

namespace iris {

/// Flag bits of the field OpArgs::epilogue.
constexpr u32 EPILOGUE_GELU = 1;
/// Values of OpArgs::producer: partial tiles are tiles of the product A B (GEMM) or elements of A
/// (LOAD). The host has one more, for products on the CPU.
constexpr u32 PRODUCER_GEMM = 0, PRODUCER_LOAD = 1;

/// Matrix in memory: element (r, c) is `r * ld + c` elements from `address`, or `c * ld + r` if
/// `transposed` is 1 (column-major).
struct Matrix {
    u64 address;
    u64 ld;
    u32 rows, cols;
    u32 dtype;
    u32 transposed;
};
static_assert(sizeof(Matrix) == 32, "the layout of iris_kernels::args::Matrix has another size");

/// Tensor of a gather of a list: this rank's rows at `from`, and all ranks' rows at `to`, with the distances
/// between the starts of rows and the length of a row in bytes. There is no tensor if `row` is 0.
struct ListTensor {
    u64 from, from_pitch, to, to_pitch, row;
};
/// Largest number of tensors of a list.
constexpr u32 MOST_TENSORS = 4;

/// Arguments of an operator kernel; the host's OpArgs documents each field. Offsets are bytes from
/// the start of a rank's data segment. The inbox is [parity][sources][max_tiles][slot], the result
/// inbox [parity][max_results][result_slot], the workspace [max_tiles][tile_m * tile_n] of f32.
/// In a slot, a tile is row-major with stride `tile_n`.
struct OpArgs {
    HeapView heap;
    Channel channel;
    Record record;
    float epsilon;
    u32 sources;
    Matrix a, b, c, bias, residual, weight, normed;
    u64 inbox, slot, results, result_slot, workspace;
    u64 pulled, pulled_ld;
    u64 trace, counters;
    u32 m, n, k;
    u32 tile_m, tile_n, k_group;
    u32 max_tiles, max_results;
    u32 wire, epilogue, producer, root;
    u32 dedicated_workgroups, shard, m_contiguous;
    u32 trace_spans;
    ListTensor list[MOST_TENSORS];
    Matrix factors, addend;
};
static_assert(IRIS_OFFSET_OF(OpArgs, channel) == 1064, "channel");
static_assert(IRIS_OFFSET_OF(OpArgs, record) == 1132, "record");
static_assert(IRIS_OFFSET_OF(OpArgs, a) == 1184, "a");
static_assert(IRIS_OFFSET_OF(OpArgs, inbox) == 1408, "inbox");
static_assert(IRIS_OFFSET_OF(OpArgs, counters) == 1472, "counters");
static_assert(IRIS_OFFSET_OF(OpArgs, m) == 1480, "m");
static_assert(IRIS_OFFSET_OF(OpArgs, trace_spans) == 1540, "trace_spans");
static_assert(IRIS_OFFSET_OF(OpArgs, list) == 1544, "list");
static_assert(IRIS_OFFSET_OF(OpArgs, factors) == 1704, "factors");
static_assert(sizeof(OpArgs) == 1768, "the layout of iris_kernels::args::OpArgs has another size");

/// Returns the launch description for this workgroup; `given` must be the kernel's first argument.
/// The description refers to the arguments in parameter memory, so that functions that are not
/// inlined can take references. On a device with `dies` dies (chiplets, each with its own L2 cache)
/// the workgroup gets the index that die_swizzle() assigns, so that neighbouring tiles share an L2
/// cache.
IRIS_DEVICE Launch launch_of(const OpArgs& given, u32 dies = 1) {
    const OpArgs& args = port::in_place(given);
    return Launch{args.heap,
                  args.channel,
                  args.record,
                  die_swizzle(port::workgroup(), port::workgroups(), dies),
                  port::workgroups(),
                  Trace(args.trace, args.trace_spans, args.counters, port::workgroup())};
}

} // namespace iris

#endif
