use core::ops::Range;

use crate::{Call, Fault};

/// Word of 32 bits in symmetric memory: any rank may load it, and one rank writes it, except lock
/// words (compare-and-exchange) and abort words (set by any rank).
///
/// Every operation on such a word has system scope; there is no conversion to or from [`DevWord`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SymWord {
    /// Rank in whose signal segment the word lies.
    pub rank: u32,
    /// Index of the word in that rank's signal segment, in 4-byte words.
    pub index: u32,
}

/// Address of two adjacent 64-bit LL words of symmetric memory, each with data and flag. Any rank
/// may load them; one rank writes them. Each word is loaded and stored as a whole, but the pair is
/// not atomic.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SymPair {
    /// Rank in whose signal segment the two words lie.
    pub rank: u32,
    /// Index of the first word in that rank's signal segment, in 4-byte words; must be a multiple
    /// of 4.
    pub index: u32,
}

/// Word of 64 bits of the LL protocol: four bytes of data, and as flag the number of the call to
/// which the data belongs.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct LlWord {
    /// Data of the word: four bytes.
    pub data: u32,
    /// Number of the call to which the data belongs.
    pub call: i32,
}

impl LlWord {
    /// Encodes the word for memory: data in the low 32 bits, call number in the high 32 bits.
    pub const fn to_bits(self) -> u64 {
        (self.call as u32 as u64) << 32 | self.data as u64
    }

    /// Decodes a word from its bits in memory; the inverse of [`LlWord::to_bits`].
    pub const fn from_bits(bits: u64) -> Self {
        Self { data: bits as u32, call: (bits >> 32) as i32 }
    }
}

/// Word of 128 bits of the LL protocol: twelve bytes of data, and as flag the number of the call to
/// which the data belongs. In memory it occupies the place of one [`SymPair`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct LlQuad {
    /// Data of the word: twelve bytes.
    pub data: [u32; 3],
    /// Number of the call to which the data belongs.
    pub call: i32,
}

/// Word of 32 bits that only this rank's workgroups access; every operation on such a word has
/// device scope.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct DevWord {
    /// Index of the word in the rank's device words, in 4-byte words.
    pub index: u32,
}

/// Memory order of an access, in the sense of C++11. There is no sequentially consistent access.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Order {
    /// Atomic, without any ordering of other accesses.
    Relaxed,
    /// Load order: everything that the writer did before its release store is visible after this
    /// load.
    Acquire,
    /// Store order: everything done before this store is visible to a thread that acquires its
    /// value.
    Release,
    /// Read-modify-write order: acquire and release in one.
    AcqRel,
}

/// Set of threads for which an access is coherent.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Scope {
    /// All workgroups of one device.
    Device,
    /// All devices and the host.
    System,
}

macro_rules! accesses {
    ($($(#[$doc:meta])* $name:ident: $order:ident, $scope:ident;)*) => {
        /// Named accesses of the protocols; the only table of memory orders and scopes.
        ///
        /// `PROTOCOL.md` gives the reason for each row and names the mutant, a model with that row
        /// weakened, that must fail.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum Access { $($(#[$doc])* $name,)* }

        impl Access {
            /// All kinds of access, in the order of the table.
            pub const ALL: &'static [Access] = &[$(Access::$name,)*];

            /// Memory order that the protocol needs for this access.
            pub const fn order(self) -> Order {
                match self { $(Access::$name => Order::$order,)* }
            }

            /// Set of threads for which this access must be coherent.
            pub const fn scope(self) -> Scope {
                match self { $(Access::$name => Scope::$scope,)* }
            }

            /// Name of this access, spelled as in the device headers.
            pub const fn name(self) -> &'static str {
                match self { $(Access::$name => stringify!($name),)* }
            }
        }
    };
}

accesses! {
    /// A rank that enters a call stores the call number at a peer, after the other fields of its
    /// entry record.
    EntryStore: Release, System;
    /// A writer polls whether a peer has entered the previous call. After that, the peer no longer
    /// reads the memory that the writer overwrites in this call.
    CreditLoad: Acquire, System;
    /// A reader polls whether a peer has entered this call.
    EntryLoad: Acquire, System;
    /// A rank that has written a tile to a peer's memory signals this to the peer.
    SignalStore: Release, System;
    /// A receiver polls the signal of a tile.
    SignalLoad: Acquire, System;
    /// A reader signals that it has read everything it pulls from a peer.
    DoneStore: Release, System;
    /// The owner of data that peers pull polls the readers' done words before it ends the call.
    DoneLoad: Acquire, System;
    /// A member of a barrier stores the call number into its word at another member.
    BarrierStore: Release, System;
    /// A member polls the barrier words that other members store at its rank.
    BarrierLoad: Acquire, System;
    /// A producer stores the version number of data that it has completed, in a versioned lock
    /// ([`crate::epoch`]).
    VersionStore: Release, System;
    /// A consumer polls a versioned lock ([`crate::epoch`]) for the version number that it waits
    /// for.
    VersionLoad: Acquire, System;
    /// A spinlock is taken, by compare-and-exchange.
    LockTake: Acquire, System;
    /// A rank releases a spinlock that it holds.
    LockGive: Release, System;
    /// The last workgroup of a launch stores the call number into all words that its rank writes,
    /// so that no word becomes too old. All other workgroups have finished by then.
    StampStore: Release, System;
    /// A rank that gives up sets the abort word of each of its peers.
    AbortStore: Relaxed, System;
    /// A waiting rank polls whether a peer or its own host gave up.
    AbortLoad: Relaxed, System;
    /// A workgroup checks at its start whether its rank has given up.
    AbortCheck: Relaxed, System;
    /// A workgroup reads the number of the call at its start.
    CallLoad: Relaxed, Device;
    /// The last workgroup advances the call number, after all workgroups have read the old number.
    CallStore: Relaxed, Device;
    /// A workgroup adds itself to the count of finished workgroups. The last workgroup then ends
    /// the launch on behalf of all workgroups.
    FinishAdd: AcqRel, Device;
    /// The last workgroup resets the count of finished workgroups for the next launch.
    FinishStore: Relaxed, Device;
    /// A workgroup that fetches remote data signals that it has filled a unit of the staging
    /// buffer.
    FlagStore: Release, Device;
    /// A workgroup that multiplies polls whether another workgroup of this device has filled a unit
    /// of the staging buffer.
    FlagLoad: Acquire, Device;
    /// The last workgroup refreshes the staging flags, so that no flag becomes too old for later
    /// launches.
    FlagStamp: Relaxed, Device;
    /// A source stores LL words (data and flag in one word).
    LlStore: Relaxed, System;
    /// A receiver polls LL words (data and flag in one word).
    LlLoad: Relaxed, System;
    /// The last workgroup refreshes the LL words that its call did not use, so that no word becomes
    /// too old.
    LlStamp: Relaxed, System;
}

/// Choice of the deadline for a wait.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Limit {
    /// Deadline for a peer to enter a call. This deadline is long, because the peer's host may be
    /// compiling or writing a file.
    Entry,
    /// Deadline for progress of a peer that has entered the call.
    Progress,
}

/// Activity of a workgroup, recorded in traces.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Span {
    /// Copying remote data to a local buffer.
    Fetch,
    /// Producing a tile: computing its matrix product, or loading it.
    Gemm,
    /// Waiting for a signal of a peer or of another workgroup.
    Wait,
    /// Writing a tile to a peer and raising its signal.
    Signal,
    /// Adding up partial tiles, or copying received tiles to C.
    Reduce,
}

/// Memory operations of the protocols, performed by one thread of one workgroup of one rank.
///
/// On the CPU a workgroup is one thread. On a device, and in the models of a device, every thread
/// of a workgroup runs the same code. Either thread 0 accesses the words, or each thread accesses
/// the words of its share of the peers. [`Memory::vote`] is the workgroup's barrier.
///
/// An implementation takes the order and the scope of an access from [`Access::order`] and
/// [`Access::scope`]. The models take them from a table in which a mutant has weakened one row.
pub trait Memory {
    /// Index of this thread in its workgroup.
    fn thread(&self) -> u32 {
        0
    }

    /// Number of threads in the workgroup.
    fn threads(&self) -> u32 {
        1
    }

    /// Barrier of the workgroup with a vote: returns true if every thread passed true. It orders
    /// plain accesses of the workgroup's threads.
    fn vote(&self, ok: bool) -> bool {
        ok
    }

    /// Marks the start of divergent code, in which threads take branches independently until
    /// [`Memory::reconverge`]; see [`divergent`]. Does nothing on the CPU, where a workgroup is one
    /// thread.
    fn diverge(&self) {}

    /// Reconverges the threads of a wave after divergent code. It orders no memory access.
    fn reconverge(&self) {}

    /// Load a word of symmetric memory.
    fn load(&self, word: SymWord, access: Access) -> i32;

    /// Store a word of symmetric memory.
    fn store(&self, word: SymWord, value: i32, access: Access);

    /// Compare-and-exchange on a word of symmetric memory: stores `value` if the word holds
    /// `expected`; returns the old value.
    fn compare_exchange(&self, word: SymWord, expected: i32, value: i32, access: Access) -> i32;

    /// Load two adjacent LL words; each word is loaded as a whole.
    fn load_pair(&self, pair: SymPair, access: Access) -> [LlWord; 2];

    /// Store two adjacent LL words; each word is stored as a whole.
    fn store_pair(&self, pair: SymPair, words: [LlWord; 2], access: Access);

    /// Load an LL word of 128 bits, data and flag. The data comes from the same store as the loaded
    /// flag, unless a later store replaces the word before the load ends.
    fn load_quad(&self, place: SymPair, access: Access) -> LlQuad;

    /// Store an LL word of 128 bits, data and flag. [`Memory::load_quad`] says what a reader of the
    /// word may rely on.
    fn store_quad(&self, place: SymPair, word: LlQuad, access: Access);

    /// Plain load of a data word. A release and an acquire of another word must order this load
    /// after the store of the data.
    fn get(&self, word: SymWord) -> i32;

    /// Plain store of a data word. A release and an acquire of another word must order this store
    /// before the load of the data.
    fn put(&self, word: SymWord, value: i32);

    /// Load a word of device memory that only this rank uses.
    fn dev_load(&self, word: DevWord, access: Access) -> i32;

    /// Store a word of device memory that only this rank uses.
    fn dev_store(&self, word: DevWord, value: i32, access: Access);

    /// Add to a word of device memory that only this rank uses; returns the old value.
    fn dev_add(&self, word: DevWord, value: i32, access: Access) -> i32;

    /// Back off between two polls of a word; `spins` is the number of polls in this wait so far.
    fn pause(&self, spins: u32);

    /// Whether the current wait has passed its deadline after `spins` polls.
    ///
    /// The implementation records the start time of a wait when `spins` is 0, at the first poll.
    fn expired(&self, limit: Limit, spins: u32) -> bool;

    /// Abort code that this rank's host has set for its kernels: 0 to continue,
    /// [`PEER_LOST`](crate::PEER_LOST) plus the number of a lost rank, or another value to leave
    /// the call for another reason.
    fn host_abort(&self) -> i32 {
        0
    }

    /// Store `fault` where the host reads it. If a fault is already stored, `fault` is dropped.
    fn record(&self, fault: &Fault);

    /// Whether a word that holds `seen` was set by call `want` or a later one. The models override
    /// this method to inject a faulty comparison.
    fn reached(&self, access: Access, want: Call, seen: i32) -> bool {
        let _ = access;
        want.reached_by(seen)
    }

    /// Whether an LL word with flag `seen` carries data of call `want`. The models override this
    /// method to inject a faulty comparison.
    fn is_of(&self, access: Access, want: Call, seen: i32) -> bool {
        let _ = access;
        seen == want.number()
    }

    /// Begin a span of the trace; `what` is the number of the tile, unit or rank that the span
    /// concerns.
    fn begin(&self, span: Span, what: u32) {
        let _ = (span, what);
    }

    /// End the span that was begun last.
    fn end(&self, span: Span) {
        let _ = span;
    }
}

/// Items of `all` that this thread takes: the item at the thread's index, then every n-th item,
/// where n is the number of threads of the workgroup.
pub(crate) fn share<M: Memory + ?Sized>(m: &M, all: Range<u32>) -> impl Iterator<Item = u32> {
    all.skip(m.thread() as usize).step_by(m.threads() as usize)
}

/// Run `steps`, in which threads take branches independently, and then reconverge the threads of
/// the wave.
///
/// In a wave that runs in lockstep, one side of a branch runs to its end before the other side
/// begins, in unspecified order. So inside `steps` no thread may wait for the effect of a store
/// that another thread of its wave makes later inside the same `steps`. Store in one `divergent`
/// block and wait in the next.
pub fn divergent<M: Memory + ?Sized, R>(m: &M, steps: impl FnOnce() -> R) -> R {
    m.diverge();
    let result = steps();
    m.reconverge();
    result
}

/// Memory of one rank, for the tests of this crate.
#[cfg(test)]
pub(crate) mod tests {
    extern crate std;

    use core::cell::{Cell, RefCell};
    use std::collections::HashMap;
    use std::vec::Vec;

    use crate::{
        ABORT_WORD, Access, DevWord, Fault, Limit, LlQuad, LlWord, Memory, SymPair, SymWord,
    };

    /// Test memory: symmetric words of all ranks, as one rank accesses them, with a log of the
    /// stores.
    #[derive(Default)]
    pub(crate) struct Words {
        pub(crate) host: i32,
        /// Index of the thread that accesses the words; the next field is the number of other
        /// threads.
        pub(crate) thread: u32,
        pub(crate) others: u32,
        pub(crate) words: RefCell<HashMap<SymWord, i32>>,
        pub(crate) device: RefCell<HashMap<u32, i32>>,
        pub(crate) stores: RefCell<Vec<Access>>,
        pub(crate) fault: Cell<Option<Fault>>,
    }

    impl Words {
        pub(crate) fn abort(&self, rank: u32) -> i32 {
            self.get(SymWord { rank, index: ABORT_WORD })
        }
    }

    impl Memory for Words {
        fn thread(&self) -> u32 {
            self.thread
        }
        fn threads(&self) -> u32 {
            1 + self.others
        }
        fn load(&self, word: SymWord, _: Access) -> i32 {
            self.get(word)
        }
        fn store(&self, word: SymWord, value: i32, access: Access) {
            self.put(word, value);
            self.stores.borrow_mut().push(access);
        }
        fn compare_exchange(&self, word: SymWord, _: i32, _: i32, _: Access) -> i32 {
            self.get(word)
        }
        fn get(&self, word: SymWord) -> i32 {
            self.words.borrow().get(&word).copied().unwrap_or(0)
        }
        fn put(&self, word: SymWord, value: i32) {
            self.words.borrow_mut().insert(word, value);
        }
        fn load_pair(&self, _: SymPair, _: Access) -> [LlWord; 2] {
            [LlWord { data: 0, call: 0 }; 2]
        }
        fn store_pair(&self, pair: SymPair, words: [LlWord; 2], access: Access) {
            self.store(SymWord { rank: pair.rank, index: pair.index }, words[0].call, access);
        }
        fn load_quad(&self, _: SymPair, _: Access) -> LlQuad {
            LlQuad { data: [0; 3], call: 0 }
        }
        fn store_quad(&self, place: SymPair, word: LlQuad, access: Access) {
            self.store(SymWord { rank: place.rank, index: place.index }, word.call, access);
        }
        fn dev_load(&self, word: DevWord, _: Access) -> i32 {
            self.device.borrow().get(&word.index).copied().unwrap_or(1)
        }
        fn dev_store(&self, word: DevWord, value: i32, access: Access) {
            self.device.borrow_mut().insert(word.index, value);
            self.stores.borrow_mut().push(access);
        }
        fn dev_add(&self, _: DevWord, _: i32, _: Access) -> i32 {
            0
        }
        fn pause(&self, _: u32) {}
        fn expired(&self, _: Limit, _: u32) -> bool {
            false
        }
        fn host_abort(&self) -> i32 {
            self.host
        }
        fn record(&self, fault: &Fault) {
            self.fault.set(self.fault.get().or(Some(*fault)));
        }
    }
}
