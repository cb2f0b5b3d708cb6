// The program that a model runs of ../examples/check_my_protocol.h.
#include "model.h"

#include "../examples/check_my_protocol.h"

using namespace iris;
using namespace iris::model;

extern "C" int my_count_in(const Input& in) {
    const Model model(in, 0);
    const SymWord counter = in.heap->word(0, 1u << 20);
    const u64 mine = model.cell(0, 0, model.me());
    // Option 1 is a mutant: the cell is written after the rank has been counted.
    if (in.option == 0 && model.me() != 0) Model::put(mine, 42);
    if (!my::count_in(*in.heap, counter)) return 0;
    if (in.option == 1 && model.me() != 0) Model::put(mine, 42);
    for (u32 peer = 1; model.me() == 0 && peer < model.ranks(); ++peer) {
        Model::expect(model.cell(0, 0, peer), 42);
    }
    return 1;
}
