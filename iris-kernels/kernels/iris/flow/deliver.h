// The skeleton that only moves: iris_sync::flow::deliver.
#ifndef IRIS_FLOW_DELIVER_H
#define IRIS_FLOW_DELIVER_H

#include "iris/flow/launch.h"

namespace iris::flow {

// Delivery: produced()                  tiles that this rank produces
//           sent(from, to)              tiles that `from` sends to `to`: the first so many
// Body: produce(tile)                   compute or load, and put it where this rank wants it
//       push(peer, tile, parity, direct)   write it to the peer: into its C or its inbox
//       take(source, tile, parity)      copy it from the inbox to C

/// The peers that `which` says.
template <class Which> IRIS_DEVICE Members peers_that(const Workgroup& wg, Which which) {
    Members peers{0};
    for (u32 step = 1; step < wg.size(); ++step) {
        const u32 peer = wg.peer(step);
        if (which(peer)) peers.bits |= 1ull << peer;
    }
    return peers;
}

/// Each rank pushes its tiles to whom they are for, then takes what others pushed.
template <class Delivery, class Body>
IRIS_DEVICE bool deliver(const Launch& launch, const Delivery& delivery, Body& body) {
    return run(launch, End::Advance, [&](Workgroup& wg) IRIS_INLINE {
        if (!wg.enter()) return false;
        const u32 parity = wg.parity(), me = wg.rank();
        const u32 produced = delivery.produced();
        for (u32 tile = wg.index; tile < produced; tile += wg.count) {
            wg.trace.begin(Span::Gemm, tile);
            body.produce(tile);
            wg.trace.end(Span::Gemm);
            const Members to =
                peers_that(wg, [&](u32 peer) { return tile < delivery.sent(me, peer); });
            if (!wg.meet(to)) return false;
            wg.trace.begin(Span::Signal, tile);
            for (u32 step = 1; step < wg.size(); ++step) {
                const u32 peer = wg.peer_in_turn(step, tile);
                if (!to.contains(peer)) continue;
                bool direct;
                if (!wg.direct(peer, direct)) return false;
                body.push(peer, tile, parity, direct);
            }
            wg.push_signals(to, tile);
            wg.trace.end(Span::Signal);
        }
        u32 most = 0;
        for (u32 step = 1; step < wg.size(); ++step) {
            const u32 sent = delivery.sent(wg.peer(step), me);
            most = sent > most ? sent : most;
        }
        for (u32 tile = wg.index; tile < most; tile += wg.count) {
            const Members from =
                peers_that(wg, [&](u32 source) { return tile < delivery.sent(source, me); });
            if (!wg.wait_tiles(from, tile)) return false;
            for (u32 step = 1; step < wg.size(); ++step) {
                const u32 source = wg.peer(step);
                if (!from.contains(source)) continue;
                bool direct;
                if (!wg.direct(source, direct)) return false;
                if (direct) continue;
                wg.trace.begin(Span::Reduce, tile);
                body.take(source, tile, parity);
                wg.trace.end(Span::Reduce);
            }
        }
        return true;
    });
}

} // namespace iris::flow

#endif
