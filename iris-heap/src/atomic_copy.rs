//! Copies between private memory and memory that other threads may access at the same time.
//!
//! A plain copy that races with a write is undefined behaviour. These copies use relaxed atomic
//! accesses: aligned 32-bit words, and single bytes before the first and after the last aligned
//! word. A race yields old or new words; the copies order no other accesses.
//!
//! The words have 32 bits because signals, device words and most elements have that size, and Rust
//! defines a race of two atomic accesses only if both have the same size. If the sizes differ (a
//! 32-bit word on one side, a single byte on the other), LLVM and the hardware still define the
//! race, byte by byte.

#![allow(unsafe_code, reason = "atomic access to memory that the caller vouches for")]

use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

const WORD: usize = size_of::<AtomicU32>();

/// Splits a run of bytes into the bytes before the first aligned word, the aligned words, and the
/// bytes after the last.
///
/// # Safety
/// The `len` bytes at `address` are valid for reads and writes during `'a`, and are accessed only
/// atomically wherever accesses race.
unsafe fn split<'a>(
    address: *mut u8,
    len: usize,
) -> (&'a [AtomicU8], &'a [AtomicU32], &'a [AtomicU8]) {
    // SAFETY: the caller guarantees that the bytes are valid; atomics may be shared.
    let bytes = unsafe { std::slice::from_raw_parts(address.cast::<AtomicU8>(), len) };
    // SAFETY: four atomic bytes are a valid atomic word, and `align_to` aligns the words.
    unsafe { bytes.align_to() }
}

/// Copies `to.len()` bytes from shared memory at `from` into `to`.
///
/// # Safety
/// The bytes are valid for reads and writes during the call, and any concurrent write is atomic.
pub unsafe fn load(from: *const u8, to: &mut [u8]) {
    // SAFETY: the caller keeps this function's contract, which covers that of `split`.
    let (head, words, tail) = unsafe { split(from.cast_mut(), to.len()) };
    let (first, rest) = to.split_at_mut(head.len());
    let (middle, last) = rest.split_at_mut(words.len() * WORD);
    let bytes = first.iter_mut().chain(last).zip(head.iter().chain(tail));
    bytes.for_each(|(to, from)| *to = from.load(Ordering::Relaxed));
    for (to, from) in middle.as_chunks_mut::<WORD>().0.iter_mut().zip(words) {
        *to = from.load(Ordering::Relaxed).to_ne_bytes();
    }
}

/// Copies `from` to shared memory at `to`.
///
/// # Safety
/// The `from.len()` bytes at `to` are valid for reads and writes during the call, and any
/// concurrent access is atomic.
pub unsafe fn store(from: &[u8], to: *mut u8) {
    // SAFETY: the caller keeps this function's contract, which covers that of `split`.
    let (head, words, tail) = unsafe { split(to, from.len()) };
    let (first, rest) = from.split_at(head.len());
    let (middle, last) = rest.split_at(words.len() * WORD);
    let bytes = first.iter().chain(last).zip(head.iter().chain(tail));
    bytes.for_each(|(from, to)| to.store(*from, Ordering::Relaxed));
    for (from, to) in middle.as_chunks::<WORD>().0.iter().zip(words) {
        to.store(u32::from_ne_bytes(*from), Ordering::Relaxed);
    }
}

/// Copies `len` bytes between two ranges of shared memory, which may overlap.
///
/// # Safety
/// Contract of [`load`] for the bytes at `from`, and of [`store`] for the bytes at `to`.
pub unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    const PART: usize = 4096;
    let mut buffer = [0; PART];
    let parts = len.div_ceil(PART);
    // Copy backwards if the target begins inside the source; a forward copy would overwrite the end
    // of the source before reading it.
    let backwards = (1..len).contains(&(to as usize).wrapping_sub(from as usize));
    for part in 0..parts {
        let part = if backwards { parts - 1 - part } else { part };
        let (start, end) = (part * PART, len.min((part + 1) * PART));
        let buffer = &mut buffer[..end - start];
        // SAFETY: the caller guarantees that `len` bytes at `from` are valid, and the part lies in
        // them.
        unsafe { load(from.add(start), buffer) };
        // SAFETY: the caller guarantees that `len` bytes at `to` are valid, and the part lies in
        // them.
        unsafe { store(buffer, to.add(start)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_every_alignment_and_length() {
        let source: Vec<u8> = (1..=40).collect();
        for (start, len) in (0..8).flat_map(|start| (0..24).map(move |len| (start, len))) {
            let (mut got, mut target) = (vec![0; len], [0; 40]);
            // SAFETY: the `len` bytes lie in `source`, which no thread writes.
            unsafe { load(source[start..].as_ptr(), &mut got) };
            assert_eq!(got, source[start..start + len]);
            // SAFETY: the `len` bytes lie in `target`, which no other thread accesses.
            unsafe { store(&got, target[start..].as_mut_ptr()) };
            let mut want = [0; 40];
            want[start..start + len].copy_from_slice(&got);
            assert_eq!(target, want, "{len} bytes from {start} on");
        }
    }

    #[test]
    fn copies_that_overlap() {
        for (from, to) in [(0, 700), (700, 0), (3, 4), (4, 3), (5, 5), (0, 20_000)] {
            let mut bytes: Vec<u8> = (0..40_000).map(|i| (i % 251) as u8).collect();
            let mut want = bytes.clone();
            want.copy_within(from..from + 20_000, to);
            let start = bytes.as_mut_ptr();
            // SAFETY: both runs lie in `bytes`, which no other thread accesses.
            unsafe { copy(start.add(from), start.add(to), 20_000) };
            assert_eq!(bytes, want, "from {from} to {to}");
        }
    }
}
