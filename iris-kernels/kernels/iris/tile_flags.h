// Flags of the staged all-gather; transcribes iris_sync::tile_flags.
#ifndef IRIS_TILE_FLAGS_H
#define IRIS_TILE_FLAGS_H

#include "iris/wait.h"

namespace iris::tile_flags {

/// Raise the flag of staging unit `unit` (a piece of the gathered A), which is filled with data of
/// its source rank. One thread calls this function, after a barrier of the workgroup that filled
/// the unit.
IRIS_DEVICE void raise(const Words& m, Call call, u32 unit) {
    m.dev_store<Access::FlagStore>(m.flag(unit), call.number());
}

/// Wait until a workgroup of this device has filled staging unit `unit` with data of rank `source`.
/// One thread calls this function.
IRIS_DEVICE bool wait(const Words& m, Call call, u32 unit, u32 source) {
    const Awaited awaited{call, call, source, static_cast<i32>(unit), Limit::Progress};
    return wait_for<Access::FlagLoad>(
        m, awaited, [&] { return m.dev_load<Access::FlagLoad>(m.flag(unit)); });
}

/// Store the number of this call into this thread's share of the flags, so that no flag becomes 2^31
/// calls old. All threads of the last workgroup call this function, in every REFRESH_PERIOD-th
/// call.
IRIS_DEVICE void stamp(const Words& m, Call call) {
    for (u32 unit = port::thread(); unit < m.channel.flag_count; unit += port::threads()) {
        m.dev_store<Access::FlagStamp>(m.flag(unit), call.number());
    }
}

} // namespace iris::tile_flags

#endif
