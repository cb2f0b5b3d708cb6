//! C++ programs of scenarios, which run the device headers: each access of the headers calls a
//! hook.
//!
//! `build.rs` compiles `cxx/` with the host form of `kernels/iris/port.h`. A program is a function
//! of an [`Input`]. The [`Thread`] that runs the program answers its hooks, so the same engines
//! explore it and the same mutants change it.
//!
//! **Running.** A new program is a C++ file that includes `model.h` and the header to be checked,
//! with a function `extern "C" int name(const iris::model::Input&)`; a [`Scenario`] takes it with
//! [`Headers::new`]. `examples/check_my_protocol` is an example, in Rust and in C++. Words after
//! those of the channel, such as index 2^20 of the signal segment, begin with 0 and are free to
//! use.
//!
//! A crate with this one in its `[dependencies]` compiles such a file in its build script, with
//! `cc` (cargo tells build scripts nothing of `[dev-dependencies]`):
//!
//! ```ignore
//! let include = std::env::var("DEP_IRIS_MODEL_INCLUDE").expect("iris-models in [dependencies]");
//! let mut build = cc::Build::new();
//! build.cpp(true).std("c++17").flag("-fexceptions").flag("-funwind-tables");
//! build.includes(std::env::split_paths(&include)).file("src/my_protocol.cpp").compile("mine");
//! ```
//!
//! **Limits.** Programs may use words of 32 bits, additions, compare-and-exchange and plain data of
//! whole words. A program that does anything else fails in the model, with a message that names the
//! operation. A failure unwinds through the program, so everything that the program owns must be
//! released by destructors.
//!
//! [`Scenario`]: crate::Scenario

#![allow(unsafe_code, reason = "the hooks that let a model run the device headers")]

use std::sync::atomic::{AtomicU64, Ordering};

use iris_sync::sym::HeapView;
use iris_sync::{Access, Channel, Record};

use super::thread::Thread;

/// Input of a program in C++. One thread runs all calls of the program. Same layout as
/// `iris::model::Input` in `cxx/model.h`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Input<'a> {
    /// Symmetric heap, with addresses that the hooks understand.
    pub heap: &'a HeapView,
    /// Layout of the synchronisation words.
    pub channel: &'a Channel,
    /// Entry record that this rank publishes in its calls.
    pub record: &'a Record,
    /// Number of the first call.
    pub first: i32,
    /// Number of calls that the program makes.
    pub calls: u32,
    /// Number of tiles of the largest plan.
    pub tiles: u32,
    /// Option bits; each program defines its own.
    pub option: u32,
    /// Participating ranks, one bit each.
    pub members: u64,
    /// Number of tiles that each call uses; an array of `calls` elements.
    pub used: *const u32,
    /// 1 in mutants that do not use double buffers.
    pub one_buffer: u32,
}

/// Entry point of a program in C++; returns nonzero on success. The function may unwind.
pub type Entry = extern "C-unwind" fn(&Input<'_>) -> i32;

/// Program in C++ that runs a scenario over the device headers, with its options.
#[derive(Clone, Copy, Debug)]
pub struct Headers {
    entry: Entry,
    tiles: u32,
    option: u32,
    members: Option<u64>,
    used: &'static [u32],
    one_buffer: bool,
    after: Option<fn(&Thread<'_>, bool)>,
}

/// Path of the C++ compiler for the programs of `cxx/`, chosen when this crate was built.
pub const COMPILER: &str = env!("IRIS_CXX_COMPILER");

/// Whether `COMPILER` was found when this crate was built. Without it, scenarios have no programs
/// over the device headers.
pub const AVAILABLE: bool = cfg!(iris_cxx);

impl Headers {
    /// Program `entry` with `tiles` tiles in its largest plan.
    pub const fn new(entry: Entry, tiles: u32) -> Self {
        let used = &[];
        Self { entry, tiles, option: 0, members: None, used, one_buffer: false, after: None }
    }

    /// Sets the option bits.
    #[must_use]
    pub const fn option(self, option: u32) -> Self {
        Self { option, ..self }
    }

    /// Sets the participating ranks; default: all.
    #[must_use]
    pub const fn members(self, bits: u64) -> Self {
        Self { members: Some(bits), ..self }
    }

    /// Sets the number of tiles that each call uses; default: all tiles.
    #[must_use]
    pub const fn used(self, used: &'static [u32]) -> Self {
        Self { used, ..self }
    }

    /// Selects the mutant without double buffers.
    #[must_use]
    pub const fn one_buffer(self) -> Self {
        Self { one_buffer: true, ..self }
    }

    /// Sets a check that runs after the program; its second argument is true if the program
    /// succeeded.
    #[must_use]
    pub const fn after(self, after: fn(&Thread<'_>, bool)) -> Self {
        Self { after: Some(after), ..self }
    }

    /// Runs the C++ program as the thread `thread`.
    pub(crate) fn run(&self, thread: &Thread<'_>) {
        let heap = heap(thread.rank(), thread.ranks());
        let mut used = self.used.to_vec();
        used.resize(thread.calls() as usize, self.tiles);
        let input = Input {
            heap: &heap,
            channel: thread.channel(),
            record: thread.record(),
            first: thread.call(0).number(),
            calls: thread.calls(),
            tiles: self.tiles,
            option: self.option,
            members: self
                .members
                .unwrap_or(iris_sync::barrier::Members::all(thread.ranks()).bits()),
            used: used.as_ptr(),
            one_buffer: self.one_buffer.into(),
        };
        let through = (self.entry)(&input) != 0;
        if let Some(after) = self.after {
            after(thread, through);
        }
    }
}

/// Memory segments that a fake address can name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Segment {
    Signal = 1,
    Device = 2,
    Data = 3,
    Control = 4,
}

/// Encodes a fake address: four bits of segment, twelve of rank, the rest a byte offset.
pub(crate) const fn address(segment: Segment, rank: u32, index: u32) -> u64 {
    ((segment as u64) << 60) | ((rank as u64) << 48) | (index as u64 * 4)
}

/// Decodes a fake address into segment, rank and index of a 4-byte word.
#[cfg(iris_cxx)]
pub(crate) fn decode(address: u64) -> Option<(Segment, u32, u32)> {
    let segment = match address >> 60 {
        1 => Segment::Signal,
        2 => Segment::Device,
        3 => Segment::Data,
        4 => Segment::Control,
        _ => return None,
    };
    let (rank, bytes) = ((address >> 48) as u32 & 0xfff, address & 0xffff_ffff_ffff);
    let index = u32::try_from(bytes / 4).ok()?;
    (bytes % 4 == 0).then_some((segment, rank, index))
}

/// View of the symmetric heap that a C++ program gets, with fake addresses.
pub(crate) fn heap(rank: u32, ranks: u32) -> HeapView {
    let mut heap: HeapView = bytemuck::Zeroable::zeroed();
    (heap.rank, heap.size) = (rank, ranks);
    for (at, peer) in (0..ranks as usize).zip(0..) {
        heap.data[at] = address(Segment::Data, peer, 0);
        heap.signal[at] = address(Segment::Signal, peer, 0);
    }
    heap.control = address(Segment::Control, rank, 0);
    heap.device_words = address(Segment::Device, rank, 0);
    heap
}

const SEEN: usize = Access::ALL.len() + 1;
static DEVICE: [AtomicU64; SEEN] = [const { AtomicU64::new(0) }; SEEN];
static SYSTEM: [AtomicU64; SEEN] = [const { AtomicU64::new(0) }; SEEN];

/// Counts an access that a hook has seen; `None` stands for an access to a user's own word.
#[cfg(iris_cxx)]
pub(crate) fn count(access: Option<Access>, scope: iris_sync::Scope) {
    let row = access.map_or(Access::ALL.len(), |access| access as usize);
    let column = if scope == iris_sync::Scope::System { &SYSTEM } else { &DEVICE };
    column[row].fetch_add(1, Ordering::Relaxed);
}

/// Name of every access, and the number of times that hooks have seen it in this process, at device
/// scope and at system scope.
pub fn scopes_seen() -> Vec<(&'static str, u64, u64)> {
    let names = Access::ALL.iter().map(|access| access.name()).chain(["accumulators, users"]);
    let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    names
        .zip(DEVICE.iter().map(read))
        .zip(SYSTEM.iter().map(read))
        .map(|((n, d), s)| (n, d, s))
        .collect()
}

macro_rules! programs {
    ($($(#[$doc:meta])* $name:ident = $symbol:ident;)*) => {
        #[cfg(iris_cxx)]
        unsafe extern "C-unwind" {
            $(safe fn $symbol(input: &Input<'_>) -> i32;)*
        }
        $($(#[$doc])*
        #[cfg(iris_cxx)]
        pub const $name: Entry = $symbol;
        $(#[$doc])*
        #[cfg(not(iris_cxx))]
        pub const $name: Entry = missing;)*
    };
}

#[cfg(not(iris_cxx))]
extern "C-unwind" fn missing(_: &Input<'_>) -> i32 {
    crate::Failure::Other("this crate was built without a C++ compiler".into()).raise()
}

/// Programs of `cxx/`, one for each scenario of [`ops`](crate::ops) and
/// [`primitives`](crate::primitives).
pub mod programs {
    use super::Entry;
    #[cfg(iris_cxx)]
    use super::Input;
    #[cfg(not(iris_cxx))]
    use super::missing;

    programs! {
        /// Scenario [`one_shot`](crate::ops::one_shot).
        ONE_SHOT = iris_model_one_shot;
        /// Scenario [`two_shot`](crate::ops::two_shot); the option is the number of workgroups that
        /// only send.
        TWO_SHOT = iris_model_two_shot;
        /// Scenario [`reduce_scatter`](crate::ops::reduce_scatter). Option 1: input from a GEMM;
        /// option 2: one workgroup only sends.
        REDUCE_SCATTER = iris_model_reduce_scatter;
        /// Scenario [`deliver`](crate::ops::deliver). Option 1: broadcast from rank 0; option 2:
        /// one workgroup only sends.
        DELIVER = iris_model_deliver;
        /// Scenario [`relay`](crate::ops::relay).
        RELAY = iris_model_relay;
        /// Scenario [`pull`](crate::ops::pull); with option 1, scenario
        /// [`pull_of_leavers`](crate::ops::pull_of_leavers).
        PULL = iris_model_pull;
        /// Scenario [`staged`](crate::ops::staged).
        STAGED = iris_model_staged;
        /// Scenario [`gather`](crate::ops::gather); with option 1, the mutant without the barrier.
        GATHER = iris_model_gather;
        /// Scenario [`copied`](crate::ops::copied). Option 1: the copies do not wait for the peers;
        /// option 2: scenario [`copied_on`](crate::ops::copied_on); option 4: scenario
        /// [`copied_beside`](crate::ops::copied_beside); option 8: scenario
        /// [`copied_of_leavers`](crate::ops::copied_of_leavers).
        COPIED = iris_model_copied;
        /// Scenario [`stored`](crate::ops::stored). Option 1: the rank stores although it has given
        /// up; option 2: the rank stores before the launch that opens the call is over.
        STORED = iris_model_stored;
        /// Scenario [`accumulate`](crate::ops::accumulate). Option bits: 1, atomic additions; 2, no
        /// first barrier; 4, no second barrier.
        ACCUMULATE = iris_model_accumulate;
        /// Scenario [`exchange`](crate::ll::exchange) and other scenarios of its module; the option
        /// is the number of the pattern.
        EXCHANGE = iris_model_exchange;
        /// Scenario [`versioned`](crate::primitives::versioned).
        VERSIONED = iris_model_versioned;
        /// Scenario [`spinlock`](crate::primitives::spinlock).
        SPINLOCK = iris_model_spinlock;
        /// Scenario [`barrier`](crate::primitives::barrier); with option 1, a second barrier
        /// protects the cell.
        BARRIER = iris_model_barrier;
        /// Scenario [`barrier_in_launch`](crate::primitives::barrier_in_launch).
        BARRIER_IN_LAUNCH = iris_model_barrier_in_launch;
        /// Scenario [`flags`](crate::primitives::flags).
        FLAGS = iris_model_flags;
        /// Scenario [`entry`](crate::primitives::entry); with option 1, each call of a rank
        /// begins by clearing the words that its peers write, as a memset would.
        ENTRY = iris_model_entry;
        /// Scenario [`abort`](crate::primitives::abort).
        ABORT = iris_model_abort;
    }
}
