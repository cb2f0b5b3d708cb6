// Wrappers of the instructions of GEMMs on sm_90a: mbarriers, TMA copies, groups of wgmma, copies of 8 x 8
// matrices, and register counts of warpgroups. Included by gemm/core.h and gemm/sm90.h.
//
// Addresses of shared memory are 32-bit numbers. The semantics are those of PTX: mbarrier, cp.async.bulk,
// wgmma and the asynchronous proxy.
#ifndef IRIS_GEMM_SM90_PTX_H
#define IRIS_GEMM_SM90_PTX_H

#include "iris/dtype.h"

namespace iris::gemm {

/// Tensor map (CUtensorMap) as the driver encodes it; a kernel parameter, passed by value.
struct alignas(64) TensorMap {
    u64 word[16];
};

// mbarriers and barriers.

IRIS_DEVICE void init_barrier(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
/// Makes mbarriers that this thread has initialised visible to threads that meet it at a barrier afterwards,
/// and to TMA copies.
IRIS_DEVICE void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
IRIS_DEVICE void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// Arrives at the same mbarrier of workgroup `workgroup` of the cluster. The arrival publishes no writes to
/// the cluster: ptxas implements .release.cluster by a fence of the whole device (MEMBAR.ALL.GPU).
IRIS_DEVICE void arrive_at(u32 barrier, u32 workgroup) {
    asm volatile("{\n .reg .b32 there;\n mapa.shared::cluster.u32 there, %0, %1;\n"
                 " mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
                 "r"(workgroup)
                 : "memory");
}
/// Arrives, and makes the phase wait for `bytes` more bytes of TMA copies.
IRIS_DEVICE void arrive_expecting(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
/// Whether the phase with this parity is complete. Before it returns false, it waits for a short time.
IRIS_DEVICE bool is_over(u32 barrier, u32 parity) {
    u32 over;
    asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 " selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(over)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return over != 0;
}
/// Barrier of all threads of the cluster; each warp must be converged. The arrival is relaxed, so the barrier
/// publishes nothing except mbarriers after publish_barriers().
IRIS_DEVICE void meet_cluster() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}
/// Barrier like meet_cluster(), which also publishes what each thread has written to shared memory.
IRIS_DEVICE void publish_to_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
/// Barrier of the `COUNT` threads of a workgroup, some of which may call come() instead.
template <u32 COUNT> IRIS_DEVICE void meet() {
    asm volatile("bar.sync 1, %0;" ::"n"(COUNT) : "memory");
}
/// Arrives at the barrier of meet() and does not wait.
template <u32 COUNT> IRIS_DEVICE void come() {
    asm volatile("bar.arrive 1, %0;" ::"n"(COUNT) : "memory");
}
/// Barrier of the 128 threads of consumer `group`.
IRIS_DEVICE void meet_group(u32 group) {
    asm volatile("bar.sync %0, 128;" ::"r"(group + 2) : "memory");
}
IRIS_DEVICE u32 rank_in_cluster() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// TMA copies.

IRIS_DEVICE void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
/// Starts to load the box at (x, y) of a matrix to shared memory; x counts along contiguous elements.
/// `barrier` counts the bytes.
IRIS_DEVICE void load_box(u32 to, const TensorMap& map, u32 barrier, u32 x, u32 y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4}], [%2];" ::"r"(to),
                 "l"(&map), "r"(barrier), "r"(x), "r"(y)
                 : "memory");
}
/// Multicast form of load_box(): loads the box to address `to` of each workgroup of the cluster whose bit is
/// set in `to_whom`. `barrier` counts the bytes in each of these workgroups.
IRIS_DEVICE void load_box_to(u16 to_whom, u32 to, const TensorMap& map, u32 barrier, u32 x, u32 y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
                 "l"(&map), "r"(barrier), "r"(x), "r"(y), "h"(to_whom)
                 : "memory");
}
/// Starts to store a box from shared memory to (x, y) of a matrix. Nothing is written beyond an edge.
IRIS_DEVICE void store_box(u32 from, const TensorMap& map, u32 x, u32 y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%1, {%2, %3}], [%0];" ::"r"(
                     from),
                 "l"(&map), "r"(x), "r"(y)
                 : "memory");
}
/// Closes a group of stores: all stores of this thread since the previous call.
IRIS_DEVICE void end_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/// Waits until all but the newest `LEFT` groups of this thread's stores have read shared memory.
template <u32 LEFT> IRIS_DEVICE void await_reads() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}
/// Waits until all stores of this thread are complete.
IRIS_DEVICE void await_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
/// Orders this thread's accesses to shared memory before later accesses of the asynchronous proxy (TMA copies
/// and wgmma).
IRIS_DEVICE void publish_to_copies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
/// Orders writes of this thread's completed TMA copies before the thread's later accesses.
IRIS_DEVICE void follow_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }
/// Lets TMA copies that this thread starts later see what the thread has acquired. The copies use the
/// asynchronous proxy, which an acquire alone does not order.
IRIS_DEVICE void follow_with_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }

// wgmma groups, and their sums.

IRIS_DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
IRIS_DEVICE void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Waits until all but the newest `LEFT` groups of wgmma are complete.
template <u32 LEFT> IRIS_DEVICE void await_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
/// Keeps the compiler from moving reads of the sums above this point.
template <u32 COUNT> IRIS_DEVICE void hold_back(float (&sums)[COUNT]) {
    IRIS_UNROLL
    for (u32 i = 0; i < COUNT; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

/// Two sums as elements of C in one word, rounded to nearest, ties to even.
IRIS_DEVICE u32 pack(float low, float high) {
    u32 both;
    asm volatile("cvt.rn." IRIS_RESULT_MMA "x2.f32 %0, %1, %2;"
                 : "=r"(both)
                 : "f"(high), "f"(low));
    return both;
}
/// Stores four matrices of 8 x 8 elements, in the register layout of wgmma, to shared memory, transposed if
/// FLIPPED. Each lane passes the address of one 16-byte row.
template <bool FLIPPED> IRIS_DEVICE void store_matrices(u32 to, const u32* v) {
    if constexpr (FLIPPED) {
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         to),
                     "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                     : "memory");
    } else {
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                     "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                     : "memory");
    }
}

/// Loads four matrices of 8 x 8 elements from shared memory into the register layout of wgmma.
IRIS_DEVICE void load_matrices(u32 from, u32 (&v)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(from)
                 : "memory");
}
IRIS_DEVICE u64 load_shared(u32 from) {
    u64 value;
    asm volatile("ld.shared.b64 %0, [%1];" : "=l"(value) : "r"(from) : "memory");
    return value;
}
IRIS_DEVICE void store_four(u32 to, const float* v) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]),
                 "f"(v[3])
                 : "memory");
}
/// Loads 16 bytes from the same address in shared memory of workgroup `workgroup` of the cluster.
IRIS_DEVICE void load_four_of(u32 workgroup, u32 from, float* v) {
    asm volatile("{\n .reg .b32 there;\n mapa.shared::cluster.u32 there, %4, %5;\n"
                 " ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}"
                 : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                 : "r"(from), "r"(workgroup)
                 : "memory");
}
/// Low element of a word of pack(), as f32.
IRIS_DEVICE float low_of(u32 both) {
    return widen(IRIS_RESULT, static_cast<u16>(both));
}
/// High element of a word of pack(), as f32.
IRIS_DEVICE float high_of(u32 both) {
    return widen(IRIS_RESULT, static_cast<u16>(both >> 16));
}

// Register counts: setmaxnreg, for all warps of a warpgroup.

template <u32 COUNT> IRIS_DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <u32 COUNT> IRIS_DEVICE void leave_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
/// Ends the launch with an error.
IRIS_DEVICE void trap() { asm volatile("trap;"); }

} // namespace iris::gemm

#endif
