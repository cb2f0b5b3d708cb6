// Skeletons of ops that push partials (each rank's contributions to a sum) to inboxes and add them there;
// transcribes iris_sync::flow::reduce.
#ifndef IRIS_FLOW_REDUCE_H
#define IRIS_FLOW_REDUCE_H

#include "iris/flow/launch.h"

namespace iris::flow {

// Members that the template arguments must have; parity is the half of the inbox (0 or 1) that the
// call uses:
// Body: AT_ONCE                         whether tiles are reduced while others are still pushed;
//                                       false for products, whose accumulators fill the registers
//       produce(tile)                   compute this rank's partial of `tile`
//       push(peer, tile, parity)        write the partial to this rank's slot in the peer's inbox
//       keep(tile, parity)              store the partial in this rank's slot of its own inbox
//       reduce(tile, parity)            add the partials of `tile` in the fixed order, write C
//       push_result(peer, tile, parity, direct)  write the result to `peer`: into its C if
//                                       `direct`, else into its inbox
//       take_result(tile, parity)       copy the result of `tile` from the inbox to C
//
// Owners: most()                        largest number of tiles that any rank owns
//         owned(owner, place, tile)     return in `tile` the place-th tile of `owner`; false if it
//                                       owns fewer

/// Round-robin ownership: tile t belongs to rank t mod `owners`.
struct Turns {
    u32 tiles, owners;
    IRIS_DEVICE u32 most() const { return tiles / owners + (tiles % owners != 0); }
    IRIS_DEVICE bool owned(u32 owner, u32 place, u32& tile) const {
        tile = place * owners + owner;
        return owner < owners && tile < tiles;
    }
};

/// One-shot all-reduce: each rank pushes its partial of every tile to all inboxes and reduces every
/// tile itself. With AT_ONCE, a workgroup pushes its next tile before it reduces the current one,
/// so that links and memory are busy at the same time.
template <class Body> IRIS_DEVICE bool one_shot(const Launch& launch, u32 tiles, Body& body) {
    return run(launch, End::Advance, [&](Workgroup& wg) IRIS_INLINE {
        if (!wg.enter()) return false;
        const u32 parity = wg.parity();
        const Members all = Members::all(wg.size());
        const auto add_up = [&](u32 tile) IRIS_INLINE {
            if (!wg.wait_tiles(all, tile)) return false;
            wg.trace.begin(Span::Reduce, tile);
            body.reduce(tile, parity);
            wg.trace.end(Span::Reduce);
            return true;
        };
        const u32 end = Body::AT_ONCE ? tiles + wg.count : tiles;
        for (u32 next = wg.index; next < end; next += wg.count) {
            if (next < tiles) {
                wg.trace.begin(Span::Gemm, next);
                body.produce(next);
                body.keep(next, parity);
                wg.trace.end(Span::Gemm);
                if (!wg.wait_before_push(all)) return false;
                wg.trace.begin(Span::Signal, next);
                for (u32 step = 1; step < wg.size(); ++step) {
                    body.push(wg.peer_in_turn(step, next), next, parity);
                }
                wg.push_signals(all, next);
                wg.trace.end(Span::Signal);
            }
            if constexpr (Body::AT_ONCE) {
                // Reduces the tile that this workgroup pushed before `next`. In its first round,
                // the workgroup has pushed no earlier tile.
                if (next >= wg.count && !add_up(next - wg.count)) return false;
            }
        }
        for (u32 tile = wg.index; !Body::AT_ONCE && tile < tiles; tile += wg.count) {
            if (!add_up(tile)) return false;
        }
        return true;
    });
}

/// Reduction of each tile at its owner. The first `senders` workgroups push tiles that other ranks
/// own, and then, in an all-reduce, wait for the results of these tiles; the other workgroups reduce.
/// If `senders` is 0 or not less than the number of workgroups, every workgroup does both. Before
/// its last push a sender waits for credits only (free slots at peers), so the waits form no cycle.
template <class Owners, class Body>
IRIS_DEVICE bool reduce_at_owners(const Launch& launch, const Owners& owners, u32 senders, Body& body,
                                  bool to_all) {
    return run(launch, End::Advance, [&](Workgroup& wg) IRIS_INLINE {
        if (!wg.enter()) return false;
        const u32 parity = wg.parity(), me = wg.rank();
        const Members all = Members::all(wg.size());
        // The loops below number the tiles as items: first the tiles that this rank owns, then the tiles that
        // the peers own, round-robin. This workgroup takes every `own_step`-th of its rank's tiles and every
        // `other_step`-th of the peers' tiles.
        const u32 most = owners.most(), peers = wg.size() - 1, items = most * wg.size();
        const u32 sending = senders < wg.count ? senders : 0;
        const u32 own_step = wg.count - sending, other_step = sending == 0 ? wg.count : sending;
        u32 first_own = wg.index, first_other = wg.index;
        if (sending == 0) {
            while (first_other < most) first_other += other_step;
        } else if (wg.index < sending) {
            first_own = most;
            first_other += most;
        } else {
            first_own -= sending;
            first_other = items;
        }
        const auto add_up = [&](u32 tile) IRIS_INLINE {
            if (!wg.wait_tiles(all, tile)) return false;
            wg.trace.begin(Span::Reduce, tile);
            body.reduce(tile, parity);
            wg.trace.end(Span::Reduce);
            if (!to_all) return true;
            if (!wg.wait_before_push(all)) return false;
            wg.trace.begin(Span::Signal, tile);
            for (u32 step = 1; step < wg.size(); ++step) {
                const u32 to = wg.peer_in_turn(step, tile);
                bool direct;
                if (!wg.direct(to, direct)) return false;
                body.push_result(to, tile, parity, direct);
            }
            wg.push_results(all, tile);
            wg.trace.end(Span::Signal);
            return true;
        };
        // A workgroup begins with pushes, because peers wait for them. Then pushes and reductions
        // alternate, so that links and memory are busy at the same time. A single loop does both,
        // so that the code of `produce` is inlined once.
        for (u32 own = first_own, other = first_other; own < most || other < items;) {
            const u32 place = other < items ? (other - most) / peers : 0;
            const bool mine =
                other >= items || (Body::AT_ONCE && own < most && place > own + own_step);
            const u32 peer = mine ? me : wg.peer(1 + (other - most) % peers);
            u32 tile;
            const bool is_tile = owners.owned(peer, mine ? own : place, tile);
            if (mine) own += own_step;
            else other += other_step;
            if (!is_tile) continue;
            wg.trace.begin(Span::Gemm, tile);
            body.produce(tile);
            wg.trace.end(Span::Gemm);
            if (!mine) {
                if (!wg.credit(peer)) return false;
                wg.trace.begin(Span::Signal, tile);
                body.push(peer, tile, parity);
                wg.push_signal(peer, tile);
                wg.trace.end(Span::Signal);
                continue;
            }
            body.keep(tile, parity);
            if constexpr (Body::AT_ONCE) {
                if (!add_up(tile)) return false;
            }
        }
        for (u32 place = first_own; !Body::AT_ONCE && place < most; place += own_step) {
            u32 tile;
            if (owners.owned(me, place, tile) && !add_up(tile)) return false;
        }
        for (u32 other = first_other; to_all && other < items; other += other_step) {
            const u32 peer = wg.peer(1 + (other - most) % peers);
            u32 tile;
            if (!owners.owned(peer, (other - most) / peers, tile)) continue;
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

/// Two-shot all-reduce: all ranks push their partials of a tile to the tile's owner, which reduces
/// them and sends the result to all ranks.
template <class Owners, class Body>
IRIS_DEVICE bool two_shot(const Launch& launch, const Owners& owners, u32 senders, Body& body) {
    return reduce_at_owners(launch, owners, senders, body, true);
}

/// Reduce-scatter: all ranks push their partials of a tile to the tile's owner, which reduces them.
template <class Owners, class Body>
IRIS_DEVICE bool reduce_scatter(const Launch& launch, const Owners& owners, u32 senders, Body& body) {
    return reduce_at_owners(launch, owners, senders, body, false);
}

} // namespace iris::flow

#endif
