// What a wait looks at, and what it leaves when it gives up: iris_sync::wait. And wait_until, for
// kernels of users.
#ifndef IRIS_WAIT_H
#define IRIS_WAIT_H

#include "iris/channel.h"

namespace iris {

/// What a wait is for, and what its fault record would say.
struct Awaited {
    Call call, want;
    u32 rank;
    i32 tile;
    Limit limit;

    IRIS_DEVICE Fault fault(FaultKind kind, const Channel& channel, i32 rank, i32 seen) const {
        return Fault{kind, static_cast<i32>(channel.op), call.number(), tile, rank, seen,
                     want.number(), -1};
    }
};

/// Whether somebody gave up: this rank's host, or a peer. Leaves a record of who it was.
IRIS_COLD bool stopped(Words m, Awaited awaited) {
    const i32 host = m.host_abort();
    const i32 peer = m.load<Access::AbortLoad>(m.abort(m.channel.rank));
    if (host == 0 && peer == 0) return false;
    if (host == 0) {
        // Whatever stands there: the record shows it.
        const i32 who = static_cast<i32>(static_cast<u32>(peer) - 1);
        m.record(awaited.fault(FaultKind::PeerGaveUp, m.channel, who, peer));
    } else if (host >= PEER_LOST) {
        m.record(awaited.fault(FaultKind::PeerLost, m.channel, host - PEER_LOST, host));
    } else {
        const i32 me = static_cast<i32>(m.channel.rank);
        m.record(awaited.fault(FaultKind::HostAbort, m.channel, me, host));
    }
    if (host != 0) {
        // For the launches that follow: they look at this word only.
        m.store<Access::AbortStore>(m.abort(m.channel.rank),
                                    static_cast<i32>(m.channel.rank) + 1);
    }
    return true;
}

/// Whether this rank has given up, or was told that a peer did. Once it is so, it stays so.
IRIS_DEVICE bool has_given_up(const Words& m) {
    return m.load<Access::AbortCheck>(m.abort(m.channel.rank)) != 0;
}

/// Keep a fault and tell every rank, this one included, that the call cannot be finished.
IRIS_COLD void give_up(Words m, Fault fault) {
    m.record(fault);
    for (u32 rank = 0; rank < m.channel.size; ++rank) {
        m.store<Access::AbortStore>(m.abort(rank), static_cast<i32>(m.channel.rank) + 1);
    }
}

/// A rank that has not entered this call, and what its entry word says.
struct Absent {
    bool any;
    u32 rank;
    i32 seen;
};

IRIS_COLD Absent find_absent(Words m, Call call) {
    for (u32 step = 1; step < m.channel.size; ++step) {
        const u32 peer = m.channel.peer(step);
        const SymWord record = m.entry(m.channel.rank, peer, call.parity());
        const i32 seen = m.load<Access::EntryLoad>(record.after(LINE_WORDS - 1));
        if (!call.reached_by(seen)) return Absent{true, peer, seen};
    }
    return Absent{false, 0, 0};
}

/// What a look has not found: the rank that it is awaited from, what of it, and what is there instead.
struct Missing {
    bool any;
    u32 rank;
    i32 tile, seen;
};

/// As wait_for, of anything that `look` can tell.
template <class Look> IRIS_DEVICE bool poll(const Words& m, Awaited awaited, Look look) {
    port::Deadline deadline = m.deadline();
    u32 spins = 0;
    bool late = false;
    for (;;) {
        const Missing missing = look();
        if (!missing.any) return true;
        awaited.rank = missing.rank;
        awaited.tile = missing.tile;
        const i32 seen = missing.seen;
        if (IRIS_RARE(port::Deadline::look_around(spins))) {
            if (stopped(m, awaited)) return false;
            if (deadline.expired(awaited.limit, spins)) {
                const Absent absent = awaited.limit == Limit::Entry
                                          ? Absent{true, awaited.rank, seen}
                                          : find_absent(m, awaited.call);
                if (absent.any && deadline.expired(Limit::Entry, spins)) {
                    give_up(m, awaited.fault(FaultKind::NotEntered, m.channel,
                                             static_cast<i32>(absent.rank), absent.seen));
                    return false;
                }
                if (!absent.any && !late) {
                    give_up(m, awaited.fault(FaultKind::NoProgress, m.channel,
                                             static_cast<i32>(awaited.rank), seen));
                    return false;
                }
                if (!absent.any) {
                    // The late rank has come: progress gets its full time from now.
                    late = false;
                    spins = 0;
                    continue;
                }
                late = true;
            }
        }
        port::pause(spins);
        if (spins != ~0u) ++spins;
    }
}

/// Look until the value was set by the wanted call or a later one. One thread calls this.
///
/// False when the deadline passes (the fault is kept and all ranks are told) or when somebody gave
/// up. The deadline of progress runs only while all ranks are in the call: whoever waits for a rank
/// that itself waits for a late third one blames the third, and gives it the time of an entry.
template <Access A, class Look>
IRIS_DEVICE bool wait_for(const Words& m, const Awaited& awaited, Look look) {
    return poll(m, awaited, [&]() IRIS_INLINE {
        const i32 seen = look();
        return Missing{!m.reached<A>(awaited.want, seen), awaited.rank, awaited.tile, seen};
    });
}

/// Wait for `word`, the signal of `tile` from `rank`. One thread calls this.
IRIS_DEVICE bool wait_signal(const Words& m, Call call, SymWord word, u32 rank, u32 tile) {
    const Awaited awaited{call, call, rank, static_cast<i32>(tile), Limit::Progress};
    return wait_for<Access::SignalLoad>(
        m, awaited, [&] { return m.load<Access::SignalLoad>(word); });
}

/// Say by `word` that what this thread has stored, or has seen stored by others, is there.
IRIS_DEVICE void raise_signal(const Words& m, Call call, SymWord word) {
    m.store<Access::SignalStore>(word, call.number());
}

/// Wait until `word` holds `value` by `compare(seen, value)`. All threads of a user's kernel call it
/// together; false, on all threads, when the deadline of progress passes or somebody gave up, with a
/// fault record whose op is -1 and whose awaited rank is `from`.
template <class Compare>
IRIS_DEVICE bool wait_until(const HeapView& heap, SymWord word, Compare compare, i32 value,
                            u32 from) {
    bool passed = true;
    if (port::thread() == 0) {
        const Channel none{~0u, heap.rank, heap.size, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
        const Words m{heap, none};
        const Awaited awaited{Call(0), Call(value), from, -1, Limit::Progress};
        port::Deadline deadline = m.deadline();
        for (u32 spins = 0;;) {
            const i32 seen = word.load<Order::Acquire>();
            if (compare(seen, value)) break;
            if (port::Deadline::look_around(spins)) {
                const bool over = stopped(m, awaited);
                if (!over && !deadline.expired(Limit::Progress, spins)) {
                    // Go on.
                } else {
                    if (!over) {
                        give_up(m, awaited.fault(FaultKind::NoProgress, none,
                                                 static_cast<i32>(from), seen));
                    }
                    passed = false;
                    break;
                }
            }
            port::pause(spins);
            if (spins != ~0u) ++spins;
        }
    }
    return port::vote(passed, Site::Waited);
}

/// Comparisons for wait_until: as calls are compared, and plainly.
struct ReachedBy {
    IRIS_DEVICE bool operator()(i32 seen, i32 value) const { return Call(value).reached_by(seen); }
};
struct Equal {
    IRIS_DEVICE bool operator()(i32 seen, i32 value) const { return seen == value; }
};

} // namespace iris

#endif
