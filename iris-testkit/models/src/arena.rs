use iris_sync::{Order, Scope, SymWord};

/// One thread of one workgroup of one rank.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ThreadId {
    /// The rank.
    pub rank: u32,
    /// The workgroup in its rank.
    pub group: u32,
    /// The thread in its workgroup.
    pub thread: u32,
}

/// A place in the memory of the model.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Place {
    /// A word of symmetric memory.
    Sym {
        /// In whose memory.
        rank: u32,
        /// Index of the word.
        index: u32,
    },
    /// A 64-bit word of symmetric memory that carries its data: `LlWord::to_bits`.
    Wide {
        /// In whose memory.
        rank: u32,
        /// Index of its first half, in 4-byte words.
        index: u32,
    },
    /// A word of one device.
    Dev {
        /// Which device.
        rank: u32,
        /// Index of the word.
        index: u32,
    },
    /// A word of symmetric memory that is read and written plainly: a field of a record.
    Data {
        /// In whose memory.
        rank: u32,
        /// Index of the word.
        index: u32,
    },
    /// An element of a tile, a shard, an inbox: what the protocol is there to protect.
    Cell {
        /// In whose memory.
        rank: u32,
        /// Index of the cell.
        index: u32,
    },
    /// A place whose accesses are not checked, for mutants that look past the first race.
    Unchecked {
        /// In whose memory.
        rank: u32,
        /// Index of the word.
        index: u32,
    },
}

impl From<SymWord> for Place {
    fn from(SymWord { rank, index }: SymWord) -> Self {
        Place::Sym { rank, index }
    }
}

/// One operation of a thread on the memory of the model. All values are `i32`, but for those of a
/// [`Place::Wide`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Op {
    /// An atomic load; the result is the value.
    Load {
        /// From where.
        place: Place,
        /// Relaxed or acquire.
        order: Order,
        /// Who has to see it.
        scope: Scope,
    },
    /// An atomic store.
    Store {
        /// Where to.
        place: Place,
        /// What.
        value: i64,
        /// Relaxed or release.
        order: Order,
        /// Who has to see it.
        scope: Scope,
    },
    /// An atomic compare-and-exchange; the result is what the place held. Relaxed if it fails.
    CompareExchange {
        /// Where.
        place: Place,
        /// Stored only if the place holds this.
        expected: i32,
        /// What is stored.
        value: i32,
        /// Order of success.
        order: Order,
        /// Who has to see it.
        scope: Scope,
    },
    /// An atomic addition; the result is what the place held.
    Add {
        /// Where.
        place: Place,
        /// What is added, wrapping.
        value: i32,
        /// The order.
        order: Order,
        /// Who has to see it.
        scope: Scope,
    },
    /// A plain read; the result is the value. A concurrent write is a race.
    Read {
        /// From where.
        place: Place,
    },
    /// A plain write. A concurrent read or write is a race.
    Write {
        /// Where to.
        place: Place,
        /// What.
        value: i32,
    },
    /// The barrier of the threads of a workgroup; the result is 1 if all were `ok`, else 0.
    Vote {
        /// What this thread says.
        ok: bool,
    },
    /// The boundary between two launches on a rank's stream: a barrier of all its threads.
    Boundary,
    /// The thread goes its own way, apart from its wave: only where waves run in lockstep.
    Part,
    /// The threads of a wave come together again: only where waves run in lockstep.
    Join,
    /// A look at a word was in vain; others may run now.
    Pause,
}

impl Op {
    /// The place that is accessed, unless the operation is a barrier or a pause.
    pub fn place(&self) -> Option<Place> {
        match *self {
            Op::Load { place, .. }
            | Op::Store { place, .. }
            | Op::CompareExchange { place, .. }
            | Op::Add { place, .. }
            | Op::Read { place }
            | Op::Write { place, .. } => Some(place),
            Op::Vote { .. } | Op::Boundary | Op::Part | Op::Join | Op::Pause => None,
        }
    }

    /// The order of an atomic operation.
    pub fn order(&self) -> Option<Order> {
        match *self {
            Op::Load { order, .. }
            | Op::Store { order, .. }
            | Op::CompareExchange { order, .. }
            | Op::Add { order, .. } => Some(order),
            _ => None,
        }
    }

    /// The scope of an atomic operation.
    pub fn scope(&self) -> Option<Scope> {
        match *self {
            Op::Load { scope, .. }
            | Op::Store { scope, .. }
            | Op::CompareExchange { scope, .. }
            | Op::Add { scope, .. } => Some(scope),
            _ => None,
        }
    }
}

/// The memory that threads share, as an engine implements it.
pub trait Arena {
    /// Perform `op` for `thread`; other threads may run before it returns.
    fn perform(&self, thread: ThreadId, op: &Op) -> i64;
}
