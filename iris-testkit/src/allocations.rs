//! A counting allocator, for tests of calls that must allocate nothing.

#![allow(unsafe_code, reason = "an allocator")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, counting: a test program declares it as its `#[global_allocator]`.
#[derive(Clone, Copy, Debug)]
pub struct Counting;

impl Counting {
    /// Number of allocations and reallocations that this thread makes during `call`, and what `call` returns.
    pub fn during<T>(call: impl FnOnce() -> T) -> (u64, T) {
        let before = COUNT.get();
        let result = call();
        (COUNT.get() - before, result)
    }
}

fn count() {
    COUNT.set(COUNT.get() + 1);
}

// SAFETY: every method passes its arguments to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as the caller says.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as the caller says.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, old: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count();
        // SAFETY: as the caller says.
        unsafe { System.realloc(old, layout, bytes) }
    }

    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        // SAFETY: as the caller says.
        unsafe { System.dealloc(old, layout) }
    }
}
