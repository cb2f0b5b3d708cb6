// LL protocol for small messages; transcribes iris_sync::ll operation by operation. Each 64-bit
// word has four bytes of data and, as its flag, the number of the call in the other four, so a
// receiver that sees the flag has the data without a memory order. Larger messages consist of words
// of 128 bits, with twelve bytes of data and a flag.
#ifndef IRIS_LL_H
#define IRIS_LL_H

#include "iris/barrier.h"
#include "iris/entry.h"

namespace iris::ll {

/// Number of pairs of LL words in the header, which has the fields of an entry record that ranks must agree
/// on, two per pair.
constexpr u32 HEAD = FIELDS / 2;

/// Largest number of sources that one wait polls together. The number is bounded because a thread
/// holds the data of all these sources in registers. Functions below take it as template parameter
/// N. Kernels for few ranks have a smaller N (1 or FEW), which shortens the code that a small
/// message runs.
constexpr u32 SOURCES = 8, FEW = 4;

/// Largest number of items per source that one wait polls together. The number is bounded because a
/// thread holds the data of all these items in registers.
constexpr u32 AT_ONCE = 8;

/// Number of sources whose headers are polled together in an exchange of rows. The number is small
/// because a thread already holds part of a row in registers.
constexpr u32 HEADS_OF_ROWS = 2;

/// Message that consists of rows of items; one workgroup takes a whole row. Every rank sends all
/// items to every other rank.
struct Rows {
    /// Number of items in all rows together, and in one row. The last row may be shorter.
    u32 items, len;
    /// Whether all workgroups share the pushes evenly; otherwise each workgroup pushes the rows
    /// that it will take. Sharing is faster, because several multiprocessors fill a link sooner
    /// than one. If `spread` is true, the pushed buffer must not be overwritten before the launch
    /// has ended.
    bool spread;

    IRIS_DEVICE bool has(u32 row) const { return row * len < items; }
};

/// Items that a thread pushes or waits for together, in ascending order: `count` of at most ITEMS
/// items, in pieces of PIECE adjacent items with a stride of `stride` items between pieces.
template <u32 ITEMS_, u32 PIECE> struct Batch {
    static constexpr u32 ITEMS = ITEMS_;
    static_assert(ITEMS % PIECE == 0, "a batch must consist of whole pieces");
    u32 first, stride, count;

    /// Distance of item number `k` of the batch from the first item, in items.
    IRIS_DEVICE u32 behind(u32 k) const { return k / PIECE * stride + k % PIECE; }
    IRIS_DEVICE u32 item(u32 k) const { return first + behind(k); }
    /// Distance of item number `k` from the first item in bytes, for `width` bytes per item. It is
    /// a compile-time constant if `k` is constant and in the first piece.
    IRIS_DEVICE u64 bytes_behind(u32 k, u32 width) const {
        return u64(k / PIECE * stride) * width + k % PIECE * width;
    }
};

/// Push two words of data to `peer` as pair number `pair` of the peer's receive region. Call it
/// only after the credit of `peer` has been seen. `peer` has then entered the previous call, and no
/// longer reads the pair of two calls ago, which this push replaces.
IRIS_DEVICE void push(const Words& m, Call call, u32 peer, u32 pair, const u32 (&data)[2]) {
    m.store_pair<Access::LlStore>(m.pair(peer, m.channel.rank, call.parity(), pair),
                                  LlWord{data[0], call.number()}, LlWord{data[1], call.number()});
}

/// Push item number `k` of a batch to `peer`. Call it only after the credit of `peer` has been
/// seen. `peer` has then entered the previous call, and no longer reads the item of two calls ago,
/// which this push replaces.
template <class Batch>
IRIS_DEVICE void push_item(const Words& m, Call call, u32 peer, const Batch& batch, u32 k,
                           const u32 (&data)[2]) {
    const SymPair first = m.pair(peer, m.channel.rank, call.parity(), HEAD + batch.first);
    m.store_pair<Access::LlStore>(first.after_bytes(batch.bytes_behind(k, SymPair::BYTES)),
                                  LlWord{data[0], call.number()}, LlWord{data[1], call.number()});
}

/// Waits for a batch of items from several ranks, and stores their data in `data`. The ranks are
/// those of `first` to `first + N - 1` whose bit in `mask` is set. Item k of the batch is pair
/// `before` + k; `begin` is the first one's place. Any single thread may call this function.
template <u32 N, class Batch>
IRIS_DEVICE bool wait(const Words& m, Call call, SymPair begin, u32 before, const Batch& batch, u32 first,
                      u32 mask, u32 (&data)[N][Batch::ITEMS][2]) {
    constexpr u32 ITEMS = Batch::ITEMS;
    if (mask == 0 || batch.count == 0) return true;
    u32 lowest = first;
    while ((mask >> (lowest - first) & 1) == 0) ++lowest;
    const i32 tile = static_cast<i32>(before + batch.first);
    const Awaited awaited{call, call, lowest, tile, Limit::Progress};
    return poll(m, awaited, [&]() IRIS_INLINE {
        LlWord words[ITEMS][N][2];
        IRIS_UNROLL
        for (u32 k = 0; k < ITEMS; ++k) {
            if (k >= batch.count) break;
            const SymPair place = begin.after_bytes(batch.bytes_behind(k, SymPair::BYTES));
            IRIS_UNROLL
            for (u32 i = 0; i < N; ++i) {
                if ((mask >> i & 1) == 0) continue;
                m.load_pair<Access::LlLoad>(place.after(u64(i) * m.channel.pair_count), words[k][i]);
            }
        }
        Missing missing{false, 0, 0, 0};
        IRIS_UNROLL
        for (u32 k = 0; k < ITEMS; ++k) {
            if (k >= batch.count) break;
            const u32 pair = before + batch.item(k);
            IRIS_UNROLL
            for (u32 i = 0; i < N; ++i) {
                if ((mask >> i & 1) == 0) continue;
                IRIS_UNROLL
                for (u32 half = 0; half < 2; ++half) {
                    const LlWord word = words[k][i][half];
                    data[i][k][half] = word.data;
                    if (!m.is_of<Access::LlLoad>(call, word.call, pair < HEAD) && !missing.any) {
                        missing = Missing{true, first + i, static_cast<i32>(pair), word.call};
                    }
                }
            }
        }
        return missing;
    });
}

/// Wait for the items of `batch` from all `sources`, N sources at a time, and pass the data of each
/// source to `take` in ascending order, until `take` returns false. PAIR: there are two ranks.
template <u32 N, bool PAIR, class Batch, class Take>
IRIS_DEVICE bool in_groups(const Words& m, Call call, u32 before, const Batch& batch,
                           Members sources, Take take) {
    const u32 size = m.channel.size, me = m.channel.rank;
    const u64 others = sources.bits & Members::all(size).bits & ~(1ull << me);
    u32 data[N][Batch::ITEMS][2];
    const auto begin = [&](u32 first) IRIS_INLINE {
        return m.pair(me, first, call.parity(), before + batch.first);
    };
    if constexpr (PAIR) {
        static_assert(N == 1, "between two ranks there is one source");
        const u32 other = 1 - me;
        return (others >> other & 1) == 0 ||
               (wait(m, call, begin(other), before, batch, other, 1, data) && take(other, data[0]));
    } else {
        IRIS_NO_UNROLL
        for (u32 first = 0; first < size; first += N) {
            const u32 mask = static_cast<u32>(others >> first) & ((1u << N) - 1);
            if (!wait(m, call, begin(first), before, batch, first, mask, data)) return false;
            IRIS_UNROLL
            for (u32 i = 0; i < N; ++i) {
                if ((mask >> i & 1) == 1 && !take(first + i, data[i])) return false;
            }
        }
        return true;
    }
}

/// Wait for pair number `pair` (two LL words) from each of the ranks `sources`, and pass the data to `take`
/// in ascending order of sources, until `take` returns false. Any thread may call this function.
template <u32 N = SOURCES, class Take>
IRIS_DEVICE bool each(const Words& m, Call call, u32 pair, Members sources, Take take) {
    const Batch<1, 1> batch{pair, 0, 1};
    return in_groups<N, N == 1>(m, call, 0, batch, sources,
                                [&](u32 source, const u32 (&data)[1][2])
                                    IRIS_INLINE { return take(source, data[0]); });
}

/// Wait for the items of `batch` from one source after the other, in ascending order of sources.
/// Pass the data of each source to `take`, until `take` returns false. Any thread may call this
/// function. PAIR: there are two ranks.
template <bool PAIR, class Batch, class Take>
IRIS_DEVICE bool each_of(const Words& m, Call call, const Batch& batch, Members sources,
                         Take take) {
    return in_groups<1, PAIR>(m, call, HEAD, batch, sources, take);
}

/// Words that a call uses for a peer: the first `pairs` pairs, including the pairs of the header,
/// and the first `packs` packs.
struct Used {
    u32 pairs, packs;
};

/// Item of 8 bytes, which is sent as two LL words of 64 bits (a pair).
struct Ll64 {
    /// Number of 32-bit words of data.
    static constexpr u32 WORDS = 2;
    /// Bytes that the item takes with its flags.
    static constexpr u32 BYTES = 16;

    /// Number of items of a message whose data would fill `pairs` pairs of LL words.
    IRIS_DEVICE static constexpr u32 count(u32 pairs) { return pairs; }

    /// Number of peers whose items a thread loads before it pushes the first of these items.
    /// `sources` is the number of sources that the thread polls together.
    IRIS_DEVICE static constexpr u32 loaded(u32 sources) { return sources; }

    IRIS_DEVICE static Used used(u32 items) { return Used{HEAD + items, 0}; }

    IRIS_DEVICE static void push(const Words& m, Call call, u32 peer, u32 item,
                                 const u32 (&data)[2]) {
        ll::push(m, call, peer, HEAD + item, data);
    }
    /// Wait for item number `item` of each of `sources`, and pass the data to `take` in ascending
    /// order of sources, until `take` returns false. Any thread may call this function.
    template <u32 N, class Take>
    IRIS_DEVICE static bool each(const Words& m, Call call, u32 item, Members sources, Take take) {
        return ll::each<N>(m, call, HEAD + item, sources, take);
    }
};

/// Pack: item of 48 bytes (three vectors of 16), which is sent as four quads (LL words of 128 bits). Each of
/// the first three quads has the first three words of a vector; the last quad has the last word of each
/// vector.
struct Ll128 {
    static constexpr u32 WORDS = 12, BYTES = 64;

    /// Number of vector `i` (0, 1 or 2) of a pack. The vectors of PACK_LANES packs are interleaved,
    /// so that the threads of a warp access adjacent vectors.
    IRIS_DEVICE static constexpr u32 vector(u32 pack, u32 i) {
        return (pack / PACK_LANES * 3 + i) * PACK_LANES + pack % PACK_LANES;
    }
    IRIS_DEVICE static constexpr u32 count(u32 pairs) {
        const u32 vectors = pairs / 2 + pairs % 2, rest = vectors % (3 * PACK_LANES);
        return vectors / (3 * PACK_LANES) * PACK_LANES + (rest < PACK_LANES ? rest : PACK_LANES);
    }

    // A thread holds the data of one pack at a time in registers.
    IRIS_DEVICE static constexpr u32 loaded(u32) { return 1; }

    IRIS_DEVICE static Used used(u32 items) { return Used{HEAD, items}; }

    IRIS_DEVICE static void push(const Words& m, Call call, u32 peer, u32 item,
                                 const u32 (&data)[12]) {
        const SymPair first = m.pack(peer, m.channel.rank, call.parity(), item);
        const i32 flag = call.number();
        IRIS_UNROLL
        for (u32 i = 0; i < 3; ++i) {
            const LlQuad quad{{data[4 * i], data[4 * i + 1], data[4 * i + 2]}, flag};
            m.store_quad<Access::LlStore>(first.after(i * PACK_LANES), quad);
        }
        const LlQuad last{{data[3], data[7], data[11]}, flag};
        m.store_quad<Access::LlStore>(first.after(3 * PACK_LANES), last);
    }

    template <u32 N, class Take>
    IRIS_DEVICE static bool each(const Words& m, Call call, u32 item, Members sources, Take take) {
        u32 data[12];
        if constexpr (N == 1) {
            const u32 other = 1 - m.channel.rank;
            return !sources.contains(other) ||
                   (wait_from(m, call, other, item, data) && take(other, data));
        } else {
            IRIS_NO_UNROLL
            for (u32 source = 0; source < m.channel.size; ++source) {
                if (source == m.channel.rank || !sources.contains(source)) continue;
                if (!wait_from(m, call, source, item, data) || !take(source, data)) return false;
            }
            return true;
        }
    }

  private:
    /// Waits for a pack from `source`, and stores its data in `data`.
    IRIS_DEVICE static bool wait_from(const Words& m, Call call, u32 source, u32 item,
                                      u32 (&data)[12]) {
        const i32 tile = static_cast<i32>(item);
        const SymPair first = m.pack(m.channel.rank, source, call.parity(), item);
        return poll(m, Awaited{call, call, source, tile, Limit::Progress}, [&]() IRIS_INLINE {
            LlQuad quads[QUADS];
            IRIS_UNROLL
            for (u32 i = 0; i < QUADS; ++i) {
                quads[i] = m.load_quad<Access::LlLoad>(first.after(i * PACK_LANES));
            }
            IRIS_UNROLL
            for (u32 i = 0; i < 3; ++i) {
                IRIS_UNROLL
                for (u32 word = 0; word < 3; ++word) data[4 * i + word] = quads[i].data[word];
                data[4 * i + 3] = quads[3].data[i];
            }
            Missing missing{false, 0, 0, 0};
            IRIS_UNROLL
            for (u32 i = 0; i < QUADS; ++i) {
                if (!m.is_of<Access::LlLoad>(call, quads[i].call, false) && !missing.any) {
                    missing = Missing{true, source, tile, quads[i].call};
                }
            }
            return missing;
        });
    }
};

/// Words of the items that this thread sends and receives in an exchange; N as in an exchange.
template <u32 N, class LlUnit> struct PeerWords {
    IRIS_DEVICE PeerWords(const Words&, u32) {}

    IRIS_DEVICE void push(const Words& m, Call call, u32 peer, u32 item,
                          const u32 (&data)[LlUnit::WORDS]) const {
        LlUnit::push(m, call, peer, item, data);
    }
    /// Wait for item number `item` of each of `sources`, and pass the data to `take` in ascending order of
    /// sources, until `take` returns false. Any thread may call this function.
    template <class Take>
    IRIS_DEVICE bool each(const Words& m, Call call, u32 item, Members sources, Take take) const {
        return LlUnit::template each<N>(m, call, item, sources, take);
    }
};

/// Words between two ranks, whose addresses are computed from arguments alone, before the previous launch has
/// ended: a small message consists of few loads, and each address in between would delay it.
template <> class PeerWords<1, Ll64> {
  public:
    /// `first`: this thread's first item.
    IRIS_DEVICE PeerWords(const Words& m, u32 first)
        : out(m.pair(1 - m.channel.rank, m.channel.rank, 0, HEAD + first)),
          in(m.pair(m.channel.rank, 1 - m.channel.rank, 0, HEAD + first)),
          of_parity(m.channel.size * m.channel.pair_count), first(first) {
        out.compute_now();
        in.compute_now();
        port::compute_now(of_parity);
    }

    IRIS_DEVICE void push(const Words& m, Call call, u32, u32 item, const u32 (&data)[2]) const {
        m.store_pair<Access::LlStore>(out.after(behind(call, item)), LlWord{data[0], call.number()},
                                      LlWord{data[1], call.number()});
    }
    template <class Take>
    IRIS_DEVICE bool each(const Words& m, Call call, u32 item, Members sources, Take take) const {
        const u32 other = 1 - m.channel.rank;
        if (!sources.contains(other)) return true;
        u32 data[1][1][2];
        const Batch<1, 1> batch{item, 0, 1};
        return wait(m, call, in.after(behind(call, item)), HEAD, batch, other, 1, data) &&
               take(other, data[0][0]);
    }

  private:
    IRIS_DEVICE u64 behind(Call call, u32 item) const {
        return (call.parity() ? of_parity : 0) + (item - first);
    }
    SymPair out, in;
    u32 of_parity, first;
};

/// This thread's share of a range of items: `first`, `first + step`, ...
struct Share {
    u32 first, step;
    IRIS_DEVICE u32 next(u32 item) const { return item + step; }

    /// Batch number `number` of this thread's items below `end`, with up to ITEMS items.
    template <u32 ITEMS> IRIS_DEVICE Batch<ITEMS, 1> batch(u32 end, u32 number) const {
        Batch<ITEMS, 1> batch{first + number * (ITEMS * step), step, 0};
        IRIS_UNROLL
        for (u32 k = 0; k < ITEMS; ++k) {
            if (first < end && batch.item(k) < end) batch.count = k + 1;
        }
        return batch;
    }
};

/// Rows of a workgroup: `first`, `first + step`, ... In each row, this thread takes every `threads`-th piece
/// (some adjacent items), beginning with piece number `thread`.
struct RowShare {
    u32 first, step, thread, threads;

    /// Batch number `number` of this thread's items of `row`, ITEMS per batch, in pieces of PIECE
    /// adjacent items.
    template <u32 ITEMS, u32 PIECE>
    IRIS_DEVICE Batch<ITEMS, PIECE> batch(const Rows& rows, u32 row, u32 number) const {
        const u32 begin = row * rows.len;
        const u32 within = (thread + number * (ITEMS / PIECE) * threads) * PIECE;
        Batch<ITEMS, PIECE> batch{begin + within, threads * PIECE, 0};
        if (begin >= rows.items || thread >= threads) return batch;
        const u32 left = rows.items - begin, len = rows.len < left ? rows.len : left;
        IRIS_UNROLL
        for (u32 k = 0; k < ITEMS; ++k) {
            if (within + batch.behind(k) < len) batch.count = k + 1;
        }
        return batch;
    }
};

/// Items of one tile of a message: in each row of `across` items, the `line` adjacent items from
/// `first` on. `line` must divide the number of threads, so that each thread stays in one column.
/// At the right edge of the message only the first `there` of the tile's items in a row exist.
struct Strip {
    u32 rows, across, first, line, there;

    /// Batch number `number` of the items of thread `thread` (of `threads`), with up to ITEMS
    /// items.
    template <u32 ITEMS> IRIS_DEVICE Batch<ITEMS, 1> batch(u32 thread, u32 threads, u32 number) const {
        const u32 at = thread % line, step = threads / line, row = thread / line + number * ITEMS * step;
        Batch<ITEMS, 1> batch{row * across + first + at, step * across, 0};
        IRIS_UNROLL
        for (u32 k = 0; k < ITEMS; ++k) {
            if (at < there && row + k * step < rows) batch.count = k + 1;
        }
        return batch;
    }
};

/// Push this thread's share of the header (the call parameters that ranks compare) to the peers `to`.
IRIS_DEVICE void push_head(const Words& m, Call call, const Record& record, i32 sequence,
                           Members to, Share share) {
    IRIS_NO_UNROLL
    for (u32 pair = share.first; pair < HEAD; pair += share.step) {
        const u32 data[2] = {
            static_cast<u32>(entry::own_field(m, record, sequence, 2 * pair)),
            static_cast<u32>(entry::own_field(m, record, sequence, 2 * pair + 1))};
        IRIS_NO_UNROLL
        for (u32 step = 1; step < m.channel.size; ++step) {
            const u32 peer = m.channel.peer(step);
            if (to.contains(peer)) push(m, call, peer, pair, data);
        }
    }
}

/// Wait for this thread's share of the headers (call parameters) of the ranks `sources`, and compare them
/// with this rank's record. Returns false if they differ or the wait fails.
template <u32 N>
IRIS_DEVICE bool wait_head(const Words& m, Call call, const Record& record, i32 sequence,
                           Members sources, Share share) {
    IRIS_NO_UNROLL
    for (u32 pair = share.first; pair < HEAD; pair += share.step) {
        const i32 own[2] = {entry::own_field(m, record, sequence, 2 * pair),
                            entry::own_field(m, record, sequence, 2 * pair + 1)};
        const bool agreed = each<N>(m, call, pair, sources, [&](u32 source, const u32 (&data)[2]) {
            IRIS_UNROLL
            for (u32 half = 0; half < 2; ++half) {
                const i32 seen = static_cast<i32>(data[half]), wanted = own[half];
                if (seen == wanted) continue;
                return entry::mismatch(m, call, source, 2 * pair + half, seen, wanted);
            }
            return true;
        });
        if (!agreed) return false;
    }
    return true;
}

/// Store a new flag into the LL words of this call's slot (receive buffer) that the call has not used, so
/// that no flag becomes 2^31 calls old. The words `used(peer)` are not refreshed, because the peer may not
/// have read them yet. All other words get the number of the previous call of this parity. All threads of the
/// last workgroup call this function and share the words, in one call of each parity per REFRESH_PERIOD
/// calls.
template <class Used> IRIS_DEVICE void stamp(const Words& m, Call call, Used used) {
    const LlWord old{0, call.of_same_slot_before().number()};
    IRIS_NO_UNROLL
    for (u32 step = 1; step < m.channel.size; ++step) {
        const u32 peer = m.channel.peer(step);
        IRIS_NO_UNROLL
        for (u32 pair = used(peer).pairs + port::thread(); pair < m.first_quad();
             pair += port::threads()) {
            m.store_pair<Access::LlStamp>(m.pair(peer, m.channel.rank, call.parity(), pair), old, old);
        }
        const LlQuad quad{{0, 0, 0}, old.call};
        IRIS_NO_UNROLL
        for (u32 pack = used(peer).packs + port::thread(); pack < m.channel.pack_count;
             pack += port::threads()) {
            const SymPair first = m.pack(peer, m.channel.rank, call.parity(), pack);
            IRIS_NO_UNROLL
            for (u32 i = 0; i < QUADS; ++i) {
                m.store_quad<Access::LlStamp>(first.after(i * PACK_LANES), quad);
            }
        }
    }
}

} // namespace iris::ll

#endif
