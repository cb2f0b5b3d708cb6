//! What a mutant changes of a protocol.

use iris_sync::{Access, Order, Scope};

/// How a word is compared with the call that waits for it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Compare {
    /// By the sign of the wrapping difference: what the protocol does.
    Wrapping,
    /// By plain `<`.
    Less,
    /// By `==`.
    Equal,
    /// With the literal 1.
    One,
    /// Not at all: whatever is there is right.
    Any,
}

/// A change to the protocol on its way to the memory: what a mutant is made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// This access has another order than the table says.
    Order(Access, Order),
    /// This access has another scope than the table says.
    Scope(Access, Scope),
    /// Waits on this access compare otherwise.
    Compare(Access, Compare),
    /// Stores of this access store this value.
    Value(Access, i32),
    /// Stores of this access are left out; waits on it pass at once.
    Skip(Access),
    /// Waits of this rank on this access pass at once.
    SkipAt(Access, u32),
    /// The threads of a workgroup leave out one of their barriers.
    DropVote {
        /// The rank.
        rank: u32,
        /// The workgroup.
        group: u32,
        /// Which barrier, counted from 0 over all calls.
        position: u32,
    },
    /// All threads, in the device headers, leave out the barriers of this place.
    DropSite(Site),
    /// There is one entry record a source, instead of two by parity.
    OneRecord,
    /// Races on the fields of entry records are not looked for.
    UncheckedRecords,
    /// Entry records are not compared.
    BlindRecords,
    /// A word that carries its data is not accessed whole, but one half after the other.
    Torn,
    /// Words that carry their data have one slot, instead of two by parity.
    OnePairSlot,
    /// The refresh of words that carry their data does not leave out those in use.
    StampUsedPairs,
    /// Calls of this parity refresh no words that carry their data.
    SkipPairStamps(u32),
    /// The owner of a word refreshes it, instead of its writer.
    OwnerStamps,
    /// Words of this kind are not refreshed.
    SkipStamps(Kind),
}

/// The words of symmetric memory that are refreshed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// One a source and tile.
    Signal,
    /// One an owner and tile.
    Result,
    /// One a reader.
    Done,
    /// One a member and phase.
    Barrier,
}

/// Where the barriers of a workgroup stand in the device headers; as `iris::Site` in port.h.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Site {
    /// Before a signal: the stores of all threads come before it.
    Signal,
    /// Before a flag of the staging buffer, likewise.
    Flag,
    /// Before a lock is given back, likewise.
    LockGive,
    /// Before a thread arrives at a device barrier, likewise.
    Arrive,
    /// After a wait of one thread: what it acquired, all threads have.
    Waited,
    /// Before a workgroup counts itself out.
    Finish,
    /// In the body of an op.
    Body,
}

impl Site {
    /// All of them, in the order of port.h.
    pub const ALL: [Site; 7] = [
        Site::Signal,
        Site::Flag,
        Site::LockGive,
        Site::Arrive,
        Site::Waited,
        Site::Finish,
        Site::Body,
    ];
}

/// A set of changes; empty is the protocol as it stands.
#[derive(Clone, Default, Debug)]
pub struct Rules {
    /// The changes, all in force at once.
    pub changes: Vec<Change>,
}

impl From<Change> for Rules {
    fn from(change: Change) -> Self {
        Self { changes: vec![change] }
    }
}

impl<const N: usize> From<[Change; N]> for Rules {
    fn from(changes: [Change; N]) -> Self {
        Self { changes: changes.into() }
    }
}

impl Rules {
    pub(super) fn find<T>(&self, pick: impl Fn(&Change) -> Option<T>) -> Option<T> {
        self.changes.iter().find_map(pick)
    }

    pub(super) fn has(&self, change: Change) -> bool {
        self.changes.contains(&change)
    }

    pub(super) fn order(&self, access: Access) -> Order {
        self.find(|c| match c {
            Change::Order(a, order) if *a == access => Some(*order),
            _ => None,
        })
        .unwrap_or(access.order())
    }

    pub(super) fn scope(&self, access: Access) -> Scope {
        self.find(|c| match c {
            Change::Scope(a, scope) if *a == access => Some(*scope),
            _ => None,
        })
        .unwrap_or(access.scope())
    }
}
