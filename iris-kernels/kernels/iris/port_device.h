// Parts of port.h that the CUDA and HIP forms share.
#ifndef IRIS_PORT_DEVICE_H
#define IRIS_PORT_DEVICE_H

namespace iris::port {

/// Clock of a wait, which starts at the first poll that reads it.
class Deadline {
  public:
    IRIS_DEVICE Deadline(u64 entry_ns, u64 progress_ns)
        : entry(entry_ns), progress(progress_ns), began(0) {}

    /// Whether this poll should also check abort words and the clock. Only one poll in PERIOD does
    /// so, which is once in every few milliseconds. The host's abort word is in host memory, which
    /// serves readers one after the other. When workgroups checked it every few polls, each
    /// workgroup delayed the others by 0.7 us on an H200.
    IRIS_DEVICE static bool look_around(u32 spins) { return spins % PERIOD == PERIOD - 1; }

    /// Whether the wait has passed its deadline after `spins` polls. The clock starts anew when the
    /// caller counts `spins` from 0 again.
    IRIS_DEVICE bool expired(Limit limit, u32 spins) {
        const u64 time = now();
        if (spins < PERIOD) began = time;
        return time - began > (limit == Limit::Entry ? entry : progress);
    }

  private:
    static constexpr u32 PERIOD = 4096;
    u64 entry, progress, began;
};

/// Abort code that this rank's host has set for its kernels; 0 means continue.
IRIS_DEVICE i32 host_abort(u64 control) {
    return load<Order::Relaxed, Scope::System>(control, static_cast<i32*>(nullptr), USER_ACCESS);
}

/// Stores the words of a fault in the control block, unless a fault is already stored. The first
/// thread that changes the claim from 0 to 1 writes the record; the host reads the record when the
/// claim is 2.
IRIS_DEVICE void keep_fault(u64 control, const i32 (&words)[8]) {
    const u64 claim = control + 4, record = control + 8;
    if (compare_exchange<Order::Relaxed, Scope::System>(claim, 0, 1, USER_ACCESS) != 0) return;
    IRIS_UNROLL
    for (u32 i = 0; i < 8; ++i) {
        store<Order::Relaxed, Scope::System>(record + 4 * i, words[i], USER_ACCESS);
    }
    store<Order::Release, Scope::System>(claim, 2, USER_ACCESS);
}

/// Comparisons that a model checker overrides in the host form. On devices they return `answer`,
/// the true result.
IRIS_DEVICE bool reached(int, i32, i32, bool answer) { return answer; }
IRIS_DEVICE bool is_of(int, i32, i32, bool answer) { return answer; }

} // namespace iris::port

#endif
