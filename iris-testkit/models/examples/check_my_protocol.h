// Example of a protocol in a device header, which also compiles for a GPU. Every rank except 0
// increments a counter at rank 0; rank 0 waits until all of them have done so. The mutant passes
// another ORDER, which weakens the increment.
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
