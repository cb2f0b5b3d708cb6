use iris_sync::{Order, Scope, SymWord};

/// Identity of one thread: its rank, its workgroup, and its index in the workgroup.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ThreadId {
    /// Rank that the thread runs on.
    pub rank: u32,
    /// Index of the workgroup among those of its rank.
    pub group: u32,
    /// Index of the thread in its workgroup.
    pub thread: u32,
}

/// Location in the memory of the model.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Place {
    /// 32-bit word of symmetric memory that is accessed atomically.
    Sym {
        /// Rank whose memory holds the word.
        rank: u32,
        /// Index of the word in that rank's symmetric words.
        index: u32,
    },
    /// 64-bit word of the LL protocol, data and call number together; see `LlWord::to_bits`.
    Wide {
        /// Rank whose memory holds the word.
        rank: u32,
        /// Index of the word's first half, in 4-byte words.
        index: u32,
    },
    /// Word of device memory that only its own rank accesses.
    Dev {
        /// Rank whose device holds the word.
        rank: u32,
        /// Index of the word in that rank's device words.
        index: u32,
    },
    /// Field of an entry record: a word of symmetric memory that is read and written without
    /// atomics.
    Data {
        /// Rank whose memory holds the word.
        rank: u32,
        /// Index of the word in that rank's symmetric words.
        index: u32,
    },
    /// Element of a tile, shard or inbox: the data that a protocol protects.
    Cell {
        /// Rank whose memory holds the cell.
        rank: u32,
        /// Index of the cell in that rank's cells.
        index: u32,
    },
    /// Location whose accesses are not checked for races. Mutants use such locations if they must
    /// run on after their first race.
    Unchecked {
        /// Rank whose memory holds the word.
        rank: u32,
        /// Index of the word in that rank's memory.
        index: u32,
    },
}

impl From<SymWord> for Place {
    fn from(SymWord { rank, index }: SymWord) -> Self {
        Place::Sym { rank, index }
    }
}

/// Operation of a thread on the memory of the model. All values are `i32`, except for a
/// [`Place::Wide`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Operation {
    /// Atomic load; its result is the value that was read.
    Load {
        /// Location that is read.
        place: Place,
        /// Memory order of the load: relaxed or acquire.
        order: Order,
        /// Memory scope of the load: device or system.
        scope: Scope,
    },
    /// Atomic store of a value.
    Store {
        /// Location that is written.
        place: Place,
        /// Value to store.
        value: i64,
        /// Memory order of the store: relaxed or release.
        order: Order,
        /// Memory scope of the access: device or system.
        scope: Scope,
    },
    /// Atomic compare-and-exchange; the result is the previous value. If the exchange fails, the
    /// order is relaxed.
    CompareExchange {
        /// Location that is accessed.
        place: Place,
        /// Expected value: if the location holds another value, nothing is stored.
        expected: i32,
        /// Value to store.
        value: i32,
        /// Memory order on success.
        order: Order,
        /// Memory scope of the access: device or system.
        scope: Scope,
    },
    /// Atomic addition; the result is the previous value.
    Add {
        /// Location that is accessed.
        place: Place,
        /// Summand; the sum wraps.
        value: i32,
        /// Memory order of the addition.
        order: Order,
        /// Memory scope of the access: device or system.
        scope: Scope,
    },
    /// Non-atomic read; the result is the value. A concurrent write is a race.
    Read {
        /// Location that is read.
        place: Place,
    },
    /// Non-atomic write. A concurrent read or write is a race.
    Write {
        /// Location that is written.
        place: Place,
        /// Value to store.
        value: i32,
    },
    /// Barrier of the threads of a workgroup; the result is 1 if all threads passed `ok`, else 0.
    Vote {
        /// Whether this thread has succeeded so far.
        ok: bool,
    },
    /// Boundary between two launches on a rank's stream: a barrier of all threads of the rank.
    Boundary,
    /// Divergence: the thread leaves the other threads of its wave for one side of a branch. Only
    /// for waves in lockstep.
    Part,
    /// Reconvergence: the threads of a wave wait for each other. Only for waves in lockstep.
    Join,
    /// Pause after a failed poll of a word; the engine may run other threads now.
    Pause,
}

impl Operation {
    /// Location that is accessed; `None` for a barrier or a pause.
    pub fn place(&self) -> Option<Place> {
        match *self {
            Operation::Load { place, .. }
            | Operation::Store { place, .. }
            | Operation::CompareExchange { place, .. }
            | Operation::Add { place, .. }
            | Operation::Read { place }
            | Operation::Write { place, .. } => Some(place),
            Operation::Vote { .. }
            | Operation::Boundary
            | Operation::Part
            | Operation::Join
            | Operation::Pause => None,
        }
    }

    /// Memory order of an atomic operation; `None` for all others.
    pub fn order(&self) -> Option<Order> {
        match *self {
            Operation::Load { order, .. }
            | Operation::Store { order, .. }
            | Operation::CompareExchange { order, .. }
            | Operation::Add { order, .. } => Some(order),
            _ => None,
        }
    }

    /// Memory scope of an atomic operation; `None` for all others.
    pub fn scope(&self) -> Option<Scope> {
        match *self {
            Operation::Load { scope, .. }
            | Operation::Store { scope, .. }
            | Operation::CompareExchange { scope, .. }
            | Operation::Add { scope, .. } => Some(scope),
            _ => None,
        }
    }
}

/// Memory that the threads of a scenario share; each engine implements it.
pub trait Arena {
    /// Performs `op` for `thread` and returns its result; other threads may run before it returns.
    fn perform(&self, thread: ThreadId, op: &Operation) -> i64;
}
