// One workgroup in one call: the protocol functions of which ops are made. iris_sync::Workgroup.
//
// Long because a workgroup is one type, whose functions share what it has seen of its peers.
#ifndef IRIS_WORKGROUP_H
#define IRIS_WORKGROUP_H

#include "iris/barrier.h"
#include "iris/entry.h"
#include "iris/ll.h"
#include "iris/lock.h"
#include "iris/tile_flags.h"
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
        : m(launch.heap, launch.channel), index(launch.index), count(launch.count),
          trace(launch.trace), own(launch.record),
          number(port::uniform(m.dev_load<Access::CallLoad>(m.call_word()))),
          sequence(port::uniform(m.dev_load<Access::CallLoad>(m.sequence_word()))),
          given_up(has_given_up(m)),
          counted(false), credited(0), entered(0), asked(0), directs(0) {}

    const Words m;
    const u32 index, count;
    Trace trace;

    IRIS_DEVICE Call call() const { return number; }
    /// Which of the two slots this call uses.
    IRIS_DEVICE u32 parity() const { return number.parity(); }
    IRIS_DEVICE u32 rank() const { return m.channel.rank; }
    IRIS_DEVICE u32 size() const { return m.channel.size; }
    IRIS_DEVICE u32 peer(u32 step) const { return m.channel.peer(step); }
    IRIS_DEVICE u32 peer_in_turn(u32 step, u32 turn) const { return m.channel.peer_in_turn(step, turn); }

    /// Before a launch that is not the first of its call does anything: fails if the rank has given
    /// up, as credit and barrier do.
    [[nodiscard]] IRIS_DEVICE bool go_on() { return all_go_on(Site::Waited); }

    /// Tell every peer that this rank is in the call. The first workgroup does it, before anything
    /// else, even when the rank has nothing to send.
    [[nodiscard]] IRIS_DEVICE bool enter() {
        if (index == 0) {
            const u64 all = others();
            if (!for_peers(all, [&](u32 peer) {
                    if (!credit_of(peer)) return false;
                    entry::publish(m, number, own, sequence, peer);
                    return true;
                })) {
                return false;
            }
            credited |= all;
        }
        hold<Hold::Entered>(rank());
        return true;
    }

    /// Before pushing words that carry data: credit of these peers, and, in the first workgroup, of
    /// all, since it is to tell all of them that this rank has entered.
    [[nodiscard]] IRIS_DEVICE bool begin_push(Members to) {
        const u64 peers = index == 0 ? others() : to.bits & others();
        // Where there are threads enough, each looks at one word of one peer, before it is known which of the
        // two counts in this call: so their way is gone together with that of the number.
        const bool passed = port::threads() >= 2 * (size() - 1)
                                ? port::vote(look_ahead(peers), Site::Waited)
                                : for_peers(peers, [&](u32 peer) { return credit_of(peer); });
        if (!passed) return false;
        credited |= peers;
        hold<Hold::Entered>(rank());
        return true;
    }

    /// Which items, of words that carry their data, fall to this thread of this workgroup. The last wave
    /// gets none: it does what is to be done beside them, by the functions that follow, and the others
    /// do not wait until an entry, whose release takes a way there and back, is at the peers. A
    /// workgroup of one wave does first the one and then the other.
    IRIS_DEVICE ll::Share share_of_threads() const {
        const u32 carriers = this->carriers();
        if (port::thread() >= carriers) return ll::Share{~0u, 1};
        return ll::Share{(count - 1 - index) * carriers + port::thread(), count * carriers};
    }

    /// The same of items in rows, of which a workgroup takes whole ones: every so many of them.
    IRIS_DEVICE ll::RowShare share_of_rows() const {
        return ll::RowShare{count - 1 - index, count, port::thread(), carriers()};
    }

    /// Count this workgroup out before its end: all of its threads have read the number of the call, and
    /// passed a barrier since. A release at the end would wait until what its thread has pushed is there;
    /// so the last wave does it now, and in the first workgroup, where that one has more to do, the one
    /// before, which the last items fall to. Not in calls that refresh words: that is for the last
    /// workgroup, when all is over.
    IRIS_DEVICE void count_out() {
        if (number.restamps_slot()) return;
        counted = true;
        const u32 thread = index == 0 ? carriers() - 1 : port::threads() - 1;
        if (port::thread() == thread && count_one()) advance();
    }

    /// In the last wave of the first workgroup: tell every peer that this rank is in the call, and say
    /// to these peers what it says about it, in words that carry their data. These go first, since they are
    /// awaited in this call, and an entry, whose release takes a way there and back, in the next. No record is
    /// written, since its release would wait until it is there: who enters otherwise finds that of an older call.
    IRIS_DEVICE void push_head(Members to) {
        const ll::Share share = beside();
        IRIS_NO_UNROLL
        for (u32 step = 1; step < size(); ++step) {
            if (to.contains(peer(step))) ll::push_head(m, number, own, sequence, peer(step), share);
        }
        IRIS_NO_UNROLL
        for (u32 i = share.first; i < size() - 1; i += share.step) {
            entry::announce(m, number, peer(1 + i));
        }
    }

    /// In the last wave of the first workgroup: wait for what these peers say about the call, and
    /// compare it. Those threads fail that find a difference: leave_together must follow.
    template <u32 N = ll::SOURCES> [[nodiscard]] IRIS_DEVICE bool wait_head(Members sources) {
        return ll::wait_head<N>(m, number, own, sequence, sources, beside());
    }

    /// After waits of single threads: fails on all threads if it failed on one.
    [[nodiscard]] IRIS_DEVICE bool leave_together(bool result) {
        return port::vote(result, Site::Waited);
    }

    /// Before writing slots at these peers: as credit of each; where this rank allows results to go
    /// straight into C, also as wait_entry.
    [[nodiscard]] IRIS_DEVICE bool meet(Members to) {
        const u64 peers = to.bits & others();
        const u64 credits = peers & ~credited, entries = own.direct == 0 ? 0 : peers & ~entered;
        if ((credits | entries) == 0) return true;
        if (!for_peers(credits | entries, [&](u32 peer) {
                if ((credits >> peer & 1) == 1 && !credit_of(peer)) return false;
                return (entries >> peer & 1) == 0 || entry_of(peer);
            })) {
            return false;
        }
        credited |= credits;
        entered |= entries;
        return true;
    }

    /// Before writing a slot at `peer`: wait until its last reader of that slot is done.
    [[nodiscard]] IRIS_DEVICE bool credit(u32 peer) {
        if ((credited >> peer & 1) == 0) {
            if (!waiting([&] { return credit_of(peer); })) return false;
            credited |= 1ull << peer;
        }
        return true;
    }

    /// Before touching a peer's own memory or consuming what it sent: wait until it is in this
    /// call, with the same arguments.
    [[nodiscard]] IRIS_DEVICE bool wait_entry(u32 peer) {
        if ((entered >> peer & 1) == 0) {
            if (!waiting([&] { return entry_of(peer); })) return false;
            entered |= 1ull << peer;
        }
        return true;
    }

    /// The same of each of these peers.
    [[nodiscard]] IRIS_DEVICE bool wait_entries(Members from) {
        const u64 peers = from.bits & others() & ~entered;
        if (!for_peers(peers, [&](u32 peer) { return entry_of(peer); })) return false;
        entered |= peers;
        return true;
    }

    /// Whether results go straight into C between this rank and `peer`. If this rank allows it at
    /// all, waits until the peer has entered.
    [[nodiscard]] IRIS_DEVICE bool direct(u32 peer, bool& answer) {
        answer = false;
        if (own.direct == 0) return true;
        if (!wait_entry(peer)) return false;
        if ((asked >> peer & 1) == 0) {
            asked |= 1ull << peer;
            directs |= u64(entry::is_direct(m, number, own, peer)) << peer;
        }
        answer = (directs >> peer & 1) == 1;
        return true;
    }

    /// Say that the threads' stores to `peer`'s slot of `tile` are done.
    IRIS_DEVICE void push_signal(u32 peer, u32 tile) {
        port::barrier(Site::Signal);
        if (port::thread() == 0) raise(m.signal(peer, rank(), tile));
    }

    /// As push_signal, with the number that is in flag 0: for who copies for a call without being able to
    /// look at anything else.
    IRIS_DEVICE void push_copied(u32 peer, u32 tile) {
        port::barrier(Site::Signal);
        if (port::thread() != 0) return;
        const i32 allowed = m.dev_load<Access::FlagLoad>(m.flag(0));
        m.store<Access::SignalStore>(m.signal(peer, rank(), tile), allowed);
        trace.add(Counter::Flags, 1);
    }

    /// Say that the threads' stores to the slots of `tile` at these peers are done.
    IRIS_DEVICE void push_signals(Members peers, u32 tile) {
        port::barrier(Site::Signal);
        share_of_peers(peers.bits, [&](u32 peer) {
            raise(m.signal(peer, rank(), tile));
            return true;
        });
    }

    /// Say that the result of `tile`, which this rank owns, is at these peers.
    IRIS_DEVICE void push_results(Members peers, u32 tile) {
        port::barrier(Site::Signal);
        share_of_peers(peers.bits, [&](u32 peer) {
            raise(m.result(peer, rank(), tile));
            return true;
        });
    }

    /// Wait for `tile` of `source`, and for agreement with it.
    [[nodiscard]] IRIS_DEVICE bool wait_tile(u32 source, u32 tile) {
        return wait_entry(source) &&
               waiting([&] { return signal_of(m.signal(rank(), source, tile), source, tile); });
    }

    /// Wait for so many tiles of `source`, from `first` on, and for agreement with it: each thread for some.
    [[nodiscard]] IRIS_DEVICE bool wait_parts(u32 source, u32 first, u32 parts) {
        if (!wait_entry(source)) return false;
        const bool passed = port::divergent([&] {
            for (u32 part = first + port::thread(); part < first + parts; part += port::threads()) {
                if (!signal_of(m.signal(rank(), source, part), source, part)) return false;
            }
            return true;
        });
        return port::vote(passed, Site::Waited);
    }

    /// Wait for `tile` of each of these peers, and for agreement with all.
    [[nodiscard]] IRIS_DEVICE bool wait_tiles(Members from, u32 tile) {
        const u64 sources = from.bits & others();
        if (!for_peers(sources, [&](u32 source) {
                return ((entered >> source & 1) == 1 || entry_of(source)) &&
                       signal_of(m.signal(rank(), source, tile), source, tile);
            })) {
            return false;
        }
        entered |= sources;
        hold<Hold::Received>(rank());
        return true;
    }

    /// Wait for the result of `tile` from its owner, and for agreement with it.
    [[nodiscard]] IRIS_DEVICE bool wait_result(u32 owner, u32 tile) {
        return wait_entry(owner) &&
               waiting([&] { return signal_of(m.result(rank(), owner, tile), owner, tile); });
    }

    /// Say that the threads have filled `unit` of this device's staging buffer.
    IRIS_DEVICE void raise_flag(u32 unit) {
        port::barrier(Site::Flag);
        if (port::thread() == 0) {
            tile_flags::raise(m, number, unit);
            trace.add(Counter::Flags, 1);
        }
    }

    /// Wait until `unit`, which comes from `source`, is in the staging buffer.
    [[nodiscard]] IRIS_DEVICE bool wait_flag(u32 unit, u32 source) {
        return waiting([&] {
            return timed(unit, [&] { return tile_flags::wait(m, number, unit, source); });
        });
    }

    /// Run `critical` under the lock of `tile` at `owner`.
    template <class Critical>
    [[nodiscard]] IRIS_DEVICE bool locked(u32 owner, u32 tile, Critical critical) {
        const SymWord word = m.lock(owner, tile);
        if (!waiting([&] {
                return timed(tile, [&] { return lock::take(m, number, word, tile); });
            })) {
            return false;
        }
        critical();
        port::barrier(Site::LockGive);
        if (port::thread() == 0) lock::give(m, word);
        return true;
    }

    /// A barrier of all threads here and of the first workgroups of all members.
    [[nodiscard]] IRIS_DEVICE bool barrier(u32 phase, Members members) {
        const Limit limit = phase == 0 ? Limit::Entry : Limit::Progress;
        if (!all_go_on(Site::Arrive)) return false;
        // One call for all threads: in an arm of its own one would wait before the others have stored.
        // In traces thread 0 stands for all.
        trace.add_once(Counter::Waits, 1);
        trace.begin(Span::Wait, phase);
        const bool passed = arrive_and_wait(m, number, phase, members, limit);
        trace.end(Span::Wait);
        return port::vote(passed, Site::Waited);
    }

    /// Count this workgroup out, whether it got through or not. The last one ends the call: it
    /// refreshes words where that is due, settles pulls, and advances the number.
    IRIS_DEVICE bool finish(End end, bool result) {
        return finish_push(end, result, [](u32) { return 0u; });
    }

    /// As finish, of a call that has used so many pairs of words that carry data, from the first on, of
    /// those for each peer: the others are refreshed where that is due.
    template <class Used> IRIS_DEVICE bool finish_push(End end, bool result, Used used) {
        if (counted) return result;
        port::barrier(Site::Finish);
        if (port::thread() != 0 || !count_one()) return result;
        if (end == End::Keep) return result;
        const bool settled = end == End::Pulled ? settle(result) : true;
        // Signals of a call that was given up are not all raised: a refresh would raise them.
        if (IRIS_RARE(number.restamps_slot()) && !has_given_up(m)) {
            ll::stamp(m, number, used);
            if (number.restamps()) stamp();
        }
        advance();
        return result && settled;
    }

  private:
    const Record& own;
    const Call number;
    const i32 sequence;
    /// Whether the rank had given up when this launch began.
    const bool given_up;
    /// Whether this workgroup has been counted out before its end.
    bool counted;
    /// Peers whose credit, or entry, was seen, and whose answer about C is known: one bit each.
    u64 credited, entered, asked, directs;

    /// Count this workgroup. True for the last one of the launch.
    IRIS_DEVICE bool count_one() {
        // One that is alone need not count.
        if (count == 1) return true;
        const i32 before = m.dev_add<Access::FinishAdd>(m.finished_word(), 1);
        if (before + 1 != static_cast<i32>(count)) return false;
        m.dev_store<Access::FinishStore>(m.finished_word(), 0);
        return true;
    }

    /// The call is over. Nobody else has ended one since this one read the number.
    IRIS_DEVICE void advance() {
        m.dev_store<Access::CallStore>(m.sequence_word(), Call(sequence).next().number());
        m.dev_store<Access::CallStore>(m.call_word(), number.next().number());
    }

    /// The credit of the peer that this thread is for, if it is for the word that counts in this call.
    IRIS_DEVICE bool look_ahead(u64 peers) {
        return port::divergent([&] {
            const u32 step = 1 + port::thread() / 2, half = port::thread() % 2;
            if (step >= size()) return true;
            const u32 at = peer(step);
            const i32 seen = entry::look_at_credit(m, at, half);
            const Call want = number.previous();
            if (half != want.parity() || (peers >> at & 1) == 0) return true;
            return (!given_up && m.reached<Access::CreditLoad>(want, seen)) || credit_of(at);
        });
    }

    /// Threads that items fall to.
    IRIS_DEVICE u32 carriers() const {
        const u32 threads = port::threads();
        return threads > port::WAVE ? threads - port::WAVE : threads;
    }

    /// What falls to this thread of what the last wave of the first workgroup does.
    IRIS_DEVICE ll::Share beside() const {
        const u32 threads = port::threads(), before = threads > port::WAVE ? threads - port::WAVE : 0;
        if (index != 0 || port::thread() < before) return ll::Share{~0u, 1};
        return ll::Share{port::thread() - before, threads - before};
    }

    /// All ranks but this one.
    IRIS_DEVICE u64 others() const { return Members::all(size()).bits & ~(1ull << rank()); }

    /// Call `each` for those of these peers that fall to this thread, up to the first that fails.
    template <class Each> IRIS_DEVICE bool share_of_peers(u64 peers, Each each) {
        return port::divergent([&] {
            for (u32 step = 1 + port::thread(); step < size(); step += port::threads()) {
                const u32 at = peer(step);
                if ((peers >> at & 1) == 1 && !each(at)) return false;
            }
            return true;
        });
    }

    IRIS_DEVICE void raise(SymWord word) {
        raise_signal(m, number, word);
        trace.add(Counter::Flags, 1);
    }

    IRIS_DEVICE bool all_go_on(Site site) {
        if (port::vote(!given_up, site)) return true;
        if (port::thread() == 0) leave();
        return false;
    }

    /// Keep a record that the rank, or a peer, gave up, unless there is one.
    IRIS_DEVICE void leave() {
        stopped(m, Awaited{number, number, rank(), -1, Limit::Progress});
    }

    IRIS_DEVICE bool credit_of(u32 peer) {
        if (given_up) {
            leave();
            return false;
        }
        return timed(peer, [&] { return entry::wait_credit(m, number, peer); });
    }
    IRIS_DEVICE bool entry_of(u32 peer) {
        return timed(peer, [&] { return entry::wait_entry(m, number, own, sequence, peer); });
    }
    IRIS_DEVICE bool signal_of(SymWord word, u32 rank, u32 tile) {
        return timed(tile, [&] { return wait_signal(m, number, word, rank, tile); });
    }

    /// One wait of one thread.
    template <class Wait> IRIS_DEVICE bool timed(u32 what, Wait wait) {
        trace.add(Counter::Waits, 1);
        trace.begin(Span::Wait, what);
        const bool passed = wait();
        trace.end(Span::Wait);
        return passed;
    }

    /// Let thread 0 wait, then take all threads past the barrier: what it acquired, they have.
    template <class Wait> IRIS_DEVICE bool waiting(Wait wait) {
        const bool passed = port::thread() != 0 || wait();
        return port::vote(passed, Site::Waited);
    }

    /// Let each thread do its share of these peers, up to the first that fails; then take all threads
    /// past the barrier: what one of them acquired, they all have.
    template <class Each> IRIS_DEVICE bool for_peers(u64 peers, Each each) {
        return port::vote(share_of_peers(peers, each), Site::Waited);
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
        if (has_given_up(m)) {
            // A peer that gave up may have changed its shard before it was read here.
            leave();
            return false;
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
