// The barrier of some ranks: one workgroup. `phase` tells two barriers of one call apart; `last` is 1
// if the call is over after it.
#include "iris/args.h"

using namespace iris;

IRIS_KERNEL iris_barrier(IRIS_ARGS OpArgs args, u32 phase, u64 members, u32 last) {
    port::take_turn();
    flow::barrier(launch_of(args), phase, Members{members}, last == 1 ? End::Advance : End::Keep);
}
