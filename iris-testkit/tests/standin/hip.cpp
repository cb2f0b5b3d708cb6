// Stand-in for the HIP runtime, release 7, built on driver.h, which it shares with the stand-in for
// CUDA (cuda.cpp).
#define STANDIN_HIP
#include "driver.h"

#include "../hip/devices.h"

namespace {

/// Kind of a copy whose direction follows from the addresses (hipMemcpyDefault).
constexpr u32 BY_ADDRESS = 4;

} // namespace

extern "C" {

Error hipRuntimeGetVersion(int* version) {
    *version = 70253211;
    return SUCCESS;
}
Error hipDeviceGetAttribute(int* value, u32 attribute, int) {
    switch (attribute) {
    case 63: *value = multiprocessors(); return SUCCESS;
    case 74: *value = 64 << 10; return SUCCESS;
    case 87: *value = 64; return SUCCESS;
    case 10017: *value = 100000; return SUCCESS;
    default: return INVALID_VALUE;
    }
}
static std::string arch() { return setting("STANDIN_ARCH", "gfx942"); }
Error hipGetDeviceProperties(char* to, int) { return properties(to, 792, 396, arch()); }
Error hipGetDevicePropertiesR0600(char* to, int) { return properties(to, 1472, 1160, arch()); }
Error hipDeviceEnablePeerAccess(int peer, u32 flags) {
    std::lock_guard guard(lock);
    if (flags != 0 || peer == current) return INVALID_DEVICE;
    return peers.insert({current, peer}).second ? SUCCESS : ALREADY_ENABLED;
}

Error hipExtStreamCreateWithCUMask(Stream** stream, u32 words, const u32*) {
    ENTER(ExtStreamCreateWithCUMask);
    return words == static_cast<u32>(multiprocessors() + 31) / 32 ? create(stream) : INVALID_VALUE;
}
Error hipStreamCreateWithFlags(Stream** stream, u32 flags) {
    ENTER(StreamCreateWithFlags);
    return flags == 1 ? create(stream) : INVALID_VALUE;
}
Error hipStreamGetDevice(Stream* stream, int* device) {
    std::lock_guard guard(lock);
    if (streams.count(stream) == 0) return INVALID_HANDLE;
    *device = stream->device;
    return SUCCESS;
}

Error hipEventCreateWithFlags(Event** event, u32 flags) {
    ENTER(EventCreateWithFlags);
    // Expected flags of an event: no timing, and a release at system scope for each record.
    return flags == (2 | 0x80000000u) ? create(event) : INVALID_VALUE;
}

Error hipMemcpyAsync(Address to, Address from, u64 bytes, u32 kind, Stream* stream) {
    if (kind != BY_ADDRESS) return INVALID_VALUE;
    return copy("hipMemcpyAsync", stream, {to, 0, false}, {from, 0, false}, bytes, 1);
}
Error hipMemcpy2DAsync(Address to, u64 to_apart, Address from, u64 from_apart, u64 bytes, u64 lines, u32 kind,
                       Stream* stream) {
    if (kind != BY_ADDRESS) return INVALID_VALUE;
    return copy("hipMemcpy2DAsync", stream, {to, to_apart, false}, {from, from_apart, false}, bytes, lines);
}
Error hipMemsetAsync(Address to, int value, u64 bytes, Stream* stream) {
    return fill("hipMemsetAsync", stream, to, value, bytes);
}
Error hipMemGetInfo(u64* free, u64* total) {
    *free = *total = 192ull << 30;
    return SUCCESS;
}
static Error take(Address* address, u64 bytes) {
    std::lock_guard guard(lock);
    if (const Error code = check_apart()) return code;
    return allocate(address, bytes, current);
}
Error hipMalloc(Address* address, u64 bytes) {
    ENTER(Malloc);
    host_waits("hipMalloc");
    return take(address, bytes);
}
Error hipExtMallocWithFlags(Address* address, u64 bytes, u32 flags) {
    ENTER(ExtMallocWithFlags);
    return flags == 1 || flags == 3 ? take(address, bytes) : INVALID_VALUE;
}
Error hipFree(Address address) {
    std::lock_guard guard(lock);
    return unmap(address, false);
}
Error hipHostMalloc(void** to, u64 bytes, u32 flags) {
    if (flags != (1u | 2u | 0x40000000u)) return INVALID_VALUE;
    *to = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    return SUCCESS;
}
Error hipHostGetDevicePointer(Address* address, void* host, u32 flags) {
    *address = pin(host);
    return flags == 0 ? SUCCESS : INVALID_VALUE;
}
Error hipIpcOpenMemHandle(Address* address, Handle handle, u32 flags) {
    return flags == 1 ? open_handle(address, handle, current) : INVALID_VALUE;
}

Error hipModuleLoadData(Module** module, const char* image) {
    ENTER(ModuleLoadData);
    return load(module, image);
}
Error hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(int* each, Function*, int threads, u64 shared) {
    *each = static_cast<int>(std::min<u64>(2048 / static_cast<u64>(threads), (64 << 10) / (shared + 1)));
    return SUCCESS;
}
Error hipModuleLaunchKernel(Function* function, u32 gx, u32 gy, u32 gz, u32 tx, u32 ty, u32 tz, u32 shared, Stream* stream,
                            void** parameters, void** extra) {
    if (gy * gz * ty * tz != 1 || extra != nullptr) return INVALID_VALUE;
    return launch("hipModuleLaunchKernel", function, gx, tx, shared, stream, parameters, "");
}
}
