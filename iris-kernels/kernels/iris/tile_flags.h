// Flags of the staged all-gather; transcribes iris_sync::tile_flags.
#ifndef IRIS_TILE_FLAGS_H
#define IRIS_TILE_FLAGS_H

#include "iris/wait.h"

namespace iris::tile_flags {

/// Raise the flag of `unit`: it is filled. Called by one thread, after the barrier of the workgroup
/// that filled the unit.
IRIS_DEVICE void raise(const Words& m, Call call, u32 unit) {
    m.dev_store<Access::FlagStore>(m.flag(unit), call.number());
}

/// Wait until `unit`, whose data comes from rank `source`, is filled. Called by one thread.
IRIS_DEVICE bool wait(const Words& m, Call call, u32 unit, u32 source) {
    const Awaited awaited{call, call, source, static_cast<i32>(unit), Limit::Progress};
    return wait_for<Access::FlagLoad>(
        m, awaited, [&] { return m.dev_load<Access::FlagLoad>(m.flag(unit)); });
}

/// Refresh all flags with the number of this call. Called by one thread of the last workgroup, in
/// calls that refresh.
IRIS_DEVICE void stamp(const Words& m, Call call) {
    for (u32 unit = 0; unit < m.channel.flag_count; ++unit) {
        m.dev_store<Access::FlagStamp>(m.flag(unit), call.number());
    }
}

} // namespace iris::tile_flags

#endif
