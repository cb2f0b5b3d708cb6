// Fake of HIP and hiprtc that runs on the host, for tests of the backend without a device: the
// stand-in for HIP (standin/hip.cpp) with streams that are threads, and kernels that run (compute.h).
// It is stricter than AMD's runtime: the stream's device must be current, memory is freed exactly
// once by the matching function, and flags unknown to the release are refused.
//
// Environment variables: FAKE_HIP_DEVICES (2), FAKE_HIP_UNITS (8, compute units of a device),
// FAKE_HIP_LOG (file to which calls are logged), FAKE_HIP_NO_MASKS (streams get no hardware queue of
// their own), FAKE_HIP_HOOKS (folder of launch.h), FAKE_HIP_CODE (folder in which processes share
// compiled programs), FAKE_HIP_DELAY (0; milliseconds before each kernel), FAKE_HIP_WAVE (64),
// FAKE_HIP_NO_PEERS (devices without access to others' memory).
#define FAKE_COMPUTES
#include "../standin/hip.cpp"
