//! Memory that operators need in a heap: for one choice of variant and tile, and as the maximum
//! over several choices.

use iris_sync::{Channel, Shape, Words};

/// Alignment of inbox slots (places for one tile), in bytes.
pub(crate) const SLOT_ALIGNMENT: u64 = 128;

/// Number of device-local words for an op's counters: two 32-bit words for each 64-bit counter.
pub(crate) const COUNTER_WORDS: usize = iris_kernels::args::counter::COUNT * 2;

/// Number of device-local words that an operator does not share with other operators of its
/// workspace: its counters, and copies of the call number and of the sequence number for a kernel
/// that runs at the same time as a call.
pub(crate) const OWN_WORDS: usize = COUNTER_WORDS + 2;

/// Memory that one choice of a plan (a variant with a tile) needs in the workspace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Needs {
    /// Number of tiles that have a signal, per source rank.
    pub(crate) tiles: u32,
    /// Number of flags that a staged gather, or copies by copy engines, need.
    pub(crate) flags: u32,
    /// Whether each tile has a lock.
    pub(crate) locks: bool,
    /// Number of items that one rank sends to another by the LL protocol, in the largest call that
    /// has no packs. An item is a pair of words, each with data and flag.
    pub(crate) pairs: u32,
    /// Number of packs that one rank sends to another: items of 48 bytes in larger messages.
    pub(crate) packs: u32,
    /// Number of inbox slots (places for one tile) per source rank, for calls with even numbers;
    /// calls with odd numbers have as many.
    pub(crate) places: u32,
    /// Number of source ranks that have slots in the inbox.
    pub(crate) sources: u32,
    /// Bytes of a slot of the inbox, a multiple of [`SLOT_ALIGNMENT`].
    pub(crate) slot: u64,
    /// Number of slots of the result inbox (it receives finished tiles), for calls with even
    /// numbers; calls with odd numbers have as many.
    pub(crate) results: u32,
    /// Bytes of a slot of the result inbox, a multiple of [`SLOT_ALIGNMENT`].
    pub(crate) result_slot: u64,
    /// Bytes of the workspace outside the inboxes: f32 sums, a staging buffer, or matrices that a
    /// GEMM reads or writes.
    pub(crate) workspace: u64,
    /// Number of columns of A in a unit, the piece of A that a staged gather fetches at once; 0 if
    /// A is not gathered.
    pub(crate) k_group: u32,
}

impl Needs {
    /// Bytes of the inbox slots for calls of one parity (even or odd call numbers).
    pub(crate) fn inbox_half(&self) -> u64 {
        (u64::from(self.sources) * u64::from(self.places)).saturating_mul(self.slot)
    }

    /// Bytes of the slots of the result inbox for calls of one parity (even or odd call numbers).
    pub(crate) fn results_half(&self) -> u64 {
        u64::from(self.results).saturating_mul(self.result_slot)
    }
}

/// Capacity of a workspace: the maximum of the needs of its ops.
///
/// Calls of different variants and sizes use the same inbox one after the other. The inbox has one
/// half for each parity of the call number, and the boundary between the halves is at the same byte
/// for all variants. So a call never writes bytes that a slower rank still reads for the previous
/// call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Extent {
    /// Number of ranks of the world.
    size: u32,
    tiles: u32,
    flags: u32,
    locks: bool,
    pairs: u32,
    packs: u32,
    inbox_half: u64,
    results_half: u64,
    workspace: u64,
}

impl Extent {
    /// Capacity for an operator on `size` ranks without tiles, flags and items: only the words that
    /// every operator needs.
    pub(crate) fn new(size: u32) -> Self {
        Self { size, ..Self::default() }
    }

    /// Smallest capacity that suffices for this capacity and for one more choice of variant and
    /// tile, which needs `needs`.
    pub(crate) fn with(self, needs: &Needs) -> Self {
        let Needs { tiles, flags, locks, pairs, packs, workspace, .. } = *needs;
        let (inbox_half, results_half) = (needs.inbox_half(), needs.results_half());
        let size = self.size;
        let own =
            Self { size, tiles, flags, locks, pairs, packs, inbox_half, results_half, workspace };
        self.max(own)
    }

    /// Maximum of two capacities in each field.
    pub(crate) fn max(self, other: Self) -> Self {
        Self {
            size: self.size.max(other.size),
            tiles: self.tiles.max(other.tiles),
            flags: self.flags.max(other.flags),
            locks: self.locks || other.locks,
            pairs: self.pairs.max(other.pairs),
            packs: self.packs.max(other.packs),
            inbox_half: self.inbox_half.max(other.inbox_half),
            results_half: self.results_half.max(other.results_half),
            workspace: self.workspace.max(other.workspace),
        }
    }

    /// Whether this capacity is at least as large as `other` in every field.
    pub(crate) fn holds(self, other: Self) -> bool {
        self.max(other) == self
    }

    /// Layout parameters of the signal words. `sequence` is the index of the device word with the
    /// number of calls.
    pub(crate) fn shape(&self, sequence: u32) -> Shape {
        let Self { size, tiles, flags, locks, pairs, packs, .. } = *self;
        Shape { op: 0, size, tiles, flags, locks, sequence, pairs, packs }
    }

    fn words(&self) -> Words {
        Channel::lay_out(self.shape(0), 0, 0, 0).1
    }

    /// Number of 32-bit words in the signal segment.
    pub(crate) fn signal_words(&self) -> u32 {
        self.words().signal
    }

    /// Bytes in the signal segment.
    pub(crate) fn signal_bytes(&self) -> u64 {
        u64::from(self.signal_words()) * 4
    }

    /// Number of device-local words.
    pub(crate) fn device_words(&self) -> usize {
        self.words().device as usize
    }

    /// Areas of the workspace in the data segment, each with its size in bytes; areas of size 0 are
    /// left out.
    pub(crate) fn data_blocks(&self) -> Vec<(Area, u64)> {
        let parts = [
            (Area::Inbox, self.inbox_half.saturating_mul(2)),
            (Area::Results, self.results_half.saturating_mul(2)),
            (Area::Workspace, self.workspace),
        ];
        parts.into_iter().filter(|&(_, bytes)| bytes > 0).collect()
    }

    /// Byte offset in the inbox block at which the inbox begins for one choice of variant and tile.
    /// With this offset, the boundary between the halves for even and odd calls is the same for all
    /// choices.
    pub(crate) fn inbox_of(&self, needs: &Needs) -> u64 {
        self.inbox_half - needs.inbox_half()
    }

    /// Byte offset in its block at which the result inbox begins for one choice of variant and
    /// tile. With this offset, the boundary between the halves for even and odd calls is the same
    /// for all choices.
    pub(crate) fn results_of(&self, needs: &Needs) -> u64 {
        self.results_half - needs.results_half()
    }
}

/// Area of the data segment, by its purpose.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Area {
    /// Inbox, which receives tiles from peers.
    Inbox,
    /// Result inbox, which receives finished tiles from the ranks that summed them.
    Results,
    /// Workspace, which holds f32 sums, the gathered A, or other matrices of a call.
    Workspace,
}

impl Area {
    /// Name of the area in errors.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Area::Inbox => "inbox",
            Area::Results => "results",
            Area::Workspace => "workspace",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tests that inbox halves of different parity share no byte, for any two choices whose slots
    /// have different sizes.
    #[test]
    fn halves_of_different_choices_do_not_meet() {
        let inbox = |sources, places, slot| Needs { sources, places, slot, ..Needs::default() };
        let all = [inbox(4, 7, 128), inbox(1, 1, 640), inbox(4, 1, 256), inbox(2, 9, 1152)];
        let extent = all.iter().fold(Extent::default(), |extent, needs| extent.with(needs));
        let [(Area::Inbox, bytes)] = extent.data_blocks()[..] else { panic!("{extent:?}") };
        for needs in &all {
            let (begin, half) = (extent.inbox_of(needs), needs.inbox_half());
            assert_eq!(begin + half, bytes / 2, "the halves meet in the middle: {needs:?}");
            assert!(begin + 2 * half <= bytes && begin % SLOT_ALIGNMENT == 0, "{needs:?}");
        }
    }
}
