// The skeleton of words that carry their data: iris_sync::flow::ll.
#ifndef IRIS_FLOW_LL_H
#define IRIS_FLOW_LL_H

#include "iris/flow/launch.h"

namespace iris::flow {

// Exchange: sent(from, to)              items that `from` sends to `to`, eight bytes each
// Body: load(first, item)               look at an item that is about to be given to peers: the N
//                                       of them from number `first` of Channel::peer on
//       give(i, peer, item, data)       what goes to the peer, the one behind those first of number i
//       begin(item)                     it is about to be taken: what this rank has itself
//       take(source, item, data)        take what a source sent; sources come in ascending order
//       end(item)                       all have been taken

/// The steps of exchange, of the items that fall to this thread.
template <u32 N, class Share, class Exchange, class Body>
IRIS_DEVICE bool exchange_steps(Workgroup& wg, const Share& share, const Exchange& exchange,
                                Body& body) {
    const u32 me = wg.rank(), size = wg.size();
    const Call call = wg.call();
    Members to{0}, from{0};
    u32 pushed = 0, taken = 0;
    IRIS_NO_UNROLL
    for (u32 rank = 0; rank < size; ++rank) {
        const u32 out = exchange.sent(me, rank), in = exchange.sent(rank, me);
        to.bits |= u64(out > 0) << rank;
        from.bits |= u64(in > 0) << rank;
        if (rank != me && out > pushed) pushed = out;
        if (in > taken) taken = in;
    }
    // It is under way while the credit is.
    if (share.first < pushed) body.load(1, share.first);
    if (!wg.begin_push(to)) return false;
    wg.trace.begin(Span::Signal, 0);
    wg.count_out();
    // All threads of a wave have pushed before one of them waits.
    port::divergent([&]() IRIS_INLINE {
        wg.push_head(to);
        IRIS_NO_UNROLL
        for (u32 item = share.first; item < pushed; item = share.next(item)) {
            IRIS_NO_UNROLL
            for (u32 first = 1; first < size; first += N) {
                if (item != share.first || first != 1) body.load(first, item);
                IRIS_UNROLL
                for (u32 i = 0; i < N; ++i) {
                    if (first + i >= size) break;
                    const u32 peer = wg.peer(first + i);
                    if (item >= exchange.sent(me, peer)) continue;
                    u32 data[2];
                    body.give(i, peer, item, data);
                    ll::push(wg.m, call, peer, ll::HEAD + item, data);
                }
            }
        }
        return true;
    });
    wg.trace.end(Span::Signal);
    const bool through = port::divergent([&]() IRIS_INLINE {
        bool passed = wg.template wait_head<N>(from);
        IRIS_NO_UNROLL
        for (u32 item = share.first; passed && item < taken; item = share.next(item)) {
            body.begin(item);
            Members sources{0};
            IRIS_NO_UNROLL
            for (u32 rank = 0; rank < size; ++rank) {
                sources.bits |= u64(item < exchange.sent(rank, me)) << rank;
            }
            if (port::thread() == 0) wg.trace.add(Counter::Waits, 1);
            wg.trace.begin(Span::Wait, item);
            passed = ll::each<N>(wg.m, call, ll::HEAD + item, sources,
                              [&](u32 source, const u32 (&data)[2]) IRIS_INLINE {
                                  body.take(source, item, data);
                                  return true;
                              });
            wg.trace.end(Span::Wait);
            if (passed) body.end(item);
        }
        return passed;
    });
    return wg.leave_together(through);
}

/// Count the workgroup out.
template <class Exchange>
IRIS_DEVICE bool finish_exchange(Workgroup& wg, bool result, const Exchange& exchange) {
    return wg.finish_push(End::Advance, result, [&](u32 peer) {
        // The head goes along wherever there is data.
        const u32 items = exchange.sent(wg.rank(), peer);
        return items == 0 ? 0 : ll::HEAD + items;
    });
}

/// Each rank pushes its items to whom they are for, in words that carry their data, then takes what
/// others pushed.
///
/// All that a thread pushes comes before all that it waits for, and so does the entry: so nobody waits
/// for a peer that waits for it. N is 1 with two ranks, and else ll::SOURCES.
template <u32 N, class Exchange, class Body>
IRIS_DEVICE bool exchange(const Launch& launch, const Exchange& exchange, Body& body) {
    Workgroup wg(launch);
    const bool result = exchange_steps<N>(wg, wg.share_of_threads(), exchange, body);
    return finish_exchange(wg, result, exchange);
}

/// The same of items in rows of `len`, of which a workgroup takes whole ones: when it has passed, all of
/// them are there.
template <u32 N, class Exchange, class Body>
IRIS_DEVICE bool exchange_rows(const Launch& launch, const Exchange& exchange, u32 len, Body& body) {
    Workgroup wg(launch);
    const bool result = exchange_steps<N>(wg, wg.share_of_rows(len), exchange, body);
    return finish_exchange(wg, result, exchange);
}

} // namespace iris::flow

#endif
