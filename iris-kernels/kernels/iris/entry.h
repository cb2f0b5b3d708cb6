// Entry of ranks into a call: records, which a rank publishes to its peers, and credits, by which it knows
// that a peer has entered the previous call; transcribes iris_sync::entry.
#ifndef IRIS_ENTRY_H
#define IRIS_ENTRY_H

#include "iris/wait.h"

namespace iris {

/// Description of a call that a rank publishes to its peers when it enters the call.
struct Record {
    i32 fields[FIELDS];
    /// Leading dimension of C in elements if peers may write C directly; else 0.
    i32 direct;
    /// Offset of C in the data segment, in bytes: low and high 32 bits.
    i32 c_offset[2];
};
static_assert(sizeof(Record) == 44, "the layout of iris_sync::Record has another size");

/// Functions with which a rank enters a call. A rank writes to a slot (receive buffer) of a peer only after
/// that peer has entered the previous call, which is the peer's credit: the peer then no longer reads the
/// slot's old contents.
namespace entry {

IRIS_DEVICE SymWord number(SymWord record) { return record.after(LINE_WORDS - 1); }

/// Credit words of a peer, one for each parity of call numbers.
class Credits {
  public:
    IRIS_DEVICE Credits(const Words& m, u32 peer) : even(number(m.entry(m.channel.rank, peer, 0))) {}

    /// Load, without waiting, the number of the last call with parity `parity` that the peer has entered.
    IRIS_DEVICE i32 look(const Words& m, u32 parity) const {
        return m.load<Access::CreditLoad>(even.after(u64(parity) * LINE_WORDS));
    }
    /// See port::compute_now().
    IRIS_DEVICE void compute_now() const { even.compute_now(); }

  private:
    SymWord even;
};

/// Load, without waiting, the credit of `peer`: the number of the last call with parity `parity`
/// that `peer` has entered.
IRIS_DEVICE i32 look_at_credit(const Words& m, u32 peer, u32 parity) { return Credits(m, peer).look(m, parity); }

/// Wait until `peer` has entered the previous call. The slots at `peer` that this call writes are
/// then free.
IRIS_DEVICE bool wait_credit(const Words& m, Call call, u32 peer) {
    const Call want = call.previous();
    const Awaited awaited{call, want, peer, -1, Limit::Entry};
    return wait_for<Access::CreditLoad>(
        m, awaited, [&] { return look_at_credit(m, peer, want.parity()); });
}

/// Value of field `field` in this rank's record. The protocol itself fills in the fields Op and
/// Sequence.
IRIS_DEVICE i32 own_field(const Words& m, const Record& record, i32 sequence, u32 field) {
    if (field == static_cast<u32>(Field::Op)) return static_cast<i32>(m.channel.op);
    if (field == static_cast<u32>(Field::Sequence)) return sequence;
    return record.fields[field];
}

/// Store at `peer` the number of the call that this rank has entered. Call it only after the credit
/// of `peer` has been seen. `peer` has then entered the previous call, and no longer reads the
/// number of two calls ago, which this store replaces.
IRIS_DEVICE void announce(const Words& m, Call call, u32 peer) {
    const SymWord place = m.entry(peer, m.channel.rank, call.parity());
    m.store<Access::EntryStore>(number(place), call.number());
}

/// Write this rank's record of `call` at `peer`, then publish the call number (release store). Call
/// it only after the credit of `peer` has been seen. `peer` has then entered the previous call, and
/// no longer reads the record of two calls ago, which this record replaces.
IRIS_DEVICE void publish(const Words& m, Call call, const Record& record, i32 sequence, u32 peer) {
    const SymWord place = m.entry(peer, m.channel.rank, call.parity());
    IRIS_UNROLL
    for (u32 i = 0; i < FIELDS; ++i) place.after(i).put(own_field(m, record, sequence, i));
    place.after(FIELDS).put(record.direct);
    place.after(FIELDS + 1).put(record.c_offset[0]);
    place.after(FIELDS + 2).put(record.c_offset[1]);
    announce(m, call, peer);
}

/// Record a fault and give up, because a field of the entry record of `peer` differs from this
/// rank's record. Returns false.
IRIS_DEVICE bool mismatch(const Words& m, Call call, u32 peer, u32 field, i32 seen, i32 wanted) {
    give_up(m, Fault{FaultKind::Mismatch, static_cast<i32>(m.channel.op), call.number(), -1,
                     static_cast<i32>(peer), seen, wanted, static_cast<i32>(field)});
    return false;
}

/// Wait until `peer` has entered this call, then compare the record of `peer` with this rank's
/// record. Returns false if the records differ or the call cannot be finished.
IRIS_DEVICE bool wait_entry(const Words& m, Call call, const Record& record, i32 sequence,
                            u32 peer) {
    // A stress test that leaves out this wait also skips the comparison. The record may belong to
    // another call, and a reported mismatch would hide the wrong results that the test looks for.
    if (static_cast<int>(Access::EntryLoad) == IRIS_TEST_NO_WAIT) return true;
    const SymWord place = m.entry(m.channel.rank, peer, call.parity());
    const Awaited awaited{call, call, peer, -1, Limit::Entry};
    if (!wait_for<Access::EntryLoad>(
            m, awaited, [&] { return m.load<Access::EntryLoad>(number(place)); })) {
        return false;
    }
    // All fields are loaded before the first comparison, so that the loads are in flight together:
    // each has the latency of device memory.
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

/// Whether this rank and `peer` may write results directly into each other's C; both ranks get the
/// same answer. Call it only after wait_entry() for `peer`.
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
