// Hooks of the host form of port.h over real memory and threads, so that whole kernels run as host
// code: each thread of a workgroup is a thread of the host. Built into one library with a kernel's
// source.
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "iris/view.h"

using namespace iris;

namespace {

struct Group {
    explicit Group(u32 index, u32 count) : index(index), count(count), meet(THREADS) {}
    u32 index, count;
    std::barrier<> meet;
    std::atomic<int> votes[2] = {1, 1};
    alignas(16) unsigned char shared[512 * 1024];
};

thread_local Group* group;
thread_local u32 thread_index;
thread_local u32 rounds, products;
thread_local std::chrono::steady_clock::time_point began;

u64 nanoseconds() {
    return static_cast<u64>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                std::chrono::steady_clock::now().time_since_epoch())
                                .count());
}

// Returns the memory order as GCC knows it. GCC treats an order that is not a constant as the
// strongest one; that is acceptable here, because the models check the orders.
int order_of(int order) {
    constexpr int orders[] = {__ATOMIC_RELAXED, __ATOMIC_ACQUIRE, __ATOMIC_RELEASE,
                              __ATOMIC_ACQ_REL};
    return orders[order];
}

template <class T> T load(u64 address, int order) {
    return __atomic_load_n(reinterpret_cast<T*>(address), order_of(order));
}
template <class T> void store(u64 address, T value, int order) {
    __atomic_store_n(reinterpret_cast<T*>(address), value, order_of(order));
}
template <class T> T rmw(u64 address, int op, T value) {
    T* at = reinterpret_cast<T*>(address);
    switch (static_cast<Rmw>(op)) {
    case Rmw::Add: return __atomic_fetch_add(at, value, __ATOMIC_ACQ_REL);
    case Rmw::Exchange: return __atomic_exchange_n(at, value, __ATOMIC_ACQ_REL);
    case Rmw::And: return __atomic_fetch_and(at, value, __ATOMIC_ACQ_REL);
    case Rmw::Or: return __atomic_fetch_or(at, value, __ATOMIC_ACQ_REL);
    case Rmw::Xor: return __atomic_fetch_xor(at, value, __ATOMIC_ACQ_REL);
    default: break;
    }
    T seen = __atomic_load_n(at, __ATOMIC_RELAXED);
    for (;;) {
        const bool lower = value < seen;
        const T next = lower == (static_cast<Rmw>(op) == Rmw::Min) ? value : seen;
        if (__atomic_compare_exchange_n(at, &seen, next, false, __ATOMIC_ACQ_REL,
                                        __ATOMIC_ACQUIRE)) {
            return seen;
        }
    }
}
template <class T> T cas(u64 address, T expected, T value) {
    __atomic_compare_exchange_n(reinterpret_cast<T*>(address), &expected, value, false,
                                __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    return expected;
}

} // namespace

extern "C" {

u32 iris_hook_thread(void) { return thread_index; }
u32 iris_hook_threads(void) { return THREADS; }
u32 iris_hook_workgroup(void) { return group->index; }
u32 iris_hook_workgroups(void) { return group->count; }

int iris_hook_vote(int ok, int) {
    if (THREADS == 1) return ok;
    // Two ballots suffice, used alternately: no thread can be two votes ahead of a thread that
    // still reads an earlier ballot.
    std::atomic<int>& ballot = group->votes[rounds++ % 2];
    if (!ok) ballot.store(0);
    group->meet.arrive_and_wait();
    const int all = ballot.load();
    group->meet.arrive_and_wait();
    if (thread_index == 0) ballot.store(1);
    return all;
}

#if IRIS_HAS_MFMA
// Emulation of AMD's matrix instructions, which defines the layout of their fragments: thread l of
// a wave has left[l % s][l / s * count + j] and right[l / s * count + j][l % s]; its sums are those
// of [r / 4 * 8 + l / s * 4 + r % 4][l % s], and for s = 16 those of [l / 16 * 4 + r][l % 16].
void iris_hook_mfma(u32 size, u32 dtype, u32 count, const void* left, const void* right, float* sums) {
    // Two buffers suffice, used alternately: no thread can be two products ahead of a thread that
    // still reads an earlier buffer.
    static float places[2][2][THREADS][8];
    auto& [lefts, rights] = places[products++ % 2];
    const auto element = [&](const void* from, u32 j) {
        if (dtype == F32) return static_cast<const float*>(from)[j];
        return widen(dtype, static_cast<const u16*>(from)[j]);
    };
    for (u32 j = 0; j < count; ++j) {
        lefts[thread_index][j] = element(left, j);
        rights[thread_index][j] = element(right, j);
    }
    group->meet.arrive_and_wait();
    const u32 lane = thread_index % 64, first = thread_index - lane;
    for (u32 r = 0; r < size * size / 64; ++r) {
        const u32 row = size == 32 ? r / 4 * 8 + lane / 32 * 4 + r % 4 : lane / 16 * 4 + r;
        for (u32 k = 0; k < 64 / size * count; ++k) {
            const u32 high = first + k / count * size;
            sums[r] += lefts[high + row][k % count] * rights[high + lane % size][k % count];
        }
    }
}
#endif

// The hooks for divergent waits do nothing, because a waiting host thread does not block other
// threads.
void iris_hook_diverge(void) {}
void iris_hook_reconverge(void) {}

u64 iris_hook_now(void) { return nanoseconds(); }
void iris_hook_pause(u32 spins) {
    // Most waits are short: yields the core first, and sleeps only then.
    if (spins < 1000) {
        std::this_thread::yield();
    } else {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
}
int iris_hook_expired(int, u32 spins, u64 ns) {
    if (spins == 0) {
        began = std::chrono::steady_clock::now();
        return 0;
    }
    return std::chrono::steady_clock::now() - began >= std::chrono::nanoseconds(ns);
}
int iris_hook_reached(int, i32, i32, int answer) { return answer; }
int iris_hook_is_of(int, i32, i32, int answer) { return answer; }

i32 iris_hook_host_abort(u64 control) { return load<i32>(control, 0); }
void iris_hook_record(u64 control, const i32* words) {
    if (cas<i32>(control + 4, 0, 1) != 0) return;
    for (u32 i = 0; i < 8; ++i) store<i32>(control + 8 + 4 * i, words[i], 0);
    store<i32>(control + 4, 2, 2);
}

i32 iris_hook_load32(u64 address, int order, int, int) { return load<i32>(address, order); }
void iris_hook_store32(u64 address, i32 value, int order, int, int) {
    store<i32>(address, value, order);
}
i32 iris_hook_rmw32(u64 address, int op, i32 value, int, int, int) {
    return rmw<i32>(address, op, value);
}
i32 iris_hook_cas32(u64 address, i32 expected, i32 value, int, int, int) {
    return cas<i32>(address, expected, value);
}
i64 iris_hook_load64(u64 address, int order, int, int) { return load<i64>(address, order); }
void iris_hook_store64(u64 address, i64 value, int order, int, int) {
    store<i64>(address, value, order);
}
// The order of two accesses of 64 bits stands in for one of 128 bits: a load that sees the second
// word of a store sees the first one, too.
void iris_hook_load_quad(u64 address, u32* words, int, int, int) {
    const u64 high = load<i64>(address + 8, 1), low = load<i64>(address, 0);
    std::memcpy(words, &low, 8);
    std::memcpy(words + 2, &high, 8);
}
void iris_hook_store_quad(u64 address, const u32* words, int, int, int) {
    i64 low, high;
    std::memcpy(&low, words, 8);
    std::memcpy(&high, words + 2, 8);
    store<i64>(address, low, 0);
    store<i64>(address + 8, high, 2);
}
i64 iris_hook_rmw64(u64 address, int op, i64 value, int, int, int) {
    return rmw<i64>(address, op, value);
}
i64 iris_hook_cas64(u64 address, i64 expected, i64 value, int, int, int) {
    return cas<i64>(address, expected, value);
}
void iris_hook_add_f32(u64 address, float value, int) {
    i32 seen = load<i32>(address, 0);
    for (;;) {
        float sum;
        std::memcpy(&sum, &seen, 4);
        sum += value;
        i32 next;
        std::memcpy(&next, &sum, 4);
        const i32 old = cas<i32>(address, seen, next);
        if (old == seen) return;
        seen = old;
    }
}
void iris_hook_fence(int, int) { __atomic_thread_fence(__ATOMIC_ACQ_REL); }

void iris_hook_read(u64 address, void* value, u32 bytes) {
    if (address % bytes != 0) __builtin_trap();
    std::memcpy(value, reinterpret_cast<const void*>(address), bytes);
}
void iris_hook_write(u64 address, const void* value, u32 bytes) {
    if (address % bytes != 0) __builtin_trap();
    std::memcpy(reinterpret_cast<void*>(address), value, bytes);
}
void* iris_hook_shared(u64 bytes) {
    if (bytes > sizeof(group->shared)) __builtin_trap();
    return group->shared;
}

/// Runs one workgroup of the kernel `entry`; `first`, `second` and `third` are the further
/// arguments of a barrier or gate kernel, if `has_more`.
void iris_host_run(void* entry, const OpArgs* args, u32 index, u32 count, int has_more, u32 first,
                   u64 second, u32 third) {
    const auto own = std::make_unique<Group>(index, count);
    const auto thread = [&](u32 number) {
        group = own.get();
        thread_index = number;
        rounds = products = 0;
        if (has_more) {
            using Entry = void (*)(OpArgs, u32, u64, u32);
            reinterpret_cast<Entry>(entry)(*args, first, second, third);
        } else {
            reinterpret_cast<void (*)(OpArgs)>(entry)(*args);
        }
    };
    std::vector<std::thread> threads;
    for (u32 number = 1; number < THREADS; ++number) threads.emplace_back(thread, number);
    thread(0);
    for (std::thread& thread : threads) thread.join();
}
}
