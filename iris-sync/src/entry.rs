//! Entry records and credits: the slot rule.
//!
//! Each rank keeps, at every peer, a record of the call it is in, two by parity, the call number
//! last. The number is also the credit: a rank that has entered call c has ended call c - 1, so its
//! slots of call c - 2, which have the parity of c, are free. The record itself is such a slot, so
//! it is written only with that credit, and no rank is ever more than one call ahead of another.

use crate::wait::{Awaited, give_up, wait_for};
use crate::{
    Access, Call, Channel, Fault, FaultKind, Field, LINE_WORDS, Limit, Memory, Stop, SymWord,
};

/// What a rank says about the call it enters: words 0.. of an entry record, the number last.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct Record {
    /// Values that all ranks must have in common, in the order of [`Field`]. `Op` and `Sequence`
    /// are filled in by the protocol.
    pub fields: [i32; 8],
    /// The leading dimension of C in elements, if peers may write C of this rank directly; 0 if
    /// results go to the inbox.
    pub direct: i32,
    /// Offset of C in the data segment, low and high half.
    pub c_offset: [i32; 2],
}

const WORDS: usize = size_of::<Record>() / 4;

fn word(record: SymWord, index: usize) -> SymWord {
    SymWord { index: record.index + index as u32, ..record }
}

fn number(record: SymWord) -> SymWord {
    word(record, LINE_WORDS as usize - 1)
}

/// One look at what `peer` has entered of the calls of a parity.
pub fn look_at_credit<M: Memory + ?Sized>(m: &M, channel: &Channel, peer: u32, parity: u32) -> i32 {
    m.load(number(channel.entry(channel.rank, peer, parity)), Access::CreditLoad)
}

/// Wait until `peer` has entered the call before this one: its slots for this call are free.
pub fn wait_credit<M: Memory + ?Sized>(
    m: &M,
    channel: &Channel,
    call: Call,
    peer: u32,
) -> Result<(), Stop> {
    let want = call.previous();
    let awaited = Awaited { call, want, rank: peer, tile: -1, limit: Limit::Entry };
    let look = || look_at_credit(m, channel, peer, want.parity());
    wait_for(m, channel, Access::CreditLoad, awaited, look).map(drop)
}

/// Tell `peer` that this rank is in `call`. Needs the credit.
pub fn announce<M: Memory + ?Sized>(m: &M, channel: &Channel, call: Call, peer: u32) {
    let place = channel.entry(peer, channel.rank, call.parity());
    m.store(number(place), call.number(), Access::EntryStore);
}

/// Write this rank's record of `call` at `peer`, then publish its number. Needs the credit.
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

/// Wait until `peer` has entered this call and compare its record with our own.
///
/// A difference is a fault that names the field and both values.
pub fn wait_entry<M: Memory + ?Sized>(
    m: &M,
    channel: &Channel,
    call: Call,
    record: &Record,
    peer: u32,
) -> Result<(), Stop> {
    let place = channel.entry(channel.rank, peer, call.parity());
    let awaited = Awaited { call, want: call, rank: peer, tile: -1, limit: Limit::Entry };
    let look = || m.load(number(place), Access::EntryLoad);
    wait_for(m, channel, Access::EntryLoad, awaited, look)?;
    // All are under way before the first is looked at: memory of a device is far away.
    let all: [i32; Field::ALL.len()] = core::array::from_fn(|index| m.get(word(place, index)));
    for (index, field) in Field::ALL.into_iter().enumerate() {
        let (seen, wanted) = (all[index], record.fields[index]);
        if seen != wanted {
            return Err(mismatch(m, channel, call, peer, (field, seen, wanted)));
        }
    }
    Ok(())
}

/// Give up because `peer` entered with another value of a field: theirs, then our own.
pub(crate) fn mismatch<M: Memory + ?Sized>(
    m: &M,
    channel: &Channel,
    call: Call,
    peer: u32,
    (field, seen, wanted): (Field, i32, i32),
) -> Stop {
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
    Stop
}

/// Whether results may be written straight into C, between this rank and `peer`.
///
/// Both sides come to the same answer, since each compares the same two records: both allow it and
/// C has the same offset and leading dimension on both. Only after [`wait_entry`] for that peer.
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
