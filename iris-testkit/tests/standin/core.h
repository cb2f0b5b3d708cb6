// Common parts of the stand-ins for the drivers of both vendors: memory of a device is a file in memory, copies are carried
// out at once, and no kernel runs. Every call that enqueues is written into the log of the calling thread, which is one
// rank; a call can be made to fail. Error codes are those that CUDA and HIP have in common.
//
// In the environment: STANDIN_DEVICES (8), STANDIN_MULTIPROCESSORS (132), STANDIN_ARCH (90, or gfx942).
#ifndef STANDIN_CORE_H
#define STANDIN_CORE_H

#include "work.h"

// For the test, whichever vendor's interface there is beside it.
extern "C" {
using namespace standin;

/// The calling thread is this rank from now on, and its memory is numbered from 0.
void standin_rank(u32 number) {
    standin::rank = Rank{};
    standin::rank.number = number;
}
/// The log of this thread.
const char* standin_log() { return standin::rank.log.c_str(); }
/// Empties it; streams and events are numbered anew.
void standin_clear() {
    standin::rank.log.clear();
    standin::rank.streams = {};
    standin::rank.events = {};
}
/// Lets call number `nth` of `function` from now on fail on this thread; "" for whatever enqueues. 0: none.
void standin_fail(const char* function, u64 nth) {
    standin::rank.fails = function;
    standin::rank.until = nth;
    standin::rank.failed.clear();
}
/// Whether the log of this thread has the calls in which the host waits for the device, too.
void standin_log_waits(bool waits) { standin::rank.waits = waits; }
/// The function that failed; "" if none has.
const char* standin_failed() { return standin::rank.failed.c_str(); }
/// A stream of the caller's.
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
/// For stand-ins of libraries: enqueues what a line says.
Error standin_enqueue(u64 stream, const char* function, const char* line) {
    std::lock_guard guard(standin::lock);
    return standin::enqueue(reinterpret_cast<Stream*>(stream), function, line);
}
/// For them, too: an address as the log has it; valid until this thread's next call.
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
