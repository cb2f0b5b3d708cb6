//! Hooks that the host form of `kernels/iris/port.h` calls for every access, barrier and wait.
//!
//! A hook has no context argument. It acts for the thread whose program runs on this OS thread or,
//! if operations are compared, for the recorder of this OS thread. A hook fails by unwinding
//! through C++.

#![allow(unsafe_code, reason = "the hooks that let a model run the device headers")]

use std::ffi::c_void;

use iris_sync::{
    Access, Call, DevWord, Fault, Limit, LlQuad, LlWord, Memory, Order, Scope, SymWord,
};

use crate::headers::{Segment, count, decode};
use crate::quads;
use crate::recorder::Recorder;
use crate::target::HookMemory;
use crate::{Failure, Operation, Place, Site, Thread, ThreadId};

impl HookMemory for Thread<'_> {
    fn id(&self) -> ThreadId {
        self.id()
    }

    fn extent(&self) -> (u32, u32) {
        (self.threads(), self.groups())
    }

    fn vote_at(&self, ok: bool, site: Site) -> bool {
        Thread::vote_at(self, ok, Some(site))
    }

    fn atomic(&self, access: Option<Access>, op: Operation) -> i32 {
        let (Some(place), Some(order), Some(scope)) = (op.place(), op.order(), op.scope()) else {
            other(format!("{op:?} is not atomic"));
        };
        count(access, scope);
        let device = matches!(place, Place::Dev { .. });
        if !device && scope != Scope::System {
            Failure::Scope(self.id(), place).raise();
        }
        let Some(access) = access else { return self.perform(op) };
        if order != access.order() || scope != access.scope() {
            other(format!("the headers have {order:?}, {scope:?} for {access:?}"));
        }
        // Performs the access through `Memory`, which applies the changes of a mutant: it may
        // replace order and scope.
        match (op, place) {
            (Operation::Load { .. }, Place::Sym { rank, index }) => {
                Memory::load(self, SymWord { rank, index }, access)
            }
            (Operation::Store { value, .. }, Place::Sym { rank, index }) => {
                Memory::store(self, SymWord { rank, index }, value as i32, access);
                0
            }
            (Operation::CompareExchange { expected, value, .. }, Place::Sym { rank, index }) => {
                self.compare_exchange(SymWord { rank, index }, expected, value, access)
            }
            (Operation::Load { .. }, Place::Dev { index, .. }) => {
                self.dev_load(DevWord { index }, access)
            }
            (Operation::Store { value, .. }, Place::Dev { index, .. }) => {
                self.dev_store(DevWord { index }, value as i32, access);
                0
            }
            (Operation::Add { value, .. }, Place::Dev { index, .. }) => {
                self.dev_add(DevWord { index }, value, access)
            }
            _ => other(format!("{access:?} is no such operation: {op:?}")),
        }
    }

    fn load_wide(&self, op: Operation, access: Access) -> LlWord {
        Thread::load_wide(self, wide_word(self.id(), &op, access), access)
    }

    fn store_wide(&self, op: Operation, access: Access) {
        let word = wide_word(self.id(), &op, access);
        if let Operation::Store { value, .. } = op {
            Thread::store_wide(self, word, LlWord::from_bits(value as u64), access);
        }
    }

    fn read(&self, place: Place) -> i32 {
        match place {
            Place::Data { rank, index } => self.get(SymWord { rank, index }),
            place => self.perform(Operation::Read { place }),
        }
    }

    fn write(&self, place: Place, value: i32) {
        match place {
            Place::Data { rank, index } => self.put(SymWord { rank, index }, value),
            place => {
                self.perform(Operation::Write { place, value });
            }
        }
    }
}

/// Returns the word that a 64-bit access addresses; fails unless order and scope are those of the
/// table of accesses.
fn wide_word(thread: ThreadId, op: &Operation, access: Access) -> SymWord {
    let (Some(place @ Place::Wide { rank, index }), Some(order), Some(scope)) =
        (op.place(), op.order(), op.scope())
    else {
        other(format!("{op:?} is no access to an LL word"));
    };
    count(Some(access), scope);
    if scope != Scope::System {
        Failure::Scope(thread, place).raise();
    }
    if order != access.order() {
        other(format!("the headers have {order:?}, {scope:?} for {access:?}"));
    }
    SymWord { rank, index }
}

fn other(message: String) -> ! {
    Failure::Other(message).raise()
}

/// Evaluates `$call` with the target of this OS thread: its active recorder, else the thread whose
/// program runs.
macro_rules! target {
    (|$target:ident| $call:expr) => {
        if Recorder::is_current() {
            Recorder::with_current(|$target| $call)
        } else {
            Thread::with_current(|$target| $call)
        }
    };
}

/// Location of the atomically accessed 32-bit word at `address`.
fn word(address: u64) -> Place {
    match decode(address) {
        Some((Segment::Signal, rank, index)) => Place::Sym { rank, index },
        Some((Segment::Device, rank, index)) => Place::Dev { rank, index },
        Some((Segment::Data, rank, index)) => Place::Cell { rank, index },
        _ => other(format!("no word at {address:#x}")),
    }
}

/// Location of the 64-bit word at `address`, which must be in the signal segment: models have such
/// words nowhere else.
fn wide(address: u64) -> Place {
    match decode(address) {
        Some((Segment::Signal, rank, index)) if index % 2 == 0 => Place::Wide { rank, index },
        _ => other(format!("no 64-bit word at {address:#x}")),
    }
}

/// Location of the word at `address` that is accessed without atomics.
fn data(address: u64) -> Place {
    match decode(address) {
        Some((Segment::Signal, rank, index)) => Place::Data { rank, index },
        Some((Segment::Device, rank, index)) => Place::Dev { rank, index },
        Some((Segment::Data, rank, index)) => Place::Cell { rank, index },
        _ => other(format!("no data at {address:#x}")),
    }
}

fn order(number: i32) -> Order {
    let orders = [Order::Relaxed, Order::Acquire, Order::Release, Order::AcqRel];
    pick(&orders, number, "order")
}

fn scope(number: i32) -> Scope {
    pick(&[Scope::Device, Scope::System], number, "scope")
}

fn limit(number: i32) -> Limit {
    pick(&[Limit::Entry, Limit::Progress], number, "limit")
}

fn access(number: i32) -> Option<Access> {
    (number != -1).then(|| pick(Access::ALL, number, "access"))
}

fn pick<T: Copy>(all: &[T], number: i32, what: &str) -> T {
    match usize::try_from(number).ok().and_then(|number| all.get(number)) {
        Some(&one) => one,
        None => other(format!("{what} {number}")),
    }
}

/// Hooks that the target of this OS thread answers.
macro_rules! answered {
    ($($name:ident($($argument:ident: $of:ty),*) -> $result:ty: |$target:ident| $answer:expr;)*) => {$(
        #[unsafe(no_mangle)]
        extern "C-unwind" fn $name($($argument: $of),*) -> $result {
            target!(|$target| $answer)
        }
    )*};
}

answered! {
    iris_hook_thread() -> u32: |t| Memory::thread(t);
    iris_hook_threads() -> u32: |t| HookMemory::extent(t).0;
    iris_hook_workgroup() -> u32: |t| HookMemory::id(t).group;
    iris_hook_workgroups() -> u32: |t| HookMemory::extent(t).1;
    iris_hook_vote(ok: i32, site: i32) -> i32:
        |t| HookMemory::vote_at(t, ok != 0, pick(&Site::ALL, site, "site")).into();
    iris_hook_diverge() -> (): |t| Memory::diverge(t);
    iris_hook_reconverge() -> (): |t| Memory::reconverge(t);
    iris_hook_pause(spins: u32) -> (): |t| Memory::pause(t, spins);
    iris_hook_expired(number: i32, spins: u32, _ns: u64) -> i32:
        |t| Memory::expired(t, limit(number), spins).into();
    iris_hook_host_abort(_control: u64) -> i32: |t| Memory::host_abort(t);
}

#[unsafe(no_mangle)]
extern "C-unwind" fn iris_hook_now() -> u64 {
    0
}

#[unsafe(no_mangle)]
extern "C-unwind" fn iris_hook_reached(number: i32, want: i32, seen: i32, answer: i32) -> i32 {
    let want = Call::new(want);
    if (answer != 0) != want.reached_by(seen) {
        other(format!("the headers say {answer} to {seen} where {want:?} is awaited"));
    }
    match access(number) {
        Some(access) => target!(|t| Memory::reached(t, access, want, seen)).into(),
        None => answer,
    }
}

#[unsafe(no_mangle)]
extern "C-unwind" fn iris_hook_is_of(number: i32, want: i32, seen: i32, answer: i32) -> i32 {
    if (answer != 0) != (seen == want) {
        other(format!("the headers say {answer} to {seen} where {want} is awaited"));
    }
    match access(number) {
        Some(access) => target!(|t| Memory::is_of(t, access, Call::new(want), seen)).into(),
        None => answer,
    }
}

/// # Safety
/// `words` points to eight words.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn iris_hook_record(_control: u64, words: *const [i32; 8]) {
    // SAFETY: the only caller, `port::keep_fault`, passes an array of eight words.
    let words = unsafe { *words };
    match Fault::from_words(words) {
        Some(fault) => target!(|t| Memory::record(t, &fault)),
        None => other(format!("no fault: {words:?}")),
    }
}

#[unsafe(no_mangle)]
extern "C-unwind" fn iris_hook_load32(address: u64, o: i32, s: i32, a: i32) -> i32 {
    let op = Operation::Load { place: word(address), order: order(o), scope: scope(s) };
    target!(|t| HookMemory::atomic(t, access(a), op))
}

#[unsafe(no_mangle)]
extern "C-unwind" fn iris_hook_store32(address: u64, value: i32, o: i32, s: i32, a: i32) {
    let value = value.into();
    let op = Operation::Store { place: word(address), value, order: order(o), scope: scope(s) };
    target!(|t| HookMemory::atomic(t, access(a), op));
}

#[unsafe(no_mangle)]
extern "C-unwind" fn iris_hook_rmw32(
    address: u64,
    rmw: i32,
    value: i32,
    o: i32,
    s: i32,
    a: i32,
) -> i32 {
    if rmw != 0 {
        other(format!("read-modify-write {rmw} is not modelled, only additions"));
    }
    let op = Operation::Add { place: word(address), value, order: order(o), scope: scope(s) };
    target!(|t| HookMemory::atomic(t, access(a), op))
}

#[unsafe(no_mangle)]
extern "C-unwind" fn iris_hook_cas32(
    address: u64,
    expected: i32,
    value: i32,
    o: i32,
    s: i32,
    a: i32,
) -> i32 {
    let place = word(address);
    let op =
        Operation::CompareExchange { place, expected, value, order: order(o), scope: scope(s) };
    target!(|t| HookMemory::atomic(t, access(a), op))
}

#[unsafe(no_mangle)]
extern "C-unwind" fn iris_hook_load64(address: u64, o: i32, s: i32, a: i32) -> i64 {
    let op = Operation::Load { place: wide(address), order: order(o), scope: scope(s) };
    match access(a) {
        Some(access) => target!(|t| HookMemory::load_wide(t, op, access)).to_bits() as i64,
        None => other("a 64-bit load of a user's is not modelled".into()),
    }
}

#[unsafe(no_mangle)]
extern "C-unwind" fn iris_hook_store64(address: u64, value: i64, o: i32, s: i32, a: i32) {
    let op = Operation::Store { place: wide(address), value, order: order(o), scope: scope(s) };
    match access(a) {
        Some(access) => target!(|t| HookMemory::store_wide(t, op, access)),
        None => other("a 64-bit store of a user's is not modelled".into()),
    }
}

/// # Safety
/// `words` has room for four words.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn iris_hook_load_quad(
    address: u64,
    words: *mut u32,
    o: i32,
    s: i32,
    a: i32,
) {
    let op = Operation::Load { place: wide(address + 8), order: order(o), scope: scope(s) };
    let Some(access) = access(a) else { other("a quad of a user's is not modelled".into()) };
    let LlQuad { data: [x, y, z], call } =
        quads::decode(target!(|t| HookMemory::load_wide(t, op, access)));
    // SAFETY: the caller, `port::load_quad`, has room for four words.
    unsafe { words.cast::<[u32; 4]>().write_unaligned([x, y, z, call as u32]) };
}

/// # Safety
/// `words` points to four words.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn iris_hook_store_quad(
    address: u64,
    words: *const u32,
    o: i32,
    s: i32,
    a: i32,
) {
    // SAFETY: the caller, `port::store_quad`, passes four words.
    let [x, y, z, call] = unsafe { words.cast::<[u32; 4]>().read_unaligned() };
    let word = quads::encode(LlQuad { data: [x, y, z], call: call as i32 });
    let (place, value) = (wide(address + 8), word.to_bits() as i64);
    let op = Operation::Store { place, value, order: order(o), scope: scope(s) };
    let Some(access) = access(a) else { other("a quad of a user's is not modelled".into()) };
    target!(|t| HookMemory::store_wide(t, op, access));
}

macro_rules! not_modelled {
    ($($name:ident($($argument:ty),*) -> $result:ty;)*) => {$(
        #[unsafe(no_mangle)]
        extern "C-unwind" fn $name($(_: $argument),*) -> $result {
            other(concat!(stringify!($name), " is not modelled").into())
        }
    )*};
}

not_modelled! {
    iris_hook_rmw64(u64, i32, i64, i32, i32, i32) -> i64;
    iris_hook_cas64(u64, i64, i64, i32, i32, i32) -> i64;
    iris_hook_add_f32(u64, f32, i32) -> ();
    iris_hook_fence(i32, i32) -> ();
    iris_hook_shared(u64) -> *mut c_void;
}

/// # Safety
/// `value` has room for `bytes` bytes.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn iris_hook_read(address: u64, value: *mut i32, bytes: u32) {
    for index in 0..words(bytes) {
        let seen = target!(|t| HookMemory::read(t, data(address + index as u64 * 4)));
        // SAFETY: the caller, `port::read`, has room for `bytes` bytes, and `index` is below their
        // number of words.
        unsafe { value.add(index).write_unaligned(seen) };
    }
}

/// # Safety
/// `value` points to `bytes` bytes.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn iris_hook_write(address: u64, value: *const i32, bytes: u32) {
    for index in 0..words(bytes) {
        // SAFETY: the caller, `port::write`, points to `bytes` bytes, and `index` is below their
        // number of words.
        let value = unsafe { value.add(index).read_unaligned() };
        target!(|t| HookMemory::write(t, data(address + index as u64 * 4), value));
    }
}

fn words(bytes: u32) -> usize {
    if !bytes.is_multiple_of(4) {
        other(format!("{bytes} bytes: the model has words of four"));
    }
    bytes as usize / 4
}

#[unsafe(no_mangle)]
extern "C-unwind" fn iris_model_boundary() {
    Thread::with_current(|thread| thread.boundary());
}

#[unsafe(no_mangle)]
extern "C-unwind" fn iris_model_gives_up() -> i32 {
    Thread::with_current(|thread| thread.gives_up()).into()
}

#[unsafe(no_mangle)]
extern "C-unwind" fn iris_model_check(address: u64, seen: i32, wanted: i32) {
    Thread::with_current(|thread| thread.check(data(address), seen, wanted));
}
