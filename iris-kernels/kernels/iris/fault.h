// Fault record of a call that cannot be finished; transcribes iris_sync::Fault.
#ifndef IRIS_FAULT_H
#define IRIS_FAULT_H

#include "iris/port.h"

namespace iris {

/// Base of the abort code that a host gives its kernels if a rank is lost. The code is this value
/// plus the number of the lost rank.
constexpr i32 PEER_LOST = 1000;

enum class FaultKind : i32 {
    NotEntered = 1,
    NoProgress = 2,
    Mismatch = 3,
    PeerGaveUp = 4,
    PeerLost = 5,
    HostAbort = 6,
    StepDiffers = 7,
};

/// Fields of an entry record that must be equal on all ranks. Direct (permission to write C
/// directly) is not among the first FIELDS fields. It must be equal only if a user kernel that runs
/// concurrently reads tiles of C as they arrive.
enum class Field : i32 { Op, Sequence, M, N, K, Dtypes, Variant, Config, Direct };
constexpr u32 FIELDS = 8;

/// Fault record of a call that cannot be finished.
struct Fault {
    FaultKind kind;
    i32 op, call, tile, rank, seen, wanted, field;

    /// Encodes the record as words, in the order of iris_sync::Fault.
    IRIS_DEVICE void to_words(i32 (&words)[8]) const {
        const i32 all[8] = {static_cast<i32>(kind), op, call, tile, rank, seen, wanted, field};
        IRIS_UNROLL
        for (u32 i = 0; i < 8; ++i) words[i] = all[i];
    }
};

} // namespace iris

#endif
