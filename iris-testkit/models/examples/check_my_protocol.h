// A protocol of one's own in a device header: the same text compiles for a GPU. Every rank but 0
// counts itself in at rank 0, which goes on when all are there. ORDER is for the mutant.
#include "iris/sync.h"

namespace my {

template <iris::Order ORDER = iris::Order::Release>
IRIS_DEVICE bool count_in(const iris::HeapView& heap, iris::SymWord counter) {
    if (heap.rank != 0) {
        if (iris::port::thread() == 0) counter.add<ORDER>(1);
        return true;
    }
    return iris::wait_until(heap, counter, iris::Equal(), static_cast<int>(heap.size) - 1, 1);
}

} // namespace my
