// Layout of the synchronisation words of one op; transcribes iris_sync::Channel.
#ifndef IRIS_CHANNEL_H
#define IRIS_CHANNEL_H

#include "iris/memory.h"

namespace iris {

/// Number of 4-byte words in a 128-byte line.
constexpr u32 LINE_WORDS = 32;

/// Number of quads (LL words of 128 bits) of a pack, and number of packs whose quads are
/// interleaved in memory; see iris_sync::Channel.
constexpr u32 QUADS = 4, PACK_LANES = 32;

/// Layout of the words of one op, as word indices; equal on every rank. iris_sync::Channel
/// documents each field.
struct Channel {
    u32 op, rank, size, tiles;
    u32 entries, signals, results, done, barriers, locks;
    u32 call, finished, sequence, flags, flag_count;
    /// `pair_count`: number of pairs of LL words for data from one rank to another; they lie after the
    /// barrier words. `pack_count`: number of packs (48 bytes of data), whose 128-bit words use the memory of
    /// the last of these pairs.
    u32 pair_count, pack_count;

    /// Returns the peer `step` (1 to size - 1) ranks after this one. In a loop over `step`, each
    /// rank begins with its successor, so that the ranks do not all write to one peer at once.
    IRIS_DEVICE u32 peer(u32 step) const {
        const u32 at = rank + step;
        return at < size ? at : at - size;
    }

    /// Returns peer number `step` in an order that starts `turn` places later than the order of
    /// peer(). A workgroup that moves one tile passes the tile's number as `turn`. So the
    /// workgroups start with different peers, and all links are busy.
    IRIS_DEVICE u32 peer_in_turn(u32 step, u32 turn) const {
        const u32 others = size - 1;
        return peer(1 + (step - 1 + turn % others) % others);
    }
};
static_assert(sizeof(Channel) == 68, "the layout of iris_sync::Channel has another size");

/// Synchronisation words of one op (the channel): positions of the words, and accesses of one
/// thread to the words.
struct Words : Memory {
    const Channel& channel;
    IRIS_DEVICE Words(const HeapView& heap, const Channel& channel)
        : Memory{heap}, channel(channel) {}

    // Positions of the words, as in iris_sync::Channel. `at` is the rank in whose memory the word
    // lies.
    IRIS_DEVICE SymWord entry(u32 at, u32 source, u32 parity) const {
        return heap.word(at, channel.entries + u64(source * 2 + parity) * LINE_WORDS);
    }
    IRIS_DEVICE SymWord signal(u32 at, u32 source, u32 tile) const {
        return heap.word(at, channel.signals + u64(source) * channel.tiles + tile);
    }
    IRIS_DEVICE SymWord result(u32 at, u32 owner, u32 tile) const {
        return heap.word(at, channel.results + u64(owner) * channel.tiles + tile);
    }
    IRIS_DEVICE SymWord done(u32 at, u32 reader) const {
        return heap.word(at, channel.done + u64(reader) * LINE_WORDS);
    }
    IRIS_DEVICE SymWord barrier(u32 at, u32 source, u32 phase) const {
        return heap.word(at, channel.barriers + u64(phase * channel.size + source) * LINE_WORDS);
    }
    IRIS_DEVICE SymPair pair(u32 at, u32 source, u32 parity, u32 pair) const {
        const u64 number = u64(parity * channel.size + source) * channel.pair_count + pair;
        return heap.pair(at, channel.barriers + 2 * channel.size * LINE_WORDS + number * 4);
    }
    /// Number of the first pair whose memory is used by a quad (LL word of 128 bits).
    IRIS_DEVICE u32 first_quad() const { return channel.pair_count - QUADS * channel.pack_count; }
    /// First quad (LL word of 128 bits) of a pack; the pack's next quad lies PACK_LANES pairs later.
    IRIS_DEVICE SymPair pack(u32 at, u32 source, u32 parity, u32 pack) const {
        const u32 before = pack / PACK_LANES * QUADS * PACK_LANES + pack % PACK_LANES;
        return pair(at, source, parity, first_quad() + before);
    }
    IRIS_DEVICE SymWord lock(u32 owner, u32 tile) const {
        return heap.word(owner, u64(channel.locks) + tile);
    }
    IRIS_DEVICE SymWord abort(u32 at) const { return heap.word(at, ABORT_WORD); }
    IRIS_DEVICE DevWord flag(u32 unit) const { return heap.device_word(u64(channel.flags) + unit); }
    IRIS_DEVICE DevWord call_word() const { return heap.device_word(channel.call); }
    IRIS_DEVICE DevWord finished_word() const { return heap.device_word(channel.finished); }
    IRIS_DEVICE DevWord sequence_word() const { return heap.device_word(channel.sequence); }
};

} // namespace iris

#endif
