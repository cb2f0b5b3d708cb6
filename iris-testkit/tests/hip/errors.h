// Error codes that CUDA and HIP share, for the fake drivers of both.
#ifndef FAKE_ERRORS_H
#define FAKE_ERRORS_H

namespace drivers {

using Error = unsigned;
constexpr Error SUCCESS = 0;

/// Calls `code(constant, number, name)` for each code, with its name in CUDA after `CUDA_ERROR_`
/// and in HIP after `hipError`.
#define DRIVER_ERRORS(code)                                                                                            \
    code(INVALID_VALUE, 1, "INVALID_VALUE", "InvalidValue")                                                            \
    code(OUT_OF_MEMORY, 2, "OUT_OF_MEMORY", "OutOfMemory")                                                             \
    code(NO_DEVICE, 100, "NO_DEVICE", "NoDevice")                                                                      \
    code(INVALID_DEVICE, 101, "INVALID_DEVICE", "InvalidDevice")                                                       \
    code(INVALID_IMAGE, 200, "INVALID_IMAGE", "InvalidImage")                                                          \
    code(INVALID_CONTEXT, 201, "INVALID_CONTEXT", "InvalidContext")                                                    \
    code(INVALID_HANDLE, 400, "INVALID_HANDLE", "InvalidHandle")                                                       \
    code(NOT_FOUND, 500, "NOT_FOUND", "NotFound")                                                                      \
    code(NOT_READY, 600, "NOT_READY", "NotReady")                                                                      \
    code(ILLEGAL_ADDRESS, 700, "ILLEGAL_ADDRESS", "IllegalAddress")                                                    \
    code(ALREADY_ENABLED, 704, "PEER_ACCESS_ALREADY_ENABLED", "PeerAccessAlreadyEnabled")                              \
    code(LAUNCH_FAILED, 719, "LAUNCH_FAILED", "LaunchFailure")                                                         \
    code(CAPTURE_UNSUPPORTED, 900, "STREAM_CAPTURE_UNSUPPORTED", "StreamCaptureUnsupported")                           \
    code(CAPTURE_INVALIDATED, 901, "STREAM_CAPTURE_INVALIDATED", "StreamCaptureInvalidated")                           \
    code(CAPTURE_MERGE, 902, "STREAM_CAPTURE_MERGE", "StreamCaptureMerge")                                             \
    code(CAPTURE_UNMATCHED, 903, "STREAM_CAPTURE_UNMATCHED", "StreamCaptureUnmatched")                                 \
    code(CAPTURE_UNJOINED, 904, "STREAM_CAPTURE_UNJOINED", "StreamCaptureUnjoined")                                    \
    code(CAPTURE_ISOLATION, 905, "STREAM_CAPTURE_ISOLATION", "StreamCaptureIsolation")                                 \
    code(CAPTURED_EVENT, 907, "CAPTURED_EVENT", "CapturedEvent")

#define CONSTANT(constant, number, cuda, hip) constexpr Error constant = number;
DRIVER_ERRORS(CONSTANT)
#undef CONSTANT

/// Name of `code` in CUDA; null if the list above has none for it.
inline const char* cuda_name(Error code) {
    switch (code) {
    case SUCCESS: return "CUDA_SUCCESS";
#define NAMED(constant, number, cuda, hip)                                                                             \
    case constant: return "CUDA_ERROR_" cuda;
        DRIVER_ERRORS(NAMED)
#undef NAMED
    default: return nullptr;
    }
}

/// Name of `code` in HIP.
inline const char* hip_name(Error code) {
    switch (code) {
    case SUCCESS: return "hipSuccess";
#define NAMED(constant, number, cuda, hip)                                                                             \
    case constant: return "hipError" hip;
        DRIVER_ERRORS(NAMED)
#undef NAMED
    default: return "hipErrorUnknown";
    }
}

} // namespace drivers

#endif
