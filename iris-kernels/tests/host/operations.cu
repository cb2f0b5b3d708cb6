// One kernel for each operation on words, for the tests that read what compilers make of it.
#include "iris/sync.h"

using namespace iris;

struct Args {
    HeapView heap;
    u64 index;
};

#define KERNEL(name, body)                                                                         \
    IRIS_KERNEL name(IRIS_ARGS Args args, i32 value, u64 out) {                                    \
        const SymWord sym = args.heap.word(1, args.index);                                         \
        const DevWord dev = args.heap.device_word(args.index);                                     \
        i32 got = 0;                                                                               \
        body;                                                                                      \
        (void)sym, (void)dev, (void)value;                                                         \
        port::write(out, got);                                                                     \
    }

KERNEL(sym_load_acquire, got = sym.load<Order::Acquire>())
KERNEL(sym_load_relaxed, got = sym.load<Order::Relaxed>())
KERNEL(sym_store_release, sym.store<Order::Release>(value))
KERNEL(sym_store_relaxed, sym.store<Order::Relaxed>(value))
KERNEL(sym_add_acqrel, got = sym.add<Order::AcqRel>(value))
KERNEL(sym_exchange_acquire, got = sym.exchange<Order::Acquire>(value))
KERNEL(sym_cas_acquire, got = sym.compare_exchange<Order::Acquire>(0, value))
KERNEL(sym_and_release, got = sym.bit_and<Order::Release>(value))
KERNEL(sym_or_release, got = sym.bit_or<Order::Release>(value))
KERNEL(sym_xor_release, got = sym.bit_xor<Order::Release>(value))
KERNEL(sym_min_release, got = sym.min<Order::Release>(value))
KERNEL(sym_max_release, got = sym.max<Order::Release>(value))
KERNEL(dev_load_acquire, got = dev.load<Order::Acquire>())
KERNEL(dev_load_relaxed, got = dev.load<Order::Relaxed>())
KERNEL(dev_store_release, dev.store<Order::Release>(value))
KERNEL(dev_store_relaxed, dev.store<Order::Relaxed>(value))
KERNEL(dev_add_acqrel, got = dev.add<Order::AcqRel>(value))
KERNEL(sym_fence, fence<Order::AcqRel>())
KERNEL(sym_get, got = sym.get())
KERNEL(sym_put, sym.put(value))
