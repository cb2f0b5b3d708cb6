// What is left behind when a call cannot be finished: iris_sync::Fault.
#ifndef IRIS_FAULT_H
#define IRIS_FAULT_H

#include "iris/port.h"

namespace iris {

/// What a host tells its kernels when a rank is gone: this plus the rank.
constexpr i32 PEER_LOST = 1000;

enum class FaultKind : i32 {
    NotEntered = 1,
    NoProgress = 2,
    Mismatch = 3,
    PeerGaveUp = 4,
    PeerLost = 5,
    HostAbort = 6,
};

/// Fields of an entry record that ranks must agree on. Direct, where C may be written, only must
/// where a kernel beside the op takes tiles from it.
enum class Field : i32 { Op, Sequence, M, N, K, Dtypes, Variant, Config, Direct };
constexpr u32 FIELDS = 8;

/// What a rank leaves behind when a call cannot be finished.
struct Fault {
    FaultKind kind;
    i32 op, call, tile, rank, seen, wanted, field;

    /// The record as words, the order of iris_sync::Fault.
    IRIS_DEVICE void to_words(i32 (&words)[8]) const {
        const i32 all[8] = {static_cast<i32>(kind), op, call, tile, rank, seen, wanted, field};
        IRIS_UNROLL
        for (u32 i = 0; i < 8; ++i) words[i] = all[i];
    }
};

} // namespace iris

#endif
