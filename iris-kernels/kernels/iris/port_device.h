// What the CUDA and the HIP form of port.h have in common, over their atomics.
#ifndef IRIS_PORT_DEVICE_H
#define IRIS_PORT_DEVICE_H

namespace iris::port {

/// The clock of a wait, which begins at its first look.
class Deadline {
  public:
    IRIS_DEVICE Deadline(u64 entry_ns, u64 progress_ns)
        : entry(entry_ns), progress(progress_ns), began(0) {}

    /// Whether it is time to look at abort words and the clock. One of the words is the host's, which
    /// answers one reader after the other: workgroups that asked every few looks waited for each
    /// other in turn, 0.7 us each on an H200. So many looks are some milliseconds.
    IRIS_DEVICE static bool look_around(u32 spins) { return spins % PERIOD == PERIOD - 1; }

    /// Whether the wait, `spins` looks old, is over its deadline. It starts anew with `spins`.
    IRIS_DEVICE bool expired(Limit limit, u32 spins) {
        const u64 time = now();
        if (spins < PERIOD) began = time;
        return time - began > (limit == Limit::Entry ? entry : progress);
    }

  private:
    static constexpr u32 PERIOD = 4096;
    u64 entry, progress, began;
};

/// What the host of this rank tells its kernels: 0 to go on.
IRIS_DEVICE i32 host_abort(u64 control) {
    return load<Order::Relaxed, Scope::System>(control, static_cast<i32*>(nullptr), USER_ACCESS);
}

/// Keep these words of a fault in the control block, unless one is kept already. The first to claim
/// the record writes it; the host reads it once the claim says 2.
IRIS_DEVICE void keep_fault(u64 control, const i32 (&words)[8]) {
    const u64 claim = control + 4, record = control + 8;
    if (compare_exchange<Order::Relaxed, Scope::System>(claim, 0, 1, USER_ACCESS) != 0) return;
    IRIS_UNROLL
    for (u32 i = 0; i < 8; ++i) {
        store<Order::Relaxed, Scope::System>(record + 4 * i, words[i], USER_ACCESS);
    }
    store<Order::Release, Scope::System>(claim, 2, USER_ACCESS);
}

/// The override of comparisons by models: none on a device.
IRIS_DEVICE bool reached(int, i32, i32, bool answer) { return answer; }
IRIS_DEVICE bool is_of(int, i32, i32, bool answer) { return answer; }

} // namespace iris::port

#endif
