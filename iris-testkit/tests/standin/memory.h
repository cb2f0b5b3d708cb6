// Memory of the devices of a stand-in (fake) driver: files in memory, each mapped at its own
// address range.
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
    /// Name of the memory in the log: `rank.number`.
    std::string name;
    /// Whether the memory has been written; until then it is zero.
    bool written;
    /// Devices to which access was granted explicitly; other devices need peer access.
    std::set<int> granted;
    bool opened;
};
inline auto& memory = *new std::map<u64, Memory>;
/// Peer access: pairs of a device and the peer whose memory it may access without an explicit
/// grant.
inline auto& peers = *new std::set<std::pair<int, int>>;
/// Blocks of pinned host memory, by address, with their names in the log.
inline auto& pinned = *new std::map<u64, std::string>;

inline Memory* memory_at(u64 address, u64 bytes) {
    auto next = memory.upper_bound(address);
    if (next == memory.begin()) return nullptr;
    auto& [base, found] = *--next;
    return address + bytes <= base + found.bytes ? &found : nullptr;
}
inline u64 base_of(u64 address) { return std::prev(memory.upper_bound(address))->first; }

/// Text of an address as the log shows it; empty if no known memory contains it.
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
    // Addresses of the host are all shown as `host`, because logs must not differ between runs.
    return address == 0 ? "0" : "host";
}
/// Whether kernels of `device` can access memory of `peer`. FAKE_HIP_NO_PEERS denies it: for all
/// pairs of devices ("all"), or for pairs like "0-2,1-2", where device 0 cannot access memory of
/// device 2.
inline bool can_access(int device, int peer) {
    const std::string denied = setting("FAKE_HIP_NO_PEERS", "");
    const std::string pair = std::to_string(device) + "-" + std::to_string(peer);
    return device == peer || (denied != "all" && ("," + denied + ",").find("," + pair + ",") == std::string::npos);
}
/// Lets kernels of the current device access memory of `peer`.
inline Error enable_access(int peer, u32 flags) {
    std::lock_guard guard(lock);
    if (flags != 0 || current < 0 || peer == current || !can_access(current, peer)) return INVALID_DEVICE;
    return peers.insert({current, peer}).second ? SUCCESS : ALREADY_ENABLED;
}
inline bool reaches(int device, u64 address, u64 bytes) {
    const Memory* found = memory_at(address, bytes);
    return found != nullptr && (found->opened || found->device == device || found->granted.count(device) ||
                                peers.count({device, found->device}));
}

constexpr u64 PAGE = 4096, BLOCK = 2 << 20;
/// Bytes of address space that an allocation of `bytes` bytes takes: whole pages, and one unmapped
/// page after them.
inline u64 reserved(u64 bytes) { return (bytes + PAGE - 1) / PAGE * PAGE + PAGE; }
/// Reserves an address range of `bytes` bytes, aligned to BLOCK.
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
/// Maps a file at `address` as memory of `device`; the memory then owns the file. Memory smaller
/// than a page gets no number in the log: the driver's scratch, which belongs to no rank.
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
/// Frees memory that this process allocated, or closes memory of another process if `opened`.
inline Error give(u64 address, bool opened) {
    std::lock_guard guard(lock);
    const auto found = memory.find(address);
    return found == memory.end() || found->second.opened != opened ? INVALID_VALUE : unmap(address, false);
}
inline Error allocate(u64* address, u64 bytes, int device) {
    const int file = file_of(bytes);
    if (file < 0 || (*address = reserve(bytes)) == 0) return OUT_OF_MEMORY;
    const Error code = map_at(*address, bytes, file, device);
    // New memory has undefined content, so it is filled with a pattern that tests would notice.
    if (COMPUTES && code == SUCCESS) {
        void* at = reinterpret_cast<void*>(*address);
#ifdef MADV_POPULATE_WRITE
        // One call for all pages takes less time than a page fault for each.
        madvise(at, bytes, MADV_POPULATE_WRITE);
#endif
        std::memset(at, 0xa5, bytes);
    }
    return code;
}

/// Handle by which another process opens memory: the process and the file that hold it.
struct Handle {
    u64 bytes;
    int process, file, device;
    char rest[44];
};
static_assert(sizeof(Handle) == 64, "as that of both vendors");
inline Error export_handle(Handle* handle, u64 address) {
    std::lock_guard guard(lock);
    const auto found = memory.find(address);
    if (found == memory.end() || found->second.opened) return INVALID_VALUE;
    *handle = {found->second.bytes, getpid(), found->second.file, found->second.device, {}};
    return SUCCESS;
}
inline Error open_handle(u64* address, const Handle& handle, int device) {
    // Like the vendors' drivers, refuses a handle in the process that owns its memory.
    if (handle.process == getpid()) return INVALID_VALUE;
    if (!can_access(device, handle.device)) return INVALID_DEVICE;
    std::lock_guard guard(lock);
    const auto place = "/proc/" + std::to_string(handle.process) + "/fd/" + std::to_string(handle.file);
    const int file = open(place.c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0) return INVALID_VALUE;
    *address = reserve(handle.bytes);
    return map_at(*address, handle.bytes, file, device, true);
}

} // namespace standin

#endif
