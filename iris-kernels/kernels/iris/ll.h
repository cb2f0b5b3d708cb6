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

/// Push two words of data to `peer` as pair number `pair`. Needs the credit.
IRIS_DEVICE void push(const Words& m, Call call, u32 peer, u32 pair, const u32 (&data)[2]) {
    m.store_pair<Access::LlStore>(m.pair(peer, m.channel.rank, call.parity(), pair),
                                  LlWord{data[0], call.number()}, LlWord{data[1], call.number()});
}

/// Wait for pair number `pair` of those of the N ranks from `first` on that have a bit in `mask`, and put
/// its data into `data`. Any thread.
template <u32 N>
IRIS_DEVICE bool wait(const Words& m, Call call, u32 pair, u32 first, u32 mask, u32 (&data)[N][2]) {
    if (mask == 0) return true;
    u32 lowest = first;
    while ((mask >> (lowest - first) & 1) == 0) ++lowest;
    const Awaited awaited{call, call, lowest, static_cast<i32>(pair), Limit::Progress};
    return poll(m, awaited, [&]() IRIS_INLINE {
        LlWord words[N][2];
        const SymPair place = m.pair(m.channel.rank, first, call.parity(), pair);
        IRIS_UNROLL
        for (u32 i = 0; i < N; ++i) {
            if ((mask >> i & 1) == 0) continue;
            m.load_pair<Access::LlLoad>(place.after(u64(i) * m.channel.pair_count), words[i]);
        }
        Missing missing{false, 0, 0};
        IRIS_UNROLL
        for (u32 i = 0; i < N; ++i) {
            if ((mask >> i & 1) == 0) continue;
            IRIS_UNROLL
            for (u32 half = 0; half < 2; ++half) {
                const LlWord word = words[i][half];
                data[i][half] = word.data;
                if (!m.is_of<Access::LlLoad>(call, word.call, pair < HEAD) && !missing.any) {
                    missing = Missing{true, first + i, word.call};
                }
            }
        }
        return missing;
    });
}

/// Wait for pair number `pair` of each of these sources, and give them to `take` in ascending order,
/// until it is false. Any thread.
template <u32 N = SOURCES, class Take>
IRIS_DEVICE bool each(const Words& m, Call call, u32 pair, Members sources, Take take) {
    const u32 size = m.channel.size, me = m.channel.rank;
    const u64 others = sources.bits & Members::all(size).bits & ~(1ull << me);
    u32 data[N][2];
    if constexpr (N == 1) {
        const u32 other = 1 - me;
        return (others >> other & 1) == 0 ||
               (wait(m, call, pair, other, 1, data) && take(other, data[0]));
    } else {
        IRIS_NO_UNROLL
        for (u32 first = 0; first < size; first += N) {
            const u32 mask = static_cast<u32>(others >> first) & ((1u << N) - 1);
            if (!wait(m, call, pair, first, mask, data)) return false;
            IRIS_UNROLL
            for (u32 i = 0; i < N; ++i) {
                if ((mask >> i & 1) == 1 && !take(first + i, data[i])) return false;
            }
        }
        return true;
    }
}

/// Which of some things fall to a thread: number `first`, and every so many behind it.
struct Share {
    u32 first, step;
    IRIS_DEVICE u32 next(u32 item) const { return item + step; }
};

/// The same where they come in rows of `len`, of which a workgroup takes whole ones, `apart` from the first
/// of one to that of the next.
struct RowShare {
    u32 first, step, len, apart;
    IRIS_DEVICE u32 next(u32 item) const {
        const u32 within = item % len;
        return within + step < len ? item + step : item - within + apart + first % len;
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
