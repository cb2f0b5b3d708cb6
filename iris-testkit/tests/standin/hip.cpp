// Stand-in for the HIP runtime, built on driver.h, which it shares with the stand-in for CUDA
// (cuda.cpp). FAKE_RELEASE is the release of HIP, 5 or 7.
#define STANDIN_HIP
#include "driver.h"

#include <bit>

namespace {

/// Kind of a copy whose direction follows from the addresses (hipMemcpyDefault).
constexpr u32 BY_ADDRESS = 4;

/// Fills the device properties at `to`, `bytes` long, with a pattern, and writes the architecture's
/// name at byte `at`.
Error properties(char* to, std::size_t bytes, std::size_t at, const std::string& arch) {
    std::memset(to, 0xff, bytes);
    std::strcpy(to + at, (arch + ":sramecc+:xnack-").c_str());
    return SUCCESS;
}

} // namespace

extern "C" {

const char* hipGetErrorName(Error code) { return drivers::hip_name(code); }
Error hipGetLastError() { return SUCCESS; }
Error hipGetDeviceCount(int* count) {
    *count = devices();
    return *count == 0 ? NO_DEVICE : SUCCESS;
}
Error hipGetDevice(int* device) {
    *device = current;
    return SUCCESS;
}
Error hipSetDevice(int device) {
    if (device < 0 || device >= devices()) return INVALID_DEVICE;
    current = device;
    return SUCCESS;
}
Error hipDeviceGetUuid(unsigned char* uuid, int) {
    std::memset(uuid, 0, 16);
    return SUCCESS;
}
Error hipDeviceGetPCIBusId(char* bus, int length, int device) {
    std::snprintf(bus, static_cast<std::size_t>(length), "0000:%02x:00.0", static_cast<unsigned>(device));
    return SUCCESS;
}
Error hipRuntimeGetVersion(int* version) {
    *version = FAKE_RELEASE < 6 ? 50422804 : 70253211;
    return SUCCESS;
}
Error hipDeviceGetAttribute(int* value, u32 attribute, int) {
    switch (attribute) {
    case 63: *value = multiprocessors(); return SUCCESS;
    case 74: *value = 64 << 10; return SUCCESS;
    case 87: *value = std::stoi(setting("FAKE_HIP_WAVE", "64")); return SUCCESS;
    case 10017: *value = 100000; return FAKE_RELEASE < 6 ? INVALID_VALUE : SUCCESS;
    default: return outcome(INVALID_VALUE, "hipDeviceGetAttribute", attribute);
    }
}
static std::string arch() { return setting("STANDIN_ARCH", FAKE_RELEASE < 6 ? "gfx90a" : "gfx942"); }
Error hipGetDeviceProperties(char* to, int) { return properties(to, 792, 396, arch()); }
#if FAKE_RELEASE >= 6
Error hipGetDevicePropertiesR0600(char* to, int) { return properties(to, 1472, 1160, arch()); }
Error hipStreamGetDevice(Stream* stream, int* device) {
    std::lock_guard guard(lock);
    if (streams.count(stream) == 0) return INVALID_HANDLE;
    *device = stream->device;
    return SUCCESS;
}
#endif
Error hipDeviceEnablePeerAccess(int peer, u32 flags) {
    return outcome(enable_access(peer, flags), "hipDeviceEnablePeerAccess", peer);
}

Error hipExtStreamCreateWithCUMask(Stream** stream, u32 words, const u32* mask) {
    ENTER(ExtStreamCreateWithCUMask);
    int units = 0;
    for (u32 word = 0; word < words; ++word) units += std::popcount(mask[word]);
    const bool all = words == static_cast<u32>(multiprocessors() + 31) / 32 && units == multiprocessors();
    const bool made = all && setting("FAKE_HIP_NO_MASKS", "").empty();
    return outcome(made ? create(stream) : INVALID_VALUE, "hipExtStreamCreateWithCUMask", words);
}
Error hipStreamCreateWithFlags(Stream** stream, u32 flags) {
    ENTER(StreamCreateWithFlags);
    return outcome(flags == 1 ? create(stream) : INVALID_VALUE, "hipStreamCreateWithFlags", flags);
}

Error hipEventCreateWithFlags(Event** event, u32 flags) {
    ENTER(EventCreateWithFlags);
    // Expected flags of an event: no timing, and a release at system scope for each record.
    return flags == (2 | 0x80000000u) ? create(event) : outcome(INVALID_VALUE, "hipEventCreateWithFlags", flags);
}

Error hipMemcpyAsync(Address to, Address from, u64 bytes, u32 kind, Stream* stream) {
    const Place target{to, 0, false}, source{from, 0, false};
    const Error code = kind == BY_ADDRESS ? copy("hipMemcpyAsync", stream, target, source, bytes, 1) : INVALID_VALUE;
    return outcome(code, "hipMemcpyAsync", bytes, "on stream", stream);
}
Error hipMemcpy2DAsync(Address to, u64 to_apart, Address from, u64 from_apart, u64 bytes, u64 lines, u32 kind,
                       Stream* stream) {
    const Place target{to, to_apart, false}, source{from, from_apart, false};
    const Error code = kind == BY_ADDRESS ? copy("hipMemcpy2DAsync", stream, target, source, bytes, lines) : INVALID_VALUE;
    return outcome(code, "hipMemcpy2DAsync", bytes * lines, "on stream", stream);
}
Error hipMemsetAsync(Address to, int value, u64 bytes, Stream* stream) {
    if (COMPUTES) return outcome(INVALID_VALUE, "hipMemsetAsync", bytes);
    return fill("hipMemsetAsync", stream, to, value, bytes);
}
Error hipMemGetInfo(u64* free, u64* total) {
    *free = *total = COMPUTES ? 1ull << 30 : 192ull << 30;
    return SUCCESS;
}
static Error take(const char* call, Address* address, u64 bytes, u32 flags) {
    std::lock_guard guard(lock);
    const bool known = flags <= 1 || (flags == 3 && FAKE_RELEASE >= 6);
    Error code = known ? check_apart() : INVALID_VALUE;
    if (code == SUCCESS) code = allocate(address, bytes, current);
    return outcome(code, call, bytes, "flags", flags);
}
Error hipMalloc(Address* address, u64 bytes) {
    ENTER(Malloc);
    host_waits("hipMalloc");
    return take("hipMalloc", address, bytes, 0);
}
Error hipExtMallocWithFlags(Address* address, u64 bytes, u32 flags) {
    ENTER(ExtMallocWithFlags);
    return flags == 0 ? INVALID_VALUE : take("hipExtMallocWithFlags", address, bytes, flags);
}
Error hipFree(Address address) { return outcome(give(address, false), "hipFree"); }
Error hipHostMalloc(void** to, u64 bytes, u32 flags) {
    if (flags != (1u | 2u | 0x40000000u)) return outcome(INVALID_VALUE, "hipHostMalloc", flags);
    *to = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    return SUCCESS;
}
Error hipHostGetDevicePointer(Address* address, void* host, u32 flags) {
    *address = pin(host);
    return flags == 0 ? SUCCESS : INVALID_VALUE;
}
Error hipIpcOpenMemHandle(Address* address, Handle handle, u32 flags) {
    const Error code = flags == u32{LAZY_PEER} ? open_handle(address, handle, current) : INVALID_VALUE;
    return outcome(code, "hipIpcOpenMemHandle", flags);
}

Error hipModuleLoadData(Module** module, const char* image) {
    ENTER(ModuleLoadData);
    return outcome(load(module, image), "hipModuleLoadData");
}
Error hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(int* each, Function*, int threads, u64 shared) {
    const u64 fit = std::min<u64>(2048 / static_cast<u64>(threads), (64 << 10) / (shared + 1));
    *each = COMPUTES ? 1 : static_cast<int>(fit);
    return SUCCESS;
}
Error hipModuleLaunchKernel(Function* function, u32 gx, u32 gy, u32 gz, u32 tx, u32 ty, u32 tz, u32 shared, Stream* stream,
                            void** parameters, void** extra) {
    const bool odd = gy * gz * ty * tz != 1 || extra != nullptr;
    const Error code = odd ? INVALID_VALUE : launch("hipModuleLaunchKernel", function, gx, tx, shared, stream, parameters, "");
    return outcome(code, "hipModuleLaunchKernel", name_of(function), gx);
}
}
