//! Changes that turn a protocol into a mutant, applied to its accesses on the way to the memory.

use iris_sync::{Access, Order, Scope};

/// Comparison between a word and the number of the call that waits for the word; mutants replace
/// it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Compare {
    /// Sign of the wrapping difference: the correct protocol.
    Wrapping,
    /// Comparison by `<`, which fails when the counter wraps.
    Less,
    /// Comparison of two numbers by `==`.
    Equal,
    /// Comparison with the literal 1.
    One,
    /// No comparison of numbers: any value ends the wait.
    Any,
}

/// Change to the accesses of a protocol; mutants are made of such changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// Replaces the memory order of this access.
    Order(Access, Order),
    /// Replaces the memory scope of this access.
    Scope(Access, Scope),
    /// Replaces the comparison by which waits on this access decide that they are over.
    Compare(Access, Compare),
    /// Replaces the value of stores of this access.
    Value(Access, i32),
    /// Drops stores of this access, and lets waits on this access return at once.
    Skip(Access),
    /// Makes this rank's waits on this access return at once.
    SkipAt(Access, u32),
    /// Drops one barrier of a workgroup.
    DropVote {
        /// Rank to which the workgroup belongs.
        rank: u32,
        /// Index of the workgroup in its rank.
        group: u32,
        /// Index of the barrier, counted from 0 over all calls.
        position: u32,
    },
    /// Drops the workgroup barriers at this place in the device headers, for all threads.
    DropSite(Site),
    /// Uses one entry record per source instead of two by parity.
    OneRecord,
    /// Disables the race check on the fields of entry records.
    UncheckedRecords,
    /// Disables the comparison of entry records.
    BlindRecords,
    /// Splits the access to an LL word into two accesses of half a word.
    Torn,
    /// Uses one slot for LL words instead of two by parity.
    OnePairSlot,
    /// Lets the refresh of LL words overwrite words that are in use.
    StampUsedPairs,
    /// Drops the refresh of LL words in calls of this parity.
    SkipPairStamps(u32),
    /// Lets the rank in whose memory a word lies refresh the word, instead of the rank that writes
    /// it.
    OwnerStamps,
    /// Leaves out the refresh of words of this kind.
    SkipStamps(Kind),
    /// Makes a rank that has given up advance its call number by this number of calls more than
    /// one, as if it had counted that many calls. The protocol allows this.
    Ages(i32),
    /// Lets a rank leave a call without telling its peers, if its host or a peer told it to leave.
    LeaveUntold,
}

/// Kinds of symmetric words that calls refresh periodically, so that the call counter can wrap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Signal words: one for each source rank and tile.
    Signal,
    /// Result words: one for each owner rank and tile.
    Result,
    /// Done words: one per reader.
    Done,
    /// Barrier words: one per member and phase.
    Barrier,
}

/// Places of workgroup barriers in the device headers; same list as `iris::Site` in port.h.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Site {
    /// Barrier before a signal, which publishes the stores of all threads.
    Signal,
    /// Barrier before a flag of the staging buffer is raised, which publishes the stores of all
    /// threads.
    Flag,
    /// Barrier before a lock is released, which publishes the stores of all threads.
    LockGive,
    /// Barrier before a thread arrives at a device barrier, which publishes the stores of all
    /// threads.
    Arrive,
    /// Barrier after the wait of one thread, which passes on to all threads what that thread has
    /// acquired.
    Waited,
    /// Barrier before a workgroup counts itself as finished.
    Finish,
    /// Barrier after the count and before a refresh, which passes on to all threads of the last
    /// workgroup what its thread 0 has acquired.
    Refresh,
    /// Barrier inside the body of an op.
    Body,
}

impl Site {
    /// All places, in the order of port.h.
    pub const ALL: [Site; 8] = [
        Site::Signal,
        Site::Flag,
        Site::LockGive,
        Site::Arrive,
        Site::Waited,
        Site::Finish,
        Site::Refresh,
        Site::Body,
    ];
}

/// Set of changes to a protocol; the empty set is the correct protocol.
#[derive(Clone, Default, Debug)]
pub struct Rules {
    /// Changes, all in force at once.
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
