// GEMM of few rows, then one-shot all-reduce. Each workgroup multiplies one tile, pushes the tile
// to all peers, raises its signal there, and adds the same tile of all peers.

// Functions that are normally not inlined are inlined here. A call would need more registers than the loading
// thread of the GEMM has, and the compiler would then serialise the matrix instructions.
#define IRIS_COLD IRIS_DEVICE
#include "iris/body/reduce.h"
#include "iris/gemm/whole.h"

using namespace iris;

/// Source of this rank's partial (its contribution to a sum) for ReduceBody: the tile that the GEMM left in
/// shared memory, rounded to the transfer type.
class TileProducer {
  public:
    struct Shared {
        gemm::Core<gemm::Staying>& core;
        bool is_over;
        IRIS_DEVICE void end() {
            if (!is_over) core.end();
            is_over = true;
        }
    };
    IRIS_DEVICE TileProducer(const OpArgs&, Shared& shared) : shared(shared), area{} {}

    IRIS_DEVICE void produce(const Tile& at) {
        area = at;
        shared.end();
    }
    static constexpr bool REPEATS = false, KEEPS = true;
    static constexpr u32 DIES = 1;
    IRIS_DEVICE void write_to(const View& to) {
        for_each_vector(area.rows, area.cols, [&](u32 row, u32 col, u32 count) {
            Raw raw{};
            IRIS_UNROLL
            for (u32 half = 0; half < 2; ++half) {
                const u64 bits = shared.core.staged(row, col * 2 + half * 8);
                raw.low.word[2 * half] = static_cast<u32>(bits);
                raw.low.word[2 * half + 1] = static_cast<u32>(bits >> 32);
            }
            const u64 place = to.at(row, col);
            if (is_whole(place, count)) port::write(place, raw.low);
            else store_pieces(place, to.dtype, count, values_of(raw, IRIS_RESULT));
        });
    }

  private:
    Shared& shared;
    Tile area;
};

IRIS_GEMM_KERNEL iris_gemm_one_shot(IRIS_ARGS gemm::TensorMap a, IRIS_ARGS gemm::TensorMap b,
                                    IRIS_ARGS gemm::Arguments args, IRIS_ARGS OpArgs op) {
    const gemm::Staying staying(args, a);
    gemm::Core<gemm::Staying> core(staying, b, gemm::dynamic_memory(), args.deadline_ns);
    core.begin();
    TileProducer::Shared shared{core, false};
    run_one_shot<TileProducer, true>(op, shared);
    // This wait is needed even if the call was given up: asynchronous copies to shared memory must
    // complete before the workgroup ends.
    shared.end();
}
