// Device barrier over a group of ranks; transcribes iris_sync::barrier.
#ifndef IRIS_BARRIER_H
#define IRIS_BARRIER_H

#include "iris/wait.h"

namespace iris {

/// Set of ranks, one bit per rank.
struct Members {
    u64 bits;
    IRIS_DEVICE static Members all(u32 size) {
        return Members{size >= 64 ? ~0ull : (1ull << size) - 1};
    }
    IRIS_DEVICE bool contains(u32 rank) const { return rank < 64 && (bits >> rank & 1) == 1; }
};

/// Arrive at a barrier and wait for the other members; false if the call cannot be finished. All
/// threads of one workgroup call this function, each for its share of the members. The caller must
/// then pass all threads through a workgroup barrier.
IRIS_DEVICE bool arrive_and_wait(const Words& m, Call call, u32 phase, Members members,
                                 Limit limit) {
    const u32 me = m.channel.rank;
    // All threads of a wave store before any of these threads waits. Otherwise one thread of the
    // wave could wait for a peer that itself still waits for the store of another thread of the
    // same wave.
    port::divergent([&] {
        for (u32 step = 1 + port::thread(); step < m.channel.size; step += port::threads()) {
            const u32 peer = m.channel.peer(step);
            if (!members.contains(peer)) continue;
            m.store<Access::BarrierStore>(m.barrier(peer, me, phase), call.number());
        }
        return true;
    });
    return port::divergent([&] {
        for (u32 step = 1 + port::thread(); step < m.channel.size; step += port::threads()) {
            const u32 peer = m.channel.peer(step);
            if (!members.contains(peer)) continue;
            const Awaited awaited{call, call, peer, -1, limit};
            const SymWord word = m.barrier(me, peer, phase);
            if (!wait_for<Access::BarrierLoad>(
                    m, awaited, [&] { return m.load<Access::BarrierLoad>(word); })) {
                return false;
            }
        }
        return true;
    });
}

} // namespace iris

#endif
