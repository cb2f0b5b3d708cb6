// Switches of the fake drivers, and the state of one thread, which acts as a rank: its log, and the
// driver call that is to fail.
#ifndef STANDIN_RANK_H
#define STANDIN_RANK_H

#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>
#include <string>

#include "../hip/errors.h"
#include "image.h"

namespace standin {

using namespace drivers;
constexpr u32 GLOBAL = 0, RELAXED = 2;

inline std::string setting(const char* name, const char* otherwise) {
    const char* value = std::getenv(name);
    return value != nullptr && *value != 0 ? value : otherwise;
}
/// Whether kernels, copies and events run, each stream on a thread of its own (compute.h); if not,
/// copies are done at once, and kernels are only logged.
#ifdef FAKE_COMPUTES
constexpr bool COMPUTES = true;
inline int devices() { return std::stoi(setting("FAKE_HIP_DEVICES", "2")); }
inline int multiprocessors() { return std::stoi(setting("FAKE_HIP_UNITS", "8")); }
#else
constexpr bool COMPUTES = false;
inline int devices() { return std::stoi(setting("STANDIN_DEVICES", "8")); }
inline int multiprocessors() { return std::stoi(setting("STANDIN_MULTIPROCESSORS", "132")); }
#endif
#ifndef FAKE_RELEASE
#define FAKE_RELEASE 7
#endif

// State of a driver is never destroyed, because threads of the program and of streams may still use
// it while the process ends.

/// Guards all state that threads share.
inline std::mutex lock;

#ifdef STANDIN_HIP
inline thread_local int current = 0;
#else
/// Current device of the thread; -1 until a context is pushed.
inline thread_local int current = -1;
#endif

/// Returns `code`, the result of a call, and adds the call to the file FAKE_HIP_LOG.
template <class... Parts> Error outcome(Error code, const char* call, Parts... parts) {
    static const std::string& file = *new std::string(setting("FAKE_HIP_LOG", ""));
    if (file.empty()) return code;
    std::ostringstream line;
    line << call;
    ((line << ' ' << parts), ...);
    line << " on " << current << " = " << code << "\n";
    std::ofstream(file, std::ios::app) << line.str();
    return code;
}

/// State of one thread, which acts as a rank.
struct Rank {
    u32 number = 0, allocations = 0, pinned = 0;
    std::string log;
    /// Whether the log includes calls in which the host waits for the device.
    bool waits = false;
    /// Numbers that the log shows for streams or events, in the order of their first use. So the
    /// log does not depend on the order in which a program creates streams and events.
    struct Numbers {
        std::map<u64, u32> known;
        u32 next = 0;
        u32 of(const void* handle) {
            const auto [at, is_new] = known.emplace(reinterpret_cast<u64>(handle), next);
            next += is_new;
            return at->second;
        }
        void forget(const void* handle) { known.erase(reinterpret_cast<u64>(handle)); }
    } streams, events;
    /// `fails`: function whose calls are counted, or "" for all functions that enqueue. `failed`:
    /// function that has failed. `until`: number of calls until one fails, 0 for never.
    std::string fails, failed;
    u64 until = 0;
    u32 mode = GLOBAL;
};
inline thread_local Rank rank;

/// Counts a call of `function`; returns whether a test asked for this call to fail.
inline bool is_to_fail(const char* function, bool enqueues) {
    if (rank.until == 0 || !(rank.fails.empty() ? enqueues : rank.fails == function)) return false;
    if (--rank.until > 0) return false;
    rank.failed = function;
    return true;
}

/// Logs a call in which the host waits for the device, if such calls are logged.
inline void host_waits(const char* function) {
    if (rank.waits) rank.log += std::string("HOST ") + function + "\n";
}

} // namespace standin

#endif
