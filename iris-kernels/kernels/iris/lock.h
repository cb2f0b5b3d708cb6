// Spinlock in device code, transcribed from iris_sync::lock.
#ifndef IRIS_LOCK_H
#define IRIS_LOCK_H

#include "iris/wait.h"

namespace iris::lock {

/// Value of a free spinlock; a taken spinlock holds 1 + the rank that took it.
constexpr i32 FREE = 0;

/// Take a spinlock; false if the call cannot be finished. The holder waits for nothing before it
/// releases the lock, so no deadlock can arise.
IRIS_DEVICE bool take(const Words& m, Call call, SymWord word, u32 tile) {
    const i32 mine = static_cast<i32>(m.channel.rank) + 1;
    port::Deadline deadline = m.deadline();
    u32 spins = 0;
    for (;;) {
        const i32 held = m.compare_exchange<Access::LockTake>(word, FREE, mine);
        if (held == FREE || static_cast<int>(Access::LockTake) == IRIS_TEST_NO_WAIT) return true;
        if (port::Deadline::look_around(spins)) {
            const Awaited awaited{call, Call(FREE), static_cast<u32>(held - 1),
                                  static_cast<i32>(tile), Limit::Progress};
            if (stopped(m, awaited)) return false;
            if (deadline.expired(Limit::Progress, spins)) {
                give_up(m, awaited.fault(FaultKind::NoProgress, m.channel, held - 1, held));
                return false;
            }
        }
        port::pause(spins);
        if (spins != ~0u) ++spins;
    }
}

/// Release a spinlock that this rank holds.
IRIS_DEVICE void give(const Words& m, SymWord word) { m.store<Access::LockGive>(word, FREE); }

} // namespace iris::lock

#endif
