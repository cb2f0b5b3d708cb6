// Kernels that use every remote access that iris/sym.h and iris/sync.h offer to users.
#include "iris/sync.h"

using namespace iris;

/// Operates, by one thread of each rank, on words of the next rank, and stores the old values in
/// `old`. The host knows which words and old values to expect.
template <class T> IRIS_DEVICE void operate(const HeapView& heap, Slice<T> words, Slice<T> old) {
    if (port::thread() != 0 || port::workgroup() != 0) return;
    const auto at = heap.at(words, (heap.rank + 1) % heap.size), to = heap.at(old, heap.rank);
    const T wide = sizeof(T) == 8 ? T(1) << (8 * sizeof(T) - 4) : 0;
    u32 i = 0;
    to.put(0, at.word(i++).load());
    to.put(1, at.word(i++).template load<Order::Relaxed>());
    at.word(i++).store(T(-7) + wide);
    at.word(i++).template store<Order::Relaxed>(T(9));
    to.put(4, at.word(i++).add(T(100) + wide));
    to.put(5, at.word(i++).add(T(-100)));
    to.put(6, at.word(i++).exchange(T(-3) - wide));
    to.put(7, at.word(i).compare_exchange(at.word(i).load(), T(77) + wide)), ++i;
    to.put(8, at.word(i).compare_exchange(at.word(i).load() + 1, T(88))), ++i;
    to.put(9, at.word(i++).bit_and(T(0x0ff0) | wide));
    to.put(10, at.word(i++).bit_or(T(0x0ff0) | wide));
    to.put(11, at.word(i++).bit_xor(T(0x0ff0) | wide));
    to.put(12, at.word(i++).min(T(-1000) - wide));
    to.put(13, at.word(i++).min(T(1000) + wide));
    to.put(14, at.word(i++).max(T(-1000) - wide));
    to.put(15, at.word(i++).max(T(1000) + wide));
}
IRIS_KERNEL operate_i32(IRIS_ARGS HeapView heap, Slice<i32> words, Slice<i32> old) {
    operate(heap, words, old);
}
IRIS_KERNEL operate_i64(IRIS_ARGS HeapView heap, Slice<i64> words, Slice<i64> old) {
    operate(heap, words, old);
}

/// Operates, by all threads of all ranks at the same time, on words of rank 0; no update may be
/// lost.
template <class T> IRIS_DEVICE void contend(const HeapView& heap, Slice<T> words) {
    const auto at = heap.at(words, 0);
    const u32 thread = port::workgroup() * port::threads() + port::thread();
    const T number = T(heap.rank * port::workgroups() * port::threads() + thread);
    at.word(0).template add<Order::Relaxed>(1);
    at.word(1).max(number);
    at.word(2).min(-number);
    at.word(3).bit_or(T(1) << (number % 30));
    at.word(4).bit_and(~(T(1) << (number % 30)));
    at.word(5).bit_xor(number);
    // The compare-and-exchange is repeated until it succeeds; each failure means that another
    // thread has succeeded.
    for (T seen = at.word(6).load(), was = seen + 1; was != seen;) {
        was = seen;
        seen = at.word(6).compare_exchange(was, was + 1);
    }
}
IRIS_KERNEL contend_i32(IRIS_ARGS HeapView heap, Slice<i32> words, Slice<float> sums) {
    contend(heap, words);
    heap.at(sums, 0).add(0, 0.5f);
}
IRIS_KERNEL contend_i64(IRIS_ARGS HeapView heap, Slice<i64> words, Slice<float> sums) {
    contend(heap, words);
    heap.at(sums, 0).add(0, 0.5f);
}

/// Makes a copy for each entry of `cases`: target, source, and number of elements. Data that
/// put_with_signal() has sent is read here after the wait for the signal.
template <class T>
IRIS_DEVICE void copies(const HeapView& heap, Slice<T> to, Slice<T> from, Slice<T> seen,
                        Slice<u32> cases, u32 mode, u32 word) {
    const u32 me = heap.rank, next = (me + 1) % heap.size, before = (me + heap.size - 1) % heap.size;
    const auto table = heap.at(cases, me);
    for (u32 c = port::workgroup(); c < cases.len / 3; c += port::workgroups()) {
        const auto target = to.from(table.get(3 * c)), source = from.from(table.get(3 * c + 1));
        const u32 count = table.get(3 * c + 2);
        const SymWord theirs = heap.word(next, word + c), ours = heap.word(me, word + c);
        if (mode == 0) put(heap, target, source, count, next);
        if (mode == 1) get(heap, target, source, count, next);
        if (mode == 2) copy(heap, target, before, source, next, count);
        if (mode == 3) put_with_signal(heap, target, source, count, next, theirs, i32(c + 1));
        if (mode == 4) {
            // Copies element by element, with a fence after the last one.
            const auto there = heap.at(target, next), here = heap.at(source, me);
            for (u32 i = port::thread(); i < count; i += port::threads()) there.put(i, here.get(i));
            port::barrier(Site::Signal);
            fence();
            if (port::thread() == 0) theirs.store<Order::Relaxed>(i32(c + 1));
        }
        if (mode < 3) continue;
        if (!wait_until(heap, ours, Equal{}, i32(c + 1), before)) return;
        copy(heap, seen.from(table.get(3 * c)), me, target, me, count);
    }
}
#define COPIES(name, T)                                                                            \
    IRIS_KERNEL name(IRIS_ARGS HeapView heap, Slice<T> to, Slice<T> from, Slice<T> seen,           \
                     Slice<u32> cases, u32 mode, u32 word) {                                       \
        copies(heap, to, from, seen, cases, mode, word);                                           \
    }
COPIES(copies_2, u16)
COPIES(copies_4, float)
COPIES(copies_8, i64)
COPIES(copies_16, Vec16)

/// Copies `rows` rows of `cols` elements, `ld` elements apart.
IRIS_KERNEL rectangle(IRIS_ARGS HeapView heap, Slice<u32> to, Slice<u32> from, u32 rows, u32 cols,
                      u32 ld) {
    if (port::workgroup() != 0) return;
    const u64 own = heap.data[heap.rank];
    copy_rect(own + to.offset, ld, own + from.offset, ld, rows, cols, sizeof(u32));
}

/// Waits for a value that no rank stores, so the wait must fail.
IRIS_KERNEL wait_in_vain(IRIS_ARGS HeapView heap, u32 word) {
    if (wait_until(heap, heap.word(heap.rank, word), ReachedBy{}, 1000, heap.rank)) {
        heap.word(heap.rank, word).store(-1);
    }
}
