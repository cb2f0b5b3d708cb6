// Driver functions that CUDA and HIP have alike; the macro STANDIN_HIP chooses HIP's names for
// them.
#ifndef STANDIN_DRIVER_H
#define STANDIN_DRIVER_H

#include "core.h"

/// Macros for the names of driver functions without the vendor's prefix: FUNCTION adds the prefix,
/// SECOND also adds CUDA's `_v2`, and NAME is the text in logs.
#ifdef STANDIN_HIP
#define FUNCTION(name) hip##name
#define SECOND(name) hip##name
#define NAME(name) "hip" #name
#else
#define FUNCTION(name) cu##name
#define SECOND(name) cu##name##_v2
#define NAME(name) "cu" #name
#endif

/// First statement of each driver function: counts the call, and returns an error if a test asked
/// for this call to fail.
#define ENTER(name)                                                                                                    \
    if (is_to_fail(NAME(name), false)) return LAUNCH_FAILED

using namespace standin;
using Address = u64;

/// Number of the memory type of device memory, and flag with which handles are opened.
constexpr int DEVICE_MEMORY = FAKE_RELEASE < 6 ? 1 : 2, LAZY_PEER = FAKE_RELEASE < 6 ? 0 : 1;

extern "C" {

Error FUNCTION(DeviceGetName)(char* name, int length, int) {
    std::snprintf(name, static_cast<std::size_t>(length), COMPUTES ? "a fake of HIP" : "stand-in");
    return SUCCESS;
}
Error FUNCTION(DeviceCanAccessPeer)(int* can, int device, int peer) {
    *can = device != peer && can_access(device, peer);
    return SUCCESS;
}
Error FUNCTION(ThreadExchangeStreamCaptureMode)(u32* mode) {
    if (*mode > 2) return INVALID_VALUE;
    std::swap(standin::rank.mode, *mode);
    return SUCCESS;
}

Error SECOND(StreamDestroy)(Stream* stream) { return outcome(destroy(stream), NAME(StreamDestroy)); }
Error FUNCTION(StreamSynchronize)(Stream* stream) {
    ENTER(StreamSynchronize);
    host_waits(NAME(StreamSynchronize));
    return synchronize(stream);
}
Error FUNCTION(StreamQuery)(Stream* stream) { return finished(stream); }
Error FUNCTION(StreamWaitEvent)(Stream* stream, Event* event, u32 flags) {
    const Error code = flags == 0 ? wait(NAME(StreamWaitEvent), stream, event) : INVALID_VALUE;
    return outcome(code, NAME(StreamWaitEvent));
}
Error FUNCTION(StreamGetCaptureInfo_v2)(Stream* stream, u32* status, u64* id, void*, void*, void*) {
    ENTER(StreamGetCaptureInfo_v2);
    return capture_info(stream, status, id);
}
Error SECOND(StreamBeginCapture)(Stream* stream, u32 mode) { return begin_capture(stream, mode); }
Error FUNCTION(StreamEndCapture)(Stream* stream, u64* graph) { return end_capture(stream, graph); }

Error FUNCTION(EventRecord)(Event* event, Stream* stream) {
    return outcome(record(NAME(EventRecord), event, stream), NAME(EventRecord), "on stream", stream);
}
Error FUNCTION(EventQuery)(Event* event) { return event_finished(event); }
Error FUNCTION(EventSynchronize)(Event* event) {
    host_waits(NAME(EventSynchronize));
    return synchronize(event);
}
Error SECOND(EventDestroy)(Event* event) { return destroy(event); }

Error SECOND(MemcpyHtoDAsync)(Address to, const void* from, u64 bytes, Stream* stream) {
    const Place host{reinterpret_cast<u64>(from), 0, true};
    return outcome(copy(NAME(MemcpyHtoDAsync), stream, {to, 0, false}, host, bytes, 1), NAME(MemcpyHtoDAsync), bytes);
}
Error SECOND(MemcpyDtoHAsync)(void* to, Address from, u64 bytes, Stream* stream) {
    const Place host{reinterpret_cast<u64>(to), 0, true};
    return outcome(copy(NAME(MemcpyDtoHAsync), stream, host, {from, 0, false}, bytes, 1), NAME(MemcpyDtoHAsync), bytes);
}
Error SECOND(MemGetAddressRange)(Address* base, u64* bytes, Address address) {
    std::lock_guard guard(lock);
    const Memory* found = memory_at(address, 1);
    if (found == nullptr) return NOT_FOUND;
    *base = base_of(address), *bytes = found->bytes;
    return SUCCESS;
}
Error FUNCTION(PointerGetAttribute)(void* data, u32 attribute, Address address) {
    std::lock_guard guard(lock);
    const Memory* found = memory_at(address, 1);
    if (found == nullptr || (attribute != 2 && attribute != 9)) return INVALID_VALUE;
    *static_cast<int*>(data) = attribute == 2 ? DEVICE_MEMORY : found->device;
    return SUCCESS;
}
Error FUNCTION(IpcGetMemHandle)(Handle* handle, Address address) {
    return outcome(export_handle(handle, address), NAME(IpcGetMemHandle));
}
Error FUNCTION(IpcCloseMemHandle)(Address address) {
    return outcome(give(address, true), NAME(IpcCloseMemHandle));
}

Error FUNCTION(ModuleGetFunction)(Function** function, Module* module, const char* name) {
    return find(function, module, name);
}
Error FUNCTION(FuncGetAttribute)(int* value, u32 attribute, Function*) {
    *value = attribute == 4 ? 64 : 0;
    return attribute == 3 || attribute == 4 ? SUCCESS : INVALID_VALUE;
}
}

#endif
