// What a product on sm_90a is made of, instruction by instruction: barriers in shared memory, copies by
// tensor maps, the roles' registers. Included by gemm/sm90.h.
//
// Addresses of shared memory are 32-bit numbers. The semantics are those of PTX: mbarrier, cp.async.bulk,
// wgmma and the asynchronous proxy.
#ifndef IRIS_GEMM_SM90_PTX_H
#define IRIS_GEMM_SM90_PTX_H

#include "iris/port.h"

namespace iris::gemm {

/// A tensor map, as the driver encodes it: a kernel has it by value.
struct alignas(64) TensorMap {
    u64 word[16];
};

// Barriers.

IRIS_DEVICE void init_barrier(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
/// What is initialised is seen by whoever has met this thread, and by copies for it.
IRIS_DEVICE void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
IRIS_DEVICE void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// Arrive at the same barrier of a workgroup of the cluster. It publishes nothing: with a release to
/// the cluster each would be a fence of the whole device.
IRIS_DEVICE void arrive_at(u32 barrier, u32 workgroup) {
    asm volatile("{\n .reg .b32 there;\n mapa.shared::cluster.u32 there, %0, %1;\n"
                 " mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
                 "r"(workgroup)
                 : "memory");
}
/// Arrive, and let the phase wait for so many bytes of copies besides.
IRIS_DEVICE void arrive_expecting(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
/// Whether the phase of this parity is over. It waits a little before it says no.
IRIS_DEVICE bool is_over(u32 barrier, u32 parity) {
    u32 over;
    asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 " selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(over)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return over != 0;
}
/// All threads of the cluster meet, each warp as a whole. It publishes nothing but barriers that were
/// initialised.
IRIS_DEVICE void meet_cluster() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}
/// All threads of the workgroup meet, `COUNT` of them, but those that only come and do not wait.
template <u32 COUNT> IRIS_DEVICE void meet() {
    asm volatile("bar.sync 1, %0;" ::"n"(COUNT) : "memory");
}
template <u32 COUNT> IRIS_DEVICE void come() {
    asm volatile("bar.arrive 1, %0;" ::"n"(COUNT) : "memory");
}
/// All threads of a consumer meet.
IRIS_DEVICE void meet_group(u32 group) {
    asm volatile("bar.sync %0, 128;" ::"r"(group + 2) : "memory");
}
IRIS_DEVICE u32 rank_in_cluster() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Copies.

IRIS_DEVICE void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
/// The box at (x, y) of a matrix to shared memory; `barrier` counts the bytes.
IRIS_DEVICE void load_box(u32 to, const TensorMap& map, u32 barrier, u32 x, u32 y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4}], [%2];" ::"r"(to),
                 "l"(&map), "r"(barrier), "r"(x), "r"(y)
                 : "memory");
}
/// The same to the same place of each workgroup of the cluster that `to_whom` has a bit of, whose
/// barriers count the bytes.
IRIS_DEVICE void load_box_to(u16 to_whom, u32 to, const TensorMap& map, u32 barrier, u32 x, u32 y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
                 "l"(&map), "r"(barrier), "r"(x), "r"(y), "h"(to_whom)
                 : "memory");
}
/// A box of shared memory to (x, y) of a matrix; what is beyond an edge stays.
IRIS_DEVICE void store_box(u32 from, const TensorMap& map, u32 x, u32 y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%1, {%2, %3}], [%0];" ::"r"(
                     from),
                 "l"(&map), "r"(x), "r"(y)
                 : "memory");
}
/// This thread's stores since the last are a group.
IRIS_DEVICE void end_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/// Wait until all but the last `LEFT` groups of this thread's stores have read shared memory.
template <u32 LEFT> IRIS_DEVICE void await_reads() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}
/// Wait until all stores of this thread are done.
IRIS_DEVICE void await_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
/// What this thread wrote to shared memory is seen by copies from there.
IRIS_DEVICE void publish_to_copies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
/// What copies of this thread have written is ordered before what it does from here on.
IRIS_DEVICE void follow_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }
/// What this thread has acquired, copies that it starts from here on see: they are of another proxy, which
/// an acquire alone does not order.
IRIS_DEVICE void follow_with_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }

// Products.

IRIS_DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
IRIS_DEVICE void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Wait until all but the last `LEFT` groups of products are done.
template <u32 LEFT> IRIS_DEVICE void await_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
/// Sums are looked at only behind this.
template <u32 COUNT> IRIS_DEVICE void hold_back(float (&sums)[COUNT]) {
    IRIS_UNROLL
    for (u32 i = 0; i < COUNT; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

/// Two sums as elements of the result, rounded to nearest, ties to even.
IRIS_DEVICE u32 pack(float low, float high) {
    u32 both;
#if IRIS_DTYPE == 1
    asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#else
    asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#endif
    return both;
}
/// Four matrices of 8 x 8 elements, spread over a warp as products leave them, to shared memory: each
/// lane names a line of 16 bytes.
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

/// The same from there.
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
/// The elements that `pack` has packed.
IRIS_DEVICE float low_of(u32 both) {
#if IRIS_DTYPE == 1
    return port::half_to_float(static_cast<u16>(both));
#else
    return __builtin_bit_cast(float, both << 16);
#endif
}
IRIS_DEVICE float high_of(u32 both) {
#if IRIS_DTYPE == 1
    return port::half_to_float(static_cast<u16>(both >> 16));
#else
    return __builtin_bit_cast(float, both & 0xffff0000);
#endif
}

// Roles.

template <u32 COUNT> IRIS_DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <u32 COUNT> IRIS_DEVICE void leave_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
/// Ends the launch with an error.
IRIS_DEVICE void give_up() { asm volatile("trap;"); }

} // namespace iris::gemm

#endif
