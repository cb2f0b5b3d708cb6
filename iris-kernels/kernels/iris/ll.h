// Words that carry their data: iris_sync::ll, operation by operation. 64 bits, of which four bytes are
// data and four the number of the call: whoever sees the number has the data, without an order.
#ifndef IRIS_LL_H
#define IRIS_LL_H

#include "iris/barrier.h"
#include "iris/entry.h"

namespace iris::ll {

/// Pairs ahead of the data: the fields of an entry record that ranks must agree on.
constexpr u32 HEAD = FIELDS / 2;

/// Sources that one wait is for, at most: they are looked at together, and stay in registers. Of two
/// ranks there is one other, and N, which is so many in what follows, is 1: a small message is over
/// before much code has been run.
constexpr u32 SOURCES = 8;

/// Items of one source that one wait is for, at most: likewise.
constexpr u32 AT_ONCE = 8;

/// Sources whose heads are awaited together beside what a thread holds of a row.
constexpr u32 HEADS_OF_ROWS = 2;

/// Items in rows, of which a workgroup takes whole ones. Every rank sends all of them to every other.
struct Rows {
    /// Items of all rows, and of one; the last may have less.
    u32 items, len;
    /// Whether all workgroups share what is pushed evenly, and not as they take it: a link gets it sooner
    /// from several multiprocessors than from the one that takes a row. Then nobody may write what is
    /// pushed before the launch is over.
    bool spread;

    IRIS_DEVICE bool has(u32 row) const { return row * len < items; }
};

/// Items that a thread pushes or waits for together: the first `count` of so many, in ascending order, of
/// which PIECE lie side by side and the next begin `apart` behind these.
template <u32 ITEMS_, u32 PIECE> struct Batch {
    static constexpr u32 ITEMS = ITEMS_;
    static_assert(ITEMS % PIECE == 0, "whole pieces");
    u32 first, apart, count;

    /// How far behind the first item number `k` lies.
    IRIS_DEVICE u32 behind(u32 k) const { return k / PIECE * apart + k % PIECE; }
    IRIS_DEVICE u32 item(u32 k) const { return first + behind(k); }
    /// The same in bytes, of `width` an item: a constant remains of a number that is one.
    IRIS_DEVICE u64 bytes_behind(u32 k, u32 width) const {
        return u64(k / PIECE * apart) * width + k % PIECE * width;
    }
};

/// Push two words of data to `peer` as pair number `pair`. Needs the credit.
IRIS_DEVICE void push(const Words& m, Call call, u32 peer, u32 pair, const u32 (&data)[2]) {
    m.store_pair<Access::LlStore>(m.pair(peer, m.channel.rank, call.parity(), pair),
                                  LlWord{data[0], call.number()}, LlWord{data[1], call.number()});
}

/// Push number `k` of a batch of items to `peer`.
template <class Batch>
IRIS_DEVICE void push_item(const Words& m, Call call, u32 peer, const Batch& batch, u32 k,
                           const u32 (&data)[2]) {
    const SymPair first = m.pair(peer, m.channel.rank, call.parity(), HEAD + batch.first);
    m.store_pair<Access::LlStore>(first.after_bytes(batch.bytes_behind(k, SymPair::BYTES)),
                                  LlWord{data[0], call.number()}, LlWord{data[1], call.number()});
}

/// Wait for pairs `before` behind these items of those of the N ranks from `first` on that have a bit in
/// `mask`, and put their data into `data`. Any thread.
template <u32 N, class Batch>
IRIS_DEVICE bool wait(const Words& m, Call call, u32 before, const Batch& batch, u32 first, u32 mask,
                      u32 (&data)[N][Batch::ITEMS][2]) {
    constexpr u32 ITEMS = Batch::ITEMS;
    if (mask == 0 || batch.count == 0) return true;
    u32 lowest = first;
    while ((mask >> (lowest - first) & 1) == 0) ++lowest;
    const i32 tile = static_cast<i32>(before + batch.first);
    const Awaited awaited{call, call, lowest, tile, Limit::Progress};
    return poll(m, awaited, [&]() IRIS_INLINE {
        LlWord words[ITEMS][N][2];
        const SymPair begin = m.pair(m.channel.rank, first, call.parity(), before + batch.first);
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

/// The waits of N sources together, each of which `take` gets in ascending order, until it is false. PAIR:
/// there are two ranks.
template <u32 N, bool PAIR, class Batch, class Take>
IRIS_DEVICE bool in_groups(const Words& m, Call call, u32 before, const Batch& batch,
                           Members sources, Take take) {
    const u32 size = m.channel.size, me = m.channel.rank;
    const u64 others = sources.bits & Members::all(size).bits & ~(1ull << me);
    u32 data[N][Batch::ITEMS][2];
    if constexpr (PAIR) {
        static_assert(N == 1, "there is one other");
        const u32 other = 1 - me;
        return (others >> other & 1) == 0 ||
               (wait(m, call, before, batch, other, 1, data) && take(other, data[0]));
    } else {
        IRIS_NO_UNROLL
        for (u32 first = 0; first < size; first += N) {
            const u32 mask = static_cast<u32>(others >> first) & ((1u << N) - 1);
            if (!wait(m, call, before, batch, first, mask, data)) return false;
            IRIS_UNROLL
            for (u32 i = 0; i < N; ++i) {
                if ((mask >> i & 1) == 1 && !take(first + i, data[i])) return false;
            }
        }
        return true;
    }
}

/// Wait for pair number `pair` of each of these sources, and give them to `take` in ascending order,
/// until it is false. Any thread.
template <u32 N = SOURCES, class Take>
IRIS_DEVICE bool each(const Words& m, Call call, u32 pair, Members sources, Take take) {
    const Batch<1, 1> batch{pair, 0, 1};
    return in_groups<N, N == 1>(m, call, 0, batch, sources,
                                [&](u32 source, const u32 (&data)[1][2])
                                    IRIS_INLINE { return take(source, data[0]); });
}

/// Wait for the pairs of these items, of one source after the other in ascending order, and give what each
/// sent to `take`, until it is false. Any thread. PAIR: there are two ranks.
template <bool PAIR, class Batch, class Take>
IRIS_DEVICE bool each_of(const Words& m, Call call, const Batch& batch, Members sources,
                         Take take) {
    return in_groups<1, PAIR>(m, call, HEAD, batch, sources, take);
}

/// Which of some things fall to a thread: number `first`, and every so many behind it.
struct Share {
    u32 first, step;
    IRIS_DEVICE u32 next(u32 item) const { return item + step; }

    /// Those below `end`, so many together: batch number `number`.
    template <u32 ITEMS> IRIS_DEVICE Batch<ITEMS, 1> batch(u32 end, u32 number) const {
        Batch<ITEMS, 1> batch{first + number * (ITEMS * step), step, 0};
        IRIS_UNROLL
        for (u32 k = 0; k < ITEMS; ++k) {
            if (first < end && batch.item(k) < end) batch.count = k + 1;
        }
        return batch;
    }
};

/// Which rows a workgroup takes whole, number `first` and every so many behind it, and which pieces of
/// each fall to this thread: number `thread` of so many threads that take any, if it is one of them.
struct RowShare {
    u32 first, step, thread, threads;

    /// Those of `row`, so many together, in pieces of PIECE side by side: batch number `number`.
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

/// The items of a tile of a message: of each of its rows, which have `across`, those that lie side by side from
/// `first` on. There are `line` of them, a divisor of the threads that take them, so that each keeps its
/// columns; or, at the right edge, the first `there` of so many.
struct Strip {
    u32 rows, across, first, line, there;

    /// Those that fall to a thread, so many together: batch number `number`.
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

/// Push the head of what goes to `peer`: this thread's share of the pairs.
IRIS_DEVICE void push_head(const Words& m, Call call, const Record& record, i32 sequence, u32 peer,
                           Share share) {
    IRIS_NO_UNROLL
    for (u32 pair = share.first; pair < HEAD; pair += share.step) {
        const u32 data[2] = {
            static_cast<u32>(entry::own_field(m, record, sequence, 2 * pair)),
            static_cast<u32>(entry::own_field(m, record, sequence, 2 * pair + 1))};
        push(m, call, peer, pair, data);
    }
}

/// Wait for the heads of what these sources push, and compare them with this rank's own record: this
/// thread's share of the pairs.
template <u32 N>
IRIS_DEVICE bool wait_head(const Words& m, Call call, const Record& record, i32 sequence,
                           Members sources, Share share) {
    IRIS_NO_UNROLL
    for (u32 pair = share.first; pair < HEAD; pair += share.step) {
        const bool agreed = each<N>(m, call, pair, sources, [&](u32 source, const u32 (&data)[2]) {
            IRIS_UNROLL
            for (u32 half = 0; half < 2; ++half) {
                const u32 field = 2 * pair + half;
                const i32 wanted = entry::own_field(m, record, sequence, field);
                const i32 seen = static_cast<i32>(data[half]);
                if (seen != wanted) return entry::mismatch(m, call, source, field, seen, wanted);
            }
            return true;
        });
        if (!agreed) return false;
    }
    return true;
}

/// Refresh the pairs of this call's slot that it did not use: the first `used(peer)` of those for a
/// peer stay. One thread of the last workgroup, in one call of each parity in a period.
template <class Used> IRIS_DEVICE void stamp(const Words& m, Call call, Used used) {
    const LlWord old{0, call.of_same_slot_before().number()};
    IRIS_NO_UNROLL
    for (u32 step = 1; step < m.channel.size; ++step) {
        const u32 peer = m.channel.peer(step);
        IRIS_NO_UNROLL
        for (u32 pair = used(peer); pair < m.channel.pair_count; ++pair) {
            m.store_pair<Access::LlStamp>(m.pair(peer, m.channel.rank, call.parity(), pair), old, old);
        }
    }
}

} // namespace iris::ll

#endif
