//! Global allocator that counts allocations, for tests of calls that must not allocate.

#![allow(unsafe_code, reason = "an allocator")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

/// System allocator that counts allocations per thread. A test program declares it as its
/// `#[global_allocator]`.
#[derive(Clone, Copy, Debug)]
pub struct Counting;

impl Counting {
    /// Runs `call`; returns the number of allocations and reallocations that this thread made
    /// during the call, and the call's result.
    pub fn during<T>(call: impl FnOnce() -> T) -> (u64, T) {
        let before = COUNT.get();
        let result = call();
        (COUNT.get() - before, result)
    }
}

fn count() {
    COUNT.set(COUNT.get() + 1);
}

// SAFETY: every method passes its arguments unchanged to the system's allocator, which keeps the
// contract.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps the contract of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, old: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count();
        // SAFETY: the caller keeps the contract of `realloc`.
        unsafe { System.realloc(old, layout, bytes) }
    }

    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(old, layout) }
    }
}
