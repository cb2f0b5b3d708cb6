// Skeletons (waits and signals) of ops that move data without adding; transcribes iris_sync::flow::deliver.
#ifndef IRIS_FLOW_DELIVER_H
#define IRIS_FLOW_DELIVER_H

#include "iris/flow/launch.h"

namespace iris::flow {

// Functions that the template arguments must have; parity is the half of the inbox (0 or 1) that
// the call uses:
// Delivery: produced()                  number of tiles that this rank produces
//           sent(from, to)              number of tiles that `from` sends to `to`: its first ones
// Body: produce(tile)                   compute or load `tile`, store it at its place on this rank
//       push(peer, tile, parity, direct)  write `tile` to `peer`: into its C if `direct`, else into
//                                       its inbox; a relay writes data that has arrived in its own C
//       take(source, tile, parity)      copy `tile` of the data from `source` from the inbox to C

/// Returns the set of the peers for which `which` returns true.
template <class Which> IRIS_DEVICE Members peers_that(const Workgroup& wg, Which which) {
    Members peers{0};
    for (u32 step = 1; step < wg.size(); ++step) {
        const u32 peer = wg.peer(step);
        if (which(peer)) peers.bits |= 1ull << peer;
    }
    return peers;
}

template <class Body> IRIS_DEVICE void produce(Workgroup& wg, Body& body, u32 tile) {
    wg.trace.begin(Span::Gemm, tile);
    body.produce(tile);
    wg.trace.end(Span::Gemm);
}

/// Write `tile` to the peers `to`, then raise the signal of `tile` at each of them. Returns false if the wait
/// for the peers' credits (free slots at the peers) fails.
template <class Body> IRIS_DEVICE bool send(Workgroup& wg, Body& body, Members to, u32 tile) {
    if (!wg.wait_before_push(to)) return false;
    wg.trace.begin(Span::Signal, tile);
    for (u32 step = 1; step < wg.size(); ++step) {
        const u32 peer = wg.peer_in_turn(step, tile);
        if (!to.contains(peer)) continue;
        bool direct;
        if (!wg.direct(peer, direct)) return false;
        body.push(peer, tile, wg.parity(), direct);
    }
    wg.push_signals(to, tile);
    wg.trace.end(Span::Signal);
    return true;
}

/// Wait until `tile` has arrived from each of the peers `from`. Then copy it from the inbox to C,
/// unless the peer has written into C directly.
template <class Body> IRIS_DEVICE bool receive(Workgroup& wg, Body& body, Members from, u32 tile) {
    if (!wg.wait_tiles(from, tile)) return false;
    for (u32 step = 1; step < wg.size(); ++step) {
        const u32 source = wg.peer(step);
        if (!from.contains(source)) continue;
        bool direct;
        if (!wg.direct(source, direct)) return false;
        if (direct) continue;
        wg.trace.begin(Span::Reduce, tile);
        body.take(source, tile, wg.parity());
        wg.trace.end(Span::Reduce);
    }
    return true;
}

/// Each rank pushes its tiles to their receivers, and takes the tiles that peers pushed. The first
/// `senders` workgroups push and the others take. If `senders` is 0 or not less than the number of
/// workgroups, every workgroup pushes first and then takes. A pushing workgroup waits until the
/// receivers' slots are free (credits), and also for entries if it writes into the receivers' C,
/// but never for a signal, so the waits form no cycle. Workgroups are counted as finished before
/// they take tiles. With dedicated senders, `push` must not read data that `produce` writes, because
/// another workgroup runs `produce`, in no fixed order.
template <class Delivery, class Body>
IRIS_DEVICE bool deliver(const Launch& launch, const Delivery& delivery, u32 senders, Body& body) {
    return run(launch, End::Advance, [&](Workgroup& wg) IRIS_INLINE {
        if (!wg.enter()) return false;
        const u32 me = wg.rank(), produced = delivery.produced();
        const bool dedicated = senders != 0 && senders < wg.count;
        const bool sends = !dedicated || wg.index < senders, takes = !dedicated || !sends;
        const u32 first = sends ? wg.index : wg.index - senders;
        const u32 every = !dedicated ? wg.count : sends ? senders : wg.count - senders;
        for (u32 tile = first; sends && tile < produced; tile += every) {
            const Members to =
                peers_that(wg, [&](u32 peer) { return tile < delivery.sent(me, peer); });
            if (takes) produce(wg, body, tile);
            if (!send(wg, body, to, tile)) return false;
        }
        // A workgroup that sent nothing has not passed a barrier yet, which count_out() requires.
        port::barrier(Site::Finish);
        wg.count_out();
        // Number of tiles to produce in the loop below. A workgroup that takes but does not push
        // produces each tile there, before it waits for the peers' tiles with the same number.
        const u32 left = sends ? 0 : produced;
        u32 most = left;
        for (u32 step = 1; step < wg.size(); ++step) {
            const u32 sent = delivery.sent(wg.peer(step), me);
            most = sent > most ? sent : most;
        }
        for (u32 tile = first; takes && tile < most; tile += every) {
            const Members from =
                peers_that(wg, [&](u32 source) { return tile < delivery.sent(source, me); });
            if (tile < left) produce(wg, body, tile);
            if (!receive(wg, body, from, tile)) return false;
        }
        return true;
    });
}

/// Assignment of a root's tiles to relays, round-robin over the other ranks. Each relay forwards
/// its tiles to the ranks that are neither the root nor the relay of the tile.
struct Relays {
    u32 tiles, root, size;
    /// Rank that receives `tile` from the root and forwards it.
    IRIS_DEVICE u32 relay(u32 tile) const { return (root + 1 + tile % (size - 1)) % size; }
    /// Number of the tile that `rank` forwards at position `place` of its order; `rank` must not be
    /// the root. The result is at least `tiles` if `rank` forwards fewer tiles.
    IRIS_DEVICE u32 relayed(u32 rank, u32 place) const {
        return place * (size - 1) + (rank + size - 1 - root) % size;
    }
};

/// Broadcast: the root sends each tile to one relay. When the tile has arrived, the relay forwards
/// it to all other ranks.
template <class Body>
IRIS_DEVICE bool relay(const Launch& launch, const Relays& relays, Body& body) {
    return run(launch, End::Advance, [&](Workgroup& wg) IRIS_INLINE {
        if (!wg.enter()) return false;
        const u32 tiles = relays.tiles, root = relays.root, me = wg.rank();
        const auto one = [](u32 rank) { return Members{1ull << rank}; };
        if (me == root) {
            for (u32 tile = wg.index; tile < tiles; tile += wg.count) {
                produce(wg, body, tile);
                if (!send(wg, body, one(relays.relay(tile)), tile)) return false;
            }
            return true;
        }
        const Members others = peers_that(wg, [&](u32 peer) { return peer != root; });
        // A rank first receives the tiles that it must forward, because other ranks wait for them.
        // These tiles come from the root.
        for (u32 place = wg.index; relays.relayed(me, place) < tiles; place += wg.count) {
            const u32 tile = relays.relayed(me, place);
            if (!receive(wg, body, one(root), tile)) return false;
            if (!send(wg, body, others, tile)) return false;
        }
        for (u32 tile = wg.index; tile < tiles; tile += wg.count) {
            const u32 from = relays.relay(tile);
            if (from != me && !receive(wg, body, one(from), tile)) return false;
        }
        return true;
    });
}

} // namespace iris::flow

#endif
