// Portability layer: the only header that distinguishes CUDA (NVRTC or nvcc), HIP (hiprtc or clang)
// and a host compiler.
//
// All other device source uses the names defined here. The host variant (port_host.h) calls a hook
// for every atomic, every access to shared data, every barrier and every wait, so that a model
// checker can run the same protocol source that runs on the device.
//
// Addresses are 64-bit integers that point to global memory. Data that peers write during a kernel
// must be read with plain loads, never with non-coherent ones; use only read() and write().
#ifndef IRIS_PORT_H
#define IRIS_PORT_H

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define IRIS_PORT_CUDA 1
#elif defined(__HIP__) || defined(__HIPCC_RTC__)
#define IRIS_PORT_HIP 1
#else
#define IRIS_PORT_HOST 1
#endif

// Marks a condition that is rarely true, so that the compiler moves the code for it out of line.
#define IRIS_RARE(condition) __builtin_expect((condition), 0)

// Whether messages in words of 128 bits are built. AMD has no atomic access of 128 bits.
#if IRIS_PORT_CUDA || IRIS_PORT_HOST
#define IRIS_HAS_QUADS 1
#endif

// Smallest number of workgroups of a kernel that must fit on a multiprocessor at once. This number
// limits the registers per thread.
#ifndef IRIS_TOGETHER
#define IRIS_TOGETHER 1
#endif

#if IRIS_PORT_CUDA
#define IRIS_DEVICE __device__ __forceinline__
// Marks lambdas that must be inlined, so that captured variables, above all sums, stay in
// registers.
#define IRIS_INLINE __attribute__((always_inline))
// Marks functions that must not be inlined, to limit code size: they process elements that do not
// fill a vector. A kernel may define the macro differently before it includes this header.
#ifndef IRIS_COLD
#define IRIS_COLD static __device__ __noinline__
#endif
#define IRIS_KERNEL extern "C" __global__ void __launch_bounds__(IRIS_THREADS, IRIS_TOGETHER)
#define IRIS_ARGS const __grid_constant__
#define IRIS_SHARED(type, name) type& name = iris::port::shared<type>()
#define IRIS_UNROLL _Pragma("unroll")
#define IRIS_NO_UNROLL _Pragma("unroll 1")
#define IRIS_HAS_MMA_SYNC 1
#if __CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 3)
#define IRIS_HAS_128_BIT_ACCESS 1
#endif
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define IRIS_HAS_WGMMA 1
#endif
#define IRIS_OFFSET_OF(type, member) __INTADDR__(&static_cast<type*>(nullptr)->member)
#ifndef IRIS_THREADS
#define IRIS_THREADS 256
#endif
#elif IRIS_PORT_HIP
#define IRIS_DEVICE __attribute__((device)) inline __attribute__((always_inline))
#define IRIS_INLINE __attribute__((always_inline))
#define IRIS_COLD static __attribute__((device)) __attribute__((noinline))
// Smallest number of waves per SIMD unit, from the required number of workgroups per compute unit.
// A compute unit has four SIMD units, and a wave has 64 threads.
#define IRIS_WAVES_A_UNIT ((IRIS_TOGETHER * ((IRIS_THREADS + 63) / 64) + 3) / 4)
#define IRIS_KERNEL                                                                                \
    extern "C" __attribute__((global))                                                             \
    __attribute__((amdgpu_flat_work_group_size(1, IRIS_THREADS)))                                    \
    __attribute__((amdgpu_waves_per_eu(IRIS_WAVES_A_UNIT))) void
#define IRIS_ARGS const
#define IRIS_SHARED(type, name) static __attribute__((shared)) type name
#if defined(__gfx90a__) || defined(__gfx942__) || defined(__gfx950__)
#define IRIS_HAS_MFMA 1
#endif
// Defined for gfx950, whose matrix instructions (MFMA) can take 16 bytes per thread.
#if defined(__gfx950__)
#define IRIS_HAS_MFMA_16 1
#endif
#define IRIS_UNROLL _Pragma("unroll")
#define IRIS_NO_UNROLL _Pragma("unroll 1")
#define IRIS_OFFSET_OF(type, member) __builtin_offsetof(type, member)
#ifndef IRIS_THREADS
#define IRIS_THREADS 256
#endif
#else
#define IRIS_DEVICE inline
#define IRIS_INLINE
#define IRIS_COLD inline
#define IRIS_KERNEL extern "C" void
#define IRIS_ARGS const
#define IRIS_SHARED(type, name) type& name = *static_cast<type*>(iris_hook_shared(sizeof(type)))
#define IRIS_UNROLL
#define IRIS_NO_UNROLL
#define IRIS_OFFSET_OF(type, member) __builtin_offsetof(type, member)
#ifndef IRIS_THREADS
#define IRIS_THREADS 1
#endif
#endif

namespace iris {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

/// Memory order of an access, as in C++11.
enum class Order : int { Relaxed, Acquire, Release, AcqRel };

/// Set of threads for which an access is coherent: the workgroups of one device, or all devices and
/// the host.
enum class Scope : int { Device, System };

/// Operation of a read-modify-write access.
enum class Rmw : int { Add, Exchange, And, Or, Xor, Min, Max };

/// Purpose of a workgroup barrier; a model checker can leave out the barriers of one purpose.
enum class Site : int {
    /// Barrier before a signal: the stores of all threads must precede the signal.
    Signal,
    /// Barrier before a flag of the staging buffer is raised: the stores of all threads must
    /// precede the flag.
    Flag,
    /// Barrier before a lock is released: the stores of all threads must precede the release.
    LockGive,
    /// Barrier before a thread arrives at a device barrier: the stores of all threads must precede
    /// the arrival.
    Arrive,
    /// Barrier after a wait of one thread: all threads see what that thread acquired.
    Waited,
    /// Barrier before a workgroup is counted as finished.
    Finish,
    /// Barrier after the last workgroup was counted as finished and before it refreshes words: the work of
    /// all workgroups must precede the stores of all threads of the last one.
    Refresh,
    /// Barrier in the body of an op, for the op's own shared memory or scratch.
    Body,
};

/// Kind of deadline of a wait: for a peer to enter a call, or for a peer to make progress in it.
enum class Limit : int { Entry, Progress };

/// Activity of a workgroup, for traces.
enum class Span : int { Fetch, Gemm, Wait, Signal, Reduce };

/// Sixteen bytes, the widest single access.
struct alignas(16) Vec16 {
    u32 word[4];
};

/// Whether one plain access can have this number of bytes.
IRIS_DEVICE constexpr bool is_access(u64 bytes) {
    return bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8 || bytes == 16;
}

/// Number of threads per workgroup that kernels are compiled for.
constexpr u32 THREADS = IRIS_THREADS;

/// Access number for accesses in users' kernels, which have no entry in the protocols' access
/// table.
constexpr int USER_ACCESS = -1;

} // namespace iris

#if IRIS_PORT_CUDA
#include "iris/port_cuda.h"
#include "iris/port_device.h"
#elif IRIS_PORT_HIP
#include "iris/port_hip.h"
#include "iris/port_device.h"
#else
#include "iris/port_host.h"
#endif

#endif
