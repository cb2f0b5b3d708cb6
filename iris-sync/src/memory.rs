use crate::{Call, Fault};

/// A 32-bit word of symmetric memory: any rank may load it, one rank writes it.
///
/// Every operation on it has system scope; there is no conversion to or from [`DevWord`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SymWord {
    /// The rank in whose signal segment the word lies.
    pub rank: u32,
    /// Index of the word in that segment, in 4-byte words.
    pub index: u32,
}

/// Two neighbouring 64-bit words of symmetric memory that carry data: any rank may load them, one
/// rank writes them. Each word is loaded and stored whole; the two of them are not one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SymPair {
    /// The rank in whose signal segment the words lie.
    pub rank: u32,
    /// Index of the first in that segment, in 4-byte words: a multiple of 4.
    pub index: u32,
}

/// A 64-bit word that carries its data: four bytes, and the number of the call they belong to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct LlWord {
    /// The data.
    pub data: u32,
    /// The number of the call that pushed it.
    pub call: i32,
}

impl LlWord {
    /// As it lies in memory: the data in the low half.
    pub const fn to_bits(self) -> u64 {
        (self.call as u32 as u64) << 32 | self.data as u64
    }

    /// The word that lies in memory as these bits.
    pub const fn from_bits(bits: u64) -> Self {
        Self { data: bits as u32, call: (bits >> 32) as i32 }
    }
}

/// A 32-bit word that only this rank's workgroups touch; every operation has device scope.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct DevWord {
    /// Index of the word in the rank's device words, in 4-byte words.
    pub index: u32,
}

/// Memory order of an access, in the sense of C++11. There is no sequentially consistent access.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Order {
    /// Atomic, ordering nothing else.
    Relaxed,
    /// A load: what the writer did before its release is seen after it.
    Acquire,
    /// A store: what was done before it is seen by whoever acquires it.
    Release,
    /// A read-modify-write that is both.
    AcqRel,
}

/// Who can see an access.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Scope {
    /// The workgroups of one device.
    Device,
    /// Every device and the host.
    System,
}

macro_rules! accesses {
    ($($(#[$doc:meta])* $name:ident: $order:ident, $scope:ident;)*) => {
        /// Every access of the protocols by name, and the one table of their orders and scopes.
        ///
        /// `PROTOCOL.md` gives the reason for each row and the mutant that fails without it.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum Access { $($(#[$doc])* $name,)* }

        impl Access {
            /// All accesses, in the order of the table.
            pub const ALL: &'static [Access] = &[$(Access::$name,)*];

            /// The memory order of this access.
            pub const fn order(self) -> Order {
                match self { $(Access::$name => Order::$order,)* }
            }

            /// The scope of this access.
            pub const fn scope(self) -> Scope {
                match self { $(Access::$name => Scope::$scope,)* }
            }

            /// The name of this access, as the device headers spell it.
            pub const fn name(self) -> &'static str {
                match self { $(Access::$name => stringify!($name),)* }
            }
        }
    };
}

accesses! {
    /// The owner of a record publishes its call number, after the record's fields.
    EntryStore: Release, System;
    /// A writer looks whether a peer has entered the call before, so that its slot is free.
    CreditLoad: Acquire, System;
    /// A reader looks whether a peer has entered this call.
    EntryLoad: Acquire, System;
    /// A source says that its tile is in the peer's slot.
    SignalStore: Release, System;
    /// A receiver looks for that.
    SignalLoad: Acquire, System;
    /// A reader says that it has read everything it pulls from a peer.
    DoneStore: Release, System;
    /// The owner looks for that before it ends the call.
    DoneLoad: Acquire, System;
    /// A member stores the epoch into its word at another member.
    BarrierStore: Release, System;
    /// A member looks at its own words.
    BarrierLoad: Acquire, System;
    /// A producer publishes a version.
    VersionStore: Release, System;
    /// A consumer looks for a version.
    VersionLoad: Acquire, System;
    /// A spinlock is taken, by compare-and-exchange.
    LockTake: Acquire, System;
    /// A spinlock is given back.
    LockGive: Release, System;
    /// A writer refreshes its words after all of its workgroups are done.
    StampStore: Release, System;
    /// A rank that gives up tells its peers.
    AbortStore: Relaxed, System;
    /// A waiting rank looks whether someone gave up.
    AbortLoad: Relaxed, System;
    /// A workgroup looks at its start whether its rank has given up.
    AbortCheck: Relaxed, System;
    /// A workgroup reads the number of the call at its start.
    CallLoad: Relaxed, Device;
    /// The last workgroup advances it, when all have read it.
    CallStore: Relaxed, Device;
    /// A workgroup counts itself out; the last one goes on for all.
    FinishAdd: AcqRel, Device;
    /// The last workgroup resets that count for the next launch.
    FinishStore: Relaxed, Device;
    /// A fetching workgroup says that a part of the staging buffer is filled.
    FlagStore: Release, Device;
    /// A multiplying workgroup looks for that.
    FlagLoad: Acquire, Device;
    /// The last workgroup refreshes the flags, for launches that come after it.
    FlagStamp: Relaxed, Device;
    /// A source stores words that carry their data.
    LlStore: Relaxed, System;
    /// A receiver looks for them.
    LlLoad: Relaxed, System;
    /// The last workgroup refreshes those that its call did not use.
    LlStamp: Relaxed, System;
}

/// Which deadline a wait has.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Limit {
    /// Until a peer enters a call: it may be compiling or saving a file.
    Entry,
    /// Until a peer that has entered makes progress.
    Progress,
}

/// What a workgroup is doing, for traces.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Span {
    /// Copying remote data to a local buffer.
    Fetch,
    /// Producing a tile: the matrix product, or loading it.
    Gemm,
    /// Waiting for a peer or another workgroup.
    Wait,
    /// Writing a tile to a peer and raising its signal.
    Signal,
    /// Adding up partial tiles, or copying received ones out.
    Reduce,
}

/// The words as one thread of one workgroup of one rank sees them.
///
/// On the CPU a workgroup is one thread. On a device, and in the models of it,
/// every thread runs the same code, thread 0 does the word accesses, or each thread those of some peers,
/// and [`Memory::vote`] is the barrier of the workgroup.
///
/// An implementation takes order and scope of an access from [`Access::order`] and
/// [`Access::scope`]; the models' implementations take them from a table that a mutant has changed.
pub trait Memory {
    /// Index of this thread in its workgroup.
    fn thread(&self) -> u32 {
        0
    }

    /// Threads of the workgroup.
    fn threads(&self) -> u32 {
        1
    }

    /// Barrier of the workgroup; true if every thread said true. It orders plain accesses of its threads.
    fn vote(&self, ok: bool) -> bool {
        ok
    }

    /// From here to [`Memory::reconverge`] each thread goes its own way; see [`divergent`]. On the CPU a
    /// workgroup is one thread, which never parts from others.
    fn diverge(&self) {}

    /// The threads of a wave are together again. It orders nothing.
    fn reconverge(&self) {}

    /// Load a word of symmetric memory.
    fn load(&self, word: SymWord, access: Access) -> i32;

    /// Store a word of symmetric memory.
    fn store(&self, word: SymWord, value: i32, access: Access);

    /// If a word of symmetric memory holds `expected`, store `value`; returns what it held.
    fn compare_exchange(&self, word: SymWord, expected: i32, value: i32, access: Access) -> i32;

    /// Load two words of symmetric memory that carry data, each of them whole.
    fn load_pair(&self, pair: SymPair, access: Access) -> [LlWord; 2];

    /// Store two words of symmetric memory that carry data, each of them whole.
    fn store_pair(&self, pair: SymPair, words: [LlWord; 2], access: Access);

    /// Read a data word that a release and an acquire of some other word order.
    fn get(&self, word: SymWord) -> i32;

    /// Write a data word that a release and an acquire of some other word order.
    fn put(&self, word: SymWord, value: i32);

    /// Load a word of this device.
    fn dev_load(&self, word: DevWord, access: Access) -> i32;

    /// Store a word of this device.
    fn dev_store(&self, word: DevWord, value: i32, access: Access);

    /// Add to a word of this device, returning the old value.
    fn dev_add(&self, word: DevWord, value: i32, access: Access) -> i32;

    /// Between two looks at a word: `spins` counts the looks of this wait so far.
    fn pause(&self, spins: u32);

    /// Whether this wait, `spins` looks old, has passed its deadline.
    ///
    /// The implementation remembers when a wait began: `spins` is 0 at its first look.
    fn expired(&self, limit: Limit, spins: u32) -> bool;

    /// What the host of this rank tells its kernels: 0 to go on, [`PEER_LOST`](crate::PEER_LOST)
    /// plus a rank that is gone, anything else to leave for another reason.
    fn host_abort(&self) -> i32 {
        0
    }

    /// Keep this fault where the host sees it, unless one is kept already.
    fn record(&self, fault: &Fault);

    /// Whether a word that holds `seen` was set by `want` or later. Models override it with mutants.
    fn reached(&self, access: Access, want: Call, seen: i32) -> bool {
        let _ = access;
        want.reached_by(seen)
    }

    /// Whether a word that carries `seen` carries data of the call `want`. Models override it with
    /// mutants.
    fn is_of(&self, access: Access, want: Call, seen: i32) -> bool {
        let _ = access;
        seen == want.number()
    }

    /// A span of work begins; `what` is a tile, unit or rank.
    fn begin(&self, span: Span, what: u32) {
        let _ = (span, what);
    }

    /// The span begun last ends.
    fn end(&self, span: Span) {
        let _ = span;
    }
}

/// Run `steps`, in which each thread goes its own way, and bring the threads of a wave together again.
///
/// Where the threads of a wave run in lockstep, one arm of a branch is run to its end before another
/// begins, and nobody says which is first. So no thread may wait in here for what depends on a store that
/// another thread of its wave has still to make in here: what is stored in one piece is waited for in
/// the next.
pub fn divergent<M: Memory + ?Sized, R>(m: &M, steps: impl FnOnce() -> R) -> R {
    m.diverge();
    let result = steps();
    m.reconverge();
    result
}
