//! Memory that records every request and answers from a script, to compare two implementations
//! operation by operation.

#![allow(unsafe_code, reason = "the hooks that let a model run the device headers")]

use std::cell::{Cell, RefCell};
use std::ptr;

use iris_sync::{
    Access, Call, DevWord, Fault, LINE_WORDS, Limit, LlQuad, LlWord, Memory, Order, Scope, SymPair,
    SymWord,
};

use super::{Operation, Place, ThreadId};
use crate::quads;

/// Request that a program made of its memory, as recorded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the arguments of Memory's functions")]
pub enum Event {
    /// Access to a word, with its name, order, scope and value.
    Atomic(Access, Operation),
    /// Load of one field of an entry record.
    Get(SymWord),
    /// Store to one field of an entry record.
    Put(SymWord, i32),
    Vote(bool),
    Diverge,
    Reconverge,
    Pause(u32),
    Expired(Limit, u32),
    Reached(Access, Call, i32),
    IsOf(Access, Call, i32),
    HostAbort,
    Record(Fault),
}

/// Scripted answers. Each list is consumed in order; the comment of each field says which answer
/// follows after the end of its list.
#[derive(Clone, Debug, Default)]
pub struct Script {
    /// Number of the call, and of the op in its heap.
    pub number: i32,
    /// Values that loads of words return; after the end, the last value stored to the word, or the
    /// call number.
    pub words: Vec<i32>,
    /// Contents of every entry record.
    pub fields: Vec<i32>,
    /// Scripted answers to the question whether the deadline has passed; true after the end of the
    /// list.
    pub expired: Vec<bool>,
    /// Scripted votes of the other threads at barriers; true after the end of the list.
    pub votes: Vec<bool>,
    /// Scripted values that the host has stored; 0 after the end of the list.
    pub host: Vec<i32>,
    /// Scripted value of the abort word.
    pub abort: i32,
    /// Scripted values of locks; 0 after the end of the list.
    pub locks: Vec<i32>,
    /// Number of workgroups that have finished.
    pub finished: i32,
}

/// Memory of a single thread that answers by a script and records the requests.
pub struct Recorder {
    id: ThreadId,
    extent: (u32, u32),
    script: Script,
    asked: [Cell<usize>; 5],
    events: RefCell<Vec<Event>>,
}

thread_local! {
    static CURRENT: Cell<*const Recorder> = const { Cell::new(ptr::null()) };
}

impl Recorder {
    /// Recorder that answers by `script`, as thread `id`; `extent` is the number of threads and
    /// workgroups.
    pub fn new(id: ThreadId, extent: (u32, u32), script: Script) -> Self {
        let asked = [const { Cell::new(0) }; 5];
        Self { id, extent, script, asked, events: RefCell::default() }
    }

    /// Runs `f`, a C++ program, with this recorder as the target of the hooks on this OS thread.
    pub fn listen<R>(&self, f: impl FnOnce() -> R) -> R {
        /// Restores the previous target even if `f` unwinds.
        struct Leave;
        impl Drop for Leave {
            fn drop(&mut self) {
                CURRENT.set(ptr::null());
            }
        }
        CURRENT.set(self);
        let _leave = Leave;
        f()
    }

    /// Recorded requests, in order.
    pub fn into_events(self) -> Vec<Event> {
        self.events.into_inner()
    }

    #[cfg(iris_cxx)]
    pub(super) fn is_current() -> bool {
        !CURRENT.get().is_null()
    }

    #[cfg(iris_cxx)]
    pub(super) fn with_current<R>(f: impl FnOnce(&Recorder) -> R) -> R {
        // SAFETY: `CURRENT` is not null, because `is_current` was true. `listen` has set `CURRENT`,
        // and keeps the recorder borrowed until it resets `CURRENT`.
        f(unsafe { &*CURRENT.get() })
    }

    fn note(&self, event: Event) {
        self.events.borrow_mut().push(event);
    }

    fn answer<T: Copy>(&self, which: usize, script: &[T], otherwise: T) -> T {
        let position = self.asked[which].replace(self.asked[which].get() + 1);
        script.get(position).copied().unwrap_or(otherwise)
    }

    /// Records an atomic operation and returns the value that the script gives for the accessed
    /// word.
    fn found(&self, access: Access, op: Operation) -> i32 {
        self.note(Event::Atomic(access, op));
        match access {
            Access::AbortLoad | Access::AbortCheck => self.script.abort,
            Access::CallLoad => self.script.number,
            Access::FinishAdd => self.script.finished,
            Access::LockTake => self.answer(1, &self.script.locks, 0),
            _ => {
                let last = self.script.words.last().copied().unwrap_or(self.script.number);
                self.answer(0, &self.script.words, last)
            }
        }
    }

    /// Load of an LL word. The call number comes from the script's words; the data is a field of an
    /// entry record if the word belongs to the head of a message, otherwise 0.
    fn found_wide(&self, access: Access, op: Operation) -> LlWord {
        let call = self.found(access, op);
        let data = match op.place() {
            Some(Place::Wide { index, .. }) => self
                .script
                .fields
                .get((index % LINE_WORDS / 2) as usize)
                .filter(|_| index % LINE_WORDS / 2 < 2 * iris_sync::ll::HEAD),
            _ => None,
        };
        LlWord { data: data.copied().unwrap_or(0) as u32, call }
    }

    fn order(access: Access) -> (Order, Scope) {
        (access.order(), access.scope())
    }
}

fn sym(word: SymWord) -> Place {
    Place::Sym { rank: word.rank, index: word.index }
}

/// Locations of the two words of a pair.
fn wide(pair: SymPair) -> [Place; 2] {
    [0, 2].map(|half| Place::Wide { rank: pair.rank, index: pair.index + half })
}

impl Memory for Recorder {
    fn thread(&self) -> u32 {
        self.id.thread
    }

    fn threads(&self) -> u32 {
        self.extent.0
    }

    fn vote(&self, ok: bool) -> bool {
        self.note(Event::Vote(ok));
        ok & self.answer(3, &self.script.votes, true)
    }

    fn diverge(&self) {
        self.note(Event::Diverge);
    }

    fn reconverge(&self) {
        self.note(Event::Reconverge);
    }

    fn load(&self, word: SymWord, access: Access) -> i32 {
        let (order, scope) = Self::order(access);
        self.found(access, Operation::Load { place: sym(word), order, scope })
    }

    fn store(&self, word: SymWord, value: i32, access: Access) {
        let (order, scope) = Self::order(access);
        let value = value.into();
        self.note(Event::Atomic(
            access,
            Operation::Store { place: sym(word), value, order, scope },
        ));
    }

    fn load_pair(&self, pair: SymPair, access: Access) -> [LlWord; 2] {
        let (order, scope) = Self::order(access);
        wide(pair).map(|place| self.found_wide(access, Operation::Load { place, order, scope }))
    }

    fn store_pair(&self, pair: SymPair, words: [LlWord; 2], access: Access) {
        let (order, scope) = Self::order(access);
        for (place, word) in wide(pair).into_iter().zip(words) {
            let value = word.to_bits() as i64;
            self.note(Event::Atomic(access, Operation::Store { place, value, order, scope }));
        }
    }

    fn load_quad(&self, place: SymPair, access: Access) -> LlQuad {
        let (order, scope) = Self::order(access);
        let SymWord { rank, index } = quads::word(place);
        let place = Place::Wide { rank, index };
        quads::decode(self.found_wide(access, Operation::Load { place, order, scope }))
    }

    fn store_quad(&self, place: SymPair, word: LlQuad, access: Access) {
        let (order, scope) = Self::order(access);
        let SymWord { rank, index } = quads::word(place);
        let (place, value) = (Place::Wide { rank, index }, quads::encode(word).to_bits() as i64);
        self.note(Event::Atomic(access, Operation::Store { place, value, order, scope }));
    }

    fn compare_exchange(&self, word: SymWord, expected: i32, value: i32, access: Access) -> i32 {
        let (order, scope) = Self::order(access);
        let place = sym(word);
        self.found(access, Operation::CompareExchange { place, expected, value, order, scope })
    }

    fn get(&self, word: SymWord) -> i32 {
        self.note(Event::Get(word));
        let field = (word.index % LINE_WORDS) as usize;
        self.script.fields.get(field).copied().unwrap_or(0)
    }

    fn put(&self, word: SymWord, value: i32) {
        self.note(Event::Put(word, value));
    }

    fn dev_load(&self, word: DevWord, access: Access) -> i32 {
        let (order, scope) = Self::order(access);
        let place = Place::Dev { rank: self.id.rank, index: word.index };
        self.found(access, Operation::Load { place, order, scope })
    }

    fn dev_store(&self, word: DevWord, value: i32, access: Access) {
        let (order, scope) = Self::order(access);
        let place = Place::Dev { rank: self.id.rank, index: word.index };
        let value = value.into();
        self.note(Event::Atomic(access, Operation::Store { place, value, order, scope }));
    }

    fn dev_add(&self, word: DevWord, value: i32, access: Access) -> i32 {
        let (order, scope) = Self::order(access);
        let place = Place::Dev { rank: self.id.rank, index: word.index };
        self.found(access, Operation::Add { place, value, order, scope })
    }

    fn pause(&self, spins: u32) {
        self.note(Event::Pause(spins));
    }

    fn expired(&self, limit: Limit, spins: u32) -> bool {
        self.note(Event::Expired(limit, spins));
        self.answer(2, &self.script.expired, true)
    }

    fn host_abort(&self) -> i32 {
        self.note(Event::HostAbort);
        self.answer(4, &self.script.host, 0)
    }

    fn record(&self, fault: &Fault) {
        self.note(Event::Record(*fault));
    }

    fn reached(&self, access: Access, want: Call, seen: i32) -> bool {
        self.note(Event::Reached(access, want, seen));
        want.reached_by(seen)
    }

    fn is_of(&self, access: Access, want: Call, seen: i32) -> bool {
        self.note(Event::IsOf(access, want, seen));
        seen == want.number()
    }
}

#[cfg(iris_cxx)]
impl super::target::HookMemory for Recorder {
    fn id(&self) -> ThreadId {
        self.id
    }

    fn extent(&self) -> (u32, u32) {
        self.extent
    }

    fn vote_at(&self, ok: bool, _site: super::Site) -> bool {
        self.vote(ok)
    }

    /// Records an operation with the order and scope that the headers pass, which may differ from
    /// the table of accesses.
    fn atomic(&self, access: Option<Access>, op: Operation) -> i32 {
        match (access, op) {
            (None, _) => super::Failure::Other(format!("{op:?} is not the protocol's")).raise(),
            (Some(access), Operation::Store { .. }) => {
                self.note(Event::Atomic(access, op));
                0
            }
            (Some(access), _) => self.found(access, op),
        }
    }

    fn load_wide(&self, op: Operation, access: Access) -> LlWord {
        self.found_wide(access, op)
    }

    fn store_wide(&self, op: Operation, access: Access) {
        self.note(Event::Atomic(access, op));
    }

    fn read(&self, place: Place) -> i32 {
        match place {
            Place::Data { rank, index } => self.get(SymWord { rank, index }),
            _ => super::Failure::Other(format!("{place:?} is no record")).raise(),
        }
    }

    fn write(&self, place: Place, value: i32) {
        match place {
            Place::Data { rank, index } => self.put(SymWord { rank, index }, value),
            _ => super::Failure::Other(format!("{place:?} is no record")).raise(),
        }
    }
}
