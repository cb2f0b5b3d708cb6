// Operations of the stand-in drivers that are not events: copies, which are done at once, and
// launches, which are only logged.
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
    const Error code = enqueue(stream, function, line.str());
    if (code != SUCCESS || stream->capture != nullptr) return code;
    const bool is_new = !to.host && !memory_at(to.address, bytes)->written;
    if (is_new && is_zero(from, bytes, lines)) return SUCCESS;
    for (u64 at = 0; at < lines; ++at) {
        std::memcpy(reinterpret_cast<void*>(to.address + at * to.apart),
                    reinterpret_cast<const void*>(from.address + at * from.apart), bytes);
    }
    if (!to.host) memory_at(to.address, bytes)->written = true;
    return SUCCESS;
}
inline Error fill(const char* function, Stream* stream, u64 to, int value, u64 bytes) {
    std::lock_guard guard(lock);
    if (streams.count(stream) == 0) return INVALID_HANDLE;
    if (!reaches(stream->device, to, bytes)) return ILLEGAL_ADDRESS;
    const std::string line = shown(to) + " " + std::to_string(bytes) + " of " + std::to_string(value);
    const Error code = enqueue(stream, function, line);
    if (code != SUCCESS || stream->capture != nullptr) return code;
    Memory* found = memory_at(to, bytes);
    if (value == 0 && !found->written) return SUCCESS;
    std::memset(reinterpret_cast<void*>(to), value, bytes);
    found->written = true;
    return SUCCESS;
}

/// Registers a block of pinned memory under a name in the log; the block belongs to the rank that
/// asks for its device address.
inline u64 pin(void* host) {
    std::lock_guard guard(lock);
    const u64 address = reinterpret_cast<u64>(host);
    pinned[address] = std::to_string(rank.number) + ".pinned" + std::to_string(rank.pinned++);
    return address;
}

struct Module {
    int device;
    Image image;
};
struct Function {
    Module* module;
    const Kernel* kernel;
    /// Number of bytes of shared memory that a workgroup may use.
#ifdef STANDIN_HIP
    u32 shared = 64 << 10;
#else
    u32 shared = 48 << 10;
#endif
};

inline u64 read(const char* at, u32 bytes) {
    u64 value = 0;
    std::memcpy(&value, at, bytes);
    return value;
}

/// Writes one field of a kernel's parameter to the log as `name=value`, unless the value is zero.
inline void write_field(std::ostringstream& line, const std::string& name, const Field& field, const char* at) {
    if (field.kind == "map") {
        const std::string map = map_shown(at, shown);
        if (!map.empty()) line << " " << name << "=" << map;
        return;
    }
    const u64 value = read(at, field.bytes);
    if (value == 0) return;
    line << " " << name << "=";
    if (field.kind == "float") {
        float real;
        std::memcpy(&real, at, 4);
        line << real;
    } else if (field.kind == "i32") {
        line << static_cast<std::int32_t>(value);
    } else {
        const std::string address = field.bytes == 8 ? named(value) : "";
        if (address.empty()) line << value;
        else line << address;
    }
}

inline Error launch(const char* function, Function* kernel, u32 groups, u32 threads, u32 shared, Stream* stream,
                    void** parameters, const std::string& attributes) {
    std::lock_guard guard(lock);
    const bool odd = groups == 0 || threads == 0 || threads > 1024 || shared > kernel->shared;
    if (odd || kernel->module->device != current) return INVALID_VALUE;
    std::ostringstream line;
    line << kernel->kernel->name << " " << kernel->module->image.title() << " " << groups << "x" << threads << " shared "
         << shared << attributes << " |";
    for (std::size_t at = 0; at < kernel->kernel->parameters.size(); ++at) {
        const Parameter& parameter = kernel->kernel->parameters[at];
        const char* from = static_cast<const char*>(parameters[at]);
        for (const Field& field : parameter.fields) {
            for (u32 index = 0; index < field.count; ++index) {
                std::string name = parameter.prefix + field.name;
                if (field.count > 1) name += "[" + std::to_string(index) + "]";
                write_field(line, name, field, from + field.offset + u64{index} * field.bytes);
            }
        }
    }
    return enqueue(stream, function, line.str());
}

/// Number of workgroups that fit on a multiprocessor if each thread takes 64 registers.
inline u32 resident(u64 threads, u64 shared) {
    const u64 by_threads = 65536 / 64 / (threads == 0 ? 1 : threads), by_shared = (228 << 10) / (shared + 1024);
    return static_cast<u32>(std::min<u64>({by_threads, by_shared, 32}));
}

} // namespace standin

#endif
