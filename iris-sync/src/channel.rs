use crate::{DevWord, SymPair, SymWord};

/// 4-byte words of a [`SymPair`].
const PAIR_WORDS: u32 = 4;

/// Words in a 128-byte line.
pub const LINE_WORDS: u32 = 32;

/// Device word of an op, counted from its first, that counts the calls of an op which not all ranks
/// take part in.
pub const PRIVATE_SEQUENCE: u32 = 2;

/// Where the words of one op lie: the same on every rank, since the heap gives the same offsets.
///
/// `repr(C)` and made of `u32` alone, because kernels get it by value. All positions are indices of
/// 4-byte words: symmetric ones from the start of a rank's signal segment, device ones from the
/// start of its device words.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct Channel {
    /// Id of the op in its heap.
    pub op: u32,
    /// This rank.
    pub rank: u32,
    /// How many ranks there are.
    pub size: u32,
    /// Tiles of the largest plan, rounded up to a line: the stride of signals and results.
    pub tiles: u32,
    /// Entry records `[source][parity][LINE_WORDS]`.
    pub entries: u32,
    /// Signals `[source][tiles]`, set by the source.
    pub signals: u32,
    /// Second signals `[owner][tiles]`, set by the owner of a tile for its result.
    pub results: u32,
    /// Done words `[reader][LINE_WORDS]`, set by the reader.
    pub done: u32,
    /// Barrier words `[phase][source][LINE_WORDS]`, two phases.
    pub barriers: u32,
    /// Locks `[tile]` at the owner of the tile.
    pub locks: u32,
    /// Device word: number of the call.
    pub call: u32,
    /// Device word: workgroups that have finished.
    pub finished: u32,
    /// Device word of the heap: how many calls of any op were finished.
    pub sequence: u32,
    /// Device words: flags `[unit]` of a staged gather.
    pub flags: u32,
    /// How many flags there are.
    pub flag_count: u32,
    /// Words that carry data come in pairs `[parity][source][pair_count]`, behind the barrier words.
    /// So many of a source: those of the largest plan, with the head, rounded up to a line.
    pub pair_count: u32,
}

/// How many words a channel needs, before the heap has said where they lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Words {
    /// Words of the signal segment.
    pub signal: u32,
    /// Words of this device.
    pub device: u32,
}

impl Channel {
    /// Lay out the words of an op for `size` ranks, at most `tiles` tiles and `flags` flags, with
    /// the first symmetric word at `signal` and the first device word at `device`.
    ///
    /// `signal` must be a multiple of [`LINE_WORDS`]. `locks` says whether the op needs them.
    /// Returns the channel of `rank` and how many words it takes.
    pub fn lay_out(shape: Shape, rank: u32, signal: u32, device: u32) -> (Self, Words) {
        let Shape { op, size, tiles, flags, locks, sequence, pairs } = shape;
        let tiles = tiles.next_multiple_of(LINE_WORDS);
        let pair_count = match pairs {
            0 => 0,
            pairs => (crate::ll::HEAD + pairs).next_multiple_of(LINE_WORDS / PAIR_WORDS),
        };
        let mut next = signal;
        let mut take = |words: u32| {
            let first = next;
            next += words;
            first
        };
        let entries = take(size * 2 * LINE_WORDS);
        let signals = take(size * tiles);
        let results = take(size * tiles);
        let done = take(size * LINE_WORDS);
        let barriers = take(2 * size * LINE_WORDS);
        take(2 * size * pair_count * PAIR_WORDS);
        let locks = take(if locks { tiles } else { 0 });
        let channel = Self {
            op,
            rank,
            size,
            tiles,
            entries,
            signals,
            results,
            done,
            barriers,
            locks,
            call: device,
            finished: device + 1,
            sequence,
            flags: device + LINE_WORDS,
            flag_count: flags,
            pair_count,
        };
        let device = LINE_WORDS + flags.next_multiple_of(LINE_WORDS);
        (channel, Words { signal: next - signal, device })
    }

    /// The entry record that `source` keeps at rank `at` for calls of this parity: its first word.
    pub fn entry(&self, at: u32, source: u32, parity: u32) -> SymWord {
        SymWord { rank: at, index: self.entries + (source * 2 + parity) * LINE_WORDS }
    }

    /// The signal of `source` for `tile` at rank `at`.
    pub fn signal(&self, at: u32, source: u32, tile: u32) -> SymWord {
        debug_assert!(tile < self.tiles, "tile {tile} of {}", self.tiles);
        SymWord { rank: at, index: self.signals + source * self.tiles + tile }
    }

    /// The signal of `owner` for the result of `tile` at rank `at`.
    pub fn result(&self, at: u32, owner: u32, tile: u32) -> SymWord {
        debug_assert!(tile < self.tiles, "tile {tile} of {}", self.tiles);
        SymWord { rank: at, index: self.results + owner * self.tiles + tile }
    }

    /// The done word of `reader` at rank `at`.
    pub fn done(&self, at: u32, reader: u32) -> SymWord {
        SymWord { rank: at, index: self.done + reader * LINE_WORDS }
    }

    /// The word of `source` at rank `at` in barrier `phase`.
    pub fn barrier(&self, at: u32, source: u32, phase: u32) -> SymWord {
        SymWord { rank: at, index: self.barriers + (phase * self.size + source) * LINE_WORDS }
    }

    /// Pair number `pair` of those that `source` pushes to rank `at` in calls of this parity.
    pub fn pair(&self, at: u32, source: u32, parity: u32, pair: u32) -> SymPair {
        debug_assert!(pair < self.pair_count, "pair {pair} of {}", self.pair_count);
        let first = self.barriers + 2 * self.size * LINE_WORDS;
        let number = (parity * self.size + source) * self.pair_count + pair;
        SymPair { rank: at, index: first + number * PAIR_WORDS }
    }

    /// The lock of `tile` at its owner.
    pub fn lock(&self, owner: u32, tile: u32) -> SymWord {
        debug_assert!(tile < self.tiles, "tile {tile} of {}", self.tiles);
        SymWord { rank: owner, index: self.locks + tile }
    }

    /// The flag of a unit of the staging buffer.
    pub fn flag(&self, unit: u32) -> DevWord {
        debug_assert!(unit < self.flag_count, "unit {unit} of {}", self.flag_count);
        DevWord { index: self.flags + unit }
    }

    /// The other ranks, beginning behind this one, so that not all write to the same rank at once.
    pub fn peers(&self) -> impl Iterator<Item = u32> + use<> {
        self.peers_in_turn(0)
    }

    /// The same, beginning with another one for each `turn`: workgroups that move one tile each, of a
    /// number of its own, move them to different peers, so that the links to all of them are busy.
    pub fn peers_in_turn(&self, turn: u32) -> impl Iterator<Item = u32> + use<> {
        let Self { rank, size, .. } = *self;
        let others = size - 1;
        (0..others).map(move |step| (rank + 1 + (step + turn % others) % others) % size)
    }
}

/// What [`Channel::lay_out`] lays out.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Shape {
    /// Id of the op in its heap.
    pub op: u32,
    /// How many ranks there are.
    pub size: u32,
    /// Tiles of the largest plan.
    pub tiles: u32,
    /// Flags of the largest plan.
    pub flags: u32,
    /// Whether there is a lock a tile.
    pub locks: bool,
    /// Device word of the heap that counts calls.
    pub sequence: u32,
    /// Pairs of words that carry data, of the largest plan, from one rank to another.
    pub pairs: u32,
}
