// Skeletons that add up: iris_sync::flow::reduce.
#ifndef IRIS_FLOW_REDUCE_H
#define IRIS_FLOW_REDUCE_H

#include "iris/flow/launch.h"

namespace iris::flow {

// Body: produce(tile)                   compute this rank's partial, in the format it travels in
//       push(peer, tile, parity)        write it to the peer's inbox, at this rank's place
//       keep(tile, parity)              keep it at this rank's own place in its own inbox
//       reduce(tile, parity)            add up the partials in the op's order, write C
//       push_result(peer, tile, parity, direct)   write the result to the peer: C or inbox
//       take_result(tile, parity)       copy the result from the inbox to C

/// Each rank pushes its partial of every tile to all inboxes, and adds up all of them itself.
template <class Body> IRIS_DEVICE bool one_shot(const Launch& launch, u32 tiles, Body& body) {
    return run(launch, End::Advance, [&](Workgroup& wg) IRIS_INLINE {
        if (!wg.enter()) return false;
        const u32 parity = wg.parity();
        const Members all = Members::all(wg.size());
        for (u32 tile = wg.index; tile < tiles; tile += wg.count) {
            wg.trace.begin(Span::Gemm, tile);
            body.produce(tile);
            body.keep(tile, parity);
            wg.trace.end(Span::Gemm);
            if (!wg.meet(all)) return false;
            wg.trace.begin(Span::Signal, tile);
            for (u32 step = 1; step < wg.size(); ++step) body.push(wg.peer(step), tile, parity);
            wg.push_signals(all, tile);
            wg.trace.end(Span::Signal);
        }
        for (u32 tile = wg.index; tile < tiles; tile += wg.count) {
            if (!wg.wait_tiles(all, tile)) return false;
            wg.trace.begin(Span::Reduce, tile);
            body.reduce(tile, parity);
            wg.trace.end(Span::Reduce);
        }
        return true;
    });
}

template <class Owner, class Body>
IRIS_DEVICE bool reduce_at_owners(const Launch& launch, u32 tiles, Owner owner, Body& body,
                                  bool to_all) {
    return run(launch, End::Advance, [&](Workgroup& wg) IRIS_INLINE {
        if (!wg.enter()) return false;
        const u32 parity = wg.parity(), me = wg.rank();
        const Members all = Members::all(wg.size());
        // First what others wait for, then our own: one loop, so that produce stands here once.
        for (u32 pass = 0; pass < 2; ++pass) {
            const bool mine = pass == 1;
            for (u32 tile = wg.index; tile < tiles; tile += wg.count) {
                const u32 peer = owner(tile);
                if ((peer == me) != mine) continue;
                wg.trace.begin(Span::Gemm, tile);
                body.produce(tile);
                wg.trace.end(Span::Gemm);
                if (mine) {
                    body.keep(tile, parity);
                    continue;
                }
                if (!wg.credit(peer)) return false;
                wg.trace.begin(Span::Signal, tile);
                body.push(peer, tile, parity);
                wg.push_signal(peer, tile);
                wg.trace.end(Span::Signal);
            }
        }
        for (u32 tile = wg.index; tile < tiles; tile += wg.count) {
            if (owner(tile) != me) continue;
            if (!wg.wait_tiles(all, tile)) return false;
            wg.trace.begin(Span::Reduce, tile);
            body.reduce(tile, parity);
            wg.trace.end(Span::Reduce);
            if (!to_all) continue;
            if (!wg.meet(all)) return false;
            wg.trace.begin(Span::Signal, tile);
            for (u32 step = 1; step < wg.size(); ++step) {
                const u32 peer = wg.peer(step);
                bool direct;
                if (!wg.direct(peer, direct)) return false;
                body.push_result(peer, tile, parity, direct);
            }
            wg.push_results(all, tile);
            wg.trace.end(Span::Signal);
        }
        for (u32 tile = wg.index; to_all && tile < tiles; tile += wg.count) {
            const u32 peer = owner(tile);
            if (peer == me) continue;
            if (!wg.wait_result(peer, tile)) return false;
            bool direct;
            if (!wg.direct(peer, direct)) return false;
            if (direct) continue;
            wg.trace.begin(Span::Reduce, tile);
            body.take_result(tile, parity);
            wg.trace.end(Span::Reduce);
        }
        return true;
    });
}

/// Each tile has an owner: sources push to it, it adds up and sends the one result to all.
template <class Owner, class Body>
IRIS_DEVICE bool two_shot(const Launch& launch, u32 tiles, Owner owner, Body& body) {
    return reduce_at_owners(launch, tiles, owner, body, true);
}

/// Each tile has an owner: sources push to it, and it adds up.
template <class Owner, class Body>
IRIS_DEVICE bool reduce_scatter(const Launch& launch, u32 tiles, Owner owner, Body& body) {
    return reduce_at_owners(launch, tiles, owner, body, false);
}

} // namespace iris::flow

#endif
