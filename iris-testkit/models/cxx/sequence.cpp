// Single steps of a workgroup over the device headers, for comparison with iris-sync operation by
// operation.
#include "model.h"

using namespace iris;

namespace {

enum class Kind : u32 {
    Enter,
    Credit,
    WaitEntry,
    Direct,
    Meet,
    PushSignal,
    PushSignals,
    PushResults,
    WaitTile,
    WaitTiles,
    WaitResult,
    RaiseFlag,
    WaitFlag,
    Locked,
    Barrier,
    PublishVersion,
    WaitVersion,
    BeginPush,
    PushHead,
    CountOut,
    WaitHead,
    PushPair,
    WaitPair,
    PushBatch,
    WaitBatch,
    LeaveTogether,
};

struct Step {
    Kind kind;
    u32 peer, tile;
};

/// Input of one comparison: the steps to run. Same layout as sequence::Input in Rust.
struct Sequence {
    const HeapView* heap;
    const Channel* channel;
    const Record* record;
    const Step* steps;
    u32 count;
    End end;
};

/// Shape of an LL message of two rows, the second of which has no complete pieces.
constexpr ll::Rows ROWS{11, 6, false};

bool perform(Workgroup& wg, const Step& step, bool& answer) {
    const Members some{u64(1) << step.peer | u64(1) << step.tile};
    switch (step.kind) {
    case Kind::Enter: return wg.enter();
    case Kind::Credit: return wg.credit(step.peer);
    case Kind::WaitEntry: return wg.wait_entry(step.peer);
    case Kind::Direct: return wg.direct(step.peer, answer);
    case Kind::Meet: return wg.wait_before_push(some);
    case Kind::PushSignal: wg.push_signal(step.peer, step.tile); return true;
    case Kind::PushSignals: wg.push_signals(Members::all(wg.size()), step.tile); return true;
    case Kind::PushResults: wg.push_results(some, step.tile); return true;
    case Kind::WaitTile: return wg.wait_tile(step.peer, step.tile);
    case Kind::WaitTiles: return wg.wait_tiles(some, step.tile);
    case Kind::WaitResult: return wg.wait_result(step.peer, step.tile);
    case Kind::RaiseFlag: wg.raise_flag(step.tile); return true;
    case Kind::WaitFlag: return wg.wait_flag(step.tile, step.peer);
    case Kind::Locked:
        answer = false;
        return wg.locked(step.peer, step.tile, [&] { answer = true; });
    case Kind::Barrier: return wg.barrier(step.tile & 1, Members::all(wg.size()));
    case Kind::PublishVersion:
        if (port::thread() == 0) {
            epoch::publish(wg.m, wg.m.signal(step.peer, wg.rank(), step.tile), wg.call());
        }
        return true;
    case Kind::WaitVersion:
        return port::thread() != 0 ||
               epoch::wait(wg.m, wg.m.signal(wg.rank(), step.peer, step.tile), wg.call(),
                                  step.peer);
    case Kind::BeginPush: return wg.begin_push(some);
    case Kind::CountOut: wg.count_out(); return true;
    case Kind::PushHead: wg.push_head(some); return true;
    case Kind::WaitHead: return wg.wait_head(some);
    case Kind::PushPair: {
        const u32 data[2] = {step.tile, step.peer};
        ll::push(wg.m, wg.call(), step.peer, ll::HEAD + step.tile, data);
        return true;
    }
    case Kind::WaitPair:
        return ll::each(wg.m, wg.call(), ll::HEAD + step.tile, some,
                        [&](u32 source, const u32 (&data)[2]) {
                            answer = answer || data[0] == source;
                            return true;
                        });
    case Kind::PushBatch: {
        const auto batch = wg.share_of_threads().batch<4>(ROWS.items, step.tile & 1);
        for (u32 k = 0; k < batch.count; ++k) {
            const u32 data[2] = {step.tile, batch.item(k)};
            ll::push_item(wg.m, wg.call(), step.peer, batch, k, data);
        }
        return true;
    }
    case Kind::WaitBatch: {
        const ll::RowShare share = wg.share_of_rows();
        u32 row = share.first;
        for (u32 i = 0; i < step.tile && ROWS.has(row); ++i) row += share.step;
        const auto batch = share.batch<4, 2>(ROWS, row, step.peer & 1);
        const auto take = [&](u32 source, const u32 (&data)[4][2]) {
            for (u32 k = 0; k < batch.count; ++k) answer = answer || data[k][0] == source;
            return true;
        };
        return wg.size() == 2 ? ll::each_of<true>(wg.m, wg.call(), batch, some, take)
                              : ll::each_of<false>(wg.m, wg.call(), batch, some, take);
    }
    case Kind::LeaveTogether: return wg.leave_together(true);
    }
    return false;
}

} // namespace

/// Runs the steps up to the first that fails, then finishes the call. Returns twice the number of
/// steps done, plus 1 if the finish succeeds; answers of steps go to `answers`.
extern "C" u32 iris_model_sequence(const Sequence& in, u32* answers) {
    const Launch launch{*in.heap,          *in.channel,          *in.record,
                        port::workgroup(), port::workgroups(), Trace(0, 0, 0, 0)};
    Workgroup wg(launch);
    u32 done = 0;
    bool passed = true;
    while (passed && done < in.count) {
        bool answer = false;
        passed = perform(wg, in.steps[done], answer);
        answers[done] = answer;
        if (passed) ++done;
    }
    return done * 2 + wg.finish_push(in.end, passed, [](u32 peer) {
        return ll::Used{peer * 2, peer};
    });
}
