// Trace spans and counters of a workgroup. IRIS_OBSERVED is defined only if an op is planned with
// tracing or counting. Without it no code is generated, because merely testing an address for 0
// costs up to a sixth of the time of a small all_reduce. With it, tracing is off if the address of
// the trace is 0, and counting is off if the address of the counters is 0.
#ifndef IRIS_TRACE_H
#define IRIS_TRACE_H

#include "iris/sym.h"

#ifndef IRIS_OBSERVED
#define IRIS_OBSERVED 0
#endif

namespace iris {

/// Index of a counter of a rank; same as iris_kernels::args::counter.
enum class Counter : u32 { Pushed, Pulled, Flags, Waits };

/// Writer of a workgroup's spans and of the rank's counters. The trace buffer is count[MAX_GROUPS],
/// then [group][capacity] of {begin ns, end ns, kind, what}; see iris_kernels::trace.
class Trace {
  public:
    IRIS_DEVICE Trace(u64 buffer, u32 capacity, u64 counters, u32 group)
        : counters(counters), slots(0), count_word(0), capacity(capacity), used(0), began(0),
          wait_began(0), what(0), wait_what(0) {
        if (OBSERVED && buffer != 0 && group < MAX_GROUPS) {
            count_word = buffer + group * 4;
            slots = buffer + MAX_GROUPS * 4 + u64(group) * capacity * SPAN_BYTES;
            // Number of spans that earlier launches of the call have written; this launch appends
            // its spans after them.
            used = port::read<u32>(count_word);
        }
    }

    /// Begin a span. A wait may begin inside another span; other spans do not nest.
    IRIS_DEVICE void begin(Span span, u32 about) {
        if (!OBSERVED || count_word == 0 || port::thread() != 0) return;
        (span == Span::Wait ? wait_began : began) = port::now();
        (span == Span::Wait ? wait_what : what) = about;
    }

    IRIS_DEVICE void end(Span span) {
        if (!OBSERVED || count_word == 0 || port::thread() != 0) return;
        if (used < capacity) {
            const u64 at = slots + u64(used) * SPAN_BYTES;
            port::write<u64>(at, span == Span::Wait ? wait_began : began);
            port::write<u64>(at + 8, port::now());
            port::write<u32>(at + 16, static_cast<u32>(span));
            port::write<u32>(at + 20, span == Span::Wait ? wait_what : what);
        }
        port::write<u32>(count_word, ++used);
    }

    /// First half of a span that encloses another launch: stores the start time in the slot of the
    /// next span.
    IRIS_DEVICE void leave_begin() const {
        if (!OBSERVED || count_word == 0 || used >= capacity) return;
        port::write<u64>(slots + u64(used) * SPAN_BYTES, port::now());
    }

    /// Second half of a span that encloses another launch, in a later launch: reads the start time
    /// that leave_begin() stored.
    IRIS_DEVICE void end_left(Span span, u32 about) {
        if (!OBSERVED || count_word == 0) return;
        if (used < capacity) began = port::read<u64>(slots + u64(used) * SPAN_BYTES);
        what = about;
        end(span);
    }

    /// Add `amount` to a counter. One thread calls this function.
    IRIS_DEVICE void add(Counter counter, u64 amount) const {
        if (!OBSERVED || counters == 0) return;
        port::rmw<Rmw::Add, Order::Relaxed, Scope::Device>(
            counters + static_cast<u64>(counter) * 8, static_cast<i64>(amount), USER_ACCESS);
    }

    /// Add `amount` to a counter once for the workgroup. All threads call this function.
    IRIS_DEVICE void add_once(Counter counter, u64 amount) const {
        if (OBSERVED && port::thread() == 0) add(counter, amount);
    }

  private:
    static constexpr bool OBSERVED = IRIS_OBSERVED != 0;
    static constexpr u32 MAX_GROUPS = 512;
    static constexpr u32 SPAN_BYTES = 24;
    u64 counters, slots, count_word;
    u32 capacity, used;
    u64 began, wait_began;
    u32 what, wait_what;
};

} // namespace iris

#endif
