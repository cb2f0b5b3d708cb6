// Waits with deadlines and abort checks; transcribes iris_sync::wait. This header also has
// wait_until(), for users' kernels.
#ifndef IRIS_WAIT_H
#define IRIS_WAIT_H

#include "iris/channel.h"

namespace iris {

/// Description of a wait: the call and the value that are awaited, and data for the fault record if
/// the wait fails.
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

/// Copy the value of this rank's abort word to all peers except a lost one, whose memory may be
/// gone.
///
/// A rank that gives up because of its host or of a peer cannot know whether the other ranks know.
/// It tells all peers before it leaves the call, because later work on its stream may overwrite
/// memory that a peer still reads: the shard that the peer pulls from this rank, or data that a
/// copy engine sends to the peer.
IRIS_COLD void pass_on(Words m, i32 code) {
    for (u32 step = 1; step < m.channel.size; ++step) {
        const u32 peer = m.channel.peer(step);
        if (code >= PEER_LOST && static_cast<u32>(code - PEER_LOST) == peer) continue;
        m.store<Access::AbortStore>(m.abort(peer), code);
    }
}

/// Whether this rank's host or a peer has given up. If so, this function records a fault that names
/// the rank of the abort word or of the host's code, and tells all peers.
IRIS_COLD bool stopped(Words m, Awaited awaited) {
    const i32 host = m.host_abort();
    const i32 peer = m.load<Access::AbortLoad>(m.abort(m.channel.rank));
    if (host == 0 && peer == 0) return false;
    if (host == 0 && peer >= PEER_LOST) {
        m.record(awaited.fault(FaultKind::PeerLost, m.channel, peer - PEER_LOST, peer));
    } else if (host == 0) {
        // The abort word may hold any value here. The fault record has this value as `seen`.
        const i32 who = static_cast<i32>(static_cast<u32>(peer) - 1);
        m.record(awaited.fault(FaultKind::PeerGaveUp, m.channel, who, peer));
    } else if (host >= PEER_LOST) {
        m.record(awaited.fault(FaultKind::PeerLost, m.channel, host - PEER_LOST, host));
    } else {
        const i32 me = static_cast<i32>(m.channel.rank);
        m.record(awaited.fault(FaultKind::HostAbort, m.channel, me, host));
    }
    if (host != 0) {
        // The abort word of this rank is set too, because later launches check only this word, not
        // the host's code.
        const i32 code = host >= PEER_LOST ? host : static_cast<i32>(m.channel.rank) + 1;
        m.store<Access::AbortStore>(m.abort(m.channel.rank), code);
        pass_on(m, code);
    } else {
        pass_on(m, peer);
    }
    return true;
}

/// Returns whether this rank has given up, or a peer has told it to give up. The abort word is
/// never reset, so a true result stays true.
IRIS_DEVICE bool has_given_up(const Words& m) {
    return m.load<Access::AbortCheck>(m.abort(m.channel.rank)) != 0;
}

/// Store `fault` in this rank's fault record, and set the abort word of every rank, this one
/// included. If a wait for a rank has failed, the abort words name that rank, so that all ranks
/// blame it. Otherwise they name this rank, whose fault record gives the reason.
IRIS_COLD void give_up(Words m, Fault fault) {
    m.record(fault);
    const bool waited = fault.kind == FaultKind::NotEntered || fault.kind == FaultKind::NoProgress;
    const i32 named = waited ? fault.rank : static_cast<i32>(m.channel.rank);
    for (u32 rank = 0; rank < m.channel.size; ++rank) {
        m.store<Access::AbortStore>(m.abort(rank), named + 1);
    }
}

/// Rank that has not entered this call (`rank`), and the value of its entry word. `any` is false if
/// all ranks have entered.
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

/// Result of an unsuccessful poll: the rank and the tile that are still awaited, and the value that
/// was found instead.
struct Missing {
    bool any;
    u32 rank;
    i32 tile, seen;
};

/// Poll until `look` reports nothing missing; false if a deadline passes or the call is aborted.
/// wait_for() is the version for a single word.
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
                    // The late rank has now entered the call. This wait goes on, with the full
                    // deadline for progress.
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

/// Poll the value that `look` returns until call `awaited.want` or a later one has set it. One
/// thread calls this function.
///
/// Returns false if the deadline passes, or if a rank or the host gave up. A missed deadline is
/// recorded as a fault, and all ranks are told. The progress deadline runs only while all ranks are
/// in the call. If the awaited rank itself waits for a third rank that has not entered the call,
/// the fault names the third rank, and only after the longer entry deadline.
template <Access A, class Look>
IRIS_DEVICE bool wait_for(const Words& m, const Awaited& awaited, Look look) {
    return poll(m, awaited, [&]() IRIS_INLINE {
        const i32 seen = look();
        return Missing{!m.reached<A>(awaited.want, seen), awaited.rank, awaited.tile, seen};
    });
}

/// Wait for `word`, the signal of `tile` from rank `rank`; false if the wait fails. One thread
/// calls this function.
IRIS_DEVICE bool wait_signal(const Words& m, Call call, SymWord word, u32 rank, u32 tile) {
    const Awaited awaited{call, call, rank, static_cast<i32>(tile), Limit::Progress};
    return wait_for<Access::SignalLoad>(
        m, awaited, [&] { return m.load<Access::SignalLoad>(word); });
}

/// Store this call's number into `word` (release). It is the signal for everything that this thread
/// has stored, or has acquired from other threads.
IRIS_DEVICE void raise_signal(const Words& m, Call call, SymWord word) {
    m.store<Access::SignalStore>(word, call.number());
}

/// Waits until `compare(seen, value)` is true for the value `seen` of `word`. All threads of a
/// workgroup of a user kernel call this function together. Returns false in all threads if the
/// progress deadline passes or a rank gave up. The fault record then has op -1 and names `from` as
/// the awaited rank.
template <class Compare>
IRIS_DEVICE bool wait_until(const HeapView& heap, SymWord word, Compare compare, i32 value,
                            u32 from) {
    bool passed = true;
    if (port::thread() == 0) {
        const Channel none{~0u, heap.rank, heap.size, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
        const Words m{heap, none};
        const Awaited awaited{Call(0), Call(value), from, -1, Limit::Progress};
        port::Deadline deadline = m.deadline();
        for (u32 spins = 0;;) {
            const i32 seen = word.load<Order::Acquire>();
            if (compare(seen, value)) break;
            if (port::Deadline::look_around(spins)) {
                const bool over = stopped(m, awaited);
                if (!over && !deadline.expired(Limit::Progress, spins)) {
                    // Continues to poll: no rank has given up and the deadline has not passed.
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

/// Comparisons for wait_until: by wrapping difference, like call numbers, and by equality.
struct ReachedBy {
    IRIS_DEVICE bool operator()(i32 seen, i32 value) const { return Call(value).reached_by(seen); }
};
struct Equal {
    IRIS_DEVICE bool operator()(i32 seen, i32 value) const { return seen == value; }
};

} // namespace iris

#endif
