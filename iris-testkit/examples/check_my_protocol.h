// A protocol of one's own in a device header: the same text compiles for a GPU. Every rank but 0
// counts itself in at rank 0, which goes on when all are there.
#include "iris/sync.h"

namespace my {

IRIS_DEVICE bool count_in(const iris::HeapView& heap, iris::SymWord counter) {
    using iris::port::lane;
    if (heap.rank != 0) {
        if (lane() == 0) counter.add<iris::Order::Release>(1);
        return true;
    }
    return iris::wait_until(heap, counter, iris::Equal(), static_cast<int>(heap.size) - 1, 1);
}

} // namespace my
