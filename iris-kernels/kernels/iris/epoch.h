// Versioned lock, a word by which a producer hands data to a consumer; transcribes
// iris_sync::epoch.
#ifndef IRIS_EPOCH_H
#define IRIS_EPOCH_H

#include "iris/wait.h"

namespace iris::epoch {

/// Publish, by a release store, that version `version` of the data that `word` guards is complete.
IRIS_DEVICE void publish(const Words& m, SymWord word, Call version) {
    m.store<Access::VersionStore>(word, version.number());
}

/// Wait until `producer` has published `version` or a later one in `word`; false if the wait fails.
IRIS_DEVICE bool wait(const Words& m, SymWord word, Call version, u32 producer) {
    const Awaited awaited{version, version, producer, -1, Limit::Entry};
    return wait_for<Access::VersionLoad>(m, awaited,
                                         [&] { return m.load<Access::VersionLoad>(word); });
}

} // namespace iris::epoch

#endif
