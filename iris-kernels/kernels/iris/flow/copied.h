// Skeletons of shards that a copy engine moves: iris_sync::flow::copied. It cannot wait, look at a word
// or stop: what it may do is said ahead of it, and what it has done is looked at behind it.
#ifndef IRIS_FLOW_COPIED_H
#define IRIS_FLOW_COPIED_H

#include "iris/flow/launch.h"

namespace iris::flow {

// Body: copy(peer, part)                write `part` of what the peer gets to it

// Plan: produced(), sent(from, to)      as of deliver

/// The first launch, of one workgroup: when all peers are in the call, so that what they read in the one
/// before may be overwritten, it leaves the number of the call in flag 0 for the copies behind it.
///
/// A launch that fails leaves the number that was there: copies that cannot be stopped then raise no
/// signal that was not raised before.
IRIS_DEVICE bool open(const Launch& launch) {
    return run(launch, End::Keep, [&](Workgroup& wg) IRIS_INLINE {
        if (!wg.enter() || !wg.wait_entries(Members::all(wg.size()))) return false;
        wg.raise_flag(0);
        return true;
    });
}

/// The copies, by workgroups where no engine makes them: each part to its peers, each followed by what
/// open has left, as its signal, of which the first has number `first`. They go on if the rank has given
/// up, as an engine does.
template <class Plan, class Body>
IRIS_DEVICE bool copies(const Launch& launch, u32 first, const Plan& plan, Body& body) {
    return run(launch, End::Keep, [&](Workgroup& wg) IRIS_INLINE {
        for (u32 part = wg.index; part < plan.produced(); part += wg.count) {
            for (u32 step = 1; step < wg.size(); ++step) {
                const u32 peer = wg.peer_in_turn(step, part);
                if (part >= plan.sent(wg.rank(), peer)) continue;
                body.copy(peer, part);
                wg.push_copied(peer, first + part);
            }
        }
        return true;
    });
}

/// In front of what reads `parts` parts of `source`, from number `first` on: one workgroup.
IRIS_DEVICE bool gate(const Launch& launch, u32 source, u32 first, u32 parts) {
    return run(launch, End::Keep, [&](Workgroup& wg) IRIS_INLINE {
        return wg.wait_parts(source, first, parts);
    });
}

/// The same within a launch that reads what is copied while it runs, for one thread of a workgroup, which
/// waits alone: for itself, and for copies that it starts then. Such a launch lies between open, which has
/// come to agree with all peers, and close: it counts nobody out, and ends no call.
class Arrivals {
  public:
    IRIS_DEVICE explicit Arrivals(const Launch& launch)
        : m(launch.heap, launch.channel), number(m.dev_load<Access::CallLoad>(m.call_word())), lost(false) {}

    /// Wait for this part of `source`. When one wait has failed nothing more is waited for: the call has
    /// failed, and what the launch still reads is of no use, but it must come to its end.
    IRIS_DEVICE bool wait_part(u32 source, u32 part) {
        if (lost) return false;
        lost = !wait_signal(m, number, m.signal(m.channel.rank, source, part), source, part);
        return !lost;
    }

  private:
    const Words m;
    const Call number;
    bool lost;
};

/// What one thread of a workgroup sends from within such a launch, without meeting the others: it says that
/// what it has stored itself is there. Nothing may be stored by a rank that had given up before, since peers
/// may still read what they got in an earlier call.
class Departures {
  public:
    IRIS_DEVICE explicit Departures(const Launch& launch)
        : m(launch.heap, launch.channel), own(launch.record),
          number(m.dev_load<Access::CallLoad>(m.call_word())), muted(has_given_up(m)) {}

    /// Whether anything may be stored to peers.
    IRIS_DEVICE bool may_store() const { return !muted; }

    /// Whether results go straight into C, between this rank and `peer`: both sides come to the same answer.
    IRIS_DEVICE bool is_direct(u32 peer) const { return entry::is_direct(m, number, own, peer); }

    /// Say that this thread's stores of this part are done at `peer`.
    IRIS_DEVICE void signal_part(u32 peer, u32 part) const {
        raise_signal(m, number, m.signal(peer, m.channel.rank, part));
    }

  private:
    const Words m;
    const Record& own;
    const Call number;
    const bool muted;
};

/// The last launch, of one workgroup, behind the copies and all that read what peers copied: fails if a
/// peer gave up, whose copies may have come too early for what was read here.
IRIS_DEVICE bool close(const Launch& launch) {
    return run(launch, End::Advance, [&](Workgroup& wg) IRIS_INLINE { return wg.go_on(); });
}

} // namespace iris::flow

#endif
