//! Entry records and credits. Together they guarantee that a slot (memory of this rank that a peer
//! writes in a call) is overwritten only after its last reader has finished.
//!
//! Each rank writes, at every peer, a record of the call that it is in. There are two records, one
//! for each parity of the call number; the call number is stored last. The number also serves as
//! credit: permission for its reader to overwrite slots of the rank that wrote it. A rank that has
//! entered call `c` has ended call `c - 1`, so its slots of call `c - 1` are free to be overwritten
//! in call `c + 1`, which has the same parity. An entry record is a slot too and is written only
//! with credit, so no rank is ever more than one call ahead of another.

use crate::wait::{Awaited, give_up, wait_for};
use crate::{
    Aborted, Access, Call, Channel, Fault, FaultKind, Field, LINE_WORDS, Limit, Memory, SymWord,
};

/// Description of a call that a rank publishes to its peers when it enters the call: the first
/// words of an entry record. The call number is the record's last word.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct Record {
    /// Values that must be equal on all ranks, in the order of [`Field`]. The protocol fills in
    /// `Op` and `Sequence`.
    pub fields: [i32; 8],
    /// Leading dimension of the result C in elements if peers may write this rank's C directly. 0
    /// if peers must write results to this rank's inbox, from which the rank copies them to C.
    pub direct: i32,
    /// Offset of C from the start of the data segment in bytes, as low and high 32 bits.
    pub c_offset: [i32; 2],
}

const WORDS: usize = size_of::<Record>() / 4;

fn word(record: SymWord, index: usize) -> SymWord {
    SymWord { index: record.index + index as u32, ..record }
}

fn number(record: SymWord) -> SymWord {
    word(record, LINE_WORDS as usize - 1)
}

/// Load, without waiting, the credit of `peer`: the number of the last call of parity `parity` that
/// `peer` has entered.
pub fn look_at_credit<M: Memory + ?Sized>(m: &M, channel: &Channel, peer: u32, parity: u32) -> i32 {
    m.load(number(channel.entry(channel.rank, peer, parity)), Access::CreditLoad)
}

/// Wait until `peer` has entered the previous call. The peer then no longer reads the part of its
/// memory that this rank overwrites in this call.
pub fn wait_credit<M: Memory + ?Sized>(
    m: &M,
    channel: &Channel,
    call: Call,
    peer: u32,
) -> Result<(), Aborted> {
    let want = call.previous();
    let awaited = Awaited { call, want, rank: peer, tile: -1, limit: Limit::Entry };
    let look = || look_at_credit(m, channel, peer, want.parity());
    wait_for(m, channel, Access::CreditLoad, awaited, look).map(drop)
}

/// Store at `peer` the number of the call that this rank has entered. This is allowed only after
/// [`wait_credit`] for `peer`: the peer has then entered the previous call, and no longer reads the
/// number of two calls ago, which this store replaces.
pub fn announce<M: Memory + ?Sized>(m: &M, channel: &Channel, call: Call, peer: u32) {
    let place = channel.entry(peer, channel.rank, call.parity());
    m.store(number(place), call.number(), Access::EntryStore);
}

/// Write this rank's record of `call` at `peer`, then publish the call number (release store). This
/// is allowed only after [`wait_credit`] for `peer`: the peer has then entered the previous call,
/// and no longer reads the record of two calls ago, which this record replaces.
pub fn publish<M: Memory + ?Sized>(
    m: &M,
    channel: &Channel,
    call: Call,
    record: &Record,
    peer: u32,
) {
    let place = channel.entry(peer, channel.rank, call.parity());
    let words: [i32; WORDS] = bytemuck::cast(*record);
    for (index, value) in words.into_iter().enumerate() {
        m.put(word(place, index), value);
    }
    announce(m, channel, call, peer);
}

/// Wait until `peer` has entered this call, then compare the peer's entry record with `record`.
///
/// Fails with a fault that names the first differing field and both values.
pub fn wait_entry<M: Memory + ?Sized>(
    m: &M,
    channel: &Channel,
    call: Call,
    record: &Record,
    peer: u32,
) -> Result<(), Aborted> {
    let place = channel.entry(channel.rank, peer, call.parity());
    let awaited = Awaited { call, want: call, rank: peer, tile: -1, limit: Limit::Entry };
    let look = || m.load(number(place), Access::EntryLoad);
    wait_for(m, channel, Access::EntryLoad, awaited, look)?;
    // All fields are loaded before the first comparison, so that the loads overlap, because each
    // load has the latency of device memory.
    let all: [i32; Field::ALL.len()] = core::array::from_fn(|index| m.get(word(place, index)));
    for (index, field) in Field::ALL.into_iter().enumerate() {
        let (seen, wanted) = (all[index], record.fields[index]);
        if seen != wanted {
            return Err(mismatch(m, channel, call, peer, (field, seen, wanted)));
        }
    }
    Ok(())
}

/// Record a fault and give up, because a field of the entry record of `peer` differs from this
/// rank's record. The tuple is (field, the peer's value, this rank's value).
pub(crate) fn mismatch<M: Memory + ?Sized>(
    m: &M,
    channel: &Channel,
    call: Call,
    peer: u32,
    (field, seen, wanted): (Field, i32, i32),
) -> Aborted {
    let fault = Fault {
        kind: FaultKind::Mismatch,
        op: channel.op as i32,
        call: call.number(),
        tile: -1,
        rank: peer as i32,
        seen,
        wanted,
        field: field as i32,
    };
    give_up(m, channel, &fault);
    Aborted
}

/// Whether this rank and `peer` may write results directly into each other's C.
///
/// The result is true if both ranks allow direct writes and C has the same offset and leading
/// dimension on both. Both ranks get the same answer, because each compares the same two records.
/// Requires [`wait_entry`] for `peer` before.
pub fn is_direct<M: Memory + ?Sized>(
    m: &M,
    channel: &Channel,
    call: Call,
    record: &Record,
    peer: u32,
) -> bool {
    let place = channel.entry(channel.rank, peer, call.parity());
    let theirs: [i32; 3] = core::array::from_fn(|i| m.get(word(place, Field::ALL.len() + i)));
    record.direct != 0 && theirs == [record.direct, record.c_offset[0], record.c_offset[1]]
}
