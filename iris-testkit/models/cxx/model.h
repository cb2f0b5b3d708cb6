// Common code of the C++ programs that models run: the launch of a scenario, its calls, and checks
// of values.
//
// Data lies in arrays of up to 256 cells of four bytes at each rank, as in Thread::cell.
#ifndef IRIS_MODEL_H
#define IRIS_MODEL_H

#include "iris/flow.h"

extern "C" {
/// Boundary between two launches on a rank's stream.
void iris_model_boundary(void);
/// Whether waits of this thread time out.
int iris_model_gives_up(void);
/// Fails the model unless `seen`, the value read at `address`, equals `wanted`.
void iris_model_check(iris::u64 address, iris::i32 seen, iris::i32 wanted);
}

namespace iris::model {

/// Input that Rust passes to a program. One thread runs all calls of the program. Same layout as
/// headers::Input.
struct Input {
    const HeapView* heap;
    const Channel* channel;
    const Record* record;
    i32 first;
    u32 calls, tiles;
    /// Option bits; each program defines its own.
    u32 option;
    u64 members;
    /// Number of tiles that each call uses.
    const u32* used;
    /// Nonzero for the mutant without double buffers.
    u32 one_buffer;
};

enum Array : u32 { INBOX, RESULT, OUT, SHARD, WORK, STAGE };

/// Value that `rank` produces for an element of a tile in the call of this number; equal to
/// ops::value.
inline i32 value(u32 rank, i32 call, u32 tile, u32 element) {
    return static_cast<i32>(static_cast<u32>(call) * 100003u + rank * 1009 + tile * 17 + element + 1);
}

/// State of one thread in one call of a scenario.
struct Model {
    const Input& in;
    /// Call number plus M, from which values are computed. Ranks with different M have different
    /// layouts. So a rank that uses values of a rank with another M finds that they are wrong.
    i32 call;
    /// Number of tiles that this call uses.
    u32 used;

    /// Number of the call in the scenario, from 0.
    u32 position;

    Model(const Input& in, u32 position)
        : in(in), call(static_cast<i32>(static_cast<u32>(in.first) + position +
                                        static_cast<u32>(in.record->fields[static_cast<u32>(Field::M)]))),
          used(in.used[position]), position(position) {}

    Call number() const { return Call(static_cast<i32>(static_cast<u32>(in.first) + position)); }
    u32 me() const { return in.channel->rank; }
    u32 ranks() const { return in.channel->size; }
    u32 mine() const { return port::thread(); }
    /// Index of the element that this thread reads: the element of another thread, if the workgroup
    /// has more than one.
    u32 crossed() const { return (mine() + 1) % port::threads(); }
    u32 slot(u32 parity) const { return in.one_buffer != 0 ? 0 : parity; }

    u64 cell(u32 rank, u32 array, u32 index) const {
        return in.heap->address(rank, (u64(array) * 256 + index) * 4);
    }
    u64 at(u32 rank, u32 array, u32 slot, u32 tile, u32 element) const {
        return cell(rank, array, (slot * in.tiles + tile) * port::threads() + element);
    }
    u64 inbox(u32 rank, u32 source, u32 tile, u32 parity, u32 element) const {
        return at(rank, INBOX, slot(parity) * ranks() + source, tile, element);
    }
    i32 produced(u32 tile, u32 element) const { return value(me(), call, tile, element); }
    i32 sum(u32 tile, u32 element) const {
        u32 total = 0;
        for (u32 rank = 0; rank < ranks(); ++rank) {
            total += static_cast<u32>(value(rank, call, tile, element));
        }
        return static_cast<i32>(total);
    }

    static void put(u64 address, i32 value) { port::write<i32>(address, value); }
    static i32 get(u64 address) { return port::read<i32>(address); }
    static void expect(u64 address, i32 wanted) {
        iris_model_check(address, get(address), wanted);
    }

    Launch launch() const {
        return Launch{*in.heap,          *in.channel,          *in.record,
                      port::workgroup(), port::workgroups(), Trace(0, 0, 0, 0)};
    }
};

/// Tile operations for sums of partial results, for one_shot and the other ops that add.
struct Partials : Model {
    static constexpr bool AT_ONCE = true;
    void produce(u32) {}
    void push(u32 peer, u32 tile, u32 parity) {
        put(inbox(peer, me(), tile, parity, mine()), produced(tile, mine()));
    }
    void keep(u32 tile, u32 parity) { push(me(), tile, parity); }
    void reduce(u32 tile, u32 parity) {
        const u32 element = crossed();
        for (u32 source = 0; source < ranks(); ++source) {
            expect(inbox(me(), source, tile, parity, element), value(source, call, tile, element));
        }
        put(at(me(), OUT, 0, tile, element), sum(tile, element));
    }
};

/// Runs all calls. For each call, `each` receives the model of the call, and returns whether the
/// call succeeded.
template <class Each> int calls(const Input& in, Each each) {
    int all = 1;
    for (u32 position = 0; position < in.calls; ++position) {
        // The next call runs even if this one failed, because a stream runs later launches even
        // after one that failed.
        if (!each(Model(in, position))) all = 0;
        iris_model_boundary();
    }
    return all;
}

} // namespace iris::model

#endif
