// Skeletons (waits and signals) of ops whose data a copy engine moves; transcribes iris_sync::flow::copied. A
// copy engine cannot wait, poll or abort. So one launch before the copies waits for the peers, and later
// launches check that the copies have arrived.
#ifndef IRIS_FLOW_COPIED_H
#define IRIS_FLOW_COPIED_H

#include "iris/flow/launch.h"

namespace iris::flow {

// Functions that the template arguments must have:
// Body: copy(peer, part)                write `part` of the data for `peer` into the memory of `peer`
// Plan: produced(), sent(from, to)      numbers of parts, as for deliver() in deliver.h

/// Opens the call: this is the first launch, of one workgroup. It waits until all peers have
/// entered the call, so that data which the peers read in the previous call may be overwritten.
/// Then it stores the call number in staging flag 0, and the copies that follow send that number as
/// their signal.
///
/// If this launch fails, the flag keeps the number of an older call. The copies that follow cannot
/// be stopped, but they signal with this older number, which ends no wait.
IRIS_DEVICE bool open(const Launch& launch) {
    return run(launch, End::Keep, [&](Workgroup& wg) IRIS_INLINE {
        if (!wg.enter() || !wg.wait_entries(Members::all(wg.size()))) return false;
        wg.raise_flag(0);
        return true;
    });
}

/// Replaces copy engines by workgroups: copies each part to its peers, and sends after each part a
/// signal with the number in flag 0. `first` is the number of the first signal. The copies are made
/// even if the rank has given up, because a copy engine would make them too.
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

/// Gate: a launch of one workgroup that waits until `parts` parts of the data of rank `source`,
/// from part `first` on, have arrived. The kernels that read the parts are queued after this
/// launch.
IRIS_DEVICE bool gate(const Launch& launch, u32 source, u32 first, u32 parts) {
    return run(launch, End::Keep, [&](Workgroup& wg) IRIS_INLINE {
        return wg.wait_parts(source, first, parts);
    });
}

/// Waits for parts of copied data inside a launch that reads the parts while copies are still
/// running. A single thread of a workgroup waits, and then starts copies of the arrived data to
/// shared memory. The launch runs between open(), which has compared the records, and close(). So
/// it neither counts workgroups as finished nor ends the call.
class Arrivals {
  public:
    IRIS_DEVICE explicit Arrivals(const Launch& launch)
        : m(launch.heap, launch.channel), number(m.dev_load<Access::CallLoad>(m.call_word())), lost(false) {}

    /// Waits until part `part` of the data of `source` has arrived; false if the wait fails. After
    /// one failed wait all later waits fail at once: the call has failed, but the launch must still
    /// reach its end.
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

/// Signals by a single thread, inside a kernel between open() and close(), for data that this
/// thread itself has stored at peers. A rank that has given up must not store to peers, because the
/// peers may still be reading the data of an earlier call.
class Departures {
  public:
    IRIS_DEVICE explicit Departures(const Launch& launch)
        : m(launch.heap, launch.channel), own(launch.record),
          number(m.dev_load<Access::CallLoad>(m.call_word())), muted(has_given_up(m)) {}

    /// Whether this thread may store to peers: false if this rank had given up when the launch
    /// began.
    IRIS_DEVICE bool may_store() const { return !muted; }

    /// Whether this rank and `peer` write results directly into each other's C; both ranks get the
    /// same answer.
    IRIS_DEVICE bool is_direct(u32 peer) const { return entry::is_direct(m, number, own, peer); }

    /// Raise the signal of `part` at `peer` (release). Call it after this thread's own stores of
    /// `part`.
    IRIS_DEVICE void signal_part(u32 peer, u32 part) const {
        raise_signal(m, number, m.signal(peer, m.channel.rank, part));
    }

  private:
    const Words m;
    const Record& own;
    const Call number;
    const bool muted;
};

/// Closes the call: this is the last launch, of one workgroup, enqueued after the copies and after
/// all readers of copied data. Returns false if a peer gave up, because copies of that peer may
/// have overwritten data while this rank read it.
IRIS_DEVICE bool close(const Launch& launch) {
    return run(launch, End::Advance, [&](Workgroup& wg) IRIS_INLINE { return wg.check_not_aborted(); });
}

} // namespace iris::flow

#endif
