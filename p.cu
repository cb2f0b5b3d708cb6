#include "iris/sync.h"
using namespace iris;
#define PROBE(name, body) IRIS_KERNEL probe_##name(IRIS_ARGS HeapView heap, IRIS_ARGS Channel channel, i32* out) { const Words m{heap, channel}; const SymWord sym = heap.word(1, 5); const DevWord dev = heap.device_word(5); body; }
PROBE(SignalLoad, *out = m.load<Access::SignalLoad>(sym))
PROBE(AbortLoad, *out = m.load<Access::AbortLoad>(sym))
PROBE(SignalStore, m.store<Access::SignalStore>(sym, 3))
PROBE(AbortStore, m.store<Access::AbortStore>(sym, 3))
PROBE(LockTake, *out = m.compare_exchange<Access::LockTake>(sym, 3, 4))
PROBE(FlagLoad, *out = m.dev_load<Access::FlagLoad>(dev))
PROBE(CallLoad, *out = m.dev_load<Access::CallLoad>(dev))
PROBE(FlagStore, m.dev_store<Access::FlagStore>(dev, 3))
PROBE(FlagStamp, m.dev_store<Access::FlagStamp>(dev, 3))
PROBE(FinishAdd, *out = m.dev_add<Access::FinishAdd>(dev, 3))
PROBE(UserAdd, *out = sym.add<Order::AcqRel>(3))
