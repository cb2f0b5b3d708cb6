// One workgroup in one call: the protocol functions of which ops are made. Included by sync.h.
#ifndef IRIS_WORKGROUP_H
#define IRIS_WORKGROUP_H

#include "iris/sync.h"
#include "iris/trace.h"

namespace iris {

/// How a launch ends: the call number stays, or advances; Pulled settles with the peers first.
enum class End { Keep, Advance, Pulled };

/// What every launch is given.
struct Launch {
    const HeapView& heap;
    const Channel& channel;
    const Record& record;
    /// This workgroup, and how many there are: all of them resident.
    u32 index, count;
    Trace trace;
};

class Workgroup {
  public:
    /// Read the number of the call.
    IRIS_DEVICE explicit Workgroup(const Launch& launch)
        : m{launch.heap, launch.channel}, index(launch.index), count(launch.count),
          trace(launch.trace), own(launch.record),
          number(m.dev_load<Access::CallLoad>(m.call_word())),
          sequence(m.dev_load<Access::CallLoad>(m.sequence_word())), credited(0), entered(0) {}

    const Words m;
    const u32 index, count;
    Trace trace;

    IRIS_DEVICE Call call() const { return number; }
    /// Which of the two slots this call uses.
    IRIS_DEVICE u32 parity() const { return number.parity(); }
    IRIS_DEVICE u32 rank() const { return m.channel.rank; }
    IRIS_DEVICE u32 size() const { return m.channel.size; }
    IRIS_DEVICE u32 peer(u32 step) const { return m.channel.peer(step); }

    /// Tell every peer that this rank is in the call. The first workgroup does it, before anything
    /// else, even when the rank has nothing to send.
    [[nodiscard]] IRIS_DEVICE bool enter() {
        if (index != 0) return true;
        for (u32 step = 1; step < size(); ++step) {
            if (!credit(peer(step))) return false;
            if (port::lane() == 0) entry::publish(m, number, own, sequence, peer(step));
        }
        return true;
    }

    /// Before writing a slot at `peer`: wait until its last reader of that slot is done.
    [[nodiscard]] IRIS_DEVICE bool credit(u32 peer) {
        if ((credited >> peer & 1) == 0) {
            if (!waiting(peer, [&] { return entry::wait_credit(m, number, peer); })) return false;
            credited |= 1ull << peer;
        }
        return true;
    }

    /// Before touching a peer's own memory or consuming what it sent: wait until it is in this
    /// call, with the same arguments.
    [[nodiscard]] IRIS_DEVICE bool wait_entry(u32 peer) {
        if ((entered >> peer & 1) == 0) {
            if (!waiting(peer,
                         [&] { return entry::wait_entry(m, number, own, sequence, peer); })) {
                return false;
            }
            entered |= 1ull << peer;
        }
        return true;
    }

    /// Whether results go straight into C between this rank and `peer`. If this rank allows it at
    /// all, waits until the peer has entered.
    [[nodiscard]] IRIS_DEVICE bool direct(u32 peer, bool& answer) {
        answer = false;
        if (own.direct == 0) return true;
        if (!wait_entry(peer)) return false;
        answer = entry::is_direct(m, number, own, peer);
        return true;
    }

    /// Say that the lanes' stores to `peer`'s slot of `tile` are done.
    IRIS_DEVICE void push_signal(u32 peer, u32 tile) { raise(m.signal(peer, rank(), tile)); }

    /// Say that the result of `tile`, which this rank owns, is at `peer`.
    IRIS_DEVICE void push_result(u32 peer, u32 tile) { raise(m.result(peer, rank(), tile)); }

    /// Wait for `tile` of `source`, and for agreement with it.
    [[nodiscard]] IRIS_DEVICE bool wait_tile(u32 source, u32 tile) {
        return wait_entry(source) && wait_signal(m.signal(rank(), source, tile), source, tile);
    }

    /// Wait for the result of `tile` from its owner, and for agreement with it.
    [[nodiscard]] IRIS_DEVICE bool wait_result(u32 owner, u32 tile) {
        return wait_entry(owner) && wait_signal(m.result(rank(), owner, tile), owner, tile);
    }

    /// Say that the lanes have filled `unit` of this device's staging buffer.
    IRIS_DEVICE void raise_flag(u32 unit) {
        port::barrier(Site::Flag);
        if (port::lane() == 0) {
            tile_flags::raise(m, number, unit);
            trace.add(Counter::Flags, 1);
        }
    }

    /// Wait until `unit`, which comes from `source`, is in the staging buffer.
    [[nodiscard]] IRIS_DEVICE bool wait_flag(u32 unit, u32 source) {
        return waiting(unit, [&] { return tile_flags::wait(m, number, unit, source); });
    }

    /// Run `critical` under the lock of `tile` at `owner`.
    template <class Critical>
    [[nodiscard]] IRIS_DEVICE bool locked(u32 owner, u32 tile, Critical critical) {
        const SymWord word = m.lock(owner, tile);
        if (!waiting(tile, [&] { return lock::take(m, number, word, tile); })) return false;
        critical();
        port::barrier(Site::LockGive);
        if (port::lane() == 0) lock::give(m, word);
        return true;
    }

    /// A barrier of all lanes here and of the first workgroups of all members.
    [[nodiscard]] IRIS_DEVICE bool barrier(u32 phase, Members members) {
        const Limit limit = phase == 0 ? Limit::Entry : Limit::Progress;
        port::barrier(Site::Arrive);
        return waiting(phase, [&] { return arrive_and_wait(m, number, phase, members, limit); });
    }

    /// Count this workgroup out, whether it got through or not. The last one ends the call: it
    /// refreshes words where that is due, settles pulls, and advances the number.
    IRIS_DEVICE bool finish(End end, bool result) {
        port::barrier(Site::Finish);
        if (port::lane() != 0) return result;
        const i32 before = m.dev_add<Access::FinishAdd>(m.finished_word(), 1);
        if (before + 1 != static_cast<i32>(count)) return result;
        m.dev_store<Access::FinishStore>(m.finished_word(), 0);
        if (end == End::Keep) return result;
        const bool settled = end == End::Pulled ? settle(result) : true;
        if (number.restamps()) stamp();
        const i32 calls = m.dev_load<Access::CallLoad>(m.sequence_word());
        m.dev_store<Access::CallStore>(m.sequence_word(), Call(calls).next().number());
        m.dev_store<Access::CallStore>(m.call_word(), number.next().number());
        return result && settled;
    }

  private:
    const Record& own;
    const Call number;
    const i32 sequence;
    /// Peers whose credit, or entry, was seen: one bit each.
    u64 credited, entered;

    IRIS_DEVICE void raise(SymWord word) {
        port::barrier(Site::Signal);
        if (port::lane() == 0) {
            m.store<Access::SignalStore>(word, number.number());
            trace.add(Counter::Flags, 1);
        }
    }

    IRIS_DEVICE bool wait_signal(SymWord word, u32 rank, u32 tile) {
        return waiting(tile, [&] {
            const Awaited awaited{number, number, rank, static_cast<i32>(tile), Limit::Progress};
            return wait_for<Access::SignalLoad>(
                m, awaited, [&] { return m.load<Access::SignalLoad>(word); });
        });
    }

    /// Let lane 0 wait, then take all lanes past the barrier: what it acquired, they have.
    template <class Wait> IRIS_DEVICE bool waiting(u32 what, Wait wait) {
        bool passed = true;
        if (port::lane() == 0) {
            trace.add(Counter::Waits, 1);
            trace.begin(Span::Wait, what);
            passed = wait();
            trace.end(Span::Wait);
        }
        return port::vote(passed, Site::Waited);
    }

    /// Tell all peers that this rank has read what it pulls from them, and wait for the same from
    /// them: the next launch on this stream may overwrite what they pull.
    IRIS_DEVICE bool settle(bool result) {
        if (!result) return false;
        for (u32 step = 1; step < size(); ++step) {
            m.store<Access::DoneStore>(m.done(peer(step), rank()), number.number());
        }
        for (u32 step = 1; step < size(); ++step) {
            const Awaited awaited{number, number, peer(step), -1, Limit::Progress};
            const SymWord word = m.done(rank(), peer(step));
            if (!wait_for<Access::DoneLoad>(
                    m, awaited, [&] { return m.load<Access::DoneLoad>(word); })) {
                return false;
            }
        }
        return true;
    }

    /// Refresh every word this rank writes. All of its workgroups have been counted out, so this
    /// store carries what their signals carried, and words in use may be among them.
    IRIS_DEVICE void stamp() {
        for (u32 step = 1; step < size(); ++step) {
            for (u32 tile = 0; tile < m.channel.tiles; ++tile) {
                m.store<Access::StampStore>(m.signal(peer(step), rank(), tile), number.number());
                m.store<Access::StampStore>(m.result(peer(step), rank(), tile), number.number());
            }
            // Ops of one channel may pull in some calls and not in others.
            m.store<Access::StampStore>(m.done(peer(step), rank()), number.number());
            for (u32 phase = 0; phase < 2; ++phase) {
                m.store<Access::StampStore>(m.barrier(peer(step), rank(), phase), number.number());
            }
        }
        tile_flags::stamp(m, number);
    }
};

} // namespace iris

#endif
