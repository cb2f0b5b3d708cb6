// Skeletons (waits and signals) of an all-gather before a matrix product; transcribes
// iris_sync::flow::gather.
#ifndef IRIS_FLOW_GATHER_H
#define IRIS_FLOW_GATHER_H

#include "iris/flow/launch.h"

namespace iris::flow {

// Functions that class Body must have; parity is the half of the inbox (0 or 1) that the call uses:
// Body: push_part(peer, part, parity)   write `part` of this rank's shard to the inbox of `peer`
//       multiply(tile, source, parity)  add the product of the shard of `source` to `tile`
//       store(tile)                     write the finished `tile` to C

/// Push all `parts` of this rank's shard to every inbox. A device barrier must follow before
/// local().
template <class Body> IRIS_DEVICE bool gather(const Launch& launch, u32 parts, Body& body) {
    return run(launch, End::Keep, [&](Workgroup& wg) IRIS_INLINE {
        if (!wg.enter()) return false;
        const u32 parity = wg.parity();
        for (u32 part = wg.index; part < parts; part += wg.count) {
            wg.trace.begin(Span::Fetch, part);
            body.push_part(wg.rank(), part, parity);
            for (u32 step = 1; step < wg.size(); ++step) {
                const u32 peer = wg.peer_in_turn(step, part);
                if (!wg.credit(peer)) return false;
                body.push_part(peer, part, parity);
            }
            wg.trace.end(Span::Fetch);
        }
        return true;
    });
}

/// Multiply the shards that gather() has pushed to this rank. A device barrier must precede this
/// launch, which is the last launch of the call.
template <class Body> IRIS_DEVICE bool local(const Launch& launch, u32 tiles, Body& body) {
    return run(launch, End::Advance, [&](Workgroup& wg) IRIS_INLINE {
        if (!wg.check_not_aborted()) return false;
        if (!wg.wait_entries(Members::all(wg.size()))) return false;
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

/// Multiply shards directly from the peers' own memory. No rank ends the call before all peers have
/// read that rank's shard.
template <class Body> IRIS_DEVICE bool pull(const Launch& launch, u32 tiles, Body& body) {
    return run(launch, End::Pulled, [&](Workgroup& wg) IRIS_INLINE {
        if (!wg.enter()) return false;
        const u32 parity = wg.parity();
        for (u32 tile = wg.index; tile < tiles; tile += wg.count) {
            for (u32 step = 0; step < wg.size(); ++step) {
                const u32 source = step == 0 ? wg.rank() : wg.peer_in_turn(step, tile);
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

// Functions that the template arguments must have. A unit is a piece of the gathered matrix that is
// copied as a whole and has one flag:
// Staging: units()                      number of units; each unit comes from one rank
//          unit_at(position)            unit that is fetched at `position` of the fetch order
//          source(unit)                 rank that owns the data of `unit`
//          tiles()                      number of tiles of C
//          needs(tile)                  number of units that `tile` needs
//          need(tile, i)                i-th unit that `tile` needs, in the order of use
// Body: fetch(unit)                     copy `unit` from its source to the staging buffer
//       multiply_unit(tile, unit)       add the product of `unit` to `tile`
//       store(tile)                     write the finished `tile` to C

/// All-gather and product by separate workgroups. The first `fetchers` workgroups copy remote units
/// to a staging buffer and raise a flag for each unit. The other workgroups multiply; they wait for
/// the flag of each unit before they read it. This rank's own units are read in place.
///
/// If `fetchers` is 0 or not less than the number of workgroups, every workgroup first fetches its
/// share and then multiplies. This cannot deadlock, because a workgroup that fetches waits only for
/// peers to enter the call.
template <class Staging, class Body>
IRIS_DEVICE bool staged(const Launch& launch, u32 fetchers, const Staging& staging, Body& body) {
    return run(launch, End::Pulled, [&](Workgroup& wg) IRIS_INLINE {
        if (!wg.enter()) return false;
        const u32 index = wg.index, count = wg.count, me = wg.rank();
        const u32 fetching = fetchers >= count ? 0 : fetchers;
        if (fetching == 0 || index < fetching) {
            const u32 units = staging.units(), step = fetching == 0 ? count : fetching;
            for (u32 position = index; position < units; position += step) {
                const u32 unit = staging.unit_at(position);
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

} // namespace iris::flow

#endif
