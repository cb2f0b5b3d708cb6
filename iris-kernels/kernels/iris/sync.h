// The protocols of iris-sync, operation by operation: see that crate and its PROTOCOL.md for the
// reasons. Names are the same. All lanes of a workgroup call the functions of Workgroup together;
// those that return false do so on all lanes alike, and the workgroup must then leave.
//
// Long because it is read beside iris-sync, whose files it follows one after the other.
#ifndef IRIS_SYNC_H
#define IRIS_SYNC_H

#include "iris/sym.h"

// For stress tests only: a pause of up to so many nanoseconds before each access of the protocols;
// the number of an access whose wait is left out (-1: none); and the place (a Hold; -1: none) where
// workgroups are held up, and for how many nanoseconds, so that the missing wait must show.
#ifndef IRIS_TEST_DELAY_NS
#define IRIS_TEST_DELAY_NS 0
#endif
#ifndef IRIS_TEST_NO_WAIT
#define IRIS_TEST_NO_WAIT -1
#endif
#ifndef IRIS_TEST_HOLD
#define IRIS_TEST_HOLD -1
#endif
#ifndef IRIS_TEST_HOLD_NS
#define IRIS_TEST_HOLD_NS 1
#endif

namespace iris {

/// The one table of accesses: name, order, scope; as iris_sync::Access, in its order.
#define IRIS_ACCESSES(X)                                                                           \
    X(EntryStore, Release, System)                                                                 \
    X(CreditLoad, Acquire, System)                                                                 \
    X(EntryLoad, Acquire, System)                                                                  \
    X(SignalStore, Release, System)                                                                \
    X(SignalLoad, Acquire, System)                                                                 \
    X(DoneStore, Release, System)                                                                  \
    X(DoneLoad, Acquire, System)                                                                   \
    X(BarrierStore, Release, System)                                                               \
    X(BarrierLoad, Acquire, System)                                                                \
    X(VersionStore, Release, System)                                                               \
    X(VersionLoad, Acquire, System)                                                                \
    X(LockTake, Acquire, System)                                                                   \
    X(LockGive, Release, System)                                                                   \
    X(StampStore, Release, System)                                                                 \
    X(AbortStore, Relaxed, System)                                                                 \
    X(AbortLoad, Relaxed, System)                                                                  \
    X(AbortCheck, Relaxed, System)                                                                 \
    X(CallLoad, Relaxed, Device)                                                                   \
    X(CallStore, Relaxed, Device)                                                                  \
    X(FinishAdd, AcqRel, Device)                                                                   \
    X(FinishStore, Relaxed, Device)                                                                \
    X(FlagStore, Release, Device)                                                                  \
    X(FlagLoad, Acquire, Device)                                                                   \
    X(FlagStamp, Relaxed, Device)

enum class Access : int {
#define IRIS_ROW(name, order, scope) name,
    IRIS_ACCESSES(IRIS_ROW)
#undef IRIS_ROW
};

template <Access A> struct AccessRow;
#define IRIS_ROW(name, order_of, scope_of)                                                         \
    template <> struct AccessRow<Access::name> {                                                   \
        static constexpr Order order = Order::order_of;                                            \
        static constexpr Scope scope = Scope::scope_of;                                            \
    };
IRIS_ACCESSES(IRIS_ROW)
#undef IRIS_ROW

/// Where a stress test can hold workgroups up; as iris_kernels::build::Hold, in its order. What stands
/// there is nothing in any other build.
enum class Hold : int {
    /// Before the kernel in front of an op touches what the op reads and writes.
    Filling,
    /// After the rank has entered a call, before it sends, reads or fetches anything in it.
    Entered,
    /// After the signals of a tile have come, before it is read.
    Received,
    /// After the source of a unit has entered, before the unit is copied to the staging buffer.
    Fetching,
    /// Between the read and the write of an addition under a lock.
    Adding,
};

/// Hold this lane up if `AT` is the place of the build. Rank 0 alone is late, so that the others go
/// on meanwhile; but at an addition all are, so that each reads before any other has written.
template <Hold AT> IRIS_DEVICE void hold(u32 rank) {
    if (static_cast<int>(AT) != IRIS_TEST_HOLD || (rank != 0 && AT != Hold::Adding)) return;
    for (const u64 begun = port::now(); port::now() - begun < IRIS_TEST_HOLD_NS;) port::sleep(1000);
}

/// Words in a 128-byte line.
constexpr u32 LINE_WORDS = 32;
/// What a host tells its kernels when a rank is gone: this plus the rank.
constexpr i32 PEER_LOST = 1000;
/// In calls whose number is a multiple of this, writers refresh all of their words.
constexpr i32 RESTAMP_PERIOD = 1 << 29;

/// The number of a call: an i32 that wraps, compared only by its wrapping difference.
class Call {
  public:
    IRIS_DEVICE explicit Call(i32 number) : value(number) {}
    IRIS_DEVICE i32 number() const { return value; }
    IRIS_DEVICE Call next() const { return Call(static_cast<i32>(static_cast<u32>(value) + 1)); }
    IRIS_DEVICE Call previous() const {
        return Call(static_cast<i32>(static_cast<u32>(value) - 1));
    }
    /// Whether a word that holds `seen` was set by this call or a later one.
    IRIS_DEVICE bool reached_by(i32 seen) const {
        return static_cast<i32>(static_cast<u32>(seen) - static_cast<u32>(value)) >= 0;
    }
    /// Which of two alternating slots this call uses.
    IRIS_DEVICE u32 parity() const { return static_cast<u32>(value) & 1; }
    IRIS_DEVICE bool restamps() const { return (value & (RESTAMP_PERIOD - 1)) == 0; }

  private:
    i32 value;
};

enum class FaultKind : i32 {
    NotEntered = 1,
    NoProgress = 2,
    Mismatch = 3,
    PeerGaveUp = 4,
    PeerLost = 5,
    HostAbort = 6,
};

/// Fields of an entry record that ranks must agree on. Direct, where C may be written, only must
/// where a kernel beside the op takes tiles from it.
enum class Field : i32 { Op, Sequence, M, N, K, Dtypes, Variant, Config, Direct };
constexpr u32 FIELDS = 8;

/// What a rank leaves behind when a call cannot be finished.
struct Fault {
    FaultKind kind;
    i32 op, call, tile, rank, seen, wanted, field;
};

/// What a rank says about the call it enters.
struct Record {
    i32 fields[FIELDS];
    /// The leading dimension of C if peers may write it directly; else 0.
    i32 direct;
    /// Offset of C in the data segment, low and high half.
    i32 c_offset[2];
};
static_assert(sizeof(Record) == 44, "as iris_sync::Record");

/// Where the words of one op lie, in words: the same on every rank. As iris_sync::Channel.
struct Channel {
    u32 op, rank, size, tiles;
    u32 entries, signals, results, done, barriers, locks;
    u32 call, finished, sequence, flags, flag_count, reserved;

    /// The peer `step` (1 to size - 1) behind this rank: not all write to the same rank at once.
    IRIS_DEVICE u32 peer(u32 step) const {
        const u32 at = rank + step;
        return at < size ? at : at - size;
    }
};
static_assert(sizeof(Channel) == 64, "as iris_sync::Channel");

/// The words as one lane sees them: iris_sync::Memory, and the addresses of a channel's words.
struct Words {
    const HeapView& heap;
    const Channel& channel;

    template <Access A> IRIS_DEVICE i32 load(SymWord word) const {
        check<A, Scope::System>();
        return word.load<AccessRow<A>::order, static_cast<int>(A)>();
    }
    template <Access A> IRIS_DEVICE void store(SymWord word, i32 value) const {
        check<A, Scope::System>();
        word.store<AccessRow<A>::order, static_cast<int>(A)>(value);
    }
    template <Access A>
    IRIS_DEVICE i32 compare_exchange(SymWord word, i32 expected, i32 value) const {
        check<A, Scope::System>();
        return word.compare_exchange<AccessRow<A>::order, static_cast<int>(A)>(expected, value);
    }
    template <Access A> IRIS_DEVICE i32 dev_load(DevWord word) const {
        check<A, Scope::Device>();
        return word.load<AccessRow<A>::order, static_cast<int>(A)>();
    }
    template <Access A> IRIS_DEVICE void dev_store(DevWord word, i32 value) const {
        check<A, Scope::Device>();
        word.store<AccessRow<A>::order, static_cast<int>(A)>(value);
    }
    template <Access A> IRIS_DEVICE i32 dev_add(DevWord word, i32 value) const {
        check<A, Scope::Device>();
        return word.add<AccessRow<A>::order, static_cast<int>(A)>(value);
    }

    /// Whether a word that holds `seen` was set by `want` or later.
    template <Access A> IRIS_DEVICE bool reached(Call want, i32 seen) const {
        if (static_cast<int>(A) == IRIS_TEST_NO_WAIT) return true;
        return port::reached(static_cast<int>(A), want.number(), seen, want.reached_by(seen));
    }
    IRIS_DEVICE i32 host_abort() const { return port::host_abort(heap.control); }
    IRIS_DEVICE void record(const Fault& fault) const {
        const i32 words[8] = {static_cast<i32>(fault.kind), fault.op,     fault.call,
                              fault.tile,                   fault.rank,   fault.seen,
                              fault.wanted,                 fault.field};
        port::keep_fault(heap.control, words);
    }
    IRIS_DEVICE port::Deadline deadline() const {
        return port::Deadline(heap.entry_deadline_ns, heap.progress_deadline_ns);
    }

    // Where words lie: `at` is the rank in whose memory, as in iris_sync::Channel.
    IRIS_DEVICE SymWord entry(u32 at, u32 source, u32 parity) const {
        return heap.word(at, channel.entries + u64(source * 2 + parity) * LINE_WORDS);
    }
    IRIS_DEVICE SymWord signal(u32 at, u32 source, u32 tile) const {
        return heap.word(at, channel.signals + u64(source) * channel.tiles + tile);
    }
    IRIS_DEVICE SymWord result(u32 at, u32 owner, u32 tile) const {
        return heap.word(at, channel.results + u64(owner) * channel.tiles + tile);
    }
    IRIS_DEVICE SymWord done(u32 at, u32 reader) const {
        return heap.word(at, channel.done + u64(reader) * LINE_WORDS);
    }
    IRIS_DEVICE SymWord barrier(u32 at, u32 source, u32 phase) const {
        return heap.word(at, channel.barriers + u64(phase * channel.size + source) * LINE_WORDS);
    }
    IRIS_DEVICE SymWord lock(u32 owner, u32 tile) const {
        return heap.word(owner, u64(channel.locks) + tile);
    }
    IRIS_DEVICE SymWord abort(u32 at) const { return heap.word(at, ABORT_WORD); }
    IRIS_DEVICE DevWord flag(u32 unit) const { return heap.device_word(u64(channel.flags) + unit); }
    IRIS_DEVICE DevWord call_word() const { return heap.device_word(channel.call); }
    IRIS_DEVICE DevWord finished_word() const { return heap.device_word(channel.finished); }
    IRIS_DEVICE DevWord sequence_word() const { return heap.device_word(channel.sequence); }

  private:
    template <Access A, Scope S> IRIS_DEVICE static void check() {
        static_assert(AccessRow<A>::scope == S, "the table's scope of this access");
        if constexpr (IRIS_TEST_DELAY_NS > 0) {
            const u64 mixed = (port::now() + port::workgroup()) * 0x9e3779b97f4a7c15ull;
            port::sleep(static_cast<u32>(mixed >> 33) % (IRIS_TEST_DELAY_NS + 1));
        }
    }
};

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

/// Look until the value was set by the wanted call or a later one. One lane calls this.
///
/// False when the deadline passes (the fault is kept and all ranks are told) or when somebody gave
/// up. The deadline of progress runs only while all ranks are in the call: whoever waits for a rank
/// that itself waits for a late third one blames the third, and gives it the time of an entry.
template <Access A, class Look>
IRIS_DEVICE bool wait_for(const Words& m, const Awaited& awaited, Look look) {
    port::Deadline deadline = m.deadline();
    u32 spins = 0;
    bool late = false;
    for (;;) {
        const i32 seen = look();
        if (m.reached<A>(awaited.want, seen)) return true;
        if (port::Deadline::look_around(spins)) {
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

/// Entry records and credits: the slot rule.
namespace entry {

IRIS_DEVICE SymWord number(SymWord record) { return record.after(LINE_WORDS - 1); }

/// Wait until `peer` has entered the call before this one: its slots for this call are free.
IRIS_DEVICE bool wait_credit(const Words& m, Call call, u32 peer) {
    const Call want = call.previous();
    const SymWord record = m.entry(m.channel.rank, peer, want.parity());
    const Awaited awaited{call, want, peer, -1, Limit::Entry};
    return wait_for<Access::CreditLoad>(
        m, awaited, [&] { return m.load<Access::CreditLoad>(number(record)); });
}

/// The value of a field of this rank's record: op and sequence are the protocol's.
IRIS_DEVICE i32 own_field(const Words& m, const Record& record, i32 sequence, u32 field) {
    if (field == static_cast<u32>(Field::Op)) return static_cast<i32>(m.channel.op);
    if (field == static_cast<u32>(Field::Sequence)) return sequence;
    return record.fields[field];
}

/// Write this rank's record of `call` at `peer`, then publish its number. Needs the credit.
IRIS_DEVICE void publish(const Words& m, Call call, const Record& record, i32 sequence, u32 peer) {
    const SymWord place = m.entry(peer, m.channel.rank, call.parity());
    IRIS_UNROLL
    for (u32 i = 0; i < FIELDS; ++i) place.after(i).put(own_field(m, record, sequence, i));
    place.after(FIELDS).put(record.direct);
    place.after(FIELDS + 1).put(record.c_offset[0]);
    place.after(FIELDS + 2).put(record.c_offset[1]);
    m.store<Access::EntryStore>(number(place), call.number());
}

/// Wait until `peer` has entered this call and compare its record with our own.
IRIS_DEVICE bool wait_entry(const Words& m, Call call, const Record& record, i32 sequence,
                            u32 peer) {
    // Who does not wait has no record to compare: it would find another call's, and say so.
    if (static_cast<int>(Access::EntryLoad) == IRIS_TEST_NO_WAIT) return true;
    const SymWord place = m.entry(m.channel.rank, peer, call.parity());
    const Awaited awaited{call, call, peer, -1, Limit::Entry};
    if (!wait_for<Access::EntryLoad>(
            m, awaited, [&] { return m.load<Access::EntryLoad>(number(place)); })) {
        return false;
    }
    // All are under way before the first is looked at: memory is far away.
    i32 all[FIELDS];
    IRIS_UNROLL
    for (u32 i = 0; i < FIELDS; ++i) all[i] = place.after(i).get();
    IRIS_UNROLL
    for (u32 i = 0; i < FIELDS; ++i) {
        const i32 seen = all[i];
        const i32 wanted = own_field(m, record, sequence, i);
        if (seen != wanted) {
            give_up(m, Fault{FaultKind::Mismatch, static_cast<i32>(m.channel.op), call.number(), -1,
                             static_cast<i32>(peer), seen, wanted, static_cast<i32>(i)});
            return false;
        }
    }
    return true;
}

/// Whether results may be written straight into C, between this rank and `peer`. Both sides come to
/// the same answer. Only after wait_entry for that peer.
IRIS_DEVICE bool is_direct(const Words& m, Call call, const Record& record, u32 peer) {
    const SymWord place = m.entry(m.channel.rank, peer, call.parity());
    const i32 direct = place.after(FIELDS).get();
    const i32 low = place.after(FIELDS + 1).get(), high = place.after(FIELDS + 2).get();
    return record.direct != 0 && direct == record.direct && low == record.c_offset[0] &&
           high == record.c_offset[1];
}

} // namespace entry

/// The versioned lock and the spinlock.
namespace lock {

/// What a free spinlock holds; a taken one holds 1 + the rank that took it.
constexpr i32 FREE = 0;

/// Say that the data beside `word` is that of `version`.
IRIS_DEVICE void publish_version(const Words& m, SymWord word, Call version) {
    m.store<Access::VersionStore>(word, version.number());
}

/// Wait until `producer` has published `version` or a later one.
IRIS_DEVICE bool wait_version(const Words& m, SymWord word, Call version, u32 producer) {
    const Awaited awaited{version, version, producer, -1, Limit::Entry};
    return wait_for<Access::VersionLoad>(m, awaited,
                                         [&] { return m.load<Access::VersionLoad>(word); });
}

/// Take a spinlock. Whoever holds it needs nothing else to give it back, so no cycle can arise.
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

/// Give a spinlock back.
IRIS_DEVICE void give(const Words& m, SymWord word) { m.store<Access::LockGive>(word, FREE); }

} // namespace lock

/// Flags of the staged all-gather: a flag holds the call that filled its unit, and is never reset.
namespace tile_flags {

/// Say that `unit` is filled. One lane, after the barrier of the workgroup that filled it.
IRIS_DEVICE void raise(const Words& m, Call call, u32 unit) {
    m.dev_store<Access::FlagStore>(m.flag(unit), call.number());
}

/// Wait until `unit`, which comes from rank `source`, is filled. One lane.
IRIS_DEVICE bool wait(const Words& m, Call call, u32 unit, u32 source) {
    const Awaited awaited{call, call, source, static_cast<i32>(unit), Limit::Progress};
    return wait_for<Access::FlagLoad>(
        m, awaited, [&] { return m.dev_load<Access::FlagLoad>(m.flag(unit)); });
}

/// Refresh all flags. One lane of the last workgroup, in calls that restamp.
IRIS_DEVICE void stamp(const Words& m, Call call) {
    for (u32 unit = 0; unit < m.channel.flag_count; ++unit) {
        m.dev_store<Access::FlagStamp>(m.flag(unit), call.number());
    }
}

} // namespace tile_flags

/// A set of ranks, one bit each.
struct Members {
    u64 bits;
    IRIS_DEVICE static Members all(u32 size) {
        return Members{size >= 64 ? ~0ull : (1ull << size) - 1};
    }
    IRIS_DEVICE bool contains(u32 rank) const { return rank < 64 && (bits >> rank & 1) == 1; }
};

/// Arrive at a barrier and wait for the other members. All lanes of one workgroup, each with
/// its share of them; a barrier of the workgroup must follow.
IRIS_DEVICE bool arrive_and_wait(const Words& m, Call call, u32 phase, Members members,
                                 Limit limit) {
    const u32 me = m.channel.rank;
    // All lanes of a wave have stored before one of them waits: a member may be waiting for the store
    // of one lane before it stores what another lane waits for.
    port::divergent([&] {
        for (u32 step = 1 + port::lane(); step < m.channel.size; step += port::lanes()) {
            const u32 peer = m.channel.peer(step);
            if (!members.contains(peer)) continue;
            m.store<Access::BarrierStore>(m.barrier(peer, me, phase), call.number());
        }
        return true;
    });
    return port::divergent([&] {
        for (u32 step = 1 + port::lane(); step < m.channel.size; step += port::lanes()) {
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

/// Wait until `word` holds `value` by `compare(seen, value)`. All lanes of a user's kernel call it
/// together; false, on all lanes, when the deadline of progress passes or somebody gave up, with a
/// fault record whose op is -1 and whose awaited rank is `from`.
template <class Compare>
IRIS_DEVICE bool wait_until(const HeapView& heap, SymWord word, Compare compare, i32 value,
                            u32 from) {
    bool passed = true;
    if (port::lane() == 0) {
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

#include "iris/workgroup.h"

#endif
