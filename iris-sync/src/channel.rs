use crate::{DevWord, Field, SymPair, SymWord};

/// Size of a [`SymPair`], in 4-byte words.
const PAIR_WORDS: u32 = 4;

/// Number of pairs of LL words (data with a call number as flag) that form the header of an LL
/// message. The header holds the fields of an entry record that must be equal on all ranks, two
/// fields per pair.
pub const HEAD: u32 = Field::ALL.len() as u32 / 2;

/// Number of quads (LL words of 128 bits, data with a flag) in a pack, the larger message unit of
/// the LL protocol. In memory a quad takes the place of one [`SymPair`].
pub const QUADS: u32 = 4;

/// Number of packs (messages of four 128-bit quads) whose quads are interleaved in memory, so that
/// the threads of a warp, each with its own pack, access adjacent quads.
pub const PACK_LANES: u32 = 32;

/// Number of 4-byte words in a 128-byte cache line.
pub const LINE_WORDS: u32 = 32;

/// Index, among the device words of an op, of the op's own counter of finished calls. Only ops in
/// which not all ranks take part use it. Ops of all ranks use the common counter of the heap.
pub const PRIVATE_SEQUENCE: u32 = 2;

/// Layout of the synchronisation words of one op. The layout is the same on every rank, because the
/// heap gives the same offsets on every rank.
///
/// `repr(C)` with `u32` fields only, because kernels receive it by value. All positions are indices
/// of 4-byte words: symmetric words count from the start of a rank's signal segment, device words
/// from the start of the rank's device words.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct Channel {
    /// Number that identifies the op within its heap.
    pub op: u32,
    /// Number of this rank in its world.
    pub rank: u32,
    /// Number of ranks.
    pub size: u32,
    /// Number of tiles of the op's largest plan, rounded up to a multiple of [`LINE_WORDS`]: the
    /// stride between ranks in the signal and result words.
    pub tiles: u32,
    /// Index of the first word of the entry records, `[source][parity][LINE_WORDS]`. By its record
    /// a source rank describes the call that it has entered.
    pub entries: u32,
    /// Index of the first signal word, `[source][tiles]`. Rank `source` sets a signal when its tile
    /// has arrived at this rank.
    pub signals: u32,
    /// Index of the first result word, `[owner][tiles]`. The owner of a tile sets the word when the
    /// tile's result has arrived at this rank.
    pub results: u32,
    /// Index of the first done word, `[reader][LINE_WORDS]`. Rank `reader` sets the word when it
    /// has read this rank's data.
    pub done: u32,
    /// Index of the first barrier word, `[phase][source][LINE_WORDS]`. A call has at most two
    /// barriers, the phases 0 and 1.
    pub barriers: u32,
    /// Index of the first lock word, `[tile]`. A tile's lock is used only in the memory of the rank
    /// that owns the tile.
    pub locks: u32,
    /// Index of the device word that holds the number of the op's current call.
    pub call: u32,
    /// Index of the device word that counts the workgroups that have finished a launch.
    pub finished: u32,
    /// Index of the heap's device word that counts finished calls of all ops of the heap.
    pub sequence: u32,
    /// Index of the first device word of the flags of a staged gather, `[unit]`: one flag for each
    /// unit of the staging buffer, set when the unit is filled.
    pub flags: u32,
    /// Number of staging flags: one for each unit of the staging buffer.
    pub flag_count: u32,
    /// Number of places for pairs of 64-bit LL words per source rank. First come the pairs of the
    /// largest plan (header, then data), rounded up to a whole cache line. Then come the quads
    /// (128-bit LL words) of its packs, each in the place of one pair. All places lie after the
    /// barrier words, `[parity][source][pair_count]`.
    pub pair_count: u32,
    /// Number of packs (four 128-bit quads each) per source rank, a multiple of [`PACK_LANES`].
    pub pack_count: u32,
}

/// Numbers of synchronisation words that the [`Channel`] of one op occupies.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Words {
    /// Number of 4-byte words in the signal segment.
    pub signal: u32,
    /// Number of 4-byte device words.
    pub device: u32,
}

impl Channel {
    /// Assign positions to the words of the op that `shape` describes: symmetric words start at
    /// index `signal`, device words at index `device`.
    ///
    /// `signal` must be a multiple of [`LINE_WORDS`]. Returns the channel of `rank`, and the number
    /// of words that the channel occupies.
    pub fn lay_out(shape: Shape, rank: u32, signal: u32, device: u32) -> (Self, Words) {
        let Shape { op, size, tiles, flags, locks, sequence, pairs, packs } = shape;
        let tiles = tiles.next_multiple_of(LINE_WORDS);
        let pack_count = packs.next_multiple_of(PACK_LANES);
        let pair_count = match (pairs, packs) {
            (0, 0) => 0,
            _ => (HEAD + pairs).next_multiple_of(LINE_WORDS / PAIR_WORDS) + QUADS * pack_count,
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
            pack_count,
        };
        let device = LINE_WORDS + flags.next_multiple_of(LINE_WORDS);
        (channel, Words { signal: next - signal, device })
    }

    /// First word of the entry record that rank `source` writes at rank `at` for calls of this
    /// parity. The record describes the call that `source` has entered.
    pub fn entry(&self, at: u32, source: u32, parity: u32) -> SymWord {
        SymWord { rank: at, index: self.entries + (source * 2 + parity) * LINE_WORDS }
    }

    /// Word at rank `at` that rank `source` sets when its data of `tile` has arrived at `at`.
    pub fn signal(&self, at: u32, source: u32, tile: u32) -> SymWord {
        debug_assert!(tile < self.tiles, "tile {tile} of {}", self.tiles);
        SymWord { rank: at, index: self.signals + source * self.tiles + tile }
    }

    /// Result word at rank `at` that `owner` sets when the result of `tile` has arrived.
    pub fn result(&self, at: u32, owner: u32, tile: u32) -> SymWord {
        debug_assert!(tile < self.tiles, "tile {tile} of {}", self.tiles);
        SymWord { rank: at, index: self.results + owner * self.tiles + tile }
    }

    /// Done word at rank `at`, which `reader` sets when it has read everything that it reads from
    /// `at` in a call.
    pub fn done(&self, at: u32, reader: u32) -> SymWord {
        SymWord { rank: at, index: self.done + reader * LINE_WORDS }
    }

    /// Barrier word at rank `at` that `source` sets in the barrier with number `phase`.
    pub fn barrier(&self, at: u32, source: u32, phase: u32) -> SymWord {
        SymWord { rank: at, index: self.barriers + (phase * self.size + source) * LINE_WORDS }
    }

    /// Address of pair number `pair` of LL words (data with a flag in each word) that rank `source`
    /// writes at rank `at` in calls of this parity.
    pub fn pair(&self, at: u32, source: u32, parity: u32, pair: u32) -> SymPair {
        debug_assert!(pair < self.pair_count, "pair {pair} of {}", self.pair_count);
        let first = self.barriers + 2 * self.size * LINE_WORDS;
        let number = (parity * self.size + source) * self.pair_count + pair;
        SymPair { rank: at, index: first + number * PAIR_WORDS }
    }

    /// Number of the first pair place that is used for a quad (a 128-bit LL word). The places
    /// before it hold pairs of 64-bit LL words: headers, and items of eight bytes.
    pub fn first_quad(&self) -> u32 {
        self.pair_count - QUADS * self.pack_count
    }

    /// Address of quad number `quad` (a 128-bit LL word) of pack number `pack` (four quads), which
    /// rank `source` writes at rank `at` in calls of this parity. The quads of [`PACK_LANES`] packs
    /// are interleaved.
    pub fn quad(&self, at: u32, source: u32, parity: u32, (pack, quad): (u32, u32)) -> SymPair {
        debug_assert!(pack < self.pack_count, "pack {pack} of {}", self.pack_count);
        let (block, lane) = (pack / PACK_LANES, pack % PACK_LANES);
        let before = (block * QUADS + quad) * PACK_LANES + lane;
        self.pair(at, source, parity, self.first_quad() + before)
    }

    /// Lock word of `tile`, which lies at the rank that owns the tile.
    pub fn lock(&self, owner: u32, tile: u32) -> SymWord {
        debug_assert!(tile < self.tiles, "tile {tile} of {}", self.tiles);
        SymWord { rank: owner, index: self.locks + tile }
    }

    /// Device word that is set when unit (piece) number `unit` of the staging buffer is filled.
    pub fn flag(&self, unit: u32) -> DevWord {
        debug_assert!(unit < self.flag_count, "unit {unit} of {}", self.flag_count);
        DevWord { index: self.flags + unit }
    }

    /// All other ranks in ascending order, starting at the rank after this one and wrapping around,
    /// so that the ranks do not all write to the same peer at once.
    pub fn peers(&self) -> impl Iterator<Item = u32> + use<> {
        self.peers_in_turn(0)
    }

    /// All other ranks in ascending order with wrap-around, starting `turn` places later than
    /// [`Channel::peers`]. A workgroup that sends one tile passes the tile's number as `turn`, so
    /// that workgroups start with different peers and all links are busy.
    pub fn peers_in_turn(&self, turn: u32) -> impl Iterator<Item = u32> + use<> {
        let Self { rank, size, .. } = *self;
        let others = size - 1;
        (0..others).map(move |step| (rank + 1 + (step + turn % others) % others) % size)
    }
}

/// Input of [`Channel::lay_out`]: the id of an op, and the number of words of each kind that the op
/// needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Shape {
    /// Number that identifies the op within its heap.
    pub op: u32,
    /// Number of ranks of the world.
    pub size: u32,
    /// Number of tiles of the largest plan.
    pub tiles: u32,
    /// Number of flags in the largest plan; each says that one unit of the staging buffer is
    /// filled.
    pub flags: u32,
    /// Whether the op needs a lock for each tile.
    pub locks: bool,
    /// Index of the heap's device word that counts finished calls of all ops.
    pub sequence: u32,
    /// Number of pairs of LL words (data only, without header) from one rank to another in the
    /// largest plan.
    pub pairs: u32,
    /// Number of packs (groups of 48 bytes of data with their LL flags, [`crate::ll::Ll128`]) that
    /// one rank sends to another in the largest plan.
    pub packs: u32,
}
