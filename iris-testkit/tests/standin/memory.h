// Memory of devices: files in memory, mapped at addresses that nobody else has.
#ifndef STANDIN_MEMORY_H
#define STANDIN_MEMORY_H

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <set>
#include <sstream>

#include "rank.h"

namespace standin {

struct Memory {
    u64 bytes;
    int device, file;
    /// `rank.number`, as the log has it.
    std::string name;
    /// Whether somebody wrote to it: until then it is zero.
    bool written;
    /// Devices that it is mapped for by name; else peers ask for access.
    std::set<int> granted;
    bool opened;
};
inline std::map<u64, Memory> memory;
/// A device, and another whose plain memory it accesses.
inline std::set<std::pair<int, int>> peers;
/// Blocks of pinned memory that devices were told of.
inline std::map<u64, std::string> pinned;

inline Memory* memory_at(u64 address, u64 bytes) {
    auto next = memory.upper_bound(address);
    if (next == memory.begin()) return nullptr;
    auto& [base, found] = *--next;
    return address + bytes <= base + found.bytes ? &found : nullptr;
}
inline u64 base_of(u64 address) { return std::prev(memory.upper_bound(address))->first; }

/// An address as the log has it; empty for what is none.
inline std::string named(u64 address) {
    std::ostringstream text;
    if (const Memory* found = memory_at(address, 0)) {
        text << found->name << "+0x" << std::hex << address - base_of(address);
        return text.str();
    }
    auto next = pinned.upper_bound(address);
    if (next == pinned.begin() || address - std::prev(next)->first >= 4096) return "";
    text << std::prev(next)->second << "+0x" << std::hex << address - std::prev(next)->first;
    return text.str();
}
inline std::string shown(u64 address) {
    const std::string name = named(address);
    if (!name.empty()) return name;
    // No part of a run's log may differ in the next.
    return address == 0 ? "0" : "host";
}
inline bool reaches(int device, u64 address, u64 bytes) {
    const Memory* found = memory_at(address, bytes);
    return found != nullptr && (found->opened || found->device == device || found->granted.count(device) ||
                                peers.count({device, found->device}));
}

constexpr u64 PAGE = 4096, BLOCK = 2 << 20;
/// Bytes that are reserved for memory: whole pages, and one behind them that nobody has.
inline u64 reserved(u64 bytes) { return (bytes + PAGE - 1) / PAGE * PAGE + PAGE; }
/// Addresses that nobody else has, at a multiple of a block.
inline u64 reserve(u64 bytes) {
    const u64 all = reserved(bytes) + BLOCK;
    void* at = mmap(nullptr, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return 0;
    const u64 first = reinterpret_cast<u64>(at), begin = (first + BLOCK - 1) / BLOCK * BLOCK;
    if (begin > first) munmap(at, begin - first);
    munmap(reinterpret_cast<void*>(begin + reserved(bytes)), first + all - begin - reserved(bytes));
    return begin;
}
inline void give_back(u64 address, u64 bytes) { munmap(reinterpret_cast<void*>(address), reserved(bytes)); }
inline int file_of(u64 bytes) {
    const int file = memfd_create("memory of a stand-in", MFD_CLOEXEC);
    return file >= 0 && ftruncate(file, static_cast<off_t>(bytes)) != 0 ? (close(file), -1) : file;
}
/// Maps a file, which is the memory's from then on. What is smaller than a page has no number: a device's scratch
/// belongs to no rank.
inline Error map_at(u64 address, u64 bytes, int file, int device, bool opened = false) {
    void* to = reinterpret_cast<void*>(address);
    if (mmap(to, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED) return OUT_OF_MEMORY;
    const std::string name =
        bytes < 4096 ? "scratch" : std::to_string(rank.number) + "." + std::to_string(rank.allocations++);
    memory[address] = {bytes, device, file, name, false, {}, opened};
    return SUCCESS;
}
inline Error unmap(u64 address, bool keep_reserved) {
    const auto found = memory.find(address);
    if (found == memory.end()) return INVALID_VALUE;
    const u64 bytes = found->second.bytes;
    if (keep_reserved) {
        constexpr int HOW = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
        mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE, HOW, -1, 0);
    } else {
        give_back(address, bytes);
    }
    close(found->second.file);
    memory.erase(found);
    return SUCCESS;
}
inline Error allocate(u64* address, u64 bytes, int device) {
    const int file = file_of(bytes);
    if (file < 0 || (*address = reserve(bytes)) == 0) return OUT_OF_MEMORY;
    return map_at(*address, bytes, file, device);
}

/// A handle that other processes open memory by.
struct Handle {
    u64 bytes;
    int process, file;
    char rest[48];
};
static_assert(sizeof(Handle) == 64, "as that of both vendors");
inline Error export_handle(Handle* handle, u64 address) {
    std::lock_guard guard(lock);
    const auto found = memory.find(address);
    if (found == memory.end() || found->second.opened) return INVALID_VALUE;
    *handle = {found->second.bytes, getpid(), found->second.file, {}};
    return SUCCESS;
}
inline Error open_handle(u64* address, const Handle& handle, int device) {
    std::lock_guard guard(lock);
    const auto place = "/proc/" + std::to_string(handle.process) + "/fd/" + std::to_string(handle.file);
    const int file = open(place.c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0 || handle.process == getpid()) return INVALID_VALUE;
    *address = reserve(handle.bytes);
    return map_at(*address, handle.bytes, file, device, true);
}

} // namespace standin

#endif
