// Scenarios of the ops over the device headers, with the tiles, values and checks of the Rust
// module iris_models::ops.
//
// This file is long because every op is a few lines of the same form, which are best compared side
// by side.
#include "model.h"

namespace iris::model {

struct Tiles : Partials {
    // Tile operations that `two_shot` and `reduce_scatter` call in addition to those of `one_shot`.
    void push_result(u32 peer, u32 tile, u32 parity, bool direct) {
        // Each thread sends the element that it summed in `reduce`: `crossed()`.
        const u32 element = crossed();
        put(direct ? at(peer, OUT, 0, tile, element) : at(peer, RESULT, slot(parity), tile, element),
            sum(tile, element));
    }
    void take_result(u32 tile, u32 parity) {
        const u32 element = mine();
        expect(at(me(), RESULT, slot(parity), tile, element), sum(tile, element));
        put(at(me(), OUT, 0, tile, element), sum(tile, element));
    }

    // Tile operations that `deliver` calls.
    using Partials::push;
    void push(u32 peer, u32 tile, u32 parity, bool direct) {
        put(direct ? at(peer, OUT, me(), tile, mine()) : inbox(peer, me(), tile, parity, mine()),
            produced(tile, mine()));
    }
    void take(u32 source, u32 tile, u32 parity) {
        const u32 element = crossed();
        const i32 wanted = value(source, call, tile, element);
        expect(inbox(me(), source, tile, parity, element), wanted);
        put(at(me(), OUT, source, tile, element), wanted);
    }

    // Tile operations that `gather` and `local` call.
    void push_part(u32 peer, u32 part, u32 parity) { push(peer, part, parity); }
    void multiply(u32 tile, u32 source, u32 parity) {
        const u32 element = crossed();
        expect(inbox(me(), source, tile, parity, element), value(source, call, tile, element));
    }
    void store(u32) {}

    // Tile operations that `staged` calls.
    void fetch(u32 unit) {
        const u32 source = unit / in.tiles, tile = unit % in.tiles, element = crossed();
        const i32 wanted = value(source, call, tile, element);
        expect(at(source, SHARD, 0, tile, element), wanted);
        put(at(me(), STAGE, 0, unit, element), wanted);
    }
    void multiply_unit(u32, u32 unit) {
        const u32 source = unit / in.tiles, tile = unit % in.tiles, element = mine();
        // Units of this rank's own shard are not staged, so they are read from the shard.
        expect(source == me() ? at(source, SHARD, 0, tile, element) : at(me(), STAGE, 0, unit, element),
               value(source, call, tile, element));
    }

    // Copy of one part to a peer, as a copy engine makes it; the skeleton `copied` calls it.
    void copy(u32 peer, u32 part) { push(peer, part, 0, true); }
    /// Checks an element of a tile of rank `source` in `array`.
    void expect_from(u32 array, u32 source, u32 tile, u32 element) const {
        expect(at(me(), array, source, tile, element), value(source, call, tile, element));
    }
    /// Waits for each part of each peer and checks it in `array`; `first` is the index of the first
    /// part's signal. Returns whether all parts arrived.
    bool take_gated(const Launch& launch, u32 first, u32 array) const {
        for (u32 step = 1; step < ranks(); ++step) {
            const u32 source = in.channel->peer(step);
            for (u32 tile = 0; tile < in.tiles; ++tile) {
                if (!flow::gate(launch, source, first + tile, 1)) return false;
                expect_from(array, source, tile, crossed());
            }
        }
        return true;
    }
    /// Waits for the copied parts, then writes this rank's sums.
    void take_copied(const Launch& launch) {
        if (!take_gated(launch, 0, OUT)) return;
        for (u32 tile = 0; tile < in.tiles; ++tile) {
            put(at(me(), WORK, 0, tile, mine()), value(me(), call, tile, mine()));
        }
    }
    /// Calls `each` for this workgroup's share of the tiles of each peer.
    template <class Each> void share(const Launch& launch, Each each) const {
        for (u32 step = 1; step < ranks(); ++step) {
            for (u32 tile = launch.index; tile < in.tiles; tile += launch.count) {
                each(in.channel->peer(step), tile);
            }
        }
    }
    /// Multiplies this workgroup's share of the received parts, in one launch whose thread 0 waits
    /// for each part.
    void take_arriving(const Launch& launch) {
        if (port::thread() != 0) return;
        flow::Arrivals arrivals(launch);
        share(launch, [&](u32 source, u32 tile) {
            if (arrivals.wait_part(source, tile)) expect_from(OUT, source, tile, crossed());
        });
    }
    /// Stores this workgroup's tiles to their owners. Then waits for the tiles that peers stored to
    /// this rank, and checks them.
    void store_to_owners(const Launch& launch, flow::Arrivals& arrivals, bool mutes) {
        if (port::thread() != 0) return;
        const flow::Departures departures(launch);
        share(launch, [&](u32 peer, u32 tile) {
            if (!departures.may_store() && mutes) return;
            put(at(peer, OUT, me(), tile, 0), value(me(), call, tile, 0));
            departures.signal_part(peer, tile);
        });
        share(launch, [&](u32 source, u32 tile) {
            if (arrivals.wait_part(source, tile)) expect_from(OUT, source, tile, 0);
        });
    }

    // Tile operations that the skeleton `accumulate` calls: zero, add, convert.
    void zero(u32 tile) { put(at(me(), WORK, 0, tile, mine()), 0); }
    void add(u32 owner, u32 tile) {
        const u64 place = at(owner, WORK, 0, tile, mine());
        put(place, static_cast<i32>(static_cast<u32>(get(place)) +
                                    static_cast<u32>(produced(tile, mine()))));
    }
    void convert(u32 owner, u32 tile) {
        const u32 element = crossed();
        expect(at(owner, WORK, 0, tile, element), sum(tile, element));
    }

    /// Simulates the next kernel on the stream, which reads C. A rank that gives up skips this
    /// check, because one of its workgroups may have succeeded where another failed.
    template <class Wanted> void consume(u32 slot, Wanted wanted) const {
        if (iris_model_gives_up()) return;
        for (u32 tile = 0; tile < in.tiles; ++tile) {
            expect(at(me(), OUT, slot, tile, mine()), wanted(tile, mine()));
        }
    }

    /// Simulates the kernel that fills the shard before a call; one workgroup runs it.
    void fill_shard() const {
        if (port::workgroup() == 0) {
            for (u32 part = 0; part < in.tiles; ++part) {
                put(at(me(), SHARD, 0, part, mine()), produced(part, mine()));
            }
        }
        iris_model_boundary();
    }
};

/// Tile operations for GEMM results. A rank sums tiles only after it has pushed all tiles that it
/// sends.
struct ProductTiles : Tiles {
    static constexpr bool AT_ONCE = false;
};

/// Tile operations for tiles that are read from the shards of peers.
struct PullTiles : Tiles {
    void multiply(u32 tile, u32 source, u32) {
        const u32 element = crossed();
        expect(at(source, SHARD, 0, tile, element), value(source, call, tile, element));
    }
};

/// Tile operations for a relay. C gets values of the root only, and each tile has one inbox slot,
/// whichever rank sends it.
struct RelayTiles : Tiles {
    u32 root() const { return ranks() - 1; }
    i32 sent(u32 tile, u32 element) const { return value(root(), call, tile, element); }
    void push(u32 peer, u32 tile, u32 parity, bool direct) {
        // The thread that received an element sends the element on.
        const u32 element = crossed();
        const i32 value =
            me() == root() ? sent(tile, element) : get(at(me(), OUT, 0, tile, element));
        put(direct ? at(peer, OUT, 0, tile, element) : inbox(peer, 0, tile, parity, element), value);
    }
    void take(u32, u32 tile, u32 parity) {
        const u32 element = crossed();
        expect(inbox(me(), 0, tile, parity, element), sent(tile, element));
        put(at(me(), OUT, 0, tile, element), sent(tile, element));
    }
};

/// Tile operations that accumulate by relaxed atomic additions. Accumulators are words after all
/// other words of a rank, one for each thread.
struct AtomicTiles : Tiles {
    u32 index(u32 tile) const { return (1u << 20) + tile * port::threads() + mine(); }
    SymWord accumulator(u32 owner, u32 tile) const { return in.heap->word(owner, index(tile)); }
    void zero(u32 tile) { accumulator(me(), tile).store<Order::Relaxed>(0); }
    void add(u32 owner, u32 tile) {
        accumulator(owner, tile).add<Order::Relaxed>(produced(tile, mine()));
    }
    void convert(u32 owner, u32 tile) {
        const u64 place = in.heap->signal[owner] + index(tile) * 4;
        iris_model_check(place, accumulator(owner, tile).load<Order::Relaxed>(),
                         sum(tile, mine()));
    }
};

struct Delivery {
    u32 tiles, me;
    bool broadcast;
    u32 produced() const { return sent(me, 0); }
    u32 sent(u32 from, u32) const { return broadcast && from != 0 ? 0 : tiles; }
};

/// Units of a staged gather: tile t needs unit t of each rank.
struct Staging {
    u32 ranks, tile_count;
    u32 units() const { return ranks * tile_count; }
    u32 unit_at(u32 position) const { return position; }
    u32 source(u32 unit) const { return unit / tile_count; }
    u32 tiles() const { return tile_count; }
    u32 needs(u32) const { return ranks; }
    u32 need(u32 tile, u32 i) const { return i * tile_count + tile; }
};

/// Option bits of the program iris_model_accumulate.
constexpr u32 ATOMIC = 1, NO_FIRST_BARRIER = 2, NO_SECOND_BARRIER = 4;

template <class Body> int accumulate(const Input& in) {
    const auto all = Members{in.members};
    const auto owner = [&](u32 tile) { return tile % in.channel->size; };
    return calls(in, [&](const Model& model) {
        Body body{model};
        const Launch launch = model.launch();
        // Results of launches are ignored, because a stream runs later launches even after one that
        // failed.
        (void)flow::zero(launch, in.tiles, owner, body);
        iris_model_boundary();
        if ((in.option & NO_FIRST_BARRIER) == 0) {
            (void)flow::barrier(launch, 0, all, End::Keep);
            iris_model_boundary();
        }
        const bool locked = (in.option & ATOMIC) == 0;
        (void)flow::add(launch, in.tiles, owner, locked, body);
        iris_model_boundary();
        if ((in.option & NO_SECOND_BARRIER) == 0) {
            (void)flow::barrier(launch, 1, all, End::Keep);
            iris_model_boundary();
        }
        return flow::convert(launch, in.tiles, owner, body);
    });
}

/// Special values of `used`, equal to ops::instead: the call runs another op over the same words
/// instead of one_shot.
constexpr u32 PULL = 0, TWO_SHOT = 100, GATHER = 101, STAGED = 102;

inline bool pull_once(const Model& model, u32 tiles) {
    PullTiles body{model};
    body.fill_shard();
    return flow::pull(model.launch(), tiles, body);
}

/// Tile operations for a pull of one tile, with shards in words after all other words of a rank.
/// `wrong_place`, `seen` and `wanted` record a value of another call that was read.
struct ShardWords : Model {
    u64 wrong_place = 0;
    i32 seen = 0, wanted = 0;

    SymWord shard(u32 rank) const { return in.heap->word(rank, 1u << 21); }
    void multiply(u32, u32 source, u32) {
        const i32 found = shard(source).load<Order::Relaxed>();
        if (found == value(source, call, 0, 0)) return;
        wrong_place = in.heap->signal[source] + (1u << 21) * 4;
        seen = found;
        wanted = value(source, call, 0, 0);
    }
    void store(u32) {}
};

/// Runs one call of pull, then the next kernel, which overwrites the shard. If the call succeeds,
/// it must have read the shards of all peers before they were overwritten.
inline bool pull_of_leavers(const Model& model) {
    ShardWords body{model};
    body.shard(body.me()).store<Order::Relaxed>(value(body.me(), body.call, 0, 0));
    iris_model_boundary();
    const bool done = flow::pull(model.launch(), 1, body);
    if (done && body.wrong_place != 0) {
        iris_model_check(body.wrong_place, body.seen, body.wanted);
    }
    iris_model_boundary();
    body.shard(body.me()).store<Order::Relaxed>(0);
    return done;
}

/// Copies of one part to each peer, into words after all other words of the peer.
struct CopiedWords : Model {
    SymWord word(u32 rank, u32 source) const { return in.heap->word(rank, (1u << 21) + source); }
    void copy(u32 peer, u32) { word(peer, me()).store<Order::Relaxed>(value(me(), call, 0, 0)); }
};

/// Runs one call of copied whose parts are words. If the call succeeds, it must have found the
/// parts of all peers.
inline bool copied_of_leavers(const Model& model) {
    CopiedWords body{model};
    const Launch launch = model.launch();
    // Results of launches are ignored, because a stream runs later launches even after one that
    // failed.
    (void)flow::open(launch);
    iris_model_boundary();
    (void)flow::copies(launch, 0, Delivery{1, body.me(), false}, body);
    iris_model_boundary();
    u64 wrong_place = 0;
    i32 seen = 0, wanted = 0;
    for (u32 step = 1; step < body.ranks(); ++step) {
        const u32 source = model.in.channel->peer(step);
        if (!flow::gate(launch, source, 0, 1)) break;
        const i32 found = body.word(body.me(), source).load<Order::Relaxed>();
        if (found == value(source, body.call, 0, 0)) continue;
        wrong_place = model.in.heap->signal[body.me()] + ((1u << 21) + source) * 4;
        seen = found;
        wanted = value(source, body.call, 0, 0);
    }
    iris_model_boundary();
    const bool done = flow::close(launch);
    if (done && wrong_place != 0) iris_model_check(wrong_place, seen, wanted);
    return done;
}

inline bool staged_once(const Model& model) {
    Tiles body{model};
    body.fill_shard();
    return flow::staged(model.launch(), 1, Staging{body.ranks(), model.in.tiles}, body);
}

inline bool gather_once(const Model& model, u32 tiles, bool barrier) {
    Tiles body{model};
    const Launch launch = model.launch();
    // Results of launches are ignored, because a stream runs later launches even after one that
    // failed.
    (void)flow::gather(launch, tiles, body);
    iris_model_boundary();
    if (barrier) {
        (void)flow::barrier(launch, 0, Members{model.in.members}, End::Keep);
        iris_model_boundary();
    }
    return flow::local(launch, tiles, body);
}

} // namespace iris::model

using namespace iris;
using namespace iris::model;

extern "C" {

int iris_model_one_shot(const Input& in) {
    return calls(in, [&](const Model& model) {
        Tiles body{model};
        switch (model.used) {
        case PULL: return pull_once(model, 1);
        case TWO_SHOT: return flow::two_shot(model.launch(), flow::Turns{2, body.ranks()}, 0, body);
        case GATHER: return gather_once(model, 1, true);
        case STAGED: return staged_once(model);
        default: return flow::one_shot(model.launch(), model.used, body);
        }
    });
}

/// All-reduce two_shot. The option is the number of workgroups that only send.
int iris_model_two_shot(const Input& in) {
    return calls(in, [&](const Model& model) {
        Tiles body{model};
        const flow::Turns turns{in.tiles, body.ranks()};
        const bool done = flow::two_shot(model.launch(), turns, in.option, body);
        iris_model_boundary();
        if (!done) return false;
        body.consume(0, [&](u32 tile, u32 element) { return body.sum(tile, element); });
        return true;
    });
}

/// Reduce-scatter; the last rank owns no tile. Option 1: input from a GEMM; 2: one workgroup only
/// sends.
int iris_model_reduce_scatter(const Input& in) {
    const u32 owners = in.channel->size > 1 ? in.channel->size - 1 : 1;
    return calls(in, [&](const Model& model) {
        const flow::Turns turns{in.tiles, owners};
        Tiles message{model};
        ProductTiles product{model};
        return in.option == 1 ? flow::reduce_scatter(model.launch(), turns, 0, product)
                              : flow::reduce_scatter(model.launch(), turns, in.option == 2 ? 1 : 0, message);
    });
}

/// Delivery of tiles without adding: all-gather or, with option 1, broadcast from rank 0. With
/// option 2 one workgroup only sends.
int iris_model_deliver(const Input& in) {
    const bool broadcast = in.option == 1;
    const u32 senders = in.option == 2 ? 1 : 0;
    return calls(in, [&](const Model& model) {
        Tiles body{model};
        const u32 me = body.me();
        const Delivery delivery{in.tiles, me, broadcast};
        const bool done = flow::deliver(model.launch(), delivery, senders, body);
        iris_model_boundary();
        if (!done) return false;
        for (u32 source = 0; source < (broadcast ? 1 : body.ranks()); ++source) {
            if (source == me) continue;
            body.consume(source, [&](u32 tile, u32 element) {
                return value(source, body.call, tile, element);
            });
        }
        return true;
    });
}

/// Broadcast from the last rank; the other ranks pass its tiles on.
int iris_model_relay(const Input& in) {
    return calls(in, [&](const Model& model) {
        RelayTiles body{{model}};
        const flow::Relays relays{in.tiles, body.root(), body.ranks()};
        const bool done = flow::relay(model.launch(), relays, body);
        iris_model_boundary();
        if (!done) return false;
        if (body.me() == body.root()) return true;
        body.consume(0, [&](u32 tile, u32 element) { return body.sent(tile, element); });
        return true;
    });
}

int iris_model_pull(const Input& in) {
    return calls(in, [&](const Model& model) {
        return in.option == 1 ? pull_of_leavers(model) : pull_once(model, in.tiles);
    });
}

int iris_model_staged(const Input& in) {
    return calls(in, [](const Model& model) { return staged_once(model); });
}

/// All-gather, barrier, then GEMM. Option 1: the mutant without the barrier.
int iris_model_gather(const Input& in) {
    return calls(in, [&](const Model& model) {
        return gather_once(model, in.tiles, in.option == 0);
    });
}

/// Sums of the received tiles, which the copy engine sends on to the peers.
struct Sums : Tiles {
    void copy(u32 peer, u32 part) {
        const i32 sum = value(me(), call, part, mine());
        expect(at(me(), WORK, 0, part, mine()), sum);
        put(at(peer, RESULT, me(), part, mine()), sum);
    }
};

/// All-gather by a copy engine. Option bits: 1, the engine begins before the peers have entered the
/// call; 2, the engine also sends the sums; 4, the other workgroups are one launch that waits for
/// the parts that it reads.
int iris_model_copied(const Input& in) {
    const bool is_stream = port::workgroup() == 0;
    const bool is_engine = port::workgroup() + 1 == port::workgroups();
    return calls(in, [&](const Model& model) {
        if (in.option == 8) return copied_of_leavers(model);
        Tiles body{model};
        const Launch alone{*in.heap, *in.channel, *in.record, 0, 1, Trace(0, 0, 0, 0)};
        // Results of launches are ignored, because a stream runs later launches even after one that
        // failed.
        const bool waits = (in.option & 1) == 0, sends_on = (in.option & 2) != 0;
        if (is_stream && waits) {
            (void)flow::open(alone);
        } else if (is_stream) {
            (void)flow::run(alone, End::Keep, [&](Workgroup& wg) {
                if (!wg.enter()) return false;
                wg.raise_flag(0);
                return true;
            });
        }
        iris_model_boundary();
        if (is_engine) (void)flow::copies(alone, 0, Delivery{in.tiles, body.me(), false}, body);
        if ((in.option & 4) == 0) {
            if (is_stream) body.take_copied(alone);
        } else if (is_stream || !is_engine) {
            const u32 others = port::workgroups() - 1, count = others == 0 ? 1 : others;
            body.take_arriving(
                Launch{*in.heap, *in.channel, *in.record, port::workgroup(), count, Trace(0, 0, 0, 0)});
        }
        iris_model_boundary();
        if (sends_on) {
            Sums sums{body};
            if (is_engine) (void)flow::copies(alone, in.tiles, Delivery{in.tiles, body.me(), false}, sums);
            if (is_stream) (void)body.take_gated(alone, in.tiles, RESULT);
            iris_model_boundary();
        }
        return !is_stream || flow::close(alone);
    });
}

/// GEMM that stores tiles to their owners. Option 1: the rank stores although it has given up.
/// Option 2: the rank stores before the launch that opens the call is over.
int iris_model_stored(const Input& in) {
    const bool is_stream = port::workgroup() == 0, in_turn = in.option != 2;
    return calls(in, [&](const Model& model) {
        Tiles body{model};
        const Launch alone{*in.heap, *in.channel, *in.record, 0, 1, Trace(0, 0, 0, 0)};
        // Results of launches are ignored, because a stream runs later launches even after one that
        // failed.
        if (is_stream) (void)flow::open(alone);
        const Launch launch{*in.heap, *in.channel, *in.record, port::workgroup(), port::workgroups(),
                            Trace(0, 0, 0, 0)};
        flow::Arrivals arrivals(launch);
        if (in_turn) iris_model_boundary();
        body.store_to_owners(launch, arrivals, in.option != 1);
        if (!in_turn) iris_model_boundary();
        iris_model_boundary();
        return !is_stream || flow::close(alone);
    });
}

int iris_model_accumulate(const Input& in) {
    return (in.option & ATOMIC) != 0 ? accumulate<AtomicTiles>(in) : accumulate<Tiles>(in);
}

}
