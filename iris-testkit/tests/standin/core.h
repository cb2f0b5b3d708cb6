// Common parts of the stand-in drivers of both vendors. Device memory is a file in memory. Every call
// that enqueues is written to the log of the calling thread, which is one rank; a call can be made to
// fail. Error codes are those that CUDA and HIP share. Copies are done at once, and no kernel runs,
// unless the driver computes (compute.h).
//
// Environment variables: STANDIN_DEVICES (8), STANDIN_MULTIPROCESSORS (132), STANDIN_ARCH (90, or
// gfx942).
#ifndef STANDIN_CORE_H
#define STANDIN_CORE_H

#ifdef FAKE_COMPUTES
#include "../hip/compute.h"
#else
#include "launch.h"
#endif

// Functions that tests call; they are the same for either vendor's driver.
extern "C" {
using namespace standin;

/// Makes the calling thread rank `number`; memory that the thread allocates is numbered from 0 in
/// the log.
void standin_rank(u32 number) {
    standin::rank = Rank{};
    standin::rank.number = number;
}
/// Returns the log of the calling thread.
const char* standin_log() { return standin::rank.log.c_str(); }
/// Clears the log of the calling thread and restarts the numbering of its streams and events.
void standin_clear() {
    standin::rank.log.clear();
    standin::rank.streams = {};
    standin::rank.events = {};
}
/// Makes call number `nth` of `function` on this thread fail, counted from now; 0 cancels. If
/// `function` is "", calls of all enqueuing functions are counted.
void standin_fail(const char* function, u64 nth) {
    standin::rank.fails = function;
    standin::rank.until = nth;
    standin::rank.failed.clear();
}
/// Makes the log of this thread include calls in which the host waits for the device.
void standin_log_waits(bool waits) { standin::rank.waits = waits; }
/// Name of the function whose call was made to fail by standin_fail; "" if none was.
const char* standin_failed() { return standin::rank.failed.c_str(); }
/// Creates a stream on `device` for a test, as a call of the driver's API would.
u64 standin_stream(int device) {
    const int before = standin::current;
    standin::current = device;
    Stream* stream = nullptr;
    const Error code = standin::create(&stream);
    standin::current = before;
    return code == SUCCESS ? reinterpret_cast<u64>(stream) : 0;
}
Error standin_destroy_stream(u64 stream) { return standin::destroy(reinterpret_cast<Stream*>(stream)); }
Error standin_begin_capture(u64 stream) { return begin_capture(reinterpret_cast<Stream*>(stream), GLOBAL); }
Error standin_end_capture(u64 stream, u64* graph) { return end_capture(reinterpret_cast<Stream*>(stream), graph); }
/// Enqueues an operation, which the log shows as `line`; called by the fakes of other libraries. Calls
/// `work` with `data` if the driver computes.
Error standin_enqueue(u64 stream, const char* function, const char* line, void (*work)(void*), void* data) {
    std::lock_guard guard(standin::lock);
    const Work run = COMPUTES ? Work([=] { work(data); }) : Work();
    return standin::enqueue(reinterpret_cast<Stream*>(stream), function, line, run);
}
/// Converts an address to the text that logs show; called by the fakes of other libraries. The text is
/// valid until this thread's next call.
const char* standin_shown(u64 address) {
    static thread_local std::string text;
    std::lock_guard guard(standin::lock);
    text = standin::shown(address);
    return text.c_str();
}
int standin_device() { return standin::current; }
bool standin_reaches(int device, u64 address, u64 bytes) {
    std::lock_guard guard(standin::lock);
    return standin::reaches(device, address, bytes);
}
}

#endif
