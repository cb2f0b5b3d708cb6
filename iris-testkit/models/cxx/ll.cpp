// Scenarios of the LL protocol over the device headers; counterpart of the Rust module
// iris_models::ll.
#include "model.h"

namespace iris::model {

/// TAKEN: array with items received from rank 0; items from rank r are in array TAKEN + r. GIVEN:
/// array of items that this rank sends.
constexpr u32 TAKEN = 16, GIVEN = TAKEN + 8;

/// Marker in place of a number of items: a call in which rank 0 sends one item while the other
/// ranks are in a one_shot.
constexpr u32 TWO_KINDS = 100;

/// Communication pattern; same values as ll::Pattern.
enum Pattern : u32 { ALL, PARTS, ROOT, ROWS, SPREAD_ROWS, TILES, TWO_HOPS, RELAY, PACKS, TWO_HOPS_PACKS };

/// ROW: number of items of a row in the patterns of rows. ACROSS: number of items of a row in the
/// pattern of tiles, where the workgroups share the columns.
constexpr u32 ROW = 6, ACROSS = 4;

struct Plan {
    u32 pattern, ranks, items;
    u32 sent(u32 from, u32 to) const {
        if (pattern == PARTS && to == ranks - 1 && ranks > 1) return 0;
        return pattern == ROOT && from != 0 ? 0 : items;
    }
};

template <class LlUnit = ll::Ll64> struct Message {
    static constexpr u32 WORDS = LlUnit::WORDS;
    const Model& model;
    const Plan& plan;

    i32 wanted(u32 from, u32 to, u32 item, u32 half) const {
        const u32 part = plan.pattern == PARTS ? to * 100 : 0;
        return value(from, model.call, part + item, half);
    }
    u64 out(u32 source, u32 item, u32 half) const {
        return model.cell(model.me(), TAKEN + source, WORDS * item + half);
    }

    void load(u32, u32) {}
    void give(u32, u32 peer, u32 item, u32 (&data)[WORDS]) {
        for (u32 half = 0; half < WORDS; ++half) {
            data[half] = static_cast<u32>(wanted(model.me(), peer, item, half));
        }
    }
    void begin(u32) {}
    void take(u32 source, u32 item, const u32 (&data)[WORDS]) {
        for (u32 half = 0; half < WORDS; ++half) {
            const i32 right = wanted(source, model.me(), item, half);
            iris_model_check(out(source, item, half), static_cast<i32>(data[half]), right);
            Model::put(out(source, item, half), right);
        }
    }
    void end(u32) {}

    /// Simulates the next kernel on the stream: each thread reads items that another thread has
    /// received.
    void consume() const {
        for (u32 source = 0; source < plan.ranks; ++source) {
            if (source == model.me()) continue;
            const u32 items = plan.sent(source, model.me());
            for (u32 item = model.crossed(); item < items; item += port::threads()) {
                for (u32 half = 0; half < WORDS; ++half) {
                    Model::expect(out(source, item, half),
                                  wanted(source, model.me(), item, half));
                }
            }
        }
    }
};

/// Tile operations for an LL message that is sent and received in rows.
struct RowMessage : Message<> {
    /// PIECE: number of items of a piece. ITEMS: number of items that a thread polls at a time.
    static constexpr u32 PIECE = 2, ITEMS = 4;
    using Batch = ll::Batch<ITEMS, PIECE>;
    u32 pushed[ITEMS] = {}, taken[ITEMS] = {}, count = 0;

    template <class Batch> void load(const Batch& batch) {
        for (u32 k = 0; k < ITEMS; ++k) pushed[k] = batch.item(k);
    }
    void give(u32 k, u32 (&data)[2]) { Message::give(0, 0, pushed[k], data); }
    void begin(u32, const Batch& batch) {
        count = batch.count;
        for (u32 k = 0; k < ITEMS; ++k) taken[k] = batch.item(k);
    }
    void take(u32 source, const u32 (&data)[ITEMS][2]) {
        for (u32 k = 0; k < count; ++k) Message::take(source, taken[k], data[k]);
    }
    void end() {}
    /// Checks the whole row: each thread reads the items that all threads have received.
    void row(u32 row) {
        for (u32 source = 0; source < plan.ranks; ++source) {
            if (source == model.me()) continue;
            for (u32 item = row * ROW; item < (row + 1) * ROW && item < plan.items; ++item) {
                for (u32 half = 0; half < 2; ++half) {
                    Model::expect(out(source, item, half),
                                  wanted(source, model.me(), item, half));
                }
            }
        }
    }
};

/// Tile operations for an LL message of GEMM tiles: each workgroup handles all rows of its share of
/// the columns.
struct TileMessage : Message<> {
    static constexpr u32 ITEMS = 2;
    u32 pushed[ITEMS] = {}, taken[ITEMS] = {}, count = 0;

    ll::Strip strip() const {
        const u32 line = ACROSS / port::workgroups();
        return ll::Strip{plan.items / ACROSS, ACROSS, port::workgroup() * line, line, line};
    }
    u64 given(u32 item) const { return model.cell(model.me(), GIVEN, item); }
    i32 partial(u32 item) const { return wanted(model.me(), model.me(), item, 0); }

    /// Writes the items that another thread of the workgroup will push.
    void multiply() {
        const ll::Strip all = strip();
        for (u32 i = model.crossed(); i < all.rows * all.line; i += port::threads()) {
            const u32 item = i / all.line * all.across + all.first + i % all.line;
            Model::put(given(item), partial(item));
        }
        port::barrier(Site::Body);
    }
    template <class Batch> void load(const Batch& batch) {
        for (u32 k = 0; k < ITEMS; ++k) pushed[k] = batch.item(k);
    }
    void give(u32 k, u32 (&data)[2]) {
        Model::expect(given(pushed[k]), partial(pushed[k]));
        Message::give(0, 0, pushed[k], data);
    }
    template <class Batch> void begin(const Batch& batch) {
        count = batch.count;
        for (u32 k = 0; k < ITEMS; ++k) taken[k] = batch.item(k);
    }
    void take(u32 source, const u32 (&data)[ITEMS][2]) {
        for (u32 k = 0; k < count; ++k) Message::take(source, taken[k], data[k]);
    }
    void end() {}
};

/// Operations on items of an exchange in two hops.
template <class LlUnit = ll::Ll64> struct PartsMessage : Message<LlUnit> {
    using Message<LlUnit>::plan, Message<LlUnit>::model, Message<LlUnit>::wanted, Message<LlUnit>::out;
    static constexpr u32 WORDS = LlUnit::WORDS;

    flow::Parts parts() const {
        return flow::Parts{plan.ranks, plan.items, plan.pattern == RELAY ? 0 : flow::Parts::ALL};
    }
    i32 finished(u32 owner, u32 item, u32 half) const {
        return plan.pattern == RELAY ? wanted(0, owner, item, half)
                                     : wanted(owner, 0, 1000 + item, half);
    }
    void load(u32, u32) {}
    void give(u32, u32 item, u32 (&data)[WORDS]) { Message<LlUnit>::give(0, 0, item, data); }
    /// Reads what was taken, so that an item is passed on only after it has arrived.
    void end(u32 item, u32 (&data)[WORDS]) {
        for (u32 source = 0; source < plan.ranks; ++source) {
            if (source == model.me() || parts().contributed(source, model.me()) == 0) continue;
            for (u32 half = 0; half < WORDS; ++half) {
                Model::expect(out(source, item, half), wanted(source, model.me(), item, half));
            }
        }
        for (u32 half = 0; half < WORDS; ++half) {
            data[half] = static_cast<u32>(finished(model.me(), item, half));
        }
    }
    void keep(u32 owner, u32 item, const u32 (&data)[WORDS]) {
        for (u32 half = 0; half < WORDS; ++half) {
            const i32 right = finished(owner, item, half);
            iris_model_check(out(owner, item, half), static_cast<i32>(data[half]), right);
            Model::put(out(owner, item, half), right);
        }
    }

    /// Simulates the next kernel on the stream: each thread reads every n-th item that has arrived.
    void consume() const {
        u32 number = 0;
        const auto mine = [&] { return number++ % port::threads() == model.crossed(); };
        for (u32 source = 0; source < plan.ranks; ++source) {
            const u32 me = model.me();
            if (source == me) continue;
            for (u32 i = 0; i < parts().contributed(source, me); ++i) {
                if (!mine()) continue;
                const u32 item = parts().first(me) + i;
                for (u32 half = 0; half < WORDS; ++half) {
                    Model::expect(out(source, item, half), wanted(source, me, item, half));
                }
            }
            for (u32 i = 0; i < parts().finished(source, me); ++i) {
                if (!mine()) continue;
                const u32 item = parts().first(source) + i;
                for (u32 half = 0; half < WORDS; ++half) {
                    Model::expect(out(source, item, half), finished(source, item, half));
                }
            }
        }
    }
};

} // namespace iris::model

using namespace iris;
using namespace iris::model;

template <u32 N, class LlUnit, class Exchange>
static flow::ExchangeArgs<N, LlUnit> arguments(const Launch& launch, const Exchange& exchange) {
    return {Words(launch.heap, launch.channel), launch.index, launch.count, exchange};
}

/// Runs a call whose items are distributed over single threads.
template <class LlUnit> static bool in_items(const Model& model, const Plan& plan) {
    const Launch launch = model.launch();
    const auto after = [&](bool done, const auto& body) {
        iris_model_boundary();
        if (done && !(iris_model_gives_up() && port::workgroups() > 1)) body.consume();
        return done;
    };
    if (plan.pattern >= TWO_HOPS && plan.pattern != PACKS) {
        PartsMessage<LlUnit> body{{model, plan}};
        const flow::Parts parts = body.parts();
        const bool done = plan.ranks <= ll::FEW
                              ? flow::two_shot_ll(launch, arguments<ll::FEW, LlUnit>(launch, parts), parts, body)
                              : flow::two_shot_ll(launch, arguments<ll::SOURCES, LlUnit>(launch, parts), parts, body);
        return after(done, body);
    }
    Message<LlUnit> body{model, plan};
    const bool done = [&] {
        if (plan.ranks == 2) return flow::exchange(launch, arguments<1, LlUnit>(launch, plan), plan, body);
        return plan.ranks <= ll::FEW
                   ? flow::exchange(launch, arguments<ll::FEW, LlUnit>(launch, plan), plan, body)
                   : flow::exchange(launch, arguments<ll::SOURCES, LlUnit>(launch, plan), plan, body);
    }();
    return after(done, body);
}

/// Runs all calls of a scenario. The option is the communication pattern; a call without items is a
/// one_shot.
extern "C" int iris_model_exchange(const Input& in) {
    return calls(in, [&](const Model& model) {
        const u32 items = model.used == TWO_KINDS ? u32(model.me() == 0) : model.used;
        if (items == 0) {
            Partials body{model};
            const bool done = flow::one_shot(model.launch(), 1, body);
            iris_model_boundary();
            return done;
        }
        const Plan plan{in.option, in.channel->size, items};
        // Every third call of the patterns with packs has pairs.
        const bool packs = plan.pattern >= PACKS && model.position % 3 != 2;
        if (packs) return in_items<ll::Ll128>(model, plan);
        if (plan.pattern < ROWS || plan.pattern >= TWO_HOPS) return in_items<ll::Ll64>(model, plan);
        Message<> body{model, plan};
        const bool done = [&] {
            const Launch launch = model.launch();
            if (plan.pattern == TILES) {
                TileMessage tile{{model, plan}};
                return plan.ranks == 2 ? flow::exchange_tile<true>(launch, tile.strip(), tile)
                                       : flow::exchange_tile<false>(launch, tile.strip(), tile);
            }
            RowMessage in_rows{{model, plan}};
            const ll::Rows rows{items, ROW, plan.pattern == SPREAD_ROWS};
            return plan.ranks == 2 ? flow::exchange_rows<true>(launch, rows, in_rows)
                                   : flow::exchange_rows<false>(launch, rows, in_rows);
        }();
        iris_model_boundary();
        if (done && !(iris_model_gives_up() && port::workgroups() > 1)) {
            body.consume();
        }
        return done;
    });
}
