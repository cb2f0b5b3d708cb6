// Protocol functions of one workgroup in one call, of which ops are composed; transcribes
// iris_sync::Workgroup.
//
// This file is long because the functions share one object, which records what the workgroup has
// already seen of its peers.
#ifndef IRIS_WORKGROUP_H
#define IRIS_WORKGROUP_H

#include "iris/barrier.h"
#include "iris/entry.h"
#include "iris/ll.h"
#include "iris/lock.h"
#include "iris/tile_flags.h"
#include "iris/trace.h"

namespace iris {

/// Effect on the call number when the last workgroup of a launch finishes. The number stays (Keep),
/// advances (Advance), or advances after all ranks have told each other that they have read the
/// data that they pull (Pulled).
enum class End { Keep, Advance, Pulled };

/// Arguments with which one workgroup of a launch runs.
struct Launch {
    const HeapView& heap;
    const Channel& channel;
    const Record& record;
    /// Index of this workgroup, and number of workgroups in the launch; all are co-resident.
    u32 index, count;
    Trace trace;
};

class Workgroup {
  public:
    /// Begin the call in this launch: read the number of the call.
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
    /// Parity of the call number, 0 or 1: it selects one of two receive buffers (slots), which calls use in
    /// turn.
    IRIS_DEVICE u32 parity() const { return number.parity(); }
    IRIS_DEVICE u32 rank() const { return m.channel.rank; }
    IRIS_DEVICE u32 size() const { return m.channel.size; }
    IRIS_DEVICE u32 peer(u32 step) const { return m.channel.peer(step); }
    IRIS_DEVICE u32 peer_in_turn(u32 step, u32 turn) const { return m.channel.peer_in_turn(step, turn); }

    /// Check at the start of a later launch of a call that the rank has not given up; false if it has. A
    /// launch that begins with credit() or barrier() needs no such check, because these functions check it.
    [[nodiscard]] IRIS_DEVICE bool check_not_aborted() { return all_not_aborted(Site::Waited); }

    /// Publish this rank's entry record (the number and parameters of the call) at every peer. Only workgroup
    /// 0 publishes, and it does so before anything else. It publishes even if the rank has nothing to send,
    /// because peers wait for the entry.
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

    /// Wait for the credit of the peers `to` before LL words are pushed to them. A peer that gave
    /// credit no longer reads the words of two calls ago. The last workgroup waits for the credit
    /// of all peers, because it announces this rank's entry to all of them.
    [[nodiscard]] IRIS_DEVICE bool begin_push(Members to) {
        const u64 peers = index == count - 1 ? others() : to.bits & others();
        // If there are two threads per peer, each thread loads the credit word of one parity from
        // one peer, before the call number is known. So these loads overlap with the load of the
        // call number.
        const bool passed = port::threads() >= 2 * (size() - 1)
                                ? port::vote(look_ahead(peers), Site::Waited)
                                : for_peers(peers, [&](u32 peer) { return credit_of(peer); });
        if (!passed) return false;
        credited |= peers;
        hold<Hold::Entered>(rank());
        return true;
    }

    /// Variant of begin_push() between two ranks, for one thread, which may push its items at once. `credits`
    /// are those of the peer. Both are loaded before the call number is known.
    [[nodiscard]] IRIS_DEVICE bool begin_push_of_thread(Members to, const entry::Credits& credits) {
        const u32 at = peer(1);
        const i32 seen[2] = {credits.look(m, 0), credits.look(m, 1)};
        if (index != count - 1 && !to.contains(at)) return true;
        const Call want = number.previous();
        const bool there = !given_up && m.reached<Access::CreditLoad>(want, want.parity() ? seen[1] : seen[0]);
        if (!there) {
            if (given_up) {
                leave();
                return false;
            }
            if (port::thread() == 0) trace.add(Counter::Waits, 1);
            if (!entry::wait_credit(m, number, at)) return false;
        }
        hold<Hold::Entered>(rank());
        return true;
    }

    /// Share of this thread in the items of an LL message. The last wave gets no items: it pushes the header,
    /// announces the entry, or counts the workgroup as finished. The last of several workgroups gets none
    /// either, so that the release of the entry does not wait for the arrival of items. A workgroup of one
    /// wave does all of this first and then pushes the items; between two ranks, it pushes the header first.
    IRIS_DEVICE static ll::Share share_of_threads(u32 index, u32 count) {
        const u32 carriers = Workgroup::carriers(), groups = carrying(count);
        if (port::thread() >= carriers || index >= groups) return ll::Share{~0u, 1};
        return ll::Share{(groups - 1 - index) * carriers + port::thread(), groups * carriers};
    }
    IRIS_DEVICE ll::Share share_of_threads() const { return share_of_threads(index, count); }

    /// Rows that this workgroup takes as a whole (every n-th row, where n is the number of workgroups
    /// with items), and this thread's share of the items of these rows.
    IRIS_DEVICE ll::RowShare share_of_rows() const {
        const u32 groups = carrying(count);
        return ll::RowShare{index < groups ? groups - 1 - index : ~0u, groups, port::thread(), carriers()};
    }

    /// Count this workgroup as finished before its end, so that the count overlaps with waits for
    /// data. All of its threads have then read the call number and passed a barrier. The next launch
    /// begins when this one has ended, so until then nobody relies on the count. An LL exchange
    /// counts before it pushes items, between two ranks behind its pushes. The release of the counting thread waits until the thread's
    /// pushes have arrived at the peers, so a thread of the last wave counts, because that wave
    /// pushes no items. In workgroup 0 and in the last one, the last wave pushes the header or
    /// announces the entry, so a thread of the wave before it counts. Does nothing in calls that
    /// refresh words: the last workgroup to finish refreshes the words after all others have
    /// finished, so workgroups are counted at their end.
    IRIS_DEVICE void count_out() {
        if (number.refreshes_slot()) return;
        counted = true;
        const bool last_wave_sends = index == 0 || index == count - 1;
        const u32 thread = last_wave_sends ? carriers() - 1 : port::threads() - 1;
        if (port::thread() == thread && count_one()) advance();
    }

    /// Push this rank's header (its call parameters, as LL words) to the peers `to`, and announce to every
    /// peer that this rank has entered the call. The last wave of workgroup 0 pushes the header, and the last
    /// wave of the last workgroup announces the entry. If there are two workgroups, these are different ones,
    /// because the release of the entry takes a round trip, and after a header it would take a second one. A
    /// single workgroup pushes the header first: peers wait for it in this call, but for the entry only in
    /// the next call. No entry record is written, because the release of a record would wait for the arrival
    /// of the data. If a peer makes a call without LL words in place of this one, it compares its record with
    /// that of an older call of this rank, and reports the difference.
    IRIS_DEVICE void push_head(Members to) {
        push_header(to);
        announce();
    }
    IRIS_DEVICE void push_header(Members to) { ll::push_head(m, number, own, sequence, to, beside(0)); }
    IRIS_DEVICE void announce() {
        const ll::Share share = beside(count - 1);
        IRIS_NO_UNROLL
        for (u32 i = share.first; i < size() - 1; i += share.step) {
            entry::announce(m, number, peer(1 + i));
        }
    }

    /// Wait for the headers (call parameters, as LL words) of the ranks `sources` and compare them with this
    /// rank's record. Only the last wave of workgroup 0 acts. Returns false only on threads that find a
    /// difference, so leave_together() must follow.
    template <u32 N = ll::SOURCES> [[nodiscard]] IRIS_DEVICE bool wait_head(Members sources) {
        return ll::wait_head<N>(m, number, own, sequence, sources, beside(0));
    }

    /// Returns false on all threads if any thread passes false. Used after waits of single threads.
    [[nodiscard]] IRIS_DEVICE bool leave_together(bool result) {
        return port::vote(result, Site::Waited);
    }

    /// Wait for the credit of the peers `to` before this rank writes its slots at these peers. A
    /// peer that gave credit no longer reads the data of two calls ago there. If this rank allows
    /// peers to write its C directly, also wait until the peers `to` have entered this call.
    [[nodiscard]] IRIS_DEVICE bool wait_before_push(Members to) {
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

    /// Waits, before a slot at `peer` is written, until `peer` has finished reading the slot's
    /// previous contents.
    [[nodiscard]] IRIS_DEVICE bool credit(u32 peer) {
        if ((credited >> peer & 1) == 0) {
            if (!waiting([&] { return credit_of(peer); })) return false;
            credited |= 1ull << peer;
        }
        return true;
    }

    /// Wait until `peer` has entered this call with equal arguments. This is required before this
    /// rank accesses the peer's memory or uses data that the peer sent.
    [[nodiscard]] IRIS_DEVICE bool wait_entry(u32 peer) {
        if ((entered >> peer & 1) == 0) {
            if (!waiting([&] { return entry_of(peer); })) return false;
            entered |= 1ull << peer;
        }
        return true;
    }

    /// Wait until all peers `from` have entered this call with equal arguments. wait_entry() is the
    /// version for one peer.
    [[nodiscard]] IRIS_DEVICE bool wait_entries(Members from) {
        const u64 peers = from.bits & others() & ~entered;
        if (!for_peers(peers, [&](u32 peer) { return entry_of(peer); })) return false;
        entered |= peers;
        return true;
    }

    /// Stores in `answer` whether this rank and `peer` write results directly into each other's
    /// result matrix C. If this rank allows direct writes, waits until the peer has entered the
    /// call; returns false if that wait fails.
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

    /// Raise the signal of `tile` at `peer`, after the stores of all threads to the peer's slot
    /// (barrier, then release).
    IRIS_DEVICE void push_signal(u32 peer, u32 tile) {
        port::barrier(Site::Signal);
        if (port::thread() == 0) raise(m.signal(peer, rank(), tile));
    }

    /// Raise the signal of `tile` at `peer` with the call number found in staging flag 0. Only
    /// workgroups that replace a copy engine use this function, because they know no other state of
    /// the call.
    IRIS_DEVICE void push_copied(u32 peer, u32 tile) {
        port::barrier(Site::Signal);
        if (port::thread() != 0) return;
        const i32 allowed = m.dev_load<Access::FlagLoad>(m.flag(0));
        m.store<Access::SignalStore>(m.signal(peer, rank(), tile), allowed);
        trace.add(Counter::Flags, 1);
    }

    /// Raise the signals of `tile` at `peers`, after the stores of all threads to the peers' slots
    /// (barrier, then release).
    IRIS_DEVICE void push_signals(Members peers, u32 tile) {
        port::barrier(Site::Signal);
        share_of_peers(peers.bits, [&](u32 peer) {
            raise(m.signal(peer, rank(), tile));
            return true;
        });
    }

    /// Raise the result signals of `tile`, which this rank owns, at `peers`, after the stores of
    /// all threads.
    IRIS_DEVICE void push_results(Members peers, u32 tile) {
        port::barrier(Site::Signal);
        share_of_peers(peers.bits, [&](u32 peer) {
            raise(m.result(peer, rank(), tile));
            return true;
        });
    }

    /// Wait until `source` has entered this call with equal arguments, and until the data of `tile`
    /// from `source` has arrived.
    [[nodiscard]] IRIS_DEVICE bool wait_tile(u32 source, u32 tile) {
        return wait_entry(source) &&
               waiting([&] { return signal_of(m.signal(rank(), source, tile), source, tile); });
    }

    /// Wait until `source` has entered this call with equal arguments, and until the `parts` parts
    /// from part `first` on have arrived from `source`. Each thread waits for some of the parts.
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

    /// Wait until all peers `from` have entered this call with equal arguments, and until the data
    /// of `tile` from each of them has arrived.
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

    /// Wait until `owner` has entered this call with equal arguments, and until the finished `tile`
    /// from `owner` has arrived.
    [[nodiscard]] IRIS_DEVICE bool wait_result(u32 owner, u32 tile) {
        return wait_entry(owner) &&
               waiting([&] { return signal_of(m.result(rank(), owner, tile), owner, tile); });
    }

    /// Signal to the workgroups of this device that staging unit `unit` is filled, after the stores
    /// of all threads that filled it.
    IRIS_DEVICE void raise_flag(u32 unit) {
        port::barrier(Site::Flag);
        if (port::thread() == 0) {
            tile_flags::raise(m, number, unit);
            trace.add(Counter::Flags, 1);
        }
    }

    /// Wait until a workgroup of this device has filled staging unit `unit` with data of rank
    /// `source`.
    [[nodiscard]] IRIS_DEVICE bool wait_flag(u32 unit, u32 source) {
        return waiting([&] {
            return timed(unit, [&] { return tile_flags::wait(m, number, unit, source); });
        });
    }

    /// Run `critical` under the lock of `tile` at `owner`; false if the lock cannot be taken.
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

    /// Barrier of all threads of this workgroup and the workgroups of the ranks `members` that call
    /// barrier() with the same `phase`.
    [[nodiscard]] IRIS_DEVICE bool barrier(u32 phase, Members members) {
        const Limit limit = phase == 0 ? Limit::Entry : Limit::Progress;
        if (!all_not_aborted(Site::Arrive)) return false;
        // All threads call arrive_and_wait() together. If thread 0 called it in a separate branch,
        // thread 0 could wait before the other threads of its wave have stored. Traces record
        // thread 0 only.
        trace.add_once(Counter::Waits, 1);
        trace.begin(Span::Wait, phase);
        const bool passed = arrive_and_wait(m, number, phase, members, limit);
        trace.end(Span::Wait);
        return port::vote(passed, Site::Waited);
    }

    /// Count this workgroup as finished, whether `result` is true or not. The last workgroup of the
    /// launch then does what `end` requires. It waits until peers have read what they pull from
    /// this rank, refreshes words if a refresh is due, and advances the call number.
    IRIS_DEVICE bool finish(End end, bool result) {
        return finish_push(end, result, [](u32) { return ll::Used{0, 0}; });
    }

    /// End the workgroup's part of a call that used LL words; otherwise like finish(). `used(peer)`
    /// are the words that the call used for `peer`. All other words are refreshed if a refresh is
    /// due.
    template <class Used> IRIS_DEVICE bool finish_push(End end, bool result, Used used) {
        if (counted) return result;
        port::barrier(Site::Finish);
        const bool last = port::thread() == 0 && count_one();
        if (end == End::Keep) return result;
        if (last && end == End::Pulled) result = settle(result);
        // If the rank has given up, not all signals of the call were raised. The words must then
        // not be refreshed, because a refresh would raise the missing signals. All threads share
        // the refresh. The call number may advance before they have finished, because the launch
        // ends after all of them.
        if (IRIS_RARE(number.refreshes_slot()) &&
            port::vote(port::thread() != 0 || (last && !has_given_up(m)), Site::Refresh)) {
            ll::stamp(m, number, used);
            if (number.refreshes()) stamp();
        }
        if (last) advance();
        return result;
    }

  private:
    const Record& own;
    const Call number;
    const i32 sequence;
    /// Whether this rank had already given up when this launch began.
    const bool given_up;
    /// Whether count_out has already counted this workgroup as finished.
    bool counted;
    /// Sets of peers, one bit each. `credited`: peers whose credit was seen (their slots are free).
    /// `entered`: peers that were seen to have entered the call. `asked`: peers whose permission to
    /// write their C was read. `directs`: peers that gave this permission.
    u64 credited, entered, asked, directs;

    /// Count this workgroup as finished. Returns true for the last workgroup of the launch.
    IRIS_DEVICE bool count_one() {
        // The only workgroup of a launch is always the last.
        if (count == 1) return true;
        const i32 before = m.dev_add<Access::FinishAdd>(m.finished_word(), 1);
        if (before + 1 != static_cast<i32>(count)) return false;
        m.dev_store<Access::FinishStore>(m.finished_word(), 0);
        return true;
    }

    /// Advance by one the number of ops that the heap has run (its sequence) and this op's call
    /// number. Both words are unchanged since this workgroup read them, because only the last
    /// workgroup writes them.
    IRIS_DEVICE void advance() {
        m.dev_store<Access::CallStore>(m.sequence_word(), Call(sequence).next().number());
        m.dev_store<Access::CallStore>(m.call_word(), number.next().number());
    }

    /// Load credit words, which say which calls the peers have entered, before this call's number is known.
    /// Threads 2i and 2i + 1 load the two words of the i-th peer, one word for each parity of call numbers.
    /// The thread that loaded the word of the previous call's parity then waits for the credit. Returns false
    /// if that wait fails.
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

    /// Number of threads that handle items: all except the last wave, unless there is only one
    /// wave.
    IRIS_DEVICE static u32 carriers() {
        const u32 threads = port::threads();
        return threads > port::WAVE ? threads - port::WAVE : threads;
    }

    /// Number of workgroups that handle items: all except the last one, unless it is the only one or
    /// workgroups have one wave.
    IRIS_DEVICE static u32 carrying(u32 count) {
        return count > 1 && port::threads() > port::WAVE ? count - 1 : count;
    }

    /// Share of this thread in the work of the last wave of workgroup `at`, which pushes the header
    /// or announces the rank's entry, and pushes no items.
    IRIS_DEVICE ll::Share beside(u32 at) const {
        const u32 threads = port::threads(), before = threads > port::WAVE ? threads - port::WAVE : 0;
        if (index != at || port::thread() < before) return ll::Share{~0u, 1};
        return ll::Share{port::thread() - before, threads - before};
    }

    /// Bit set of all ranks except this one.
    IRIS_DEVICE u64 others() const { return Members::all(size()).bits & ~(1ull << rank()); }

    /// Call `each` for this thread's share of `peers` until one call returns false. Returns whether
    /// all calls returned true.
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

    IRIS_DEVICE bool all_not_aborted(Site site) {
        if (port::vote(!given_up, site)) return true;
        if (port::thread() == 0) leave();
        return false;
    }

    /// Record a fault which says that this rank or a peer gave up, unless a fault is already
    /// recorded.
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

    /// Run `wait`, a wait of this thread, as a Wait span of the trace.
    template <class Wait> IRIS_DEVICE bool timed(u32 what, Wait wait) {
        trace.add(Counter::Waits, 1);
        trace.begin(Span::Wait, what);
        const bool passed = wait();
        trace.end(Span::Wait);
        return passed;
    }

    /// Let thread 0 run `wait`, then pass all threads through a barrier, so that all threads see
    /// what thread 0 has acquired. Returns the result of `wait` on all threads.
    template <class Wait> IRIS_DEVICE bool waiting(Wait wait) {
        const bool passed = port::thread() != 0 || wait();
        return port::vote(passed, Site::Waited);
    }

    /// Call `each` for all `peers`, shared among the threads, until one call returns false. Then
    /// pass all threads through a barrier, so that each thread sees what any thread acquired.
    template <class Each> IRIS_DEVICE bool for_peers(u64 peers, Each each) {
        return port::vote(share_of_peers(peers, each), Site::Waited);
    }

    /// Tell all peers that this rank has finished reading their memory, and wait until all peers
    /// have told the same to this rank. A later launch on this stream may overwrite the data that
    /// peers read.
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
            // The result is not valid: a peer that gave up may have overwritten its shard before
            // this rank had read the shard.
            leave();
            return false;
        }
        return true;
    }

    /// Store this call's number into this thread's share of all words that this rank writes, so that no word
    /// becomes 2^31 calls old. All workgroups of the rank have finished. The acquire of the last count and
    /// the barrier after it order the tiles of these workgroups before these release stores. So a peer that
    /// sees a refreshed word instead of a signal still sees the tiles.
    IRIS_DEVICE void stamp() {
        share_of_peers(others(), [&](u32 peer) {
            // Done words (which say that a rank has finished reading a peer's memory) are refreshed
            // even if this call pulls nothing, because an op may pull in some of its calls only.
            m.store<Access::StampStore>(m.done(peer, rank()), number.number());
            for (u32 phase = 0; phase < 2; ++phase) {
                m.store<Access::StampStore>(m.barrier(peer, rank(), phase), number.number());
            }
            return true;
        });
        for (u32 step = 1; step < size(); ++step) {
            for (u32 tile = port::thread(); tile < m.channel.tiles; tile += port::threads()) {
                m.store<Access::StampStore>(m.signal(peer(step), rank(), tile), number.number());
                m.store<Access::StampStore>(m.result(peer(step), rank(), tile), number.number());
            }
        }
        tile_flags::stamp(m, number);
    }
};

} // namespace iris

#endif
