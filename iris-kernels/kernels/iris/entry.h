// Entry records and credits: iris_sync::entry.
#ifndef IRIS_ENTRY_H
#define IRIS_ENTRY_H

#include "iris/wait.h"

namespace iris {

/// What a rank says about the call it enters.
struct Record {
    i32 fields[FIELDS];
    /// The leading dimension of C if peers may write it directly; else 0.
    i32 direct;
    /// Offset of C in the data segment, low and high half.
    i32 c_offset[2];
};
static_assert(sizeof(Record) == 44, "as iris_sync::Record");

/// Entry records and credits: the slot rule.
namespace entry {

IRIS_DEVICE SymWord number(SymWord record) { return record.after(LINE_WORDS - 1); }

/// One look at what `peer` has entered of the calls of a parity.
IRIS_DEVICE i32 look_at_credit(const Words& m, u32 peer, u32 parity) {
    return m.load<Access::CreditLoad>(number(m.entry(m.channel.rank, peer, parity)));
}

/// Wait until `peer` has entered the call before this one: its slots for this call are free.
IRIS_DEVICE bool wait_credit(const Words& m, Call call, u32 peer) {
    const Call want = call.previous();
    const Awaited awaited{call, want, peer, -1, Limit::Entry};
    return wait_for<Access::CreditLoad>(
        m, awaited, [&] { return look_at_credit(m, peer, want.parity()); });
}

/// The value of a field of this rank's record: op and sequence are the protocol's.
IRIS_DEVICE i32 own_field(const Words& m, const Record& record, i32 sequence, u32 field) {
    if (field == static_cast<u32>(Field::Op)) return static_cast<i32>(m.channel.op);
    if (field == static_cast<u32>(Field::Sequence)) return sequence;
    return record.fields[field];
}

/// Tell `peer` that this rank is in `call`. Needs the credit.
IRIS_DEVICE void announce(const Words& m, Call call, u32 peer) {
    const SymWord place = m.entry(peer, m.channel.rank, call.parity());
    m.store<Access::EntryStore>(number(place), call.number());
}

/// Write this rank's record of `call` at `peer`, then publish its number. Needs the credit.
IRIS_DEVICE void publish(const Words& m, Call call, const Record& record, i32 sequence, u32 peer) {
    const SymWord place = m.entry(peer, m.channel.rank, call.parity());
    IRIS_UNROLL
    for (u32 i = 0; i < FIELDS; ++i) place.after(i).put(own_field(m, record, sequence, i));
    place.after(FIELDS).put(record.direct);
    place.after(FIELDS + 1).put(record.c_offset[0]);
    place.after(FIELDS + 2).put(record.c_offset[1]);
    announce(m, call, peer);
}

/// Give up because `peer` entered with another value of a field: theirs, then our own. False.
IRIS_DEVICE bool mismatch(const Words& m, Call call, u32 peer, u32 field, i32 seen, i32 wanted) {
    give_up(m, Fault{FaultKind::Mismatch, static_cast<i32>(m.channel.op), call.number(), -1,
                     static_cast<i32>(peer), seen, wanted, static_cast<i32>(field)});
    return false;
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
            return mismatch(m, call, peer, i, seen, wanted);
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

} // namespace iris

#endif
