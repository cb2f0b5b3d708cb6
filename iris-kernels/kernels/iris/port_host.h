// Host form of port.h: every access to data that threads or ranks share, every barrier and every wait calls a
// hook, which a model checker or a test harness defines. Orders and scopes are passed as constants from the
// table in memory.h, together with the access number, so that a mutant (a protocol with one rule broken on
// purpose) can replace them.
//
// Hooks may unwind (in Rust: extern "C-unwind"), so compile with -fexceptions.
#ifndef IRIS_PORT_HOST_H
#define IRIS_PORT_HOST_H

extern "C" {

// Enumerations are passed as int: order, scope, site, limit, span and op have the values of port.h,
// and access those of iris::Access in memory.h, or -1. Each thread of a workgroup is a thread of
// the host.
iris::u32 iris_hook_thread(void);
iris::u32 iris_hook_threads(void);
iris::u32 iris_hook_workgroup(void);
iris::u32 iris_hook_workgroups(void);
/// Barrier of the workgroup; returns whether all threads passed a true `ok`.
int iris_hook_vote(int ok, int site);
/// Start and end of code in which the threads of a workgroup may take different branches.
void iris_hook_diverge(void);
void iris_hook_reconverge(void);
iris::u64 iris_hook_now(void);
void iris_hook_pause(iris::u32 spins);
/// Whether a wait has passed its deadline of `ns` nanoseconds after `spins` polls.
int iris_hook_expired(int limit, iris::u32 spins, iris::u64 ns);
/// Whether a word that holds `seen` is treated as set by call `want` or a later call; `answer` is
/// the true result.
int iris_hook_reached(int access, iris::i32 want, iris::i32 seen, int answer);
/// Whether an LL word with flag `seen` is treated as a word of call `want`; `answer` is the true
/// result.
int iris_hook_is_of(int access, iris::i32 want, iris::i32 seen, int answer);

/// Abort code that this rank's host has set for its kernels; 0 means continue.
iris::i32 iris_hook_host_abort(iris::u64 control);
/// Stores the eight words of a fault in the control block, unless a fault is already stored.
void iris_hook_record(iris::u64 control, const iris::i32* words);

iris::i32 iris_hook_load32(iris::u64 address, int order, int scope, int access);
void iris_hook_store32(iris::u64 address, iris::i32 value, int order, int scope, int access);
iris::i32 iris_hook_rmw32(iris::u64 address, int op, iris::i32 value, int order, int scope,
                          int access);
iris::i32 iris_hook_cas32(iris::u64 address, iris::i32 expected, iris::i32 value, int order,
                          int scope, int access);
iris::i64 iris_hook_load64(iris::u64 address, int order, int scope, int access);
void iris_hook_store64(iris::u64 address, iris::i64 value, int order, int scope, int access);
/// Load and store of a word of 128 bits. A thread that sees words[3] of a store sees the other
/// words of that store, too.
void iris_hook_load_quad(iris::u64 address, iris::u32* words, int order, int scope, int access);
void iris_hook_store_quad(iris::u64 address, const iris::u32* words, int order, int scope,
                          int access);
iris::i64 iris_hook_rmw64(iris::u64 address, int op, iris::i64 value, int order, int scope,
                          int access);
iris::i64 iris_hook_cas64(iris::u64 address, iris::i64 expected, iris::i64 value, int order,
                          int scope, int access);
void iris_hook_add_f32(iris::u64 address, float value, int scope);
void iris_hook_fence(int order, int scope);

/// Plain load and store of data of 2, 4, 8 or 16 bytes.
void iris_hook_read(iris::u64 address, void* value, iris::u32 bytes);
void iris_hook_write(iris::u64 address, const void* value, iris::u32 bytes);
/// Shared memory of the workgroup: at least this many bytes, aligned to 16.
void* iris_hook_shared(iris::u64 bytes);
}

namespace iris::port {

inline u32 thread() { return iris_hook_thread(); }
inline u32 threads() { return iris_hook_threads(); }
inline u32 workgroup() { return iris_hook_workgroup(); }
inline u32 workgroups() { return iris_hook_workgroups(); }

/// Does nothing: on the host, launches on a stream do not overlap. In the CUDA form, this function
/// waits for the previous launch.
inline void take_turn() {}
/// Does nothing: there is no previous launch to compute beside.
template <class T> inline void compute_now(const T&) {}

constexpr bool PUSHES_BEFORE_VOTE = true, HOLDS_VECTORS_OF_PARTS = true;

/// Number of threads in a wave: one, so that models can have workgroups of several waves.
constexpr u32 WAVE = 1;

inline void barrier(Site site) { iris_hook_vote(1, static_cast<int>(site)); }
inline bool vote(bool ok, Site site) { return iris_hook_vote(ok, static_cast<int>(site)) != 0; }

template <class Steps> inline bool divergent(Steps steps) {
    iris_hook_diverge();
    const bool result = steps();
    iris_hook_reconverge();
    return result;
}
inline i32 uniform(i32 value) { return value; }
template <class T> inline const T& in_place(const T& argument) { return argument; }

inline u64 now() { return iris_hook_now(); }
inline void pause(u32 spins) { iris_hook_pause(spins); }
inline void sleep(u32) { iris_hook_pause(0); }

template <Order O, Scope S> inline i32 load(u64 address, i32*, int access) {
    static_assert(O == Order::Relaxed || O == Order::Acquire, "a load must be relaxed or acquire");
    return iris_hook_load32(address, static_cast<int>(O), static_cast<int>(S), access);
}
template <Order O, Scope S> inline i64 load(u64 address, i64*, int access) {
    static_assert(O == Order::Relaxed || O == Order::Acquire, "a load must be relaxed or acquire");
    return iris_hook_load64(address, static_cast<int>(O), static_cast<int>(S), access);
}
template <Order O, Scope S> inline void store(u64 address, i32 value, int access) {
    static_assert(O == Order::Relaxed || O == Order::Release, "a store must be relaxed or release");
    iris_hook_store32(address, value, static_cast<int>(O), static_cast<int>(S), access);
}
template <Order O, Scope S> inline void store(u64 address, i64 value, int access) {
    static_assert(O == Order::Relaxed || O == Order::Release, "a store must be relaxed or release");
    iris_hook_store64(address, value, static_cast<int>(O), static_cast<int>(S), access);
}
/// Loads two adjacent 64-bit words, each as a whole. The address is a multiple of 16.
template <Order O, Scope S> inline void load_pair(u64 address, i64 (&words)[2], int access) {
    static_assert(O == Order::Relaxed, "accesses to a pair of words must be relaxed");
    words[0] = load<O, S>(address, static_cast<i64*>(nullptr), access);
    words[1] = load<O, S>(address + 8, static_cast<i64*>(nullptr), access);
}
template <Order O, Scope S>
inline void store_pair(u64 address, const i64 (&words)[2], int access) {
    static_assert(O == Order::Relaxed, "accesses to a pair of words must be relaxed");
    store<O, S>(address, words[0], access);
    store<O, S>(address + 8, words[1], access);
}

/// Loads a word of 128 bits as a whole; words[3] has its highest bits. The address is a multiple of
/// 16.
template <Order O, Scope S> inline void load_quad(u64 address, u32 (&words)[4], int access) {
    iris_hook_load_quad(address, words, static_cast<int>(O), static_cast<int>(S), access);
}
template <Order O, Scope S>
inline void store_quad(u64 address, const u32 (&words)[4], int access) {
    iris_hook_store_quad(address, words, static_cast<int>(O), static_cast<int>(S), access);
}

template <Rmw R, Order O, Scope S> inline i32 rmw(u64 address, i32 value, int access) {
    return iris_hook_rmw32(address, static_cast<int>(R), value, static_cast<int>(O),
                           static_cast<int>(S), access);
}
template <Rmw R, Order O, Scope S> inline i64 rmw(u64 address, i64 value, int access) {
    return iris_hook_rmw64(address, static_cast<int>(R), value, static_cast<int>(O),
                           static_cast<int>(S), access);
}
template <Order O, Scope S>
inline i32 compare_exchange(u64 address, i32 expected, i32 value, int access) {
    return iris_hook_cas32(address, expected, value, static_cast<int>(O), static_cast<int>(S),
                           access);
}
template <Order O, Scope S>
inline i64 compare_exchange(u64 address, i64 expected, i64 value, int access) {
    return iris_hook_cas64(address, expected, value, static_cast<int>(O), static_cast<int>(S),
                           access);
}
template <Scope S> inline void add_f32(u64 address, float value) {
    iris_hook_add_f32(address, value, static_cast<int>(S));
}
template <Order O, Scope S> inline void fence() {
    static_assert(O != Order::Relaxed, "a fence must not be relaxed");
    iris_hook_fence(static_cast<int>(O), static_cast<int>(S));
}

template <class T> inline T read(u64 address) {
    static_assert(is_access(sizeof(T)), "an access must have 1, 2, 4, 8 or 16 bytes");
    T value;
    iris_hook_read(address, &value, sizeof(T));
    return value;
}
template <class T> inline void write(u64 address, T value) {
    static_assert(is_access(sizeof(T)), "an access must have 1, 2, 4, 8 or 16 bytes");
    iris_hook_write(address, &value, sizeof(T));
}

/// Square root, rounded to nearest.
inline float root(float value) { return __builtin_sqrtf(value); }
/// a * b + c with a single rounding.
inline float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// Conversions between f32 and the bits of 16-bit formats; rounded to nearest, ties to even.
inline float half_to_float(u16 bits) {
    const u32 sign = static_cast<u32>(bits & 0x8000) << 16;
    const u32 exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 31) return __builtin_bit_cast(float, sign | 0x7f800000 | fraction << 13);
    // For a subnormal f16, the fraction is in units of 2^-24.
    if (exponent == 0) {
        const float value = static_cast<float>(fraction) * 0x1p-24f;
        return sign ? -value : value;
    }
    return __builtin_bit_cast(float, sign | (exponent + 112) << 23 | fraction << 13);
}
inline u16 float_to_half(float value) {
    const u32 bits = __builtin_bit_cast(u32, value);
    const u16 sign = static_cast<u16>(bits >> 16 & 0x8000);
    const u32 size = bits & 0x7fffffff;
    if (size > 0x7f800000) return sign | 0x7e00;
    if (size >= 0x477ff000) return sign | 0x7c00;
    if (size < 0x38800000) {
        // For a subnormal f16, adding 0.5 leaves the value in the low bits, in units of 2^-24,
        // rounded to nearest, ties to even.
        const float shifted = __builtin_bit_cast(float, size) + 0.5f;
        return static_cast<u16>(sign | (__builtin_bit_cast(u32, shifted) - 0x3f000000));
    }
    return static_cast<u16>(sign | ((size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13));
}
inline u16 float_to_bfloat(float value) {
    const u32 bits = __builtin_bit_cast(u32, value);
    if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<u16>(bits >> 16 | 0x40);
    return static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/// Clock of a wait; the hook reads and keeps the time. A wait begins when `spins` is 0.
class Deadline {
  public:
    Deadline(u64 entry_ns, u64 progress_ns) : limits{entry_ns, progress_ns} {}

    /// Always true, because a model checks abort words and deadline at every poll.
    static bool look_around(u32) { return true; }

    bool expired(Limit limit, u32 spins) {
        return iris_hook_expired(static_cast<int>(limit), spins,
                                 limits[static_cast<int>(limit)]) != 0;
    }

  private:
    u64 limits[2];
};

inline i32 host_abort(u64 control) { return iris_hook_host_abort(control); }
inline void keep_fault(u64 control, const i32 (&words)[8]) { iris_hook_record(control, words); }

/// Comparisons that a model checker overrides by hooks; `answer` is the true result.
inline bool reached(int access, i32 want, i32 seen, bool answer) {
    return iris_hook_reached(access, want, seen, answer) != 0;
}
inline bool is_of(int access, i32 want, i32 seen, bool answer) {
    return iris_hook_is_of(access, want, seen, answer) != 0;
}

} // namespace iris::port

#endif
