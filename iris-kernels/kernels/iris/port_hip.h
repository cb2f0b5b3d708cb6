// HIP form of port.h: compiler builtins with explicit memory order and scope. It needs no HIP
// header.
#ifndef IRIS_PORT_HIP_H
#define IRIS_PORT_HIP_H

namespace iris::port {

#define IRIS_GLOBAL __attribute__((address_space(1)))

IRIS_DEVICE u32 thread() { return __builtin_amdgcn_workitem_id_x(); }
IRIS_DEVICE u32 threads() { return __builtin_amdgcn_workgroup_size_x(); }
IRIS_DEVICE u32 workgroup() { return __builtin_amdgcn_workgroup_id_x(); }
IRIS_DEVICE u32 workgroups() { return __builtin_amdgcn_grid_size_x() / threads(); }

/// Waits until the loads, stores and write-backs of this wave have completed. Stores have then
/// reached the cache that all waves of the workgroup share, and write-backs have reached memory.
IRIS_DEVICE void wait_for_stores() { __builtin_amdgcn_s_waitcnt(0); }

/// Whether a barrier at this site precedes a signal. Before such a barrier, each wave waits for its
/// own stores, because neither the barrier nor a release by another wave waits for them.
constexpr bool publishes(Site site) { return site != Site::Waited && site != Site::Body; }

IRIS_DEVICE void barrier(Site site) {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    if (publishes(site)) wait_for_stores();
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

/// Does nothing: launches on a HIP stream do not overlap. In the CUDA form, this function waits for
/// the previous launch.
IRIS_DEVICE void take_turn() {}
/// Does nothing: there is no previous launch to compute beside.
template <class T> IRIS_DEVICE void compute_now(const T&) {}

/// Whether threads may push before the vote after which another wave releases a word: no, because the vote would
/// then have to wait until the pushes have arrived.
constexpr bool PUSHES_BEFORE_VOTE = false;
/// Whether the compiler keeps vectors of several weighted parts of a row in registers: clang puts them into memory.
constexpr bool HOLDS_VECTORS_OF_PARTS = false;

/// Number of threads in a wave on all supported architectures.
constexpr u32 WAVE = 64;

IRIS_DEVICE bool vote(bool ok, Site site) {
    const bool wave_ok = __builtin_amdgcn_ballot_w64(!ok) == 0;
    if constexpr (THREADS <= WAVE) {
        barrier(site);
        return wave_ok;
    } else {
        static __attribute__((shared)) u32 waves[(THREADS + WAVE - 1) / WAVE];
        waves[thread() / WAVE] = wave_ok;
        barrier(site);
        u32 all = 1;
        for (u32 i = 0; i * WAVE < threads(); ++i) all &= waves[i];
        // This barrier makes all threads read the result before the next vote overwrites it.
        barrier(Site::Body);
        return __builtin_amdgcn_readfirstlane(all) != 0;
    }
}

/// Runs `steps`, in which threads may take different branches, and reconverges the wave. The
/// builtin emits no instruction; it keeps the compiler from moving later code into the branches.
template <class Steps> IRIS_DEVICE bool divergent(Steps steps) {
    const bool result = steps();
    __builtin_amdgcn_wave_barrier();
    return result;
}

/// Returns `value` in a scalar register; `value` must be equal on all threads of the workgroup.
IRIS_DEVICE i32 uniform(i32 value) { return __builtin_amdgcn_readfirstlane(value); }

/// Returns the kernel's first argument as a reference to kernarg memory. The parameter itself is a
/// copy in each thread's private memory; the compiler omits that copy only if the code takes no
/// reference to the parameter.
template <class T> IRIS_DEVICE const T& in_place(const T&) {
    return *(const T*)(const __attribute__((address_space(4)))
                       T*)__builtin_amdgcn_kernarg_segment_ptr();
}

/// Current time in nanoseconds, from a clock of 100 MHz.
IRIS_DEVICE u64 now() { return __builtin_amdgcn_s_memrealtime() * 10; }

/// Pause between two polls of a word: none in the first 64 polls, later a short sleep.
IRIS_DEVICE void pause(u32 spins) {
    if (spins >= 64) __builtin_amdgcn_s_sleep(1);
}

/// Sleeps for about `ns` nanoseconds.
IRIS_DEVICE void sleep(u32 ns) {
    for (u64 until = now() + ns; now() < until;) __builtin_amdgcn_s_sleep(1);
}

// Calls a builtin with scope S. Each scope needs a call of its own, because the argument must be a
// constant.
#define IRIS_WITH_SCOPE(call, order)                                                               \
    if constexpr (S == Scope::System) return call(order, __HIP_MEMORY_SCOPE_SYSTEM);               \
    else return call(order, __HIP_MEMORY_SCOPE_AGENT)
// Memory order that is passed to the builtin: acquire if order O acquires, else relaxed. The
// releasing half of O is already done by release().
#define IRIS_ACQUIRES (O == Order::Acquire || O == Order::AcqRel)
#define IRIS_WITH_ORDER(call)                                                                      \
    if constexpr (IRIS_ACQUIRES) {                                                                 \
        IRIS_WITH_SCOPE(call, __ATOMIC_ACQUIRE);                                                   \
    } else {                                                                                       \
        IRIS_WITH_SCOPE(call, __ATOMIC_RELAXED);                                                   \
    }

/// Releasing half of an access, done before the access itself, which is then relaxed or acquire.
/// Writes back what this thread has written and waits for completion. The explicit wait is needed
/// because compilers (LLVM 19 to 22, hiprtc 7.2) omit the wait for the write-back of a releasing
/// store if they have just waited for the store's address.
template <Order O, Scope S> IRIS_DEVICE void release() {
    if constexpr (O == Order::Release || O == Order::AcqRel) {
        if constexpr (S == Scope::System) __builtin_amdgcn_fence(__ATOMIC_RELEASE, "");
        else __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
        wait_for_stores();
    }
}

template <class T> IRIS_DEVICE IRIS_GLOBAL T* at(u64 address) {
    return reinterpret_cast<IRIS_GLOBAL T*>(address);
}

template <Order O, Scope S, class T> IRIS_DEVICE T load(u64 address, T*, int) {
    static_assert(O == Order::Relaxed || O == Order::Acquire, "a load must be relaxed or acquire");
#define IRIS_CALL(order, scope) __hip_atomic_load(at<T>(address), order, scope)
    IRIS_WITH_ORDER(IRIS_CALL)
#undef IRIS_CALL
}

template <Order O, Scope S, class T> IRIS_DEVICE void store(u64 address, T value, int) {
    static_assert(O == Order::Relaxed || O == Order::Release, "a store must be relaxed or release");
    release<O, S>();
#define IRIS_CALL(order, scope) __hip_atomic_store(at<T>(address), value, order, scope)
    IRIS_WITH_SCOPE(IRIS_CALL, __ATOMIC_RELAXED);
#undef IRIS_CALL
}

template <Rmw R, Order O, Scope S, class T> IRIS_DEVICE T rmw(u64 address, T value, int) {
    release<O, S>();
#define IRIS_CALL(order, scope)                                                                    \
    (R == Rmw::Add        ? __hip_atomic_fetch_add(at<T>(address), value, order, scope)            \
     : R == Rmw::Exchange ? __hip_atomic_exchange(at<T>(address), value, order, scope)             \
     : R == Rmw::And      ? __hip_atomic_fetch_and(at<T>(address), value, order, scope)            \
     : R == Rmw::Or       ? __hip_atomic_fetch_or(at<T>(address), value, order, scope)             \
     : R == Rmw::Xor      ? __hip_atomic_fetch_xor(at<T>(address), value, order, scope)            \
     : R == Rmw::Min      ? __hip_atomic_fetch_min(at<T>(address), value, order, scope)            \
                          : __hip_atomic_fetch_max(at<T>(address), value, order, scope))
    IRIS_WITH_ORDER(IRIS_CALL)
#undef IRIS_CALL
}

template <Order O, Scope S, class T>
IRIS_DEVICE T compare_exchange(u64 address, T expected, T value, int) {
    release<O, S>();
    T old = expected;
#define IRIS_CALL(order, scope)                                                                    \
    (__hip_atomic_compare_exchange_strong(at<T>(address), &old, value, order, order, scope), old)
    IRIS_WITH_ORDER(IRIS_CALL)
#undef IRIS_CALL
}

/// Loads two adjacent 64-bit words, each as a whole. The address is a multiple of 16.
template <Order O, Scope S> IRIS_DEVICE void load_pair(u64 address, i64 (&words)[2], int access) {
    static_assert(O == Order::Relaxed, "accesses to a pair of words must be relaxed");
    words[0] = load<O, S>(address, static_cast<i64*>(nullptr), access);
    words[1] = load<O, S>(address + 8, static_cast<i64*>(nullptr), access);
}
template <Order O, Scope S>
IRIS_DEVICE void store_pair(u64 address, const i64 (&words)[2], int access) {
    static_assert(O == Order::Relaxed, "accesses to a pair of words must be relaxed");
    store<O, S>(address, words[0], access);
    store<O, S>(address + 8, words[1], access);
}

/// Loads a word of 128 bits; words[3] has its highest bits. Devices of this form have no such
/// atomic access. Two ordered accesses replace it: a thread that sees words[3] of a store sees the
/// other words of that store, too. Kernels that send such words are not built in this form.
template <Order O, Scope S> IRIS_DEVICE void load_quad(u64 address, u32 (&words)[4], int access) {
    const u64 high = load<Order::Acquire, S>(address + 8, static_cast<i64*>(nullptr), access);
    const u64 low = load<O, S>(address, static_cast<i64*>(nullptr), access);
    words[0] = static_cast<u32>(low);
    words[1] = static_cast<u32>(low >> 32);
    words[2] = static_cast<u32>(high);
    words[3] = static_cast<u32>(high >> 32);
}
template <Order O, Scope S>
IRIS_DEVICE void store_quad(u64 address, const u32 (&words)[4], int access) {
    store<O, S>(address, static_cast<i64>(u64(words[1]) << 32 | words[0]), access);
    store<Order::Release, S>(address + 8, static_cast<i64>(u64(words[3]) << 32 | words[2]), access);
}

/// Relaxed atomic addition to an f32, without returning the old value. It is a compare-and-swap
/// loop, because some devices ignore floating-point atomics on fine-grained memory.
template <Scope S> IRIS_DEVICE void add_f32(u64 address, float value) {
    i32 seen = load<Order::Relaxed, S>(address, static_cast<i32*>(nullptr), USER_ACCESS);
    for (;;) {
        const i32 sum = __builtin_bit_cast(i32, __builtin_bit_cast(float, seen) + value);
        const i32 old = compare_exchange<Order::Relaxed, S>(address, seen, sum, USER_ACCESS);
        if (old == seen) return;
        seen = old;
    }
}

/// Fence: orders all earlier accesses of this thread before its later ones.
template <Order O, Scope S> IRIS_DEVICE void fence() {
    static_assert(O != Order::Relaxed, "a fence must not be relaxed");
    release<O, S>();
    if constexpr (IRIS_ACQUIRES) {
        if constexpr (S == Scope::System) __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "");
        else __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");
    }
}

#undef IRIS_WITH_ORDER
#undef IRIS_ACQUIRES
#undef IRIS_WITH_SCOPE

/// Plain load of 1, 2, 4, 8 or 16 bytes. The caller must order it after the store of the data: by a
/// release of some word after the store, and an acquire of the same word before the load.
template <class T> IRIS_DEVICE T read(u64 address) {
    static_assert(is_access(sizeof(T)), "an access must have 1, 2, 4, 8 or 16 bytes");
    if constexpr (sizeof(T) == 16) {
        using Vector = u32 __attribute__((ext_vector_type(4)));
        return __builtin_bit_cast(T, *at<Vector>(address));
    } else {
        return *at<T>(address);
    }
}

template <class T> IRIS_DEVICE void write(u64 address, T value) {
    static_assert(is_access(sizeof(T)), "an access must have 1, 2, 4, 8 or 16 bytes");
    if constexpr (sizeof(T) == 16) {
        using Vector = u32 __attribute__((ext_vector_type(4)));
        *at<Vector>(address) = __builtin_bit_cast(Vector, value);
    } else {
        *at<T>(address) = value;
    }
}

/// Square root, rounded to nearest.
IRIS_DEVICE float root(float value) { return __builtin_sqrtf(value); }
/// a * b + c with a single rounding.
IRIS_DEVICE float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// Conversions between f32 and the bits of 16-bit formats; rounded to nearest, ties to even.
IRIS_DEVICE float half_to_float(u16 bits) {
    return static_cast<float>(__builtin_bit_cast(_Float16, bits));
}
IRIS_DEVICE u16 float_to_half(float value) {
    return __builtin_bit_cast(u16, static_cast<_Float16>(value));
}
IRIS_DEVICE u16 float_to_bfloat(float value) {
    const u32 bits = __builtin_bit_cast(u32, value);
    if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<u16>(bits >> 16 | 0x40);
    return static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

} // namespace iris::port

#endif
