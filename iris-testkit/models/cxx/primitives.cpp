// Scenarios of the primitives over the device headers; counterpart of the Rust module
// iris_models::primitives.
#include "model.h"

using namespace iris;
using namespace iris::model;

namespace {

/// Enters a call and waits until every rank has entered it.
bool enter_and_wait(const Launch& launch) {
    return flow::run(launch, End::Advance, [](Workgroup& wg) {
        if (!wg.enter()) return false;
        for (u32 step = 1; step < wg.size(); ++step) {
            if (!wg.wait_entry(wg.peer(step))) return false;
        }
        return true;
    });
}

/// Versioned lock: rank 0 hands a cell to rank 1, which signals when the cell may be written again.
/// Rank 0 calls `before` before each write.
template <class Before> int hand_over(const Input& in, Before before) {
    const Words m{*in.heap, *in.channel};
    const SymWord there = m.signal(1, 0, 0), back = m.signal(0, 1, 0);
    for (u32 position = 0; position < in.calls; ++position) {
        const Model model(in, position);
        const Call version = model.number();
        const u64 cell = model.cell(1, 0, 0);
        const i32 wanted = value(0, version.number(), 0, 0);
        if (model.me() == 0) {
            before();
            Model::put(cell, wanted);
            epoch::publish(m, there, version);
            if (!epoch::wait(m, back, version, 1)) return 0;
        } else {
            if (!epoch::wait(m, there, version, 0)) return 0;
            Model::expect(cell, wanted);
            epoch::publish(m, back, version);
        }
    }
    return 1;
}

} // namespace

extern "C" {

int iris_model_versioned(const Input& in) {
    return hand_over(in, [] {});
}

/// Spinlock: every rank adds to one cell, several times.
int iris_model_spinlock(const Input& in) {
    const Words m{*in.heap, *in.channel};
    const SymWord word = m.lock(0, 0);
    i32 seen = 0;
    for (u32 position = 0; position < in.calls; ++position) {
        const Model model(in, position);
        const u64 cell = model.cell(0, 0, 0);
        if (!lock::take(m, model.number(), word, 0)) return 0;
        const i32 now = Model::get(cell);
        // Each rank only adds to the cell, so a smaller value than before would mean a lost update.
        if (now < seen) iris_model_check(cell, now, seen);
        seen = now + 1;
        Model::put(cell, seen);
        lock::give(m, word);
    }
    return 1;
}

/// Device barrier: members read after it what members wrote before it. With option 1 a second
/// barrier protects a cell until all have read it; without the option, calls alternate between two
/// cells.
int iris_model_barrier(const Input& in) {
    const Words m{*in.heap, *in.channel};
    const Members members{in.members};
    if (!members.contains(in.channel->rank)) return 1;
    for (u32 position = 0; position < in.calls; ++position) {
        const Model model(in, position);
        const Call call = model.number();
        const u32 slot = in.option != 0 ? 0 : position;
        Model::put(model.cell(model.me(), 0, slot), value(model.me(), call.number(), 0, 0));
        if (!arrive_and_wait(m, call, 0, members, Limit::Entry)) return 0;
        for (u32 peer = 0; peer < model.ranks(); ++peer) {
            if (!members.contains(peer)) continue;
            Model::expect(model.cell(peer, 0, slot), value(peer, call.number(), 0, 0));
        }
        if (in.option != 0 && !arrive_and_wait(m, call, 1, members, Limit::Progress)) return 0;
    }
    return 1;
}

/// Barrier within a launch: data that threads wrote before the barrier is read after it by other
/// threads, on another rank. With option 1, thread 0 arrives and waits inside a branch; with waves
/// in lockstep, no other thread of its wave has arrived by then.
int iris_model_barrier_in_launch(const Input& in) {
    const Model model(in, 0);
    return flow::run(model.launch(), End::Advance, [&](Workgroup& wg) {
        if (in.option == 1) {
            const Words m{*in.heap, *in.channel};
            const auto wait = [&] {
                return arrive_and_wait(m, model.number(), 0, Members{in.members}, Limit::Entry);
            };
            return wg.check_not_aborted() && port::vote(port::thread() == 0 ? wait() : wait(), Site::Waited);
        }
        const u32 mine = model.mine(), crossed = model.crossed();
        Model::put(model.cell(model.me(), 0, mine), value(model.me(), in.first, 0, mine));
        if (!wg.barrier(0, Members{in.members})) return false;
        for (u32 step = 1; step < wg.size(); ++step) {
            const u32 peer = wg.peer(step);
            Model::expect(model.cell(peer, 0, crossed), value(peer, in.first, 0, crossed));
        }
        return true;
    });
}

/// Tile flags: one workgroup fills two units and raises their flags; another waits for the flags
/// and reads the units.
int iris_model_flags(const Input& in) {
    const Words m{*in.heap, *in.channel};
    for (u32 position = 0; position < in.calls; ++position) {
        const Model model(in, position);
        const Call call = model.number();
        for (u32 unit = 0; unit < 2; ++unit) {
            const u64 cell = model.cell(0, 0, unit);
            const i32 wanted = value(0, call.number(), unit, 0);
            if (port::workgroup() == 0) {
                Model::put(cell, wanted);
                tile_flags::raise(m, call, unit);
            } else {
                if (!tile_flags::wait(m, call, unit, 0)) return 0;
                Model::expect(cell, wanted);
            }
        }
        iris_model_boundary();
    }
    return 1;
}

/// Entry records: every rank enters and reads the records of all. With option 1, each rank clears
/// its own words first, like a memset that runs late.
int iris_model_entry(const Input& in) {
    const Words m{*in.heap, *in.channel};
    for (u32 position = 0; position < in.calls; ++position) {
        const Model model(in, position);
        for (u32 step = 1; in.option != 0 && step < model.ranks(); ++step) {
            const SymWord record =
                m.entry(model.me(), in.channel->peer(step), model.number().parity());
            m.store<Access::AbortStore>(entry::number(record), model.number().previous().number());
        }
        if (!enter_and_wait(model.launch())) return 0;
    }
    return 1;
}

/// Abort: rank 1 enters and makes no progress, so rank 0 times out and must end the wait of rank 1.
int iris_model_abort(const Input& in) {
    const Model model(in, 0);
    return flow::run(model.launch(), End::Advance, [&](Workgroup& wg) {
        if (!wg.enter()) return false;
        if (wg.rank() == 0) return wg.wait_tile(1, 0);
        return epoch::wait(wg.m, wg.m.result(1, 0, 0), wg.call(), 0);
    });
}

}
