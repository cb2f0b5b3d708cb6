// Start and end of a launch, which the skeletons of all operators share; transcribes iris_sync::flow.
#ifndef IRIS_FLOW_LAUNCH_H
#define IRIS_FLOW_LAUNCH_H

#include "iris/workgroup.h"

namespace iris::flow {

/// Begin the call in this launch, run `steps`, and count the workgroup as finished, whether `steps`
/// fails or not.
template <class Steps> IRIS_DEVICE bool run(const Launch& launch, End end, Steps steps) {
    Workgroup wg(launch);
    const bool result = steps(wg);
    return wg.finish(end, result);
}

/// Device barrier of `members`, as a launch of one workgroup that does nothing else.
IRIS_DEVICE bool barrier(const Launch& launch, u32 phase, Members members, End end) {
    return run(launch, end, [&](Workgroup& wg) IRIS_INLINE { return wg.barrier(phase, members); });
}

} // namespace iris::flow

#endif
