// Copies of the stand-in drivers.
#ifndef STANDIN_WORK_H
#define STANDIN_WORK_H

#include <algorithm>
#include <cstdio>

#include "streams.h"

namespace standin {

inline std::string hex(const void* from, u64 bytes) {
    std::string text;
    char two[3];
    for (u64 at = 0; at < bytes; ++at) {
        std::snprintf(two, sizeof two, "%02x", static_cast<const unsigned char*>(from)[at]);
        text += two;
    }
    return text;
}

struct Place {
    u64 address, apart;
    /// Whether `address` is in host memory; such ranges are not checked.
    bool host;
};

/// Whether the memory at `from` is known to hold only zeros.
inline bool is_zero(const Place& from, u64 bytes, u64 lines) {
    if (!from.host) return !memory_at(from.address, bytes)->written;
    const char* all = reinterpret_cast<const char*>(from.address);
    return lines == 1 && *all == 0 && std::memcmp(all, all + 1, bytes - 1) == 0;
}

/// Copies `lines` rows of `bytes` bytes at once. Zeros are not copied onto zeros, so that no page
/// is touched.
inline Error copy(const char* function, Stream* stream, Place to, Place from, u64 bytes, u64 lines) {
    std::lock_guard guard(lock);
    if (streams.count(stream) == 0) return INVALID_HANDLE;
    if (bytes == 0 || lines == 0) return INVALID_VALUE;
    std::ostringstream line;
    bool is_to = true;
    for (const Place& side : {to, from}) {
        const u64 all = (lines - 1) * side.apart + bytes;
        if (side.apart < bytes && lines > 1) return INVALID_VALUE;
        if (!side.host && !reaches(stream->device, side.address, all)) return ILLEGAL_ADDRESS;
        line << (side.host ? "host" : shown(side.address));
        if (lines > 1) line << "/" << side.apart;
        line << (is_to ? " <- " : " ");
        is_to = false;
    }
    line << bytes;
    if (lines > 1) line << " x " << lines;
    // For short copies from the host the log includes the data.
    if (from.host && bytes <= 64 && stream->capture == nullptr) {
        line << " = " << hex(reinterpret_cast<const void*>(from.address), bytes);
    }
#ifdef STANDIN_HIP
    // A copy between host and device is refused unless the stream is of the device that owns the
    // memory: AMD's runtime would copy on the null stream of the owning device, after all work of
    // that device. Large ones are refused, because AMD's runtime was seen to hang in them.
    if (to.host != from.host) {
        if (memory_at(to.host ? from.address : to.address, bytes)->device != stream->device) return INVALID_DEVICE;
        if (bytes > 64 << 10) return INVALID_VALUE;
    }
#endif
    return enqueue(stream, function, line.str(), [=] {
        Memory* found = COMPUTES || to.host ? nullptr : memory_at(to.address, bytes);
        if (found != nullptr && !found->written && is_zero(from, bytes, lines)) return;
        for (u64 at = 0; at < lines; ++at) {
            std::memcpy(reinterpret_cast<void*>(to.address + at * to.apart),
                        reinterpret_cast<const void*>(from.address + at * from.apart), bytes);
        }
        if (found != nullptr) found->written = true;
    });
}
inline Error fill(const char* function, Stream* stream, u64 to, int value, u64 bytes) {
    std::lock_guard guard(lock);
    if (streams.count(stream) == 0) return INVALID_HANDLE;
    if (!reaches(stream->device, to, bytes)) return ILLEGAL_ADDRESS;
    const std::string line = shown(to) + " " + std::to_string(bytes) + " of " + std::to_string(value);
    return enqueue(stream, function, line, [=] {
        Memory* found = memory_at(to, bytes);
        if (value == 0 && !found->written) return;
        std::memset(reinterpret_cast<void*>(to), value, bytes);
        found->written = true;
    });
}

/// Registers a block of pinned memory under a name in the log; the block belongs to the rank that
/// asks for its device address.
inline u64 pin(void* host) {
    std::lock_guard guard(lock);
    const u64 address = reinterpret_cast<u64>(host);
    pinned[address] = std::to_string(rank.number) + ".pinned" + std::to_string(rank.pinned++);
    return address;
}

} // namespace standin

#endif
