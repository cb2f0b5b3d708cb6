// Device barrier of the ranks in the bit set `members`, as one workgroup. `phase` (0 or 1)
// distinguishes the two barriers of a call; `last` is 1 if the barrier ends the call.
#include "iris/args.h"

using namespace iris;

IRIS_KERNEL iris_barrier(IRIS_ARGS OpArgs args, u32 phase, u64 members, u32 last) {
    port::take_turn();
    flow::barrier(launch_of(args), phase, Members{members}, last == 1 ? End::Advance : End::Keep);
}
