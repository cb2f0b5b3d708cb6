// How a launch runs: as in iris_sync::flow.
#ifndef IRIS_FLOW_LAUNCH_H
#define IRIS_FLOW_LAUNCH_H

#include "iris/workgroup.h"

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

} // namespace iris::flow

#endif
