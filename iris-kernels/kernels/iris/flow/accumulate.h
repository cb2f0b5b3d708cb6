// Skeletons of an all-reduce that adds the partials of a tile in a workspace at the tile's owner; transcribes
// iris_sync::flow::accumulate.
#ifndef IRIS_FLOW_ACCUMULATE_H
#define IRIS_FLOW_ACCUMULATE_H

#include "iris/flow/launch.h"

namespace iris::flow {

// Functions that class Body must have, called by all threads of a workgroup:
// Body: zero(tile)                      set `tile` of this rank's own workspace to zero
//       produce(tile)                   compute this rank's partial of `tile`
//       add(owner, tile)                add the partial to the workspace of rank `owner`
//       convert(owner, tile)            read `tile` from the workspace of `owner`, write it to C

/// Set the tiles that this rank owns to zero in its workspace. A device barrier must follow before any rank
/// adds to them.
template <class Owner, class Body>
IRIS_DEVICE bool zero(const Launch& launch, u32 tiles, Owner owner, Body& body) {
    return run(launch, End::Keep, [&](Workgroup& wg) IRIS_INLINE {
        if (!wg.enter()) return false;
        for (u32 tile = wg.index; tile < tiles; tile += wg.count) {
            if (owner(tile) == wg.rank()) body.zero(tile);
        }
        return true;
    });
}

/// Add this rank's partials to the workspaces of the tiles' owners, under a lock if `locked`,
/// otherwise by atomic additions. A device barrier must follow before any rank reads the sums.
template <class Owner, class Body>
IRIS_DEVICE bool add(const Launch& launch, u32 tiles, Owner owner, bool locked, Body& body) {
    return run(launch, End::Keep, [&](Workgroup& wg) IRIS_INLINE {
        if (!wg.check_not_aborted()) return false;
        for (u32 tile = wg.index; tile < tiles; tile += wg.count) {
            wg.trace.begin(Span::Gemm, tile);
            body.produce(tile);
            wg.trace.end(Span::Gemm);
            const u32 at = owner(tile);
            if (at != wg.rank() && !wg.wait_entry(at)) return false;
            if (locked) {
                const auto add = [&]() IRIS_INLINE { body.add(at, tile); };
                if (!wg.locked(at, tile, add)) return false;
            } else {
                body.add(at, tile);
            }
        }
        return true;
    });
}

/// Read all tiles from their owners' workspaces into C. This is the last launch of the call. It ends
/// when all ranks have read, because the next call may use the workspace for something else.
template <class Owner, class Body>
IRIS_DEVICE bool convert(const Launch& launch, u32 tiles, Owner owner, Body& body) {
    return run(launch, End::Pulled, [&](Workgroup& wg) IRIS_INLINE {
        if (!wg.check_not_aborted()) return false;
        for (u32 tile = wg.index; tile < tiles; tile += wg.count) {
            const u32 at = owner(tile);
            if (at != wg.rank() && !wg.wait_entry(at)) return false;
            wg.trace.begin(Span::Reduce, tile);
            body.convert(at, tile);
            wg.trace.end(Span::Reduce);
        }
        return true;
    });
}

} // namespace iris::flow

#endif
