// Skeletons of whole ops: iris_sync::flow, operation by operation. A Body moves the tiles; its
// functions are called by all lanes of a workgroup together.
//
// | skeleton | ops |
// |---|---|
// | one_shot | all-reduce with or without a product in front |
// | two_shot | the same, each tile reduced by its owner |
// | reduce_scatter | its first half |
// | deliver | all-gather, all-to-all, broadcast, product then all-gather |
// | pull, staged | all-gather then product |
// | zero, add, convert with barrier between | all-reduce by lock or atomic |
// | gather then barrier then local | all-gather, barrier, product |
#ifndef IRIS_FLOW_H
#define IRIS_FLOW_H

#include "iris/sync.h"

namespace iris::flow {

/// Begin, run `body`, and count the workgroup out on every path.
template <class Steps> IRIS_DEVICE bool run(const Launch& launch, End end, Steps steps) {
    Workgroup wg(launch);
    const bool result = steps(wg);
    return wg.finish(end, result);
}

/// A launch that is a barrier of `members` and nothing else: one workgroup.
IRIS_DEVICE bool barrier(const Launch& launch, u32 phase, Members members, End end) {
    return run(launch, end, [&](Workgroup& wg) IRIS_INLINE { return wg.barrier(phase, members); });
}

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
                const u32 peer = wg.peer(step);
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

// Body: push_part(peer, part, parity)   write `part` of this rank's shard to the peer's inbox
//       multiply(tile, source, parity)  multiply what of `tile` comes from `source`'s shard
//       store(tile)                     write the finished tile to C

/// Push all `parts` of this rank's shard to every inbox. A barrier must follow.
template <class Body> IRIS_DEVICE bool gather(const Launch& launch, u32 parts, Body& body) {
    return run(launch, End::Keep, [&](Workgroup& wg) IRIS_INLINE {
        if (!wg.enter()) return false;
        const u32 parity = wg.parity();
        for (u32 part = wg.index; part < parts; part += wg.count) {
            wg.trace.begin(Span::Fetch, part);
            body.push_part(wg.rank(), part, parity);
            for (u32 step = 1; step < wg.size(); ++step) {
                if (!wg.credit(wg.peer(step))) return false;
                body.push_part(wg.peer(step), part, parity);
            }
            wg.trace.end(Span::Fetch);
        }
        return true;
    });
}

/// Multiply what gather and a barrier brought. The last launch of its call.
template <class Body> IRIS_DEVICE bool local(const Launch& launch, u32 tiles, Body& body) {
    return run(launch, End::Advance, [&](Workgroup& wg) IRIS_INLINE {
        if (!wg.go_on()) return false;
        for (u32 step = 1; step < wg.size(); ++step) {
            if (!wg.wait_entry(wg.peer(step))) return false;
        }
        const u32 parity = wg.parity();
        for (u32 tile = wg.index; tile < tiles; tile += wg.count) {
            wg.trace.begin(Span::Gemm, tile);
            for (u32 source = 0; source < wg.size(); ++source) body.multiply(tile, source, parity);
            body.store(tile);
            wg.trace.end(Span::Gemm);
        }
        return true;
    });
}

/// Multiply straight from the peers' own shards; no rank ends before all have read.
template <class Body> IRIS_DEVICE bool pull(const Launch& launch, u32 tiles, Body& body) {
    return run(launch, End::Pulled, [&](Workgroup& wg) IRIS_INLINE {
        if (!wg.enter()) return false;
        const u32 parity = wg.parity();
        for (u32 tile = wg.index; tile < tiles; tile += wg.count) {
            for (u32 step = 0; step < wg.size(); ++step) {
                const u32 source = wg.peer(step);
                if (step != 0 && !wg.wait_entry(source)) return false;
                wg.trace.begin(Span::Gemm, tile);
                body.multiply(tile, source, parity);
                wg.trace.end(Span::Gemm);
            }
            body.store(tile);
        }
        return true;
    });
}

// Staging: units()                      units of the gathered matrix; each comes from one rank
//          fetched(position)            which unit is fetched as number `position`
//          source(unit)                 the rank it comes from
//          tiles()                      tiles of C
//          needs(tile)                  how many units `tile` needs
//          need(tile, i)                the unit it takes as number `i`
// Body: fetch(unit)                     copy it from its source to the staging buffer
//       multiply_unit(tile, unit)       multiply what of `tile` depends on it
//       store(tile)                     write the finished tile to C

/// The first `fetchers` workgroups copy remote units to a staging buffer and raise a flag for each;
/// the others multiply and wait for the unit they need. This rank's own units are multiplied where
/// they are.
///
/// With one workgroup, or no fetchers, every workgroup first fetches its share and then multiplies:
/// fetching waits for peers only, so that cannot lock up.
template <class Staging, class Body>
IRIS_DEVICE bool staged(const Launch& launch, u32 fetchers, const Staging& staging, Body& body) {
    return run(launch, End::Pulled, [&](Workgroup& wg) IRIS_INLINE {
        if (!wg.enter()) return false;
        const u32 index = wg.index, count = wg.count, me = wg.rank();
        const u32 fetching = fetchers >= count ? 0 : fetchers;
        if (fetching == 0 || index < fetching) {
            const u32 units = staging.units(), step = fetching == 0 ? count : fetching;
            for (u32 position = index; position < units; position += step) {
                const u32 unit = staging.fetched(position);
                const u32 source = staging.source(unit);
                if (source == me) continue;
                if (!wg.wait_entry(source)) return false;
                hold<Hold::Fetching>(me);
                wg.trace.begin(Span::Fetch, unit);
                body.fetch(unit);
                wg.raise_flag(unit);
                wg.trace.end(Span::Fetch);
            }
        }
        if (index >= fetching) {
            const u32 tiles = staging.tiles();
            for (u32 tile = index - fetching; tile < tiles; tile += count - fetching) {
                const u32 needs = staging.needs(tile);
                for (u32 i = 0; i < needs; ++i) {
                    const u32 unit = staging.need(tile, i);
                    const u32 source = staging.source(unit);
                    if (source != me && !wg.wait_flag(unit, source)) return false;
                    wg.trace.begin(Span::Gemm, tile);
                    body.multiply_unit(tile, unit);
                    wg.trace.end(Span::Gemm);
                }
                body.store(tile);
            }
        }
        return true;
    });
}

// Body: zero(tile, parity)              clear the tile of this rank's own workspace
//       produce(tile)                   compute this rank's partial, in the format it travels in
//       add(owner, tile, parity)        add it to the owner's workspace
//       convert(owner, tile, parity)    read the owner's workspace and write C

/// Clear this rank's tiles. A barrier must follow before anybody adds.
template <class Owner, class Body>
IRIS_DEVICE bool zero(const Launch& launch, u32 tiles, Owner owner, Body& body) {
    return run(launch, End::Keep, [&](Workgroup& wg) IRIS_INLINE {
        if (!wg.enter()) return false;
        const u32 parity = wg.parity();
        // Peers read this workspace two calls ago: they must have ended that call.
        for (u32 step = 1; step < wg.size(); ++step) {
            if (!wg.credit(wg.peer(step))) return false;
        }
        for (u32 tile = wg.index; tile < tiles; tile += wg.count) {
            if (owner(tile) == wg.rank()) body.zero(tile, parity);
        }
        return true;
    });
}

/// Add this rank's partials, under a lock if `locked`. A barrier must follow before anybody reads.
template <class Owner, class Body>
IRIS_DEVICE bool add(const Launch& launch, u32 tiles, Owner owner, bool locked, Body& body) {
    return run(launch, End::Keep, [&](Workgroup& wg) IRIS_INLINE {
        if (!wg.go_on()) return false;
        const u32 parity = wg.parity();
        for (u32 tile = wg.index; tile < tiles; tile += wg.count) {
            wg.trace.begin(Span::Gemm, tile);
            body.produce(tile);
            wg.trace.end(Span::Gemm);
            const u32 at = owner(tile);
            if (at != wg.rank() && !wg.wait_entry(at)) return false;
            if (locked) {
                if (!wg.locked(at, tile, [&] { body.add(at, tile, parity); })) return false;
            } else {
                body.add(at, tile, parity);
            }
        }
        return true;
    });
}

/// Read all tiles from their owners. The last launch of its call.
template <class Owner, class Body>
IRIS_DEVICE bool convert(const Launch& launch, u32 tiles, Owner owner, Body& body) {
    return run(launch, End::Advance, [&](Workgroup& wg) IRIS_INLINE {
        if (!wg.go_on()) return false;
        const u32 parity = wg.parity();
        for (u32 tile = wg.index; tile < tiles; tile += wg.count) {
            const u32 at = owner(tile);
            if (at != wg.rank() && !wg.wait_entry(at)) return false;
            wg.trace.begin(Span::Reduce, tile);
            body.convert(at, tile, parity);
            wg.trace.end(Span::Reduce);
        }
        return true;
    });
}

} // namespace iris::flow

#endif
