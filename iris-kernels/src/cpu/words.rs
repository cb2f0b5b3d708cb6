//! Synchronisation words in a mapped heap: an implementation of [`iris_sync::Memory`] by atomics.

use std::cell::Cell;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use iris_heap::abi::{ControlBlock, PASSED, SEEN};
use iris_heap::atomic_copy;
use iris_sync::{
    Access, DevWord, Fault, Limit, LlQuad, LlWord, Memory, Order, Span, SymPair, SymWord,
};

use crate::args::{OpArgs, counter};
use crate::trace::{MAX_GROUPS, TraceSpan};

/// Number of polls before a waiting thread yields the processor.
const SPINS: u32 = 100;
/// Time of a wait after which the waiting thread sleeps instead of yielding.
const YIELDING: Duration = Duration::from_millis(1);
/// Shortest and longest sleep between two polls. In between, a thread sleeps for a sixteenth of the
/// time that it has waited, so that a sleep adds little to the wait.
const NAPS: [Duration; 2] = [Duration::from_micros(50), Duration::from_millis(1)];

/// Synchronisation words, trace and counters, as seen by one workgroup of one rank.
pub(crate) struct Words<'a> {
    args: &'a OpArgs,
    group: u32,
    waiting_since: Cell<Instant>,
    /// Number of milliseconds that a test had added to the clock of kernels before the current wait
    /// began.
    passed: Cell<i32>,
    span_begin: [Cell<(u64, u32)>; 5],
    delays: Cell<u64>,
}

impl<'a> Words<'a> {
    /// Makes the accessor for workgroup `group` of the launch with arguments `args`.
    ///
    /// # Safety
    /// The addresses in `args` must be those of live mappings: segments, control block and device
    /// words of the heap, and trace and counters where they are not 0.
    pub(crate) unsafe fn new(args: &'a OpArgs, group: u32) -> Self {
        Self {
            args,
            group,
            waiting_since: Cell::new(Instant::now()),
            passed: Cell::new(0),
            span_begin: Default::default(),
            delays: Cell::new(super::delay::seed(args.heap.rank, group)),
        }
    }

    fn sym(&self, word: SymWord) -> &AtomicI32 {
        assert!(word.rank < self.args.heap.size, "rank {} of {}", word.rank, self.args.heap.size);
        let base = self.args.heap.signal[word.rank as usize] as *const AtomicI32;
        // SAFETY: `new` requires a live signal segment at this address; the index is from the
        // channel's layout, which the heap allocated there.
        unsafe { &*base.add(word.index as usize) }
    }

    /// Returns the two LL words of a pair.
    fn pair(&self, pair: SymPair) -> &[AtomicU64; 2] {
        assert!(pair.rank < self.args.heap.size, "rank {} of {}", pair.rank, self.args.heap.size);
        assert_eq!(pair.index % 4, 0, "a pair begins at a multiple of 16 bytes");
        let base = self.args.heap.signal[pair.rank as usize] as *const AtomicI32;
        // SAFETY: `new` requires a live signal segment; segments are aligned to more than 16 bytes,
        // and the channel's region of pairs is accessed only as 64-bit words while the op lives.
        unsafe { &*base.add(pair.index as usize).cast::<[AtomicU64; 2]>() }
    }

    fn dev(&self, word: DevWord) -> &AtomicI32 {
        let base = self.args.heap.device_words as *const AtomicI32;
        // SAFETY: `new` requires live device words at this address; the index is from the channel's
        // layout.
        unsafe { &*base.add(word.index as usize) }
    }

    /// Adds `by` to counter `which` of the rank, if the rank has counters.
    pub(crate) fn count(&self, which: usize, by: u64) {
        if self.args.counters == 0 {
            return;
        }
        let counters = self.args.counters as *const [AtomicU32; 2];
        assert!(which < counter::COUNT, "counter {which}");
        // SAFETY: `new` requires `counter::COUNT` counters at this address.
        let [low, high] = unsafe { &*counters.add(which) };
        // The 64-bit counter consists of two device words of 32 bits, which have no common
        // addition. So the carry is added to the high word in a second step.
        let (_, carry) = low.fetch_add(by as u32, Ordering::Relaxed).overflowing_add(by as u32);
        let upper = (by >> 32) as u32 + u32::from(carry);
        if upper > 0 {
            high.fetch_add(upper, Ordering::Relaxed);
        }
    }

    fn control(&self) -> *mut ControlBlock {
        self.args.heap.control as *mut ControlBlock
    }

    fn control_word(&self, offset: usize) -> &AtomicI32 {
        debug_assert!(offset + 4 <= size_of::<ControlBlock>());
        // SAFETY: `new` requires a live control block, and the offset is one of its words.
        unsafe { &*self.control().cast::<u8>().add(offset).cast::<AtomicI32>() }
    }

    fn keep_span(&self, span: TraceSpan) {
        let group = self.group as usize;
        if group >= MAX_GROUPS {
            return;
        }
        let base = self.args.trace as *mut u8;
        // SAFETY: `new` requires a trace buffer at this address, which begins with one count per
        // workgroup.
        let count = unsafe { &*base.cast::<AtomicU32>().add(group) };
        let index = count.fetch_add(1, Ordering::Relaxed);
        if index >= self.args.trace_spans {
            return;
        }
        let place = group * self.args.trace_spans as usize + index as usize;
        let spans = base.wrapping_add(MAX_GROUPS * 4).cast::<TraceSpan>();
        // SAFETY: the workgroup's part of the buffer has room for `trace_spans` spans, and only
        // this workgroup writes there; the host reads it atomically.
        unsafe { atomic_copy::store(bytemuck::bytes_of(&span), spans.add(place).cast()) };
    }
}

fn load_order(access: Access) -> Ordering {
    match access.order() {
        Order::Relaxed | Order::Release => Ordering::Relaxed,
        Order::Acquire | Order::AcqRel => Ordering::Acquire,
    }
}

fn store_order(access: Access) -> Ordering {
    match access.order() {
        Order::Relaxed | Order::Acquire => Ordering::Relaxed,
        Order::Release | Order::AcqRel => Ordering::Release,
    }
}

fn update_order(access: Access) -> Ordering {
    match access.order() {
        Order::Relaxed => Ordering::Relaxed,
        Order::Acquire => Ordering::Acquire,
        Order::Release => Ordering::Release,
        Order::AcqRel => Ordering::AcqRel,
    }
}

/// Current time in nanoseconds, on a clock that all processes of a host share.
pub(crate) fn now() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

impl Memory for Words<'_> {
    fn load(&self, word: SymWord, access: Access) -> i32 {
        self.sym(word).load(load_order(access))
    }

    fn store(&self, word: SymWord, value: i32, access: Access) {
        if access == Access::SignalStore {
            self.count(counter::FLAGS, 1);
            super::delay::sleep_sometimes(&self.delays);
        }
        self.sym(word).store(value, store_order(access));
    }

    fn compare_exchange(&self, word: SymWord, expected: i32, value: i32, access: Access) -> i32 {
        let done = self.sym(word).compare_exchange(
            expected,
            value,
            update_order(access),
            Ordering::Relaxed,
        );
        match done {
            Ok(held) | Err(held) => held,
        }
    }

    fn load_pair(&self, pair: SymPair, access: Access) -> [LlWord; 2] {
        let load = |word: &AtomicU64| LlWord::from_bits(word.load(load_order(access)));
        self.pair(pair).each_ref().map(load)
    }

    fn store_pair(&self, pair: SymPair, words: [LlWord; 2], access: Access) {
        if access == Access::LlStore {
            super::delay::sleep_sometimes(&self.delays);
        }
        for (place, word) in self.pair(pair).iter().zip(words) {
            place.store(word.to_bits(), store_order(access));
        }
    }

    // Portable code has no atomic access of 128 bits. Two ordered accesses of 64 bits replace it: a
    // load that sees the second word of a store, which has the flag, sees the first one, too.
    fn load_quad(&self, place: SymPair, access: Access) -> LlQuad {
        let [first, second] = self.pair(place);
        let LlWord { data, call } = LlWord::from_bits(second.load(Ordering::Acquire));
        let first = first.load(load_order(access));
        LlQuad { data: [first as u32, (first >> 32) as u32, data], call }
    }

    fn store_quad(&self, place: SymPair, word: LlQuad, access: Access) {
        let LlQuad { data: [a, b, data], call } = word;
        let [first, second] = self.pair(place);
        first.store(u64::from(b) << 32 | u64::from(a), store_order(access));
        second.store(LlWord { data, call }.to_bits(), Ordering::Release);
    }

    fn get(&self, word: SymWord) -> i32 {
        self.sym(word).load(Ordering::Relaxed)
    }

    fn put(&self, word: SymWord, value: i32) {
        self.sym(word).store(value, Ordering::Relaxed);
    }

    fn dev_load(&self, word: DevWord, access: Access) -> i32 {
        self.dev(word).load(load_order(access))
    }

    fn dev_store(&self, word: DevWord, value: i32, access: Access) {
        if access == Access::FlagStore {
            self.count(counter::FLAGS, 1);
            super::delay::sleep_sometimes(&self.delays);
        }
        self.dev(word).store(value, store_order(access));
    }

    fn dev_add(&self, word: DevWord, value: i32, access: Access) -> i32 {
        self.dev(word).fetch_add(value, update_order(access))
    }

    fn pause(&self, spins: u32) {
        if spins < SPINS {
            return std::hint::spin_loop();
        }
        let waited = self.waiting_since.get().elapsed();
        match waited < YIELDING {
            true => std::thread::yield_now(),
            false => std::thread::sleep((waited / 16).clamp(NAPS[0], NAPS[1])),
        }
    }

    fn expired(&self, limit: Limit, spins: u32) -> bool {
        let passed = || self.control_word(PASSED).load(Ordering::Relaxed);
        if spins == 0 {
            self.waiting_since.set(Instant::now());
            self.passed.set(passed());
            return false;
        }
        if spins < SPINS {
            return false;
        }
        let deadline = match limit {
            Limit::Entry => self.args.heap.entry_deadline_ns,
            Limit::Progress => self.args.heap.progress_deadline_ns,
        };
        let seen = passed();
        let passed = seen.wrapping_sub(self.passed.get()).unsigned_abs();
        if passed > 0 {
            self.control_word(SEEN).store(seen, Ordering::Relaxed);
        }
        let waited = self.waiting_since.get().elapsed() + Duration::from_millis(passed.into());
        waited >= Duration::from_nanos(deadline)
    }

    fn host_abort(&self) -> i32 {
        self.control_word(std::mem::offset_of!(ControlBlock, host_abort)).load(Ordering::Relaxed)
    }

    fn record(&self, fault: &Fault) {
        let claim = self.control_word(std::mem::offset_of!(ControlBlock, fault_claim));
        if claim.compare_exchange(0, 1, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            return;
        }
        let first = std::mem::offset_of!(ControlBlock, fault);
        for (index, word) in fault.to_words().into_iter().enumerate() {
            self.control_word(first + 4 * index).store(word, Ordering::Relaxed);
        }
        claim.store(2, Ordering::Release);
    }

    fn begin(&self, span: Span, what: u32) {
        if span == Span::Wait {
            self.count(counter::WAITS, 1);
            super::delay::sleep_sometimes(&self.delays);
        }
        if self.args.trace != 0 {
            self.span_begin[span as usize].set((now(), what));
        }
    }

    fn end(&self, span: Span) {
        if self.args.trace != 0 {
            let (begin, what) = self.span_begin[span as usize].get();
            self.keep_span(TraceSpan { begin, end: now(), kind: span as u32, what });
        }
    }
}
