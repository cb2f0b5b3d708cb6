// The skeleton of words that carry their data: iris_sync::flow::ll.
#ifndef IRIS_FLOW_LL_H
#define IRIS_FLOW_LL_H

#include "iris/flow/launch.h"

namespace iris::flow {

// Exchange: sent(from, to)              items that `from` sends to `to`, eight bytes each
// Body: load(item)                      look at an item that is about to be given to some peers
//       give(peer, item, data)          what goes to the peer as its item of this number
//       begin(item)                     it is about to be taken: what this rank has itself
//       take(source, item, data)        take what a source sent; sources come in ascending order
//       end(item)                       all have been taken

/// The steps of exchange.
template <class Exchange, class Body>
IRIS_DEVICE bool exchange_steps(Workgroup& wg, const Exchange& exchange, Body& body) {
    const u32 me = wg.rank(), size = wg.size();
    const Call call = wg.call();
    Members to{0}, from{0};
    u32 pushed = 0, taken = 0;
    for (u32 rank = 0; rank < size; ++rank) {
        const u32 out = exchange.sent(me, rank), in = exchange.sent(rank, me);
        to.bits |= u64(out > 0) << rank;
        from.bits |= u64(in > 0) << rank;
        if (rank != me && out > pushed) pushed = out;
        if (in > taken) taken = in;
    }
    if (!wg.begin_push(to)) return false;
    wg.trace.begin(Span::Signal, 0);
    const u32 first = wg.index * port::lanes() + port::lane(), step = wg.count * port::lanes();
    // All lanes of a wave have pushed before one of them waits.
    port::divergent([&]() IRIS_INLINE {
        wg.push_head(to);
        for (u32 item = first; item < pushed; item += step) {
            body.load(item);
            for (u32 i = 1; i < size; ++i) {
                const u32 peer = wg.peer(i);
                if (item >= exchange.sent(me, peer)) continue;
                u32 data[2];
                body.give(peer, item, data);
                ll::push(wg.m, call, peer, ll::HEAD + item, data);
            }
        }
        wg.end_push();
        return true;
    });
    wg.trace.end(Span::Signal);
    const bool through = port::divergent([&]() IRIS_INLINE {
        bool passed = wg.wait_head(from);
        for (u32 item = first; passed && item < taken; item += step) {
            body.begin(item);
            Members sources{0};
            for (u32 rank = 0; rank < size; ++rank) {
                sources.bits |= u64(item < exchange.sent(rank, me)) << rank;
            }
            if (port::lane() == 0) wg.trace.add(Counter::Waits, 1);
            wg.trace.begin(Span::Wait, item);
            passed = ll::each(wg.m, call, ll::HEAD + item, sources,
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

/// Each rank pushes its items to whom they are for, in words that carry their data, then takes what
/// others pushed.
///
/// All that a lane pushes comes before all that it waits for, and so does the entry: so nobody waits
/// for a peer that waits for it.
template <class Exchange, class Body>
IRIS_DEVICE bool exchange(const Launch& launch, const Exchange& exchange, Body& body) {
    Workgroup wg(launch);
    const bool result = exchange_steps(wg, exchange, body);
    return wg.finish_push(End::Advance, result, [&](u32 peer) {
        // The head goes along wherever there is data.
        const u32 items = exchange.sent(launch.channel.rank, peer);
        return items == 0 ? 0 : ll::HEAD + items;
    });
}

} // namespace iris::flow

#endif
