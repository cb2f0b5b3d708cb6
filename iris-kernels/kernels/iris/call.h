// Number of a call of an op, and its comparisons; transcribes iris_sync::Call.
#ifndef IRIS_CALL_H
#define IRIS_CALL_H

#include "iris/port.h"

namespace iris {

/// Period of the refresh, in calls. In every call whose number is a multiple of this period,
/// writers store the number into all of their words. Otherwise an unused word could become 2^31
/// calls old, and its wrapping difference would change sign.
constexpr i32 REFRESH_PERIOD = 1 << 29;

/// Number of a call of an op: an i32 that wraps, compared only by its wrapping difference.
class Call {
  public:
    IRIS_DEVICE explicit Call(i32 number) : value(number) {}
    IRIS_DEVICE i32 number() const { return value; }
    IRIS_DEVICE Call next() const { return Call(static_cast<i32>(static_cast<u32>(value) + 1)); }
    IRIS_DEVICE Call previous() const {
        return Call(static_cast<i32>(static_cast<u32>(value) - 1));
    }
    /// Whether the call that set a word to the call number `seen` is this call or a later one.
    IRIS_DEVICE bool reached_by(i32 seen) const {
        return static_cast<i32>(static_cast<u32>(seen) - static_cast<u32>(value)) >= 0;
    }
    /// Parity of the call number, 0 or 1: it selects one of two receive buffers (slots), which calls use in
    /// turn.
    IRIS_DEVICE u32 parity() const { return static_cast<u32>(value) & 1; }
    /// Returns the call before the previous one: it used the same receive buffer (slot) as this call.
    IRIS_DEVICE Call of_same_slot_before() const {
        return Call(static_cast<i32>(static_cast<u32>(value) - 2));
    }
    /// Whether this call stores a new number into the unused LL words of its receive buffer (slot), so that
    /// their numbers never become 2^31 calls old. True for one call of each parity in every REFRESH_PERIOD
    /// calls.
    IRIS_DEVICE bool refreshes_slot() const {
        return (static_cast<u32>(value) & (REFRESH_PERIOD - 1)) <= 1;
    }
    IRIS_DEVICE bool refreshes() const { return (value & (REFRESH_PERIOD - 1)) == 0; }

  private:
    i32 value;
};

} // namespace iris

#endif
