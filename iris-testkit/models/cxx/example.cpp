// Program that a model runs for ../examples/check_my_protocol.h: the actions of each rank.
#include "model.h"

#include "../examples/check_my_protocol.h"

using namespace iris;

extern "C" int my_count_in(const model::Input& in) {
    const model::Model model(in, 0);
    const SymWord counter = in.heap->word(0, 1u << 20);
    if (model.me() != 0) model.put(model.cell(0, 0, model.me()), 42);
    const bool there = in.option == 1 ? my::count_in<Order::Relaxed>(*in.heap, counter)
                                      : my::count_in(*in.heap, counter);
    for (u32 peer = 1; there && model.me() == 0 && peer < model.ranks(); ++peer) {
        model.expect(model.cell(0, 0, peer), 42);
    }
    return there;
}
