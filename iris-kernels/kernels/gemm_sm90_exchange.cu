// GEMM of few rows, then all-reduce by the LL protocol. Each workgroup multiplies one tile, pushes
// the tile to all peers as LL words (data and flag in one word), and adds the same tile of all
// peers.

// Functions that are normally not inlined are inlined here. A call would need more registers than the loading
// thread of the GEMM has, and the compiler would then serialise the matrix instructions.
#define IRIS_COLD IRIS_DEVICE
#include "iris/body/ll.h"
#include "iris/gemm/whole.h"

using namespace iris;

/// Whether this build is for a world of two ranks.
#ifndef IRIS_GEMM_PAIR
#define IRIS_GEMM_PAIR 1
#endif
constexpr bool PAIR = IRIS_GEMM_PAIR;

/// Body of flow::exchange_tile(): loads, adds and stores one thread's items (8 bytes each) of its workgroup's
/// tile. All items of a thread have the same columns; from one item to the next the row increases by
/// CORE_THREADS / LINE.
class TileBody {
  public:
    static constexpr u32 ITEMS = PAIR ? 8 : 4;
    using Batch = ll::Batch<ITEMS, 1>;

    IRIS_DEVICE TileBody(const OpArgs& args, gemm::Core<gemm::Staying>& core, u32 col)
        : args(args), core(core), result(View::of(args.c), args.m, args.n, SHIFT),
          residual(View::of(args.residual), args.m, args.n, SHIFT), col(col),
          across(args.n / PER_ITEM), own{}, sum{}, rest{}, own_is_added(false) {}

    IRIS_DEVICE ll::Strip strip() const {
        const u32 first = col / PER_ITEM, left = across - first;
        return ll::Strip{args.m, across, first, LINE, left < LINE ? left : LINE};
    }

    IRIS_DEVICE void multiply() { core.end(); }

    IRIS_DEVICE void load(const Batch& batch) {
        IRIS_UNROLL
        for (u32 k = 0; k < ITEMS; ++k) {
            if (k < batch.count) own[k] = staged(batch.item(k));
        }
    }
    IRIS_DEVICE void give(u32 k, u32 (&data)[2]) {
        data[0] = static_cast<u32>(own[k]);
        data[1] = static_cast<u32>(own[k] >> 32);
    }
    IRIS_DEVICE void begin(const Batch& batch) {
        at = batch;
        load(batch);
        own_is_added = false;
        // The residual is loaded while this thread waits for the peers' items.
        if (args.residual.address != 0 && args.residual.dtype == IRIS_RESULT) {
            IRIS_UNROLL
            for (u32 k = 0; k < ITEMS; ++k) {
                if (k < batch.count) residual.load(batch.item(k), IRIS_RESULT, rest[k]);
            }
        }
        // Start from -0.0, the neutral element: starting from 0.0 would turn a sum of -0.0 into
        // 0.0.
        IRIS_UNROLL
        for (u32 k = 0; k < ITEMS; ++k) {
            IRIS_UNROLL
            for (u32 i = 0; i < PER_ITEM; ++i) sum[k].v[i] = -0.0f;
        }
    }
    IRIS_DEVICE void take(u32 source, const u32 (&data)[ITEMS][2]) {
        if (!own_is_added && source > args.channel.rank) add_own();
        IRIS_UNROLL
        for (u32 k = 0; k < ITEMS; ++k) add(k, data[k]);
    }
    IRIS_DEVICE void end() {
        if (!own_is_added) add_own();
        IRIS_UNROLL
        for (u32 k = 0; k < ITEMS; ++k) {
            if (k >= at.count) break;
            if (IRIS_RARE(args.bias.address != 0 || (args.epilogue & EPILOGUE_GELU) != 0)) {
                sum[k] = result.finish(at.item(k), View::of(args.bias), args.epilogue, sum[k]);
            }
            if (args.residual.address != 0) add_residual(k);
            result.store(at.item(k), sum[k]);
        }
    }

  private:
    /// Binary logarithm of the elements per item, elements per item, and items per row of the tile.
    static constexpr u32 SHIFT = 2, PER_ITEM = 1 << SHIFT, LINE = gemm::ROWS / PER_ITEM;
    static_assert(gemm::CORE_THREADS % LINE == 0, "a thread must have the same columns of each row");

    IRIS_DEVICE u64 staged(u32 item) const {
        const u32 row = item / across;
        return core.staged(row, ((item - row * across) * PER_ITEM - col) * 2);
    }
    IRIS_DEVICE void add(u32 k, const u32 (&data)[2]) {
        const ItemValues values = unpack_item(IRIS_RESULT, data);
        IRIS_UNROLL
        for (u32 i = 0; i < PER_ITEM; ++i) sum[k].v[i] += values.v[i];
    }
    IRIS_DEVICE void add_own() {
        IRIS_UNROLL
        for (u32 k = 0; k < ITEMS; ++k) {
            const u32 data[2] = {static_cast<u32>(own[k]), static_cast<u32>(own[k] >> 32)};
            add(k, data);
        }
        own_is_added = true;
    }

    /// Adds the residual of item `k` to the item's sum, before the sum is rounded.
    IRIS_DEVICE void add_residual(u32 k) {
        if (args.residual.dtype == IRIS_RESULT) return add(k, rest[k]);
        const u64 first = u64(at.item(k)) << SHIFT;
        const Elements from{View::of(args.residual), u64(args.m) * args.n, args.n};
        sum[k] = add_pieces(from, first, SHIFT, sum[k]);
    }

    const OpArgs& args;
    gemm::Core<gemm::Staying>& core;
    const ItemsOf result, residual;
    /// First column of the tile, and number of items in a row of C.
    const u32 col, across;
    Batch at;
    u64 own[ITEMS];
    ItemValues sum[ITEMS];
    u32 rest[ITEMS][2];
    bool own_is_added;
};

IRIS_GEMM_KERNEL iris_gemm_exchange(IRIS_ARGS gemm::TensorMap a, IRIS_ARGS gemm::TensorMap b,
                                    IRIS_ARGS gemm::Arguments args, IRIS_ARGS OpArgs op) {
    const gemm::Staying staying(args, a);
    gemm::Core<gemm::Staying> core(staying, b, gemm::dynamic_memory(), args.deadline_ns);
    core.begin();
    const u32 col = port::workgroup() * gemm::ROWS;
    TileBody body(op, core, col);
    flow::exchange_tile<PAIR>(launch_of(op), body.strip(), body);
}
