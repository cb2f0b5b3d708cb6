// Functions of the HIP runtime that runtime.cpp and the stand-in driver share. The including file
// must define the codes of errors.h, `devices()` (number of devices) and `current` (the thread's
// device).
#include <cstdio>
#include <cstring>
#include <string>

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
}

/// Fills the device properties at `to`, `bytes` long, with a pattern, and writes the architecture's
/// name at byte `at`.
static Error properties(char* to, std::size_t bytes, std::size_t at, const std::string& arch) {
    std::memset(to, 0xff, bytes);
    std::strcpy(to + at, (arch + ":sramecc+:xnack-").c_str());
    return SUCCESS;
}
