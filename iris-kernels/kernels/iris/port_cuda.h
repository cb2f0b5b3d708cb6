// CUDA form of port.h: PTX with explicit memory order and scope. It needs no CUDA header.
#ifndef IRIS_PORT_CUDA_H
#define IRIS_PORT_CUDA_H

namespace iris::port {

IRIS_DEVICE u32 thread() { return threadIdx.x; }
IRIS_DEVICE u32 threads() { return blockDim.x; }
IRIS_DEVICE u32 workgroup() { return blockIdx.x; }
IRIS_DEVICE u32 workgroups() { return gridDim.x; }

/// Programmatic dependent launch. Waits until the previous launch on the stream has ended and its
/// writes are visible. Then lets the next launch start as soon as all workgroups of this launch
/// have started. This hides the launch latency.
IRIS_DEVICE void take_turn() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Computes `value` here: before take_turn(), while the previous launch still runs. Without an instruction that
/// needs the value and has an effect, the assembler computes it where it is used. So this one sleeps for a
/// nanosecond if the value is ~0 - 1.
template <class T> IRIS_DEVICE void compute_now(const T& value) {
    if constexpr (sizeof(T) == 8) {
        asm volatile("{ .reg .pred p; setp.eq.u64 p, %0, -2; @p nanosleep.u32 1; }" ::"l"(u64(value)) : "memory");
    } else {
        asm volatile("{ .reg .pred p; setp.eq.u32 p, %0, -2; @p nanosleep.u32 1; }" ::"r"(u32(value)) : "memory");
    }
}

/// Whether threads may push before the vote after which another wave releases a word.
constexpr bool PUSHES_BEFORE_VOTE = true;
/// Whether the compiler keeps vectors of several weighted parts of a row in registers.
constexpr bool HOLDS_VECTORS_OF_PARTS = true;

/// Number of threads in a wave, which CUDA calls a warp.
constexpr u32 WAVE = 32;

IRIS_DEVICE void barrier(Site) { __syncthreads(); }
IRIS_DEVICE bool vote(bool ok, Site) { return __syncthreads_and(ok) != 0; }

/// Runs `steps`, in which threads may take different branches, and reconverges the wave. On NVIDIA
/// GPUs a waiting thread does not block the other threads of its warp (independent thread
/// scheduling), so no instruction is needed.
template <class Steps> IRIS_DEVICE bool divergent(Steps steps) { return steps(); }

/// Returns `value`, which must be equal on all threads of the workgroup. The HIP form moves the
/// value to a scalar register; this form has nothing to do.
IRIS_DEVICE i32 uniform(i32 value) { return value; }

/// Returns the kernel's first argument as a reference to parameter memory.
template <class T> IRIS_DEVICE const T& in_place(const T& argument) { return argument; }

/// Alignment of dynamic shared memory in bytes. A launch requests this many bytes more than the
/// kernel uses.
constexpr u32 SHARED_ALIGNMENT = 1024;

/// Shared memory of the workgroup, one object per kernel. Objects up to 48 KiB are static, larger
/// ones dynamic.
template <class T> IRIS_DEVICE T& shared() {
    if constexpr (sizeof(T) <= 48 * 1024) {
        __shared__ T memory;
        return memory;
    } else {
        extern __shared__ unsigned char iris_dynamic[];
        const u32 first = static_cast<u32>(__cvta_generic_to_shared(iris_dynamic));
        return *reinterpret_cast<T*>(iris_dynamic + (0u - first) % SHARED_ALIGNMENT);
    }
}

/// Current time in nanoseconds, on a clock that all devices of a host share.
IRIS_DEVICE u64 now() {
    u64 value;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
    return value;
}

/// Pause between two polls of a word: none in the first 64 polls, later short sleeps that relieve
/// the memory system.
IRIS_DEVICE void pause(u32 spins) {
    if (spins >= 64) asm volatile("nanosleep.u32 64;" ::: "memory");
}

/// Sleeps for about `ns` nanoseconds or less.
IRIS_DEVICE void sleep(u32 ns) { asm volatile("nanosleep.u32 %0;" ::"r"(ns) : "memory"); }

// Each combination of order and scope has its own asm statement, because an instruction must be a
// single string literal.
#define IRIS_LOAD(order, scope, type, constraint)                                                  \
    asm volatile("ld." order "." scope ".global." type " %0, [%1];"                                \
                 : "=" constraint(value)                                                           \
                 : "l"(address)                                                                    \
                 : "memory")
#define IRIS_STORE(order, scope, type, constraint)                                                 \
    asm volatile("st." order "." scope ".global." type " [%0], %1;" ::"l"(address),                \
                 constraint(value)                                                                 \
                 : "memory")
#define IRIS_RMW(order, scope, op, constraint)                                                     \
    asm volatile("atom." order "." scope ".global." op " %0, [%1], %2;"                            \
                 : "=" constraint(old)                                                             \
                 : "l"(address), constraint(value)                                                 \
                 : "memory")
#define IRIS_CAS(order, scope, type, constraint)                                                   \
    asm volatile("atom." order "." scope ".global.cas." type " %0, [%1], %2, %3;"                  \
                 : "=" constraint(old)                                                             \
                 : "l"(address), constraint(expected), constraint(value)                           \
                 : "memory")
#define IRIS_BOTH_SCOPES(macro, order, what, constraint)                                           \
    if constexpr (S == Scope::System) macro(order, "sys", what, constraint);                       \
    else macro(order, "gpu", what, constraint)
#define IRIS_ALL_ORDERS(macro, what, constraint)                                                   \
    if constexpr (O == Order::Relaxed) {                                                           \
        IRIS_BOTH_SCOPES(macro, "relaxed", what, constraint);                                      \
    } else if constexpr (O == Order::Acquire) {                                                    \
        IRIS_BOTH_SCOPES(macro, "acquire", what, constraint);                                      \
    } else if constexpr (O == Order::Release) {                                                    \
        IRIS_BOTH_SCOPES(macro, "release", what, constraint);                                      \
    } else {                                                                                       \
        IRIS_BOTH_SCOPES(macro, "acq_rel", what, constraint);                                      \
    }

#define IRIS_ATOMICS(T, type, bits, constraint)                                                    \
    template <Order O, Scope S> IRIS_DEVICE T load(u64 address, T*, int) {                         \
        static_assert(O == Order::Relaxed || O == Order::Acquire,                                  \
                      "a load must be relaxed or acquire");                                        \
        T value;                                                                                   \
        if constexpr (O == Order::Relaxed) {                                                       \
            IRIS_BOTH_SCOPES(IRIS_LOAD, "relaxed", type, constraint);                              \
        } else {                                                                                   \
            IRIS_BOTH_SCOPES(IRIS_LOAD, "acquire", type, constraint);                              \
        }                                                                                          \
        return value;                                                                              \
    }                                                                                              \
    template <Order O, Scope S> IRIS_DEVICE void store(u64 address, T value, int) {                \
        static_assert(O == Order::Relaxed || O == Order::Release,                                  \
                      "a store must be relaxed or release");                                       \
        if constexpr (O == Order::Relaxed) {                                                       \
            IRIS_BOTH_SCOPES(IRIS_STORE, "relaxed", type, constraint);                             \
        } else {                                                                                   \
            IRIS_BOTH_SCOPES(IRIS_STORE, "release", type, constraint);                             \
        }                                                                                          \
    }                                                                                              \
    template <Rmw R, Order O, Scope S> IRIS_DEVICE T rmw(u64 address, T value, int) {              \
        T old;                                                                                     \
        if constexpr (R == Rmw::Add) {                                                             \
            IRIS_ALL_ORDERS(IRIS_RMW, "add.u" bits, constraint);                                   \
        } else if constexpr (R == Rmw::Exchange) {                                                 \
            IRIS_ALL_ORDERS(IRIS_RMW, "exch.b" bits, constraint);                                  \
        } else if constexpr (R == Rmw::And) {                                                      \
            IRIS_ALL_ORDERS(IRIS_RMW, "and.b" bits, constraint);                                   \
        } else if constexpr (R == Rmw::Or) {                                                       \
            IRIS_ALL_ORDERS(IRIS_RMW, "or.b" bits, constraint);                                    \
        } else if constexpr (R == Rmw::Xor) {                                                      \
            IRIS_ALL_ORDERS(IRIS_RMW, "xor.b" bits, constraint);                                   \
        } else if constexpr (R == Rmw::Min) {                                                      \
            IRIS_ALL_ORDERS(IRIS_RMW, "min.s" bits, constraint);                                   \
        } else {                                                                                   \
            IRIS_ALL_ORDERS(IRIS_RMW, "max.s" bits, constraint);                                   \
        }                                                                                          \
        return old;                                                                                \
    }                                                                                              \
    template <Order O, Scope S>                                                                    \
    IRIS_DEVICE T compare_exchange(u64 address, T expected, T value, int) {                        \
        T old;                                                                                     \
        IRIS_ALL_ORDERS(IRIS_CAS, "b" bits, constraint);                                           \
        return old;                                                                                \
    }

IRIS_ATOMICS(i32, "s32", "32", "r")
IRIS_ATOMICS(i64, "s64", "64", "l")

/// Loads two adjacent 64-bit words as a vector. PTX guarantees atomicity per vector element, so
/// each element must be a complete word. The address must be a multiple of 16.
template <Order O, Scope S> IRIS_DEVICE void load_pair(u64 address, i64 (&words)[2], int) {
    static_assert(O == Order::Relaxed, "accesses to a pair of words must be relaxed");
    if constexpr (S == Scope::System) {
        asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];"
                     : "=l"(words[0]), "=l"(words[1])
                     : "l"(address)
                     : "memory");
    } else {
        asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];"
                     : "=l"(words[0]), "=l"(words[1])
                     : "l"(address)
                     : "memory");
    }
}
template <Order O, Scope S> IRIS_DEVICE void store_pair(u64 address, const i64 (&words)[2], int) {
    static_assert(O == Order::Relaxed, "accesses to a pair of words must be relaxed");
    if constexpr (S == Scope::System) {
        asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(address), "l"(words[0]),
                     "l"(words[1])
                     : "memory");
    } else {
        asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(address), "l"(words[0]),
                     "l"(words[1])
                     : "memory");
    }
}

#define IRIS_LOAD_128(scope)                                                                       \
    asm volatile("{\n.reg .b128 quad;\nld.relaxed." scope ".global.b128 quad, [%2];\n"              \
                 "mov.b128 {%0, %1}, quad;\n}"                                                     \
                 : "=l"(low), "=l"(high)                                                           \
                 : "l"(address)                                                                    \
                 : "memory")
#define IRIS_STORE_128(scope)                                                                      \
    asm volatile("{\n.reg .b128 quad;\nmov.b128 quad, {%1, %2};\n"                                 \
                 "st.relaxed." scope ".global.b128 [%0], quad;\n}" ::"l"(address),                 \
                 "l"(low), "l"(high)                                                               \
                 : "memory")

/// Loads a word of 128 bits as a whole; words[3] has its highest bits. The address must be a
/// multiple of 16. Compilers before CUDA 12.3 have no such access. Two ordered accesses then
/// replace it: a thread that sees words[3] of a store sees the other words of that store, too.
template <Order O, Scope S> IRIS_DEVICE void load_quad(u64 address, u32 (&words)[4], int access) {
    static_assert(O == Order::Relaxed, "accesses to a word of 128 bits must be relaxed");
    u64 low, high;
#if IRIS_HAS_128_BIT_ACCESS
    if constexpr (S == Scope::System) IRIS_LOAD_128("sys");
    else IRIS_LOAD_128("gpu");
#else
    high = load<Order::Acquire, S>(address + 8, static_cast<i64*>(nullptr), access);
    low = load<O, S>(address, static_cast<i64*>(nullptr), access);
#endif
    words[0] = static_cast<u32>(low);
    words[1] = static_cast<u32>(low >> 32);
    words[2] = static_cast<u32>(high);
    words[3] = static_cast<u32>(high >> 32);
}
template <Order O, Scope S>
IRIS_DEVICE void store_quad(u64 address, const u32 (&words)[4], int access) {
    static_assert(O == Order::Relaxed, "accesses to a word of 128 bits must be relaxed");
    const u64 low = u64(words[1]) << 32 | words[0], high = u64(words[3]) << 32 | words[2];
#if IRIS_HAS_128_BIT_ACCESS
    if constexpr (S == Scope::System) IRIS_STORE_128("sys");
    else IRIS_STORE_128("gpu");
#else
    store<O, S>(address, static_cast<i64>(low), access);
    store<Order::Release, S>(address + 8, static_cast<i64>(high), access);
#endif
}

#undef IRIS_LOAD_128
#undef IRIS_STORE_128

/// Relaxed atomic addition to an f32, without returning the old value.
template <Scope S> IRIS_DEVICE void add_f32(u64 address, float value) {
    if constexpr (S == Scope::System) {
        asm volatile("red.relaxed.sys.global.add.f32 [%0], %1;" ::"l"(address), "f"(value)
                     : "memory");
    } else {
        asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(address), "f"(value)
                     : "memory");
    }
}

/// Fence: orders all earlier accesses of this thread before its later ones.
template <Order O, Scope S> IRIS_DEVICE void fence() {
    static_assert(O != Order::Relaxed, "a fence must not be relaxed");
    if constexpr (S == Scope::System) asm volatile("fence.acq_rel.sys;" ::: "memory");
    else asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

#undef IRIS_ATOMICS
#undef IRIS_ALL_ORDERS
#undef IRIS_BOTH_SCOPES
#undef IRIS_CAS
#undef IRIS_RMW
#undef IRIS_STORE
#undef IRIS_LOAD

/// Plain load of 1, 2, 4, 8 or 16 bytes. The caller must order it after the store of the data: by a
/// release of some word after the store, and an acquire of the same word before the load.
template <class T> IRIS_DEVICE T read(u64 address) {
    static_assert(is_access(sizeof(T)), "an access must have 1, 2, 4, 8 or 16 bytes");
    if constexpr (sizeof(T) == 16) {
        Vec16 v;
        asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                     : "l"(address)
                     : "memory");
        return __builtin_bit_cast(T, v);
    } else if constexpr (sizeof(T) == 8) {
        u64 v;
        asm volatile("ld.global.u64 %0, [%1];" : "=l"(v) : "l"(address) : "memory");
        return __builtin_bit_cast(T, v);
    } else if constexpr (sizeof(T) == 4) {
        u32 v;
        asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
        return __builtin_bit_cast(T, v);
    } else if constexpr (sizeof(T) == 1) {
        u16 v;
        asm volatile("ld.global.u8 %0, [%1];" : "=h"(v) : "l"(address) : "memory");
        return __builtin_bit_cast(T, static_cast<u8>(v));
    } else {
        u16 v;
        asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(address) : "memory");
        return __builtin_bit_cast(T, v);
    }
}

template <class T> IRIS_DEVICE void write(u64 address, T value) {
    static_assert(is_access(sizeof(T)), "an access must have 1, 2, 4, 8 or 16 bytes");
    if constexpr (sizeof(T) == 16) {
        Vec16 v = __builtin_bit_cast(Vec16, value);
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.word[0]),
                     "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
                     : "memory");
    } else if constexpr (sizeof(T) == 8) {
        u64 v = __builtin_bit_cast(u64, value);
        asm volatile("st.global.u64 [%0], %1;" ::"l"(address), "l"(v) : "memory");
    } else if constexpr (sizeof(T) == 4) {
        u32 v = __builtin_bit_cast(u32, value);
        asm volatile("st.global.u32 [%0], %1;" ::"l"(address), "r"(v) : "memory");
    } else if constexpr (sizeof(T) == 1) {
        const u16 v = __builtin_bit_cast(u8, value);
        asm volatile("st.global.u8 [%0], %1;" ::"l"(address), "h"(v) : "memory");
    } else {
        u16 v = __builtin_bit_cast(u16, value);
        asm volatile("st.global.u16 [%0], %1;" ::"l"(address), "h"(v) : "memory");
    }
}

/// Square root, rounded to nearest.
IRIS_DEVICE float root(float value) { return __fsqrt_rn(value); }
/// a * b + c with a single rounding.
IRIS_DEVICE float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }

// Conversions between f32 and the bits of 16-bit formats; rounded to nearest, ties to even.
IRIS_DEVICE float half_to_float(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
IRIS_DEVICE u16 float_to_half(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
IRIS_DEVICE u16 float_to_bfloat(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

} // namespace iris::port

#endif
