// Stand-in for the HIP runtime, release 7, built on core.h, which it shares with the one for CUDA.
#include <algorithm>

#define STANDIN_HIP
#include "core.h"

using namespace standin;

namespace {

using Address = u64;

/// First statement of each runtime function: counts the call, and returns an error if a test asked
/// for this call to fail.
#define ENTER(function)                                                                                                \
    if (is_to_fail(#function, false)) return LAUNCH_FAILED

/// Kind of a copy whose direction follows from the addresses (hipMemcpyDefault).
constexpr u32 BY_ADDRESS = 4;

} // namespace

extern "C" {

Error hipRuntimeGetVersion(int* version) {
    *version = 70253211;
    return SUCCESS;
}
const char* hipGetErrorName(Error code) {
    switch (code) {
    case SUCCESS: return "hipSuccess";
    case INVALID_VALUE: return "hipErrorInvalidValue";
    case NO_DEVICE: return "hipErrorNoDevice";
    case INVALID_DEVICE: return "hipErrorInvalidDevice";
    case INVALID_IMAGE: return "hipErrorInvalidImage";
    case INVALID_HANDLE: return "hipErrorInvalidHandle";
    case NOT_FOUND: return "hipErrorNotFound";
    case NOT_READY: return "hipErrorNotReady";
    case ILLEGAL_ADDRESS: return "hipErrorIllegalAddress";
    case LAUNCH_FAILED: return "hipErrorLaunchFailure";
    case CAPTURE_UNSUPPORTED: return "hipErrorStreamCaptureUnsupported";
    case CAPTURE_INVALIDATED: return "hipErrorStreamCaptureInvalidated";
    case CAPTURE_UNJOINED: return "hipErrorStreamCaptureUnjoined";
    case CAPTURE_ISOLATION: return "hipErrorStreamCaptureIsolation";
    case CAPTURED_EVENT: return "hipErrorCapturedEvent";
    default: return "hipErrorUnknown";
    }
}
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
Error hipDeviceGetName(char* name, int length, int) {
    std::snprintf(name, static_cast<std::size_t>(length), "stand-in");
    return SUCCESS;
}
Error hipDeviceGetUuid(unsigned char* uuid, int) {
    std::memset(uuid, 0, 16);
    return SUCCESS;
}
Error hipDeviceGetPCIBusId(char* bus, int length, int device) {
    std::snprintf(bus, static_cast<std::size_t>(length), "0000:%02x:00.0", static_cast<u32>(device));
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
static Error properties(char* to, u64 bytes, u64 arch) {
    std::memset(to, 0xff, bytes);
    std::strcpy(to + arch, (setting("STANDIN_ARCH", "gfx942") + ":sramecc+:xnack-").c_str());
    return SUCCESS;
}
Error hipGetDeviceProperties(char* to, int) { return properties(to, 792, 396); }
Error hipGetDevicePropertiesR0600(char* to, int) { return properties(to, 1472, 1160); }
Error hipDeviceCanAccessPeer(int* can, int, int) {
    *can = 1;
    return SUCCESS;
}
Error hipDeviceEnablePeerAccess(int peer, u32 flags) {
    std::lock_guard guard(lock);
    if (flags != 0 || peer == current) return INVALID_DEVICE;
    return peers.insert({current, peer}).second ? SUCCESS : ALREADY_ENABLED;
}
Error hipThreadExchangeStreamCaptureMode(u32* mode) {
    if (*mode > 2) return INVALID_VALUE;
    std::swap(standin::rank.mode, *mode);
    return SUCCESS;
}

Error hipExtStreamCreateWithCUMask(Stream** stream, u32 words, const u32*) {
    ENTER(hipExtStreamCreateWithCUMask);
    return words == static_cast<u32>(multiprocessors() + 31) / 32 ? create(stream) : INVALID_VALUE;
}
Error hipStreamCreateWithFlags(Stream** stream, u32 flags) {
    ENTER(hipStreamCreateWithFlags);
    return flags == 1 ? create(stream) : INVALID_VALUE;
}
Error hipStreamDestroy(Stream* stream) { return destroy(stream); }
Error hipStreamSynchronize(Stream* stream) {
    ENTER(hipStreamSynchronize);
    host_waits("hipStreamSynchronize");
    return finished(stream);
}
Error hipStreamQuery(Stream* stream) { return finished(stream); }
Error hipStreamGetDevice(Stream* stream, int* device) {
    std::lock_guard guard(lock);
    if (streams.count(stream) == 0) return INVALID_HANDLE;
    *device = stream->device;
    return SUCCESS;
}
Error hipStreamWaitEvent(Stream* stream, Event* event, u32 flags) {
    return flags == 0 ? wait("hipStreamWaitEvent", stream, event) : INVALID_VALUE;
}
Error hipStreamGetCaptureInfo_v2(Stream* stream, u32* status, u64* id, void*, void*, void*) {
    ENTER(hipStreamGetCaptureInfo_v2);
    return capture_info(stream, status, id);
}
Error hipStreamBeginCapture(Stream* stream, u32 mode) { return begin_capture(stream, mode); }
Error hipStreamEndCapture(Stream* stream, u64* graph) { return end_capture(stream, graph); }

Error hipEventCreateWithFlags(Event** event, u32 flags) {
    ENTER(hipEventCreateWithFlags);
    // Expected flags of an event: no timing, and a release at system scope for each record.
    return flags == (2 | 0x80000000u) ? create(event) : INVALID_VALUE;
}
Error hipEventRecord(Event* event, Stream* stream) { return record("hipEventRecord", event, stream); }
Error hipEventQuery(Event* event) { return event_finished(event); }
Error hipEventSynchronize(Event* event) {
    host_waits("hipEventSynchronize");
    return event_finished(event);
}
Error hipEventDestroy(Event* event) { return destroy(event); }

Error hipMemcpyAsync(Address to, Address from, u64 bytes, u32 kind, Stream* stream) {
    if (kind != BY_ADDRESS) return INVALID_VALUE;
    return copy("hipMemcpyAsync", stream, {to, 0, false}, {from, 0, false}, bytes, 1);
}
Error hipMemcpy2DAsync(Address to, u64 to_apart, Address from, u64 from_apart, u64 bytes, u64 lines, u32 kind,
                       Stream* stream) {
    if (kind != BY_ADDRESS) return INVALID_VALUE;
    return copy("hipMemcpy2DAsync", stream, {to, to_apart, false}, {from, from_apart, false}, bytes, lines);
}
Error hipMemcpyHtoDAsync(Address to, const void* from, u64 bytes, Stream* stream) {
    return copy("hipMemcpyHtoDAsync", stream, {to, 0, false}, {reinterpret_cast<u64>(from), 0, true}, bytes, 1);
}
Error hipMemcpyDtoHAsync(void* to, Address from, u64 bytes, Stream* stream) {
    return copy("hipMemcpyDtoHAsync", stream, {reinterpret_cast<u64>(to), 0, true}, {from, 0, false}, bytes, 1);
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
    ENTER(hipMalloc);
    host_waits("hipMalloc");
    return take(address, bytes);
}
Error hipExtMallocWithFlags(Address* address, u64 bytes, u32 flags) {
    ENTER(hipExtMallocWithFlags);
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
Error hipMemGetAddressRange(Address* base, u64* bytes, Address address) {
    std::lock_guard guard(lock);
    const Memory* found = memory_at(address, 1);
    if (found == nullptr) return NOT_FOUND;
    *base = base_of(address), *bytes = found->bytes;
    return SUCCESS;
}
Error hipPointerGetAttribute(void* data, u32 attribute, Address address) {
    std::lock_guard guard(lock);
    const Memory* found = memory_at(address, 1);
    if (found == nullptr || (attribute != 2 && attribute != 9)) return INVALID_VALUE;
    *static_cast<int*>(data) = attribute == 2 ? 2 : found->device;
    return SUCCESS;
}
Error hipIpcGetMemHandle(Handle* handle, Address address) { return export_handle(handle, address); }
Error hipIpcOpenMemHandle(Address* address, Handle handle, u32 flags) {
    return flags == 1 ? open_handle(address, handle, current) : INVALID_VALUE;
}
Error hipIpcCloseMemHandle(Address address) {
    std::lock_guard guard(lock);
    return unmap(address, false);
}

Error hipModuleLoadData(Module** module, const char* image) {
    ENTER(hipModuleLoadData);
    std::lock_guard guard(lock);
    if (const Error code = check_apart()) return code;
    *module = new Module{current, {}};
    return read_image(image, (*module)->image) ? SUCCESS : INVALID_IMAGE;
}
Error hipModuleGetFunction(Function** function, Module* module, const char* name) {
    const auto found = module->image.kernels.find(name);
    if (found == module->image.kernels.end()) return NOT_FOUND;
    *function = new Function{module, &found->second, 64 << 10};
    return SUCCESS;
}
Error hipFuncGetAttribute(int* value, u32 attribute, Function*) {
    *value = attribute == 4 ? 64 : 0;
    return attribute == 3 || attribute == 4 ? SUCCESS : INVALID_VALUE;
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
