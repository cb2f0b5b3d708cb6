//! What ops need of a heap: one choice of a plan, and all of several together.

use iris_sync::{Channel, Shape, Words};

/// Places for tiles begin at multiples of this many bytes.
pub(crate) const SLOT_ALIGNMENT: u64 = 128;

/// Device-local words of the counters of an op.
pub(crate) const COUNTER_WORDS: usize = iris_kernels::args::counter::COUNT * 2;

/// Device-local words of an op itself: its counters, then number and sequence of a call for a kernel
/// beside it.
pub(crate) const OWN_WORDS: usize = COUNTER_WORDS + 2;

/// What the workspace of a choice consists of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Needs {
    /// Tiles with a signal.
    pub(crate) tiles: u32,
    /// Flags of a staged gather.
    pub(crate) flags: u32,
    /// A lock a tile.
    pub(crate) locks: bool,
    /// Pairs of words that carry data, from one rank to another.
    pub(crate) pairs: u32,
    /// Places for tiles in the inbox, a source and parity.
    pub(crate) places: u32,
    /// Sources that have such places.
    pub(crate) sources: u32,
    /// Bytes of a place: whole vectors.
    pub(crate) slot: u64,
    /// Places in the result inbox, a parity.
    pub(crate) results: u32,
    /// Bytes of such a place: whole vectors.
    pub(crate) result_slot: u64,
    /// Bytes of the f32 workspace or the staging buffer.
    pub(crate) workspace: u64,
    /// Columns of A in a unit of a staged gather.
    pub(crate) k_group: u32,
}

impl Needs {
    /// Bytes of the inbox of one parity.
    pub(crate) fn inbox_half(&self) -> u64 {
        (u64::from(self.sources) * u64::from(self.places)).saturating_mul(self.slot)
    }

    /// Bytes of the result inbox of one parity.
    pub(crate) fn results_half(&self) -> u64 {
        u64::from(self.results).saturating_mul(self.result_slot)
    }
}

/// What a workspace has room for: the largest of what its ops need.
///
/// Calls that are done in different ways take turns in it. Both halves of an inbox, one for each parity
/// of the call number, are where they are for all of them: what a call writes into its half cannot
/// meet what a slower rank still reads of the call before, in the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Extent {
    /// How many ranks there are.
    size: u32,
    tiles: u32,
    flags: u32,
    locks: bool,
    pairs: u32,
    inbox_half: u64,
    results_half: u64,
    workspace: u64,
}

impl Extent {
    /// Room for nothing but the words of `size` ranks.
    pub(crate) fn new(size: u32) -> Self {
        Self { size, ..Self::default() }
    }

    /// This one, with room for that, too.
    pub(crate) fn with(self, needs: &Needs) -> Self {
        Self {
            size: self.size,
            tiles: self.tiles.max(needs.tiles),
            flags: self.flags.max(needs.flags),
            locks: self.locks || needs.locks,
            pairs: self.pairs.max(needs.pairs),
            inbox_half: self.inbox_half.max(needs.inbox_half()),
            results_half: self.results_half.max(needs.results_half()),
            workspace: self.workspace.max(needs.workspace),
        }
    }

    /// With room for either.
    pub(crate) fn max(self, other: Self) -> Self {
        Self {
            size: self.size.max(other.size),
            tiles: self.tiles.max(other.tiles),
            flags: self.flags.max(other.flags),
            locks: self.locks || other.locks,
            pairs: self.pairs.max(other.pairs),
            inbox_half: self.inbox_half.max(other.inbox_half),
            results_half: self.results_half.max(other.results_half),
            workspace: self.workspace.max(other.workspace),
        }
    }

    /// Whether there is room for all of the other.
    pub(crate) fn holds(self, other: Self) -> bool {
        self.max(other) == self
    }

    /// The words, which count calls by the device word `sequence`.
    pub(crate) fn shape(&self, sequence: u32) -> Shape {
        let Self { size, tiles, flags, locks, pairs, .. } = *self;
        Shape { op: 0, size, tiles, flags, locks, sequence, pairs }
    }

    fn words(&self) -> Words {
        Channel::lay_out(self.shape(0), 0, 0, 0).1
    }

    /// Words of the signal segment.
    pub(crate) fn signal_words(&self) -> u32 {
        self.words().signal
    }

    /// Bytes of the signal segment.
    pub(crate) fn signal_bytes(&self) -> u64 {
        u64::from(self.signal_words()) * 4
    }

    /// Device-local words.
    pub(crate) fn device_words(&self) -> usize {
        self.words().device as usize
    }

    /// The blocks of the data segment, by what they are for.
    pub(crate) fn data_blocks(&self) -> Vec<(Area, u64)> {
        let parts = [
            (Area::Inbox, self.inbox_half.saturating_mul(2)),
            (Area::Results, self.results_half.saturating_mul(2)),
            (Area::Workspace, self.workspace),
        ];
        parts.into_iter().filter(|&(_, bytes)| bytes > 0).collect()
    }

    /// Where the inbox of a choice begins, counted from the block: its two halves meet where those of
    /// the largest do.
    pub(crate) fn inbox_of(&self, needs: &Needs) -> u64 {
        self.inbox_half - needs.inbox_half()
    }

    /// The same of the result inbox.
    pub(crate) fn results_of(&self, needs: &Needs) -> u64 {
        self.results_half - needs.results_half()
    }
}

/// What a block of the data segment is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Area {
    /// Tiles from peers.
    Inbox,
    /// Results from the owners of tiles.
    Results,
    /// Sums, or what is gathered.
    Workspace,
}

impl Area {
    /// The name in errors.
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

    /// Whatever the shapes of two choices, no byte of one parity is one of the other.
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
