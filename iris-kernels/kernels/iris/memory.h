// Table of accesses, and word operations that use it; transcribes iris_sync::Memory.
#ifndef IRIS_MEMORY_H
#define IRIS_MEMORY_H

#include "iris/call.h"
#include "iris/fault.h"
#include "iris/sym.h"

// Options of stress tests. IRIS_TEST_DELAY_NS: maximum random delay before each access of the
// protocols, in nanoseconds. IRIS_TEST_NO_WAIT: number of the access whose wait is left out (-1:
// none). IRIS_TEST_HOLD: location at which workgroups are delayed (a Hold; -1: none), so that a
// missing wait has an effect. IRIS_TEST_HOLD_NS: that delay in nanoseconds.
#ifndef IRIS_TEST_DELAY_NS
#define IRIS_TEST_DELAY_NS 0
#endif
#ifndef IRIS_TEST_NO_WAIT
#define IRIS_TEST_NO_WAIT -1
#endif
#ifndef IRIS_TEST_HOLD
#define IRIS_TEST_HOLD -1
#endif
#ifndef IRIS_TEST_HOLD_NS
#define IRIS_TEST_HOLD_NS 1
#endif

namespace iris {

/// Table of accesses: name, order, scope; same as iris_sync::Access, in the same order.
#define IRIS_ACCESSES(X)                                                                           \
    X(EntryStore, Release, System)                                                                 \
    X(CreditLoad, Acquire, System)                                                                 \
    X(EntryLoad, Acquire, System)                                                                  \
    X(SignalStore, Release, System)                                                                \
    X(SignalLoad, Acquire, System)                                                                 \
    X(DoneStore, Release, System)                                                                  \
    X(DoneLoad, Acquire, System)                                                                   \
    X(BarrierStore, Release, System)                                                               \
    X(BarrierLoad, Acquire, System)                                                                \
    X(VersionStore, Release, System)                                                               \
    X(VersionLoad, Acquire, System)                                                                \
    X(LockTake, Acquire, System)                                                                   \
    X(LockGive, Release, System)                                                                   \
    X(StampStore, Release, System)                                                                 \
    X(AbortStore, Relaxed, System)                                                                 \
    X(AbortLoad, Relaxed, System)                                                                  \
    X(AbortCheck, Relaxed, System)                                                                 \
    X(CallLoad, Relaxed, Device)                                                                   \
    X(CallStore, Relaxed, Device)                                                                  \
    X(FinishAdd, AcqRel, Device)                                                                   \
    X(FinishStore, Relaxed, Device)                                                                \
    X(FlagStore, Release, Device)                                                                  \
    X(FlagLoad, Acquire, Device)                                                                   \
    X(FlagStamp, Relaxed, Device)                                                                  \
    X(LlStore, Relaxed, System)                                                                    \
    X(LlLoad, Relaxed, System)                                                                     \
    X(LlStamp, Relaxed, System)

enum class Access : int {
#define IRIS_ROW(name, order, scope) name,
    IRIS_ACCESSES(IRIS_ROW)
#undef IRIS_ROW
};

template <Access A> struct AccessRow;
#define IRIS_ROW(name, order_of, scope_of)                                                         \
    template <> struct AccessRow<Access::name> {                                                   \
        static constexpr Order order = Order::order_of;                                            \
        static constexpr Scope scope = Scope::scope_of;                                            \
    };
IRIS_ACCESSES(IRIS_ROW)
#undef IRIS_ROW

/// Code location at which a stress test can delay workgroups; same values in the same order as
/// iris_kernels::build::Hold. Builds without a delay have no code at these locations.
enum class Hold : int {
    /// Delay before the kernel that precedes an op accesses the op's operands.
    Filling,
    /// Delay after the rank has entered a call, before it sends, reads or fetches data.
    Entered,
    /// Delay after the signals of a tile have been seen, before the tile is read.
    Received,
    /// Delay after the source rank of a unit (a piece of the gathered matrix) has entered the call,
    /// before the unit is copied to the staging buffer.
    Fetching,
    /// Delay between the read and the write of an addition under a lock.
    Adding,
    /// Delay before a whole-matrix GEMM stores a tile of its result at the peers.
    Storing,
};

/// Delay this thread if the build selects the location `AT`. Only rank 0 is delayed, so that the
/// other ranks continue meanwhile. At Hold::Adding all ranks are delayed, so that each rank reads
/// before any other rank has written.
template <Hold AT> IRIS_DEVICE void hold(u32 rank) {
    if (static_cast<int>(AT) != IRIS_TEST_HOLD || (rank != 0 && AT != Hold::Adding)) return;
    for (const u64 begun = port::now(); port::now() - begun < IRIS_TEST_HOLD_NS;) port::sleep(1000);
}

/// Accesses of one thread to synchronisation words; transcribes iris_sync::Memory. Operations that
/// need no entry of the access table are in port.h.
struct Memory {
    const HeapView& heap;

    template <Access A> IRIS_DEVICE i32 load(SymWord word) const {
        check<A, Scope::System>();
        return word.load<AccessRow<A>::order, static_cast<int>(A)>();
    }
    template <Access A> IRIS_DEVICE void store(SymWord word, i32 value) const {
        check<A, Scope::System>();
        word.store<AccessRow<A>::order, static_cast<int>(A)>(value);
    }
    template <Access A>
    IRIS_DEVICE i32 compare_exchange(SymWord word, i32 expected, i32 value) const {
        check<A, Scope::System>();
        return word.compare_exchange<AccessRow<A>::order, static_cast<int>(A)>(expected, value);
    }
    template <Access A> IRIS_DEVICE void load_pair(SymPair pair, LlWord (&words)[2]) const {
        check<A, Scope::System>();
        pair.load<AccessRow<A>::order, static_cast<int>(A)>(words);
    }
    template <Access A> IRIS_DEVICE void store_pair(SymPair pair, LlWord first, LlWord second) const {
        check<A, Scope::System>();
        pair.store<AccessRow<A>::order, static_cast<int>(A)>(first, second);
    }
    template <Access A> IRIS_DEVICE LlQuad load_quad(SymPair place) const {
        check<A, Scope::System>();
        return place.load_quad<AccessRow<A>::order, static_cast<int>(A)>();
    }
    template <Access A> IRIS_DEVICE void store_quad(SymPair place, const LlQuad& word) const {
        check<A, Scope::System>();
        place.store_quad<AccessRow<A>::order, static_cast<int>(A)>(word);
    }
    template <Access A> IRIS_DEVICE i32 dev_load(DevWord word) const {
        check<A, Scope::Device>();
        return word.load<AccessRow<A>::order, static_cast<int>(A)>();
    }
    template <Access A> IRIS_DEVICE void dev_store(DevWord word, i32 value) const {
        check<A, Scope::Device>();
        word.store<AccessRow<A>::order, static_cast<int>(A)>(value);
    }
    template <Access A> IRIS_DEVICE i32 dev_add(DevWord word, i32 value) const {
        check<A, Scope::Device>();
        return word.add<AccessRow<A>::order, static_cast<int>(A)>(value);
    }

    /// Whether a word that holds `seen` was set by call `want` or a later call.
    template <Access A> IRIS_DEVICE bool reached(Call want, i32 seen) const {
        if (static_cast<int>(A) == IRIS_TEST_NO_WAIT) return true;
        return port::reached(static_cast<int>(A), want.number(), seen, want.reached_by(seen));
    }
    /// Whether an LL word with flag `seen` carries data of call `want`. A stress test that leaves
    /// out this wait still waits for headers. Otherwise ranks would report a mismatch instead of
    /// computing the wrong results that the test looks for.
    template <Access A> IRIS_DEVICE bool is_of(Call want, i32 seen, bool head) const {
        if (static_cast<int>(A) == IRIS_TEST_NO_WAIT && !head) return true;
        return port::is_of(static_cast<int>(A), want.number(), seen, seen == want.number());
    }
    IRIS_DEVICE i32 host_abort() const { return port::host_abort(heap.control); }
    IRIS_DEVICE void record(const Fault& fault) const {
        i32 words[8];
        fault.to_words(words);
        port::keep_fault(heap.control, words);
    }
    IRIS_DEVICE port::Deadline deadline() const {
        return port::Deadline(heap.entry_deadline_ns, heap.progress_deadline_ns);
    }

  private:
    template <Access A, Scope S> IRIS_DEVICE static void check() {
        static_assert(AccessRow<A>::scope == S, "the scope must be that of the access in the table");
        if constexpr (IRIS_TEST_DELAY_NS > 0) {
            const u64 mixed = (port::now() + port::workgroup()) * 0x9e3779b97f4a7c15ull;
            port::sleep(static_cast<u32>(mixed >> 33) % (IRIS_TEST_DELAY_NS + 1));
        }
    }
};

} // namespace iris

#endif
