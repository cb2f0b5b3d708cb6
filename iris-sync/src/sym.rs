//! Layout of the `repr(C)` structures that the host passes to kernels.
//!
//! The device header `kernels/iris/sym.h` mirrors these structures. Compile-time asserts below
//! check the offsets of the fields, so a change here without a change of the header does not build.

use std::mem::offset_of;

/// Largest number of ranks of a world: the length of the tables in [`HeapView`].
pub const MAX_RANKS: usize = 64;

/// Number of bytes at the start of each rank's signal segment that are never allocated.
///
/// Word [`ABORT_WORD`] is the abort word, which is never reset. The heap reserves the other words
/// for itself.
pub const SIGNAL_RESERVED: u64 = 4 * crate::RESERVED_WORDS as u64;

/// Index of the abort word in a signal segment. Peers may set this word; it is never reset.
pub const ABORT_WORD: usize = crate::ABORT_WORD as usize;

/// Number of 32-bit words in the fault record of a [`ControlBlock`].
pub const FAULT_WORDS: usize = 14;

/// Byte offset in a [`ControlBlock`] of the number of milliseconds by which a test has advanced the
/// clock of CPU kernels.
pub const PASSED: usize = size_of::<ControlBlock>() - 4;

/// Byte offset in a [`ControlBlock`] of the word in which a waiting CPU kernel stores the value
/// that it has read at [`PASSED`]. A test thus sees that the kernel has noticed the new time.
pub const SEEN: usize = PASSED - 4;

/// Codes that the host writes to its abort word; 0 means that kernels may continue.
pub mod abort {
    /// The heap was dropped or closed while work was waiting.
    pub const CLOSED: i32 = 1;
    /// A kernel or a host function that the program had enqueued on the CPU panicked or failed.
    pub const FAILED: i32 = 2;
    /// The program aborted the heap's kernels.
    pub const USER: i32 = 3;
    /// This rank can no longer exchange messages with the ranks of its world, for example because
    /// the process that forwards them has ended.
    pub const HUB_LOST: i32 = 4;
    /// A call was enqueued only in part, because one of its launches failed after an earlier one
    /// had been enqueued.
    pub const INCOMPLETE: i32 = 5;
    /// The ranks issued the calls of the heap in different orders.
    pub const DISORDER: i32 = 6;
    /// A rank of another node was lost, or communication between nodes failed.
    pub const ELSEWHERE: i32 = 7;
    /// Base of the code for a lost peer, which died or left without closing: the code is this value
    /// plus the peer's rank.
    pub const PEER_LOST: i32 = 1000;
    /// A rank of another node was lost, or the process that forwards this rank's messages has
    /// ended. Kernels pass this code on to peers, as they do with the code of a lost peer.
    pub const WORLD_LOST: i32 = PEER_LOST + super::MAX_RANKS as i32;
    /// The ranks go on without a rank that is lost or stopped, so this heap is not used any more.
    /// Kernels pass this code on to peers as it is, because it names no rank.
    pub const REVOKED: i32 = WORLD_LOST + 1;
}

/// Addresses that a kernel needs to reach symmetric memory. Each rank has its own copy, whose
/// addresses are valid in that rank's address space.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
pub struct HeapView {
    /// Number of this rank within its node.
    pub rank: u32,
    /// Number of ranks of the node.
    pub size: u32,
    /// Start address of each rank's data segment; zero from index `size` on.
    pub data: [u64; MAX_RANKS],
    /// Start address of each rank's signal segment; zero from index `size` on.
    pub signal: [u64; MAX_RANKS],
    /// Address of this rank's [`ControlBlock`].
    pub control: u64,
    /// Address of this rank's device-local words.
    pub device_words: u64,
    /// Deadline of a wait for a peer to enter a call, in nanoseconds.
    pub entry_deadline_ns: u64,
    /// Deadline of all other waits, in nanoseconds.
    pub progress_deadline_ns: u64,
}

/// Symmetric slice as a kernel receives it; `Slice<T>` in device code.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct SliceView {
    /// Offset in bytes from the start of the data segment, equal on every rank.
    pub offset: u64,
    /// Number of elements of the slice.
    pub len: u64,
}

/// Words shared by the host and the kernels of one rank, for aborts and fault reports. The block
/// lies in memory that the host can read.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub struct ControlBlock {
    /// Abort code that the host writes (see [`abort`]) and every waiting kernel reads; 0 to
    /// continue.
    pub host_abort: i32,
    /// State of the fault record: 0 if there is none; the first failing kernel sets it by
    /// compare-and-swap to 1 while it writes the record, and to 2 when the record is complete.
    pub fault_claim: i32,
    /// Record of the first fault. Kernels write the first eight words; tests of deadlines on the
    /// CPU use the last two ([`PASSED`], [`SEEN`]).
    pub fault: [i32; FAULT_WORDS],
}

const _: () = {
    assert!(offset_of!(HeapView, data) == 8);
    assert!(offset_of!(HeapView, signal) == 8 + 8 * MAX_RANKS);
    assert!(offset_of!(HeapView, control) == 8 + 16 * MAX_RANKS);
    assert!(offset_of!(HeapView, device_words) == 16 + 16 * MAX_RANKS);
    assert!(offset_of!(HeapView, entry_deadline_ns) == 24 + 16 * MAX_RANKS);
    assert!(offset_of!(HeapView, progress_deadline_ns) == 32 + 16 * MAX_RANKS);
    assert!(size_of::<HeapView>() == 40 + 16 * MAX_RANKS);
    assert!(offset_of!(ControlBlock, fault_claim) == 4);
    assert!(offset_of!(ControlBlock, fault) == 8);
    assert!(size_of::<ControlBlock>() == 64);
};

#[cfg(test)]
mod tests {
    use super::*;

    /// Tests the offsets of the fields against literal numbers. `sym.h` asserts the same numbers,
    /// so a change on either side fails a check.
    #[test]
    fn offsets_are_those_of_the_header() {
        assert_eq!(offset_of!(HeapView, rank), 0);
        assert_eq!(offset_of!(HeapView, size), 4);
        assert_eq!(offset_of!(HeapView, data), 8);
        assert_eq!(offset_of!(HeapView, signal), 520);
        assert_eq!(offset_of!(HeapView, control), 1032);
        assert_eq!(offset_of!(HeapView, device_words), 1040);
        assert_eq!(offset_of!(HeapView, entry_deadline_ns), 1048);
        assert_eq!(offset_of!(HeapView, progress_deadline_ns), 1056);
        assert_eq!(size_of::<HeapView>(), 1064);
        assert_eq!(size_of::<ControlBlock>(), 64);
    }
}
