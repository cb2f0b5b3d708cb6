// Skeletons of collectives of small messages, which use the LL protocol (data and flag in one word);
// transcribes iris_sync::flow::ll. The file is long because it has the skeletons of items, rows, parts and tiles.
#ifndef IRIS_FLOW_LL_H
#define IRIS_FLOW_LL_H

#include "iris/flow/launch.h"

namespace iris::flow {

// Functions that the template arguments must have; an item is an ll::Ll64 or an ll::Ll128:
// Exchange: sent(from, to)              number of items that `from` sends to `to`
// Body: load(first, item)               begin to load `item` for LlUnit::loaded(N) peers: peer(first) and
//                                       those after it in the channel
//       give(i, peer, item, data)       return in `data` the item for peer(first + i), loaded before
//       begin(item)                     load this rank's own `item`, or store it at its destination
//       take(source, item, data)        take `item` from `source`; sources come in ascending order
//       end(item)                       all contributions have been taken: store the item

/// Peers with which this rank exchanges headers (the call parameters that ranks compare): peers to which this
/// rank sends items (`to`), and peers that send items to this rank (`from`). If this rank's message is empty,
/// it exchanges headers with all peers, so that a peer whose message is not empty is told of the difference.
struct Heads {
    Members to{0}, from{0};
    /// Largest number of items that this rank sends to a peer, and that a rank sends to this one.
    u32 pushed = 0, taken = 0;

    /// Determines the peers from arguments of the kernel only, without access to memory.
    template <class Exchange> IRIS_DEVICE Heads(const Channel& channel, const Exchange& exchange) {
        const u32 me = channel.rank;
        IRIS_NO_UNROLL
        for (u32 rank = 0; rank < channel.size; ++rank) {
            const u32 out = exchange.sent(me, rank), in = exchange.sent(rank, me);
            if (in > taken) taken = in;
            if (rank == me) continue;
            if (out > pushed) pushed = out;
            to.bits |= u64(out > 0) << rank;
            from.bits |= u64(in > 0) << rank;
        }
        if ((to.bits | from.bits) == 0) to = from = all(channel);
    }
    /// Set of all ranks; empty if the channel has no room for headers.
    static IRIS_DEVICE Members all(const Channel& channel) {
        return channel.pair_count == 0 ? Members{0} : Members::all(channel.size);
    }
};

/// Part of an exchange that is computed from arguments alone, before the previous launch has ended.
template <u32 N, class LlUnit = ll::Ll64> struct ExchangeArgs {
    const Heads heads;
    const ll::Share share;
    const ll::PeerWords<N, LlUnit> words;
    /// Credits of the only peer, if there are two ranks.
    const entry::Credits credits;

    /// `index`: number of this workgroup, of `count`.
    template <class Exchange>
    IRIS_DEVICE ExchangeArgs(const Words& m, u32 index, u32 count, const Exchange& exchange)
        : heads(m.channel, exchange), share(Workgroup::share_of_threads(index, count)),
          words(m, share.first), credits(m, m.channel.peer(1)) {
        port::compute_now(share.first);
        port::compute_now(share.step);
        if constexpr (N == 1) credits.compute_now();
    }
};

/// Words that a call uses for `peer`, to which it sends `items` items and, if the peer is one of
/// `heads`, a header.
template <class LlUnit = ll::Ll64> IRIS_DEVICE ll::Used used_words(Members heads, u32 peer, u32 items) {
    return heads.contains(peer) ? LlUnit::used(items) : ll::Used{0, 0};
}

/// Announce to the peers that this rank has entered the call, and push headers and the items of this thread:
/// item after item, each to all peers. Returns false if the call cannot be finished. `most` is the largest
/// number of items for any peer, `sent(peer)` the number of items for `peer`; `load(first, item)` and
/// `give(i, peer, item, data)` are those of Body in an exchange.
/// EACH_TAKES_CREDIT: each thread takes the credit of the only peer itself, and pushes without a vote before it.
template <bool EACH_TAKES_CREDIT, u32 N, class LlUnit, class Sent, class Load, class Give>
IRIS_DEVICE bool push_items(Workgroup& wg, const ExchangeArgs<N, LlUnit>& given, u32 most, Sent sent, Load load,
                            Give give) {
    constexpr u32 LOADED = LlUnit::loaded(N);
    const ll::Share& share = given.share;
    const Members heads = given.heads.to;
    // A constant for two ranks shortens the loops over peers.
    const u32 size = N == 1 ? 2 : wg.size();
    const auto push = [&]() IRIS_INLINE {
        IRIS_NO_UNROLL
        for (u32 item = share.first; item < most; item = share.next(item)) {
            IRIS_NO_UNROLL
            for (u32 first = 1; first < size; first += LOADED) {
                if (item != share.first || first != 1) load(first, item);
                IRIS_UNROLL
                for (u32 i = 0; i < LOADED; ++i) {
                    if (first + i >= size) break;
                    const u32 peer = wg.peer(first + i);
                    if (item >= sent(peer)) continue;
                    u32 data[LlUnit::WORDS];
                    give(i, peer, item, data);
                    given.words.push(wg.m, wg.call(), peer, item, data);
                }
            }
        }
    };
    // The items are loaded while the thread waits for the peers' credits (permission to write to
    // their slots).
    if (share.first < most) load(1, share.first);
    // All threads of a wave push before any of these threads waits for items. Otherwise, in a lockstep wave,
    // a waiting thread could hold up pushes that peers wait for.
    if constexpr (EACH_TAKES_CREDIT) {
        const bool pushed = port::divergent([&]() IRIS_INLINE {
            if (!wg.begin_push_of_thread(heads, given.credits)) return false;
            wg.trace.begin(Span::Signal, 0);
            wg.push_header(heads);
            push();
            return true;
        });
        if (!wg.leave_together(pushed)) return false;
        wg.count_out();
        port::divergent([&]() IRIS_INLINE {
            wg.announce();
            return true;
        });
    } else {
        if (!wg.begin_push(heads)) return false;
        wg.trace.begin(Span::Signal, 0);
        wg.count_out();
        port::divergent([&]() IRIS_INLINE {
            wg.push_head(heads);
            push();
            return true;
        });
    }
    wg.trace.end(Span::Signal);
    return true;
}

/// Wait for item `item` of each rank for which `sends` returns true, and pass the data to `take`, in
/// ascending order of ranks; false on failure. `shown` is the number of the wait in a trace.
template <u32 N, class LlUnit, class Sends, class Take>
IRIS_DEVICE bool take_item(Workgroup& wg, const ll::PeerWords<N, LlUnit>& words, u32 item, u32 shown, Sends sends,
                           Take take) {
    Members sources{0};
    const u32 size = N == 1 ? 2 : wg.size();
    IRIS_NO_UNROLL
    for (u32 rank = 0; rank < size; ++rank) sources.bits |= u64(sends(rank)) << rank;
    if (port::thread() == 0) wg.trace.add(Counter::Waits, 1);
    wg.trace.begin(Span::Wait, shown);
    const bool passed = words.each(wg.m, wg.call(), item, sources,
                                   [&](u32 source, const u32 (&data)[LlUnit::WORDS]) IRIS_INLINE {
                                       take(source, data);
                                       return true;
                                   });
    wg.trace.end(Span::Wait);
    return passed;
}

/// Steps of exchange() for the items of this thread: push, then take; false on failure.
template <u32 N, class LlUnit, class Exchange, class Body>
IRIS_DEVICE bool exchange_steps(Workgroup& wg, const ExchangeArgs<N, LlUnit>& given, const Exchange& exchange,
                                Body& body) {
    const u32 me = wg.rank();
    const ll::Share& share = given.share;
    const Heads& heads = given.heads;
    const bool pushed = push_items<N == 1 && port::PUSHES_BEFORE_VOTE>(
        wg, given, heads.pushed, [&](u32 peer) IRIS_INLINE { return exchange.sent(me, peer); },
        [&](u32 first, u32 item) IRIS_INLINE { body.load(first, item); },
        [&](u32 i, u32 peer, u32 item, u32 (&data)[LlUnit::WORDS]) IRIS_INLINE {
            body.give(i, peer, item, data);
        });
    if (!pushed) return false;
    const bool through = port::divergent([&]() IRIS_INLINE {
        bool passed = wg.template wait_head<N>(given.heads.from);
        IRIS_NO_UNROLL
        for (u32 item = share.first; passed && item < heads.taken; item = share.next(item)) {
            body.begin(item);
            passed = take_item<N, LlUnit>(
                wg, given.words, item, item,
                [&](u32 rank) IRIS_INLINE { return item < exchange.sent(rank, me); },
                [&](u32 source, const u32 (&data)[LlUnit::WORDS]) IRIS_INLINE { body.take(source, item, data); });
            if (passed) body.end(item);
        }
        return passed;
    });
    return wg.leave_together(through);
}

/// Pushes this rank's items to their destinations as LL words, then takes the items of the other
/// ranks; false if the call cannot be finished.
///
/// A thread pushes all its items before it waits for items of peers. The thread that sends the
/// entry also does so before it waits. So the waits form no cycle. Between two ranks a thread pushes as soon as it
/// has the peer's credit: a vote before it costs 0.15 us of 2.6 (all_reduce of 8 KiB, 2 x H200, 2026-11-30). N is
/// 1 with two ranks, ll::FEW or more with up to four, otherwise ll::SOURCES. `given` is that of `exchange`.
template <u32 N, class LlUnit = ll::Ll64, class Exchange, class Body>
IRIS_DEVICE bool exchange(const Launch& launch, const ExchangeArgs<N, LlUnit>& given, const Exchange& exchange,
                          Body& body) {
    Workgroup wg(launch);
    const bool result = exchange_steps<N, LlUnit>(wg, given, exchange, body);
    return wg.finish_push(End::Advance, result, [&](u32 peer) {
        return used_words<LlUnit>(given.heads.to, peer, exchange.sent(wg.rank(), peer));
    });
}

// Members that the body of an exchange of rows must have:
// Body of rows: PIECE, ITEMS            adjacent items of one thread, and its items per batch
//               load(batch)             begin to load the items of `batch` for the next give()
//               give(k, data)           return in `data` item k of the batch, for a peer
//               begin(row, batch)       load this rank's own contribution to the batch
//               take(source, data)      take the batch from `source`, in ascending order of sources
//               end()                   all contributions have been taken: store the batch
//               row(row)                all threads of the workgroup have taken items of `row`

/// Push the items of a batch: all items to one peer, then the same items to the next peer.
template <class Batch, class Body>
IRIS_DEVICE void push_batch(Workgroup& wg, const Batch& batch, Body& body) {
    IRIS_NO_UNROLL
    for (u32 step = 1; step < wg.size(); ++step) {
        const u32 peer = wg.peer(step);
        IRIS_UNROLL
        for (u32 k = 0; k < Batch::ITEMS; ++k) {
            if (k >= batch.count) break;
            u32 data[2];
            body.give(k, data);
            ll::push_item(wg.m, wg.call(), peer, batch, k, data);
        }
    }
}

/// Steps of exchange_rows() for this workgroup: push, then take; false on failure.
template <bool PAIR, class Body>
IRIS_DEVICE bool row_steps(Workgroup& wg, const ll::Rows& rows, Body& body) {
    constexpr u32 ITEMS = Body::ITEMS, PIECE = Body::PIECE, HEADS = PAIR ? 1 : ll::HEADS_OF_ROWS;
    const Members all = Heads::all(wg.m.channel);
    const ll::RowShare share = wg.share_of_rows();
    const auto batch_of = [&](u32 row, u32 number) IRIS_INLINE {
        return share.template batch<ITEMS, PIECE>(rows, row, number);
    };
    const auto even_batch = [&](u32 number) IRIS_INLINE {
        return wg.share_of_threads().template batch<ITEMS>(rows.items, number);
    };
    u32 row = share.first;
    // The items are loaded while the thread waits for the peers' credits (permission to write to
    // their slots).
    if (rows.spread) body.load(even_batch(0));
    else body.load(batch_of(row, 0));
    if (!wg.begin_push(all)) return false;
    wg.trace.begin(Span::Signal, 0);
    wg.count_out();
    // All threads of a wave push before any of these threads waits. Otherwise, in a lockstep wave,
    // a waiting thread could hold up pushes that peers wait for.
    port::divergent([&]() IRIS_INLINE {
        wg.push_head(all);
        if (rows.spread) {
            IRIS_NO_UNROLL
            for (u32 number = 0;; ++number) {
                const auto batch = even_batch(number);
                if (batch.count == 0) return true;
                if (IRIS_RARE(number > 0)) body.load(batch);
                push_batch(wg, batch, body);
            }
        }
        IRIS_NO_UNROLL
        for (u32 from = row; rows.has(from); from += share.step) {
            IRIS_NO_UNROLL
            for (u32 number = 0;; ++number) {
                const auto batch = batch_of(from, number);
                if (batch.count == 0) break;
                if (IRIS_RARE(number > 0 || from != row)) body.load(batch);
                push_batch(wg, batch, body);
            }
        }
        return true;
    });
    wg.trace.end(Span::Signal);
    // The loop below waits for the peers' headers. It runs at least once, because a workgroup
    // without a row must wait for the headers too.
    Members heads = all;
    do {
        const bool through = port::divergent([&]() IRIS_INLINE {
            if (!wg.template wait_head<HEADS>(heads)) return false;
            IRIS_NO_UNROLL
            for (u32 number = 0;; ++number) {
                const auto batch = batch_of(row, number);
                if (batch.count == 0) return true;
                body.begin(row, batch);
                if (port::thread() == 0) wg.trace.add(Counter::Waits, 1);
                wg.trace.begin(Span::Wait, batch.first);
                const bool passed = ll::each_of<PAIR>(
                    wg.m, wg.call(), batch, all,
                    [&](u32 source, const u32 (&data)[ITEMS][2]) IRIS_INLINE {
                        body.take(source, data);
                        return true;
                    });
                wg.trace.end(Span::Wait);
                if (!passed) return false;
                body.end();
            }
        });
        if (!wg.leave_together(through)) return false;
        if (!rows.has(row)) return true;
        body.row(row);
        row += share.step;
        heads = Members{0};
    } while (rows.has(row));
    return true;
}

/// Variant of exchange() for messages of rows: one workgroup receives a whole row. A thread waits for several
/// items at once. The body's `row` is called when all threads have taken their items of a row. PAIR: there
/// are two ranks.
template <bool PAIR, class Body>
IRIS_DEVICE bool exchange_rows(const Launch& launch, const ll::Rows& rows, Body& body) {
    Workgroup wg(launch);
    const bool result = row_steps<PAIR>(wg, rows, body);
    return wg.finish_push(End::Advance, result,
                          [&](u32 peer) { return used_words(Heads::all(wg.m.channel), peer, rows.items); });
}

/// Division of a message into parts for two_shot_ll(): an owner receives the contributions to its
/// part, finishes the part, and sends it to the other ranks. Same as iris_sync::flow::Parts.
struct Parts {
    /// Value of `root` if every rank contributes.
    static constexpr u32 ALL = ~0u;
    /// Number of ranks, and number of items in the message.
    u32 size, items;
    /// Root of a broadcast: it alone contributes, and it gets no finished parts. ALL for an all-reduce.
    u32 root;

    /// First item, and number of items, of the part that `owner` finishes.
    IRIS_DEVICE u32 first(u32 owner) const {
        const u32 more = items % size;
        return owner * (items / size) + (owner < more ? owner : more);
    }
    IRIS_DEVICE u32 len(u32 owner) const { return items / size + (owner < items % size); }
    /// Number of items of the longest part.
    IRIS_DEVICE u32 longest() const { return items / size + (items % size > 0); }

    IRIS_DEVICE bool contributes(u32 rank) const { return root == ALL || root == rank; }
    /// Number of items that `from` contributes to the part of `to`.
    IRIS_DEVICE u32 contributed(u32 from, u32 to) const { return contributes(from) ? len(to) : 0; }
    /// Number of finished items that `from` sends to `to`.
    IRIS_DEVICE u32 finished(u32 from, u32 to) const { return root == to ? 0 : len(from); }
    /// Number of items that `from` sends to another rank `to`: first the contributions, then the
    /// finished items.
    IRIS_DEVICE u32 sent(u32 from, u32 to) const { return contributed(from, to) + finished(from, to); }
};

// Members that the body of an exchange in two hops must have; items are numbered within the whole
// message:
// Body of parts: load(i, item)          begin to load `item`, which this rank contributes
//                give(i, item, data)    return in `data` the item loaded before
//                begin(item)            load this rank's own contribution to `item`, which it owns
//                take(source, item, data)  take a contribution; sources come in ascending order
//                end(item, data)        finish and store the item; return its data for the others
//                keep(owner, item, data)   store an item that `owner` has finished

/// Steps of two_shot_ll() for the items of this thread; false on failure.
template <u32 N, class LlUnit, class Body>
IRIS_DEVICE bool two_shot_ll_steps(Workgroup& wg, const ExchangeArgs<N, LlUnit>& given, const Parts& parts, Body& body) {
    const ll::Share& share = given.share;
    const u32 me = wg.rank(), size = wg.size(), own = parts.len(me), longest = parts.longest();
    const auto sent = [&](u32 peer) IRIS_INLINE { return parts.contributed(me, peer); };
    const auto load = [&](u32 first, u32 item) IRIS_INLINE {
        IRIS_UNROLL
        for (u32 i = 0; i < LlUnit::loaded(N); ++i) {
            if (first + i >= size) break;
            const u32 peer = wg.peer(first + i);
            if (item < sent(peer)) body.load(i, parts.first(peer) + item);
        }
    };
    const auto give = [&](u32 i, u32 peer, u32 item, u32 (&data)[LlUnit::WORDS]) IRIS_INLINE {
        body.give(i, parts.first(peer) + item, data);
    };
    if (!push_items<false>(wg, given, longest, sent, load, give)) return false;
    // All threads of a wave complete each step before any of these threads begins the next one.
    const bool finished = port::divergent([&]() IRIS_INLINE {
        bool passed = wg.template wait_head<N>(given.heads.from);
        IRIS_NO_UNROLL
        for (u32 item = share.first; passed && item < own; item = share.next(item)) {
            const u32 at = parts.first(me) + item;
            body.begin(at);
            passed = take_item<N, LlUnit>(
                wg, given.words, item, at,
                [&](u32 rank) IRIS_INLINE { return item < parts.contributed(rank, me); },
                [&](u32 source, const u32 (&data)[LlUnit::WORDS]) IRIS_INLINE { body.take(source, at, data); });
            if (!passed) break;
            u32 data[LlUnit::WORDS];
            body.end(at, data);
            IRIS_NO_UNROLL
            for (u32 step = 1; step < size; ++step) {
                const u32 peer = wg.peer(step);
                if (item >= parts.finished(me, peer)) continue;
                given.words.push(wg.m, wg.call(), peer, sent(peer) + item, data);
            }
        }
        return passed;
    });
    const bool kept = port::divergent([&]() IRIS_INLINE {
        bool passed = finished;
        IRIS_NO_UNROLL
        for (u32 item = share.first; passed && item < longest; item = share.next(item)) {
            // A rank that contributes numbers its finished items after its contributions, other
            // ranks number them from 0. So the two kinds of ranks are awaited one after the other.
            IRIS_NO_UNROLL
            for (u32 contributes = 0; passed && contributes < 2; ++contributes) {
                const auto sends = [&](u32 rank) IRIS_INLINE {
                    const bool is_one = u32(parts.contributes(rank)) == contributes;
                    return is_one && item < parts.finished(rank, me);
                };
                passed = take_item<N, LlUnit>(
                    wg, given.words, contributes * own + item, item, sends,
                    [&](u32 owner, const u32 (&data)[LlUnit::WORDS]) IRIS_INLINE {
                        body.keep(owner, parts.first(owner) + item, data);
                    });
            }
        }
        return passed;
    });
    return wg.leave_together(kept);
}

/// Exchange by LL words in two hops: each rank pushes its contributions to the owners of the parts.
/// Each owner finishes its part and pushes it to the other ranks. So a rank sends about twice the
/// bytes of the message, instead of the whole message to each peer. N is the number of sources that
/// a thread polls together.
///
/// A thread first pushes all of its contributions, then takes and pushes all items that its rank
/// owns, then takes finished items. The first step waits for nothing, the second for the first
/// steps of other ranks, and the third for their second steps. So the waits form no cycle. A thread
/// has the items with the same numbers in all parts, so a call may run in place. `given` is that of
/// `parts`.
template <u32 N, class LlUnit = ll::Ll64, class Body>
IRIS_DEVICE bool two_shot_ll(const Launch& launch, const ExchangeArgs<N, LlUnit>& given, const Parts& parts,
                             Body& body) {
    Workgroup wg(launch);
    const bool result = two_shot_ll_steps<N, LlUnit>(wg, given, parts, body);
    return wg.finish_push(End::Advance, result, [&](u32 peer) {
        return used_words<LlUnit>(given.heads.to, peer, parts.sent(wg.rank(), peer));
    });
}

// Members that the body of an exchange of one tile of a product must have:
// Body of a tile: ITEMS, load, give, take, end as in a body of rows
//               begin(batch)            load this rank's own contribution to the batch
//               multiply()              finish the product of the workgroup's tile, all threads

/// Steps of exchange_tile() for this workgroup: multiply, push, then take; false on failure.
template <bool PAIR, class Body>
IRIS_DEVICE bool tile_steps(Workgroup& wg, const ll::Strip& strip, Body& body) {
    constexpr u32 ITEMS = Body::ITEMS, HEADS = PAIR ? 1 : ll::SOURCES;
    const Members all = Members::all(wg.size());
    const bool begun = wg.begin_push(all);
    if (begun) {
        wg.count_out();
        // The header is pushed before the product. The release of the rank's entry takes a round
        // trip, which then overlaps with the product.
        port::divergent([&]() IRIS_INLINE {
            wg.push_head(all);
            return true;
        });
    }
    // The product is finished even in a call that has failed, because asynchronous copies to shared
    // memory must complete before the workgroup ends.
    body.multiply();
    if (!begun) return false;
    wg.trace.begin(Span::Signal, 0);
    // All threads of a wave push before any of these threads waits. Otherwise, in a lockstep wave,
    // a waiting thread could hold up pushes that peers wait for.
    port::divergent([&]() IRIS_INLINE {
        IRIS_NO_UNROLL
        for (u32 number = 0;; ++number) {
            const auto batch = strip.template batch<ITEMS>(port::thread(), port::threads(), number);
            if (batch.count == 0) return true;
            body.load(batch);
            push_batch(wg, batch, body);
        }
    });
    wg.trace.end(Span::Signal);
    const bool through = port::divergent([&]() IRIS_INLINE {
        if (!wg.template wait_head<HEADS>(all)) return false;
        IRIS_NO_UNROLL
        for (u32 number = 0;; ++number) {
            const auto batch = strip.template batch<ITEMS>(port::thread(), port::threads(), number);
            if (batch.count == 0) return true;
            body.begin(batch);
            if (port::thread() == 0) wg.trace.add(Counter::Waits, 1);
            wg.trace.begin(Span::Wait, batch.first);
            const bool passed =
                ll::each_of<PAIR>(wg.m, wg.call(), batch, all,
                                  [&](u32 source, const u32 (&data)[ITEMS][2]) IRIS_INLINE {
                                      body.take(source, data);
                                      return true;
                                  });
            wg.trace.end(Span::Wait);
            if (!passed) return false;
            body.end();
        }
    });
    return wg.leave_together(through);
}

/// Variant of exchange() for the tiles of a matrix product, one tile per workgroup. The workgroup
/// multiplies, pushes the items of its tile, and then takes the items of the same tile from all
/// ranks. Together the tiles of a rank cover the message.
template <bool PAIR, class Body>
IRIS_DEVICE bool exchange_tile(const Launch& launch, const ll::Strip& strip, Body& body) {
    Workgroup wg(launch);
    const bool result = tile_steps<PAIR>(wg, strip, body);
    const ll::Used used = ll::Ll64::used(strip.rows * strip.across);
    return wg.finish_push(End::Advance, result, [&](u32) { return used; });
}

} // namespace iris::flow

#endif
