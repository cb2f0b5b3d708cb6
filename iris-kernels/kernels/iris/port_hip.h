// The HIP form of port.h: compiler builtins with order and scope. No header of HIP is needed.
#ifndef IRIS_PORT_HIP_H
#define IRIS_PORT_HIP_H

namespace iris::port {

#define IRIS_GLOBAL __attribute__((address_space(1)))

IRIS_DEVICE u32 lane() { return __builtin_amdgcn_workitem_id_x(); }
IRIS_DEVICE u32 lanes() { return __builtin_amdgcn_workgroup_size_x(); }
IRIS_DEVICE u32 workgroup() { return __builtin_amdgcn_workgroup_id_x(); }
IRIS_DEVICE u32 workgroups() { return __builtin_amdgcn_grid_size_x() / lanes(); }

IRIS_DEVICE void barrier(Site) {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

IRIS_DEVICE bool vote(bool ok, Site site) {
    // A lane writes for its wave; waves of 32 or 64 lanes, at most 1024 lanes.
    static __attribute__((shared)) u32 waves[32];
    const u32 wave = lane() / 32;
    if (lane() < 32) waves[lane()] = 1;
    barrier(site);
    if (!ok) waves[wave] = 0;
    barrier(site);
    u32 all = 1;
    for (u32 i = 0; i * 32 < lanes(); ++i) all &= waves[i];
    barrier(site);
    return all != 0;
}

/// Nanoseconds of a clock that ticks 100 million times a second.
IRIS_DEVICE u64 now() { return __builtin_amdgcn_s_memrealtime() * 10; }

/// Between two looks at a word.
IRIS_DEVICE void pause(u32 spins) {
    if (spins >= 64) __builtin_amdgcn_s_sleep(1);
}

/// About this many nanoseconds of sleep.
IRIS_DEVICE void sleep(u32 ns) {
    for (u64 until = now() + ns; now() < until;) __builtin_amdgcn_s_sleep(1);
}

// Orders must be constants where the builtin stands; scopes are numbers of the compiler.
#define IRIS_WITH_ORDER(call)                                                                      \
    if constexpr (O == Order::Relaxed) {                                                           \
        IRIS_WITH_SCOPE(call, __ATOMIC_RELAXED);                                                   \
    } else if constexpr (O == Order::Acquire) {                                                    \
        IRIS_WITH_SCOPE(call, __ATOMIC_ACQUIRE);                                                   \
    } else if constexpr (O == Order::Release) {                                                    \
        IRIS_WITH_SCOPE(call, __ATOMIC_RELEASE);                                                   \
    } else {                                                                                       \
        IRIS_WITH_SCOPE(call, __ATOMIC_ACQ_REL);                                                   \
    }
#define IRIS_WITH_SCOPE(call, order)                                                               \
    if constexpr (S == Scope::System) return call(order, __HIP_MEMORY_SCOPE_SYSTEM);               \
    else return call(order, __HIP_MEMORY_SCOPE_AGENT)

template <class T> IRIS_DEVICE IRIS_GLOBAL T* at(u64 address) {
    return reinterpret_cast<IRIS_GLOBAL T*>(address);
}

template <Order O, Scope S, class T> IRIS_DEVICE T load(u64 address, T*, int) {
    static_assert(O == Order::Relaxed || O == Order::Acquire, "a load is relaxed or acquire");
    constexpr int order = O == Order::Relaxed ? __ATOMIC_RELAXED : __ATOMIC_ACQUIRE;
#define IRIS_CALL(order, scope) __hip_atomic_load(at<T>(address), order, scope)
    IRIS_WITH_SCOPE(IRIS_CALL, order);
#undef IRIS_CALL
}

template <Order O, Scope S, class T> IRIS_DEVICE void store(u64 address, T value, int) {
    static_assert(O == Order::Relaxed || O == Order::Release, "a store is relaxed or release");
    constexpr int order = O == Order::Relaxed ? __ATOMIC_RELAXED : __ATOMIC_RELEASE;
#define IRIS_CALL(order, scope) __hip_atomic_store(at<T>(address), value, order, scope)
    IRIS_WITH_SCOPE(IRIS_CALL, order);
#undef IRIS_CALL
}

template <Rmw R, Order O, Scope S, class T> IRIS_DEVICE T rmw(u64 address, T value, int) {
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
    // Where the exchange fails nothing is released, so the order of failure is the acquiring half.
    constexpr int fails =
        O == Order::Acquire || O == Order::AcqRel ? __ATOMIC_ACQUIRE : __ATOMIC_RELAXED;
    T old = expected;
#define IRIS_CALL(order, scope)                                                                    \
    (__hip_atomic_compare_exchange_strong(at<T>(address), &old, value, order, fails, scope), old)
    IRIS_WITH_ORDER(IRIS_CALL)
#undef IRIS_CALL
}

/// Add to an f32, relaxed; nobody asks for the old value. By compare-and-swap: some devices drop a
/// floating-point atomic to fine-grained memory.
template <Scope S> IRIS_DEVICE void add_f32(u64 address, float value) {
    i32 seen = load<Order::Relaxed, S>(address, static_cast<i32*>(nullptr), USER_ACCESS);
    for (;;) {
        const i32 sum = __builtin_bit_cast(i32, __builtin_bit_cast(float, seen) + value);
        const i32 old = compare_exchange<Order::Relaxed, S>(address, seen, sum, USER_ACCESS);
        if (old == seen) return;
        seen = old;
    }
}

/// Orders all accesses of this lane before it against those after it.
template <Order O, Scope S> IRIS_DEVICE void fence() {
    static_assert(O != Order::Relaxed, "a relaxed fence does nothing");
    if constexpr (S == Scope::System) {
        if constexpr (O == Order::Acquire) __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "");
        else if constexpr (O == Order::Release) __builtin_amdgcn_fence(__ATOMIC_RELEASE, "");
        else __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "");
    } else {
        if constexpr (O == Order::Acquire) __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");
        else if constexpr (O == Order::Release) __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
        else __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "agent");
    }
}

#undef IRIS_WITH_SCOPE
#undef IRIS_WITH_ORDER

/// Plain data of 2, 4, 8 or 16 bytes, ordered by a release and an acquire of some word.
template <class T> IRIS_DEVICE T read(u64 address) {
    static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "width");
    if constexpr (sizeof(T) == 16) {
        using Vector = u32 __attribute__((ext_vector_type(4)));
        return __builtin_bit_cast(T, *at<Vector>(address));
    } else {
        return *at<T>(address);
    }
}

template <class T> IRIS_DEVICE void write(u64 address, T value) {
    static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "width");
    if constexpr (sizeof(T) == 16) {
        using Vector = u32 __attribute__((ext_vector_type(4)));
        *at<Vector>(address) = __builtin_bit_cast(Vector, value);
    } else {
        *at<T>(address) = value;
    }
}

// Between 16-bit formats, as bits, and f32: to nearest, ties to even.
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
