// Kernels of the steps between nodes. Each rank announces its record of a step, an engine such as
// NCCL gathers the records of all nodes, and each rank compares them before the step moves data. If
// the data are parts of a sum over nodes, each rank adds the parts that it has received.
#include "iris/sync.h"
#include "iris/view.h"

using namespace iris;

/// Number of 8-byte values of a record; same order as CallRecord::fields in Rust. A gathered record
/// has one more value, which is 1 if the rank has failed.
constexpr u32 FIELDS_OF_STEP = 6;
struct StepRecord {
    u64 value[FIELDS_OF_STEP];
};
constexpr u32 BYTES_OF_RECORD = 64;

/// Channel without an op, because the kernels here use no words of an op.
IRIS_DEVICE Channel no_channel(const HeapView& heap) {
    return Channel{~0u, heap.rank, heap.size, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
}

/// Writes this rank's record, and whether the rank has failed, to `to`.
IRIS_KERNEL iris_step_announce(IRIS_ARGS HeapView heap, IRIS_ARGS StepRecord own, u64 to) {
    const Channel none = no_channel(heap);
    const Words m{heap, none};
    if (port::thread() == 0) {
        IRIS_UNROLL
        for (u32 i = 0; i < FIELDS_OF_STEP; ++i) port::write(to + 8 * i, own.value[i]);
        const bool failed = m.host_abort() != 0 || has_given_up(m);
        port::write(to + 8 * FIELDS_OF_STEP, u64(failed ? 1 : 0));
    }
}

/// Compares the records of `nodes` nodes, gathered at `all`, with this rank's record. If one
/// differs, the fault record has the other node as `rank`, the step as `tile`, and the number of
/// the differing value as `field`. All ranks of this node are then told to give up.
IRIS_KERNEL iris_step_compare(IRIS_ARGS HeapView heap, IRIS_ARGS StepRecord own, u64 all,
                              u32 nodes) {
    const Channel none = no_channel(heap);
    const Words m{heap, none};
    // If the host has failed the heap, the gather of the records was ended early, and the gathered
    // records may be those of an earlier step.
    if (m.host_abort() != 0) return;
    for (u32 node = port::thread(); node < nodes; node += port::threads()) {
        u64 seen[FIELDS_OF_STEP + 1];
        IRIS_UNROLL
        for (u32 i = 0; i <= FIELDS_OF_STEP; ++i) {
            seen[i] = port::read<u64>(all + u64(node) * BYTES_OF_RECORD + 8 * i);
        }
        u32 field = 0;
        while (field < FIELDS_OF_STEP && seen[field] == own.value[field]) ++field;
        // A rank that has failed may be in an earlier call, so its failure is reported as the
        // reason.
        if (seen[FIELDS_OF_STEP] != 0) field = FIELDS_OF_STEP;
        else if (field == FIELDS_OF_STEP) continue;
        const u64 wanted = field < FIELDS_OF_STEP ? own.value[field] : 0;
        if (!has_given_up(m)) {
            give_up(m, Fault{FaultKind::StepDiffers, static_cast<i32>(own.value[0]),
                             static_cast<i32>(own.value[1]), static_cast<i32>(own.value[2]),
                             static_cast<i32>(node), static_cast<i32>(seen[field]),
                             static_cast<i32>(wanted), static_cast<i32>(field)});
        }
    }
}

/// Adds `nodes` slots of `vectors` vectors of elements each, in the order of nodes, in f32. The first
/// slot is at `slots`, the next one `stride` bytes after it; the first slot receives the sum.
IRIS_KERNEL iris_step_sum(u64 slots, u64 stride, u64 vectors, u64 nodes, u32 dtype) {
    const u64 bytes = u64(WIDTH) * element_bytes(dtype);
    const u64 step = u64(port::workgroups()) * port::threads();
    for (u64 at = u64(port::workgroup()) * port::threads() + port::thread(); at < vectors; at += step) {
        const u64 first = slots + at * bytes;
        Values sum = values_of(load_raw(first, dtype), dtype);
        for (u64 node = 1; node < nodes; ++node) {
            const Values part = values_of(load_raw(first + node * stride, dtype), dtype);
            IRIS_UNROLL
            for (u32 i = 0; i < WIDTH; ++i) sum.v[i] += part.v[i];
        }
        store_whole(first, dtype, sum);
    }
}
