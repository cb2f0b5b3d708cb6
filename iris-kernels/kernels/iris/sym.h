// Symmetric memory in kernels: the view of the heap, its words, and access to peers' memory.
//
// A word of symmetric memory (SymWord) has operations of system scope only, a word of this device
// (DevWord) operations of device scope only. Neither type converts to the other or exposes its
// address, so scopes cannot be confused. Words order the plain data that is stored with them; see
// sync.h.
#ifndef IRIS_SYM_H
#define IRIS_SYM_H

#include "iris/copy.h"
#include "iris/port.h"

namespace iris {

/// Largest number of ranks of a world.
constexpr u32 MAX_RANKS = 64;

/// Index, in every rank's signal segment, of the abort word, which tells the rank to give up and is never
/// reset.
constexpr u32 ABORT_WORD = 0;

namespace detail {
template <class T> constexpr bool is_word = false;
template <> inline constexpr bool is_word<i32> = true;
template <> inline constexpr bool is_word<i64> = true;
} // namespace detail

/// Word of 32 or 64 bits whose accesses all have scope S; kernels use it as SymWord or DevWord.
///
/// The template arguments of its functions are the memory order and, in protocol code, the access
/// number.
template <Scope S, class T> class ScopedWord {
    static_assert(detail::is_word<T>, "a word must be an i32 or an i64");

  public:
    template <Order O = Order::Acquire, int A = USER_ACCESS> IRIS_DEVICE T load() const {
        return port::load<O, S>(address, static_cast<T*>(nullptr), A);
    }
    template <Order O = Order::Release, int A = USER_ACCESS>
    IRIS_DEVICE void store(T value) const {
        port::store<O, S>(address, value, A);
    }
    /// Read-modify-write operations; each returns the old value.
    template <Order O = Order::AcqRel, int A = USER_ACCESS> IRIS_DEVICE T add(T value) const {
        return port::rmw<Rmw::Add, O, S>(address, value, A);
    }
    template <Order O = Order::AcqRel, int A = USER_ACCESS> IRIS_DEVICE T exchange(T value) const {
        return port::rmw<Rmw::Exchange, O, S>(address, value, A);
    }
    template <Order O = Order::AcqRel, int A = USER_ACCESS>
    IRIS_DEVICE T compare_exchange(T expected, T value) const {
        return port::compare_exchange<O, S>(address, expected, value, A);
    }
    template <Order O = Order::AcqRel, int A = USER_ACCESS> IRIS_DEVICE T bit_and(T value) const {
        return port::rmw<Rmw::And, O, S>(address, value, A);
    }
    template <Order O = Order::AcqRel, int A = USER_ACCESS> IRIS_DEVICE T bit_or(T value) const {
        return port::rmw<Rmw::Or, O, S>(address, value, A);
    }
    template <Order O = Order::AcqRel, int A = USER_ACCESS> IRIS_DEVICE T bit_xor(T value) const {
        return port::rmw<Rmw::Xor, O, S>(address, value, A);
    }
    template <Order O = Order::AcqRel, int A = USER_ACCESS> IRIS_DEVICE T min(T value) const {
        return port::rmw<Rmw::Min, O, S>(address, value, A);
    }
    template <Order O = Order::AcqRel, int A = USER_ACCESS> IRIS_DEVICE T max(T value) const {
        return port::rmw<Rmw::Max, O, S>(address, value, A);
    }
    /// Plain accesses to a word that is used as data. A release and an acquire of another word must
    /// order these accesses.
    IRIS_DEVICE T get() const { return port::read<T>(address); }
    IRIS_DEVICE void put(T value) const { port::write(address, value); }
    /// Returns the word that is `words` words later in the same memory.
    IRIS_DEVICE ScopedWord after(u64 words) const { return ScopedWord(address + words * sizeof(T)); }
    /// See port::compute_now().
    IRIS_DEVICE void compute_now() const { port::compute_now(address); }

  private:
    IRIS_DEVICE explicit ScopedWord(u64 address) : address(address) {}
    u64 address;
    friend struct HeapView;
    template <class> friend class Remote;
};

/// Word of 64 bits of the LL protocol: four bytes of data, and as flag the number of the call to
/// which the data belongs; same as iris_sync::LlWord.
struct LlWord {
    u32 data;
    i32 call;
};

/// Word of 128 bits of the LL protocol: twelve bytes of data, and as flag the number of the call to
/// which the data belongs; same as iris_sync::LlQuad.
struct LlQuad {
    u32 data[3];
    i32 call;
};

/// Two adjacent LL words of symmetric memory, each accessed as a whole, or one word of 128 bits in
/// their place; system scope.
class SymPair {
  public:
    template <Order O, int A> IRIS_DEVICE LlQuad load_quad() const {
        u32 words[4];
        port::load_quad<O, Scope::System>(address, words, A);
        return LlQuad{{words[0], words[1], words[2]}, static_cast<i32>(words[3])};
    }
    template <Order O, int A> IRIS_DEVICE void store_quad(const LlQuad& word) const {
        const u32 words[4] = {word.data[0], word.data[1], word.data[2], static_cast<u32>(word.call)};
        port::store_quad<O, Scope::System>(address, words, A);
    }
    template <Order O, int A> IRIS_DEVICE void load(LlWord (&words)[2]) const {
        i64 bits[2];
        port::load_pair<O, Scope::System>(address, bits, A);
        IRIS_UNROLL
        for (u32 i = 0; i < 2; ++i) {
            const u64 word = static_cast<u64>(bits[i]);
            words[i] = LlWord{static_cast<u32>(word), static_cast<i32>(word >> 32)};
        }
    }
    template <Order O, int A> IRIS_DEVICE void store(LlWord first, LlWord second) const {
        const i64 bits[2] = {bits_of(first), bits_of(second)};
        port::store_pair<O, Scope::System>(address, bits, A);
    }
    /// Returns the pair that is `pairs` pairs later in the same memory.
    IRIS_DEVICE SymPair after(u64 pairs) const { return SymPair(address + pairs * BYTES); }
    IRIS_DEVICE SymPair after_bytes(u64 bytes) const { return SymPair(address + bytes); }
    static constexpr u32 BYTES = 16;
    /// See port::compute_now().
    IRIS_DEVICE void compute_now() const { port::compute_now(address); }

  private:
    IRIS_DEVICE explicit SymPair(u64 address) : address(address) {}
    IRIS_DEVICE static i64 bits_of(LlWord word) {
        return static_cast<i64>(u64(static_cast<u32>(word.call)) << 32 | word.data);
    }
    u64 address;
    friend struct HeapView;
};

/// Word of symmetric memory, which any rank may access.
using SymWord = ScopedWord<Scope::System, i32>;
/// Word of device memory that only this rank's workgroups access.
using DevWord = ScopedWord<Scope::Device, i32>;

/// Array at the same offset in every rank's data segment; iris_heap::SymSlice on the host.
template <class T> struct Slice {
    /// Offset in bytes from the start of the data segment.
    u64 offset;
    /// Number of elements.
    u64 len;
    /// Returns the part of the slice from element `first` on.
    IRIS_DEVICE Slice from(u64 first) const { return Slice{offset + first * sizeof(T), len - first}; }
};

/// Part of a slice in the memory of one rank, for access to its elements.
template <class T> class Remote {
  public:
    /// Plain access to element `i`. The caller must order it by release and acquire of a word.
    IRIS_DEVICE T get(u64 i) const { return port::read<T>(address + i * sizeof(T)); }
    IRIS_DEVICE void put(u64 i, T value) const { port::write(address + i * sizeof(T), value); }
    /// Returns element `i` as a word, for atomic access with system scope; T must be i32 or i64.
    IRIS_DEVICE ScopedWord<Scope::System, T> word(u64 i) const {
        return ScopedWord<Scope::System, T>(address + i * sizeof(T));
    }
    /// Relaxed atomic addition to an f32 element.
    IRIS_DEVICE void add(u64 i, float value) const {
        static_assert(sizeof(T) == sizeof(float) && T(0.5f) != T(0), "the element type must be f32");
        port::add_f32<Scope::System>(address + i * sizeof(T), value);
    }
    /// Returns the elements from `first` on.
    IRIS_DEVICE Remote from(u64 first) const { return Remote(address + first * sizeof(T)); }
    /// Copies `count` elements from `source`, in 16-byte vectors if both addresses are aligned to
    /// 16. All threads call this function; no barrier is included.
    IRIS_DEVICE void copy_from(Remote source, u64 count) const {
        static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16,
                      "elements of 2, 4, 8 or 16 bytes");
        copy_bytes(address, source.address, count * sizeof(T), sizeof(T));
    }

  private:
    IRIS_DEVICE explicit Remote(u64 address) : address(address) {}
    u64 address;
    friend struct HeapView;
};

/// Addresses that a kernel needs to access symmetric memory; iris_heap::abi::HeapView on the host.
struct HeapView {
    /// Number of this rank, and number of ranks of the world.
    u32 rank, size;
    /// Start addresses of each rank's data segment (`data`) and signal segment (`signal`).
    u64 data[MAX_RANKS];
    u64 signal[MAX_RANKS];
    /// Address of this rank's control block: host_abort, fault_claim, fault[14].
    u64 control;
    /// Address of this rank's device words.
    u64 device_words;
    /// Deadlines in nanoseconds: for waits for a peer's entry, and for other waits.
    u64 entry_deadline_ns;
    u64 progress_deadline_ns;

    /// Word `index` of the signal segment of rank `at`.
    IRIS_DEVICE SymWord word(u32 at, u64 index) const { return SymWord(signal[at] + index * 4); }
    /// Pair of 64-bit words that begins at 4-byte word `index` of the signal segment of rank `at`.
    IRIS_DEVICE SymPair pair(u32 at, u64 index) const { return SymPair(signal[at] + index * 4); }
    /// Word `index` of this rank's device words.
    IRIS_DEVICE DevWord device_word(u64 index) const { return DevWord(device_words + index * 4); }
    /// Part of `slice` that lies at rank `at`.
    template <class T> IRIS_DEVICE Remote<T> at(Slice<T> slice, u32 at) const {
        return Remote<T>(data[at] + slice.offset);
    }
    /// Address of byte `offset` in the data segment of rank `at`, for plain data.
    IRIS_DEVICE u64 address(u32 at, u64 offset) const { return data[at] + offset; }
};
static_assert(sizeof(HeapView) == 1064, "the layout of iris_heap::abi::HeapView has another size");
static_assert(IRIS_OFFSET_OF(HeapView, data) == 8, "data");
static_assert(IRIS_OFFSET_OF(HeapView, signal) == 520, "signal");
static_assert(IRIS_OFFSET_OF(HeapView, control) == 1032, "control");
static_assert(IRIS_OFFSET_OF(HeapView, device_words) == 1040, "device_words");
static_assert(IRIS_OFFSET_OF(HeapView, entry_deadline_ns) == 1048, "entry_deadline_ns");
static_assert(IRIS_OFFSET_OF(HeapView, progress_deadline_ns) == 1056, "progress_deadline_ns");

/// Copies `count` elements of this rank's part of `from` into `to` at `peer`. Called by all
/// threads; no barrier is included.
template <class T>
IRIS_DEVICE void put(const HeapView& heap, Slice<T> to, Slice<T> from, u64 count, u32 peer) {
    heap.at(to, peer).copy_from(heap.at(from, heap.rank), count);
}

/// Copies `count` elements of `from` at `peer` into this rank's part of `to`. Called by all
/// threads; no barrier is included.
template <class T>
IRIS_DEVICE void get(const HeapView& heap, Slice<T> to, Slice<T> from, u64 count, u32 peer) {
    heap.at(to, heap.rank).copy_from(heap.at(from, peer), count);
}

/// Copies `count` elements of `from` at rank `from_rank` into `to` at rank `to_rank`. Called by all
/// threads; no barrier is included.
template <class T>
IRIS_DEVICE void copy(const HeapView& heap, Slice<T> to, u32 to_rank, Slice<T> from, u32 from_rank,
                      u64 count) {
    heap.at(to, to_rank).copy_from(heap.at(from, from_rank), count);
}

/// Copies `count` elements to `peer` like put(), then stores `value` in `signal`, for which `peer`
/// waits with wait_until() (sync.h).
template <class T>
IRIS_DEVICE void put_with_signal(const HeapView& heap, Slice<T> to, Slice<T> from, u64 count,
                                 u32 peer, SymWord signal, i32 value) {
    put(heap, to, from, count, peer);
    port::barrier(Site::Signal);
    if (port::thread() == 0) signal.store<Order::Release>(value);
}

/// Orders earlier accesses of this thread before its later ones, as seen by all devices and the
/// host.
template <Order O = Order::AcqRel> IRIS_DEVICE void fence() { port::fence<O, Scope::System>(); }

} // namespace iris

#endif
