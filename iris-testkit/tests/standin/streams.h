// Streams, events and captures of the stand-in drivers; the only file that enqueues operations.
#ifndef STANDIN_STREAMS_H
#define STANDIN_STREAMS_H

#include <memory>

#include "memory.h"

namespace standin {

struct Stream;

/// Dependencies of a captured stream: for each stream of the capture, the position up to which it
/// depends on that stream.
using Clock = std::map<const Stream*, u64>;

struct Capture {
    u64 id;
    Stream* origin;
    u32 mode;
    bool valid, open;
    std::set<Stream*> streams;
};
struct Stream {
    int device;
    std::shared_ptr<Capture> capture;
    Clock clock;
};
struct Event {
    int device;
    bool recorded;
    /// Capture and dependencies that the recorded stream had at the event's last record.
    std::shared_ptr<Capture> capture;
    Clock clock;
};
inline std::set<Stream*> streams;
inline std::set<Event*> events;
inline std::set<std::shared_ptr<Capture>> captures;

inline void invalidate(const std::shared_ptr<Capture>& capture) {
    if (capture != nullptr) capture->valid = false;
}
/// Checks a driver call that captures forbid: unless the thread is in relaxed mode, the call
/// invalidates every global capture and returns an error.
inline Error check_apart() {
    for (const auto& capture : captures) {
        if (rank.mode == RELAXED || capture->mode != GLOBAL) continue;
        invalidate(capture);
        return CAPTURE_UNSUPPORTED;
    }
    return SUCCESS;
}

#ifdef STANDIN_HIP
inline thread_local int current = 0;
#else
/// Current device of the thread; -1 until a context is pushed.
inline thread_local int current = -1;
#endif

/// Enqueues an operation and logs it; the only place that writes to the log.
inline Error enqueue(Stream* stream, const char* function, const std::string& what) {
    if (streams.count(stream) == 0) return INVALID_HANDLE;
    if (stream->device != current) return INVALID_CONTEXT;
    if (stream->capture != nullptr && !stream->capture->valid) return CAPTURE_INVALIDATED;
    const bool fails = is_to_fail(function, true);
    if (fails) rank.log += "FAILED ";
    rank.log += function;
    rank.log += " s" + std::to_string(rank.streams.of(stream));
    if (stream->capture != nullptr) rank.log += "*";
    rank.log += " " + what + "\n";
    if (fails) return LAUNCH_FAILED;
    if (stream->capture != nullptr) ++stream->clock[stream];
    return SUCCESS;
}

inline Error create(Stream** stream) {
    std::lock_guard guard(lock);
    if (current < 0) return INVALID_CONTEXT;
    streams.insert(*stream = new Stream{current, nullptr, {}});
    return SUCCESS;
}
inline Error destroy(Stream* stream) {
    std::lock_guard guard(lock);
    if (streams.erase(stream) == 0) return INVALID_HANDLE;
    if (stream->capture != nullptr) {
        invalidate(stream->capture);
        stream->capture->streams.erase(stream);
    }
    rank.streams.forget(stream);
    delete stream;
    return SUCCESS;
}
/// Reports whether all work of a stream is done, which is always true in this stand-in. Returns an
/// error for a captured stream.
inline Error finished(Stream* stream) {
    std::lock_guard guard(lock);
    if (streams.count(stream) == 0) return INVALID_HANDLE;
    if (stream->capture == nullptr) return check_apart();
    invalidate(stream->capture);
    return CAPTURE_UNSUPPORTED;
}
inline Error capture_info(Stream* stream, u32* status, u64* id) {
    std::lock_guard guard(lock);
    if (streams.count(stream) == 0) return INVALID_HANDLE;
    const auto& capture = stream->capture;
    *status = capture == nullptr ? 0 : capture->valid ? 1 : 2;
    *id = capture == nullptr ? 0 : capture->id;
    return SUCCESS;
}
inline Error begin_capture(Stream* stream, u32 mode) {
    static u64 ids = 0;
    std::lock_guard guard(lock);
    if (streams.count(stream) == 0) return INVALID_HANDLE;
    if (stream->capture != nullptr) return INVALID_VALUE;
    stream->capture = std::make_shared<Capture>(Capture{++ids, stream, mode, true, true, {stream}});
    captures.insert(stream->capture);
    return SUCCESS;
}
inline Error end_capture(Stream* stream, u64* graph) {
    std::lock_guard guard(lock);
    if (streams.count(stream) == 0) return INVALID_HANDLE;
    const auto capture = stream->capture;
    *graph = 0;
    if (capture == nullptr || capture->origin != stream) return CAPTURE_UNMATCHED;
    bool joined = true;
    for (Stream* other : capture->streams) {
        joined = joined && stream->clock[other] >= other->clock[other];
    }
    for (Stream* other : capture->streams) {
        other->capture = nullptr;
        other->clock.clear();
    }
    capture->open = false;
    captures.erase(capture);
    if (!capture->valid) return CAPTURE_INVALIDATED;
    if (!joined) return CAPTURE_UNJOINED;
    *graph = capture->id;
    return SUCCESS;
}

inline Error create(Event** event) {
    std::lock_guard guard(lock);
    if (current < 0) return INVALID_CONTEXT;
    events.insert(*event = new Event{current, false, nullptr, {}});
    return SUCCESS;
}
inline Error destroy(Event* event) {
    std::lock_guard guard(lock);
    if (events.erase(event) == 0) return INVALID_HANDLE;
    rank.events.forget(event);
    delete event;
    return SUCCESS;
}
inline std::string name_of(Event* event) { return "e" + std::to_string(rank.events.of(event)); }
inline Error record(const char* function, Event* event, Stream* stream) {
    std::lock_guard guard(lock);
    if (events.count(event) == 0) return INVALID_HANDLE;
    const Error code = enqueue(stream, function, name_of(event));
    if (code != SUCCESS) return code;
    event->recorded = true;
    event->capture = stream->capture;
    event->clock = stream->clock;
    return SUCCESS;
}
inline Error wait(const char* function, Stream* stream, Event* event) {
    std::lock_guard guard(lock);
    if (events.count(event) == 0 || streams.count(stream) == 0) return INVALID_HANDLE;
    if (event->capture != nullptr && !event->capture->open) return CAPTURED_EVENT;
    if (event->capture != nullptr && stream->capture != nullptr && event->capture != stream->capture) {
        invalidate(event->capture);
        invalidate(stream->capture);
        return CAPTURE_MERGE;
    }
    if (stream->capture != nullptr && event->capture == nullptr) {
        // A captured stream cannot wait for an event from outside of its capture.
        invalidate(stream->capture);
        return CAPTURE_ISOLATION;
    }
    // The stream joins the event's capture; this is undone if the enqueue fails.
    const bool joins = event->capture != nullptr && stream->capture == nullptr;
    if (joins) {
        stream->capture = event->capture;
        stream->capture->streams.insert(stream);
        stream->clock.clear();
    }
    const Error code = enqueue(stream, function, name_of(event));
    if (code != SUCCESS && joins) {
        stream->capture->streams.erase(stream);
        stream->capture = nullptr;
    }
    if (code != SUCCESS) return code;
    if (stream->capture != nullptr) {
        for (const auto& [other, at] : event->clock) {
            u64& known = stream->clock[other];
            known = at > known ? at : known;
        }
    }
    return SUCCESS;
}
inline Error event_finished(Event* event) {
    std::lock_guard guard(lock);
    if (events.count(event) == 0) return INVALID_HANDLE;
    return event->capture != nullptr ? CAPTURED_EVENT : check_apart();
}

} // namespace standin

#endif
