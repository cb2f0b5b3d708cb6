// Streams, events and captures of the stand-in drivers; the only file that enqueues operations.
#ifndef STANDIN_STREAMS_H
#define STANDIN_STREAMS_H

#include "memory.h"
#include "worker.h"

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
    /// Thread that does the stream's work; null if the driver does not compute.
    std::unique_ptr<Worker> worker;
};
struct Event {
    int device;
    bool recorded;
    /// Capture and dependencies that the recorded stream had at the event's last record.
    std::shared_ptr<Capture> capture;
    Clock clock;
    /// Latest record; null if the driver does not compute.
    std::shared_ptr<Mark> last;
};
inline auto& streams = *new std::set<Stream*>;
inline auto& events = *new std::set<Event*>;
inline auto& captures = *new std::set<std::shared_ptr<Capture>>;

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

/// Enqueues an operation and logs it; the only place that writes to the log. Calls `work` unless the
/// stream is captured: at once, or on the stream's thread.
inline Error enqueue(Stream* stream, const char* function, const std::string& what, const Work& work = {}) {
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
    if (COMPUTES) rank.log.clear();
    if (stream->capture != nullptr) ++stream->clock[stream];
    else if (work && stream->worker != nullptr) stream->worker->enqueue(work);
    else if (work) work();
    return SUCCESS;
}

inline Error create(Stream** stream) {
    std::lock_guard guard(lock);
    if (current < 0) return INVALID_CONTEXT;
    streams.insert(*stream = new Stream{current, nullptr, {}, COMPUTES ? std::make_unique<Worker>() : nullptr});
    return SUCCESS;
}
inline Error destroy(Stream* stream) {
    {
        std::lock_guard guard(lock);
        if (streams.erase(stream) == 0) return INVALID_HANDLE;
        if (stream->capture != nullptr) {
            invalidate(stream->capture);
            stream->capture->streams.erase(stream);
        }
        rank.streams.forget(stream);
    }
    delete stream;
    return SUCCESS;
}
/// Reports whether all work of a stream is done. Returns an error for a captured stream.
inline Error finished(Stream* stream) {
    std::lock_guard guard(lock);
    if (streams.count(stream) == 0) return INVALID_HANDLE;
    if (stream->capture == nullptr) return stream->worker && !stream->worker->is_idle() ? NOT_READY : check_apart();
    invalidate(stream->capture);
    return CAPTURE_UNSUPPORTED;
}
/// Waits until all work of a stream is done.
inline Error synchronize(Stream* stream) {
    const Error code = finished(stream);
    if (code != NOT_READY) return code;
    stream->worker->wait();
    return SUCCESS;
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
    events.insert(*event = new Event{current, false, nullptr, {}, nullptr});
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
    const auto mark = COMPUTES ? std::make_shared<Mark>() : nullptr;
    const Error code = enqueue(stream, function, name_of(event), COMPUTES ? Work([mark] { mark->reach(); }) : Work());
    if (code != SUCCESS) return code;
    event->last = mark;
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
    const auto mark = event->last;
    const Error code = enqueue(stream, function, name_of(event), mark ? Work([mark] { mark->wait(); }) : Work());
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
    if (event->capture != nullptr) return CAPTURED_EVENT;
    return event->last && !event->last->is_over() ? NOT_READY : check_apart();
}
/// Waits until the work before the latest record of an event is done.
inline Error synchronize(Event* event) {
    const Error code = event_finished(event);
    if (code != NOT_READY) return code;
    std::shared_ptr<Mark> last;
    {
        std::lock_guard guard(lock);
        last = event->last;
    }
    last->wait();
    return SUCCESS;
}

} // namespace standin

#endif
