//! What host and device code lay out alike: the `repr(C)` structures that kernels receive.
//!
//! `kernels/iris/sym.h` mirrors them. The offsets are asserted below at compile time, so that a
//! change here that forgets the header fails to build.

use std::mem::offset_of;

/// The most ranks a world can have: the length of the tables of [`HeapView`].
pub const MAX_RANKS: usize = 64;

/// Bytes at the start of each rank's signal segment that no allocation gets.
///
/// Word [`ABORT_WORD`] is the sticky abort word; the others are for the heap itself.
pub const SIGNAL_RESERVED: u64 = 4 * iris_sync::RESERVED_WORDS as u64;

/// Index of the sticky abort word in a signal segment. Peers may set it; nobody clears it.
pub const ABORT_WORD: usize = iris_sync::ABORT_WORD as usize;

/// Words of a fault record.
pub const FAULT_WORDS: usize = 14;

/// Byte of a [`ControlBlock`] with the milliseconds that tests let pass on the CPU backend.
pub const PASSED: usize = size_of::<ControlBlock>() - 4;

/// Byte of a [`ControlBlock`] with the value of [`PASSED`] that a waiting kernel has seen last.
pub const SEEN: usize = PASSED - 4;

/// Values of the abort words. Zero means: go on.
pub mod abort {
    /// The heap was dropped or closed while work was waiting.
    pub const CLOSED: i32 = 1;
    /// A workgroup panicked.
    pub const PANICKED: i32 = 2;
    /// The caller asked for it.
    pub const USER: i32 = 3;
    /// The process that carries this world's messages has gone.
    pub const HUB_LOST: i32 = 4;
    /// A call was enqueued in part: a launch of it failed behind another one.
    pub const INCOMPLETE: i32 = 5;
    /// The ranks issue the calls of the heap in different orders.
    pub const DISORDER: i32 = 6;
    /// A rank of another node is lost, or a step between nodes failed.
    pub const ELSEWHERE: i32 = 7;
    /// A peer died or left without closing: this plus its rank.
    pub const PEER_LOST: i32 = 1000;
}

/// What a kernel needs to reach symmetric memory: one copy a rank, addresses as that rank sees them.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
pub struct HeapView {
    /// This rank.
    pub rank: u32,
    /// Ranks of the world.
    pub size: u32,
    /// Where each rank's data segment begins; zero from `size` on.
    pub data: [u64; MAX_RANKS],
    /// Where each rank's signal segment begins; zero from `size` on.
    pub signal: [u64; MAX_RANKS],
    /// Address of this rank's [`ControlBlock`].
    pub control: u64,
    /// Address of this rank's device-local words.
    pub device_words: u64,
    /// How long a wait for a peer's entry may last, in nanoseconds.
    pub entry_deadline_ns: u64,
    /// How long any other wait may last, in nanoseconds.
    pub progress_deadline_ns: u64,
}

/// A slice as kernels are given it: `Slice<T>` there.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct SliceView {
    /// Bytes from the start of the data segment, on every rank.
    pub offset: u64,
    /// Elements.
    pub len: u64,
}

/// The words by which host and kernels of one rank talk about faults. Host-visible memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub struct ControlBlock {
    /// Written by the host (see [`abort`]), read by every waiting kernel.
    pub host_abort: i32,
    /// Zero until the first kernel that fails sets it by compare-and-swap: 1 while it writes the
    /// record, 2 once the record is complete.
    pub fault_claim: i32,
    /// The record of the first fault. Kernels write eight words; tests of deadlines on the CPU use the
    /// last two ([`PASSED`], [`SEEN`]).
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

    /// The numbers that `sym.h` asserts, written out: a change on either side shows here.
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
