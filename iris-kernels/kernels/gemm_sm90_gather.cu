// The product of an A whose rows come from all ranks while it is multiplied: this rank's own rows first, then
// those of the others, part by part as copy engines bring them.

// The loader calls nothing: a call would take more registers than it keeps, and products would go one by one.
#define IRIS_COLD IRIS_DEVICE
#include "iris/args.h"
#include "iris/gemm/whole.h"

using namespace iris;
using namespace iris::gemm;

/// How the rows of A come, counted in clusters' rows of tiles; as iris_kernels::gemm::Parts on the host.
struct Parts {
    /// Those of a rank, and those of a part but the last, which may have fewer.
    u32 shard, part;
    /// The number of the first part's signal.
    u32 first;
    u32 reserved;
};

class Gathering : public Whole {
  public:
    IRIS_DEVICE Gathering(const Arguments& args, const Parts& parts, const OpArgs& op, const TensorMap& own,
                          const TensorMap& all)
        : Whole(args, all), parts(parts), op(op), map_own(own) {}

    IRIS_DEVICE void prefetch() const {
        prefetch_map(map_own);
        prefetch_map(map_a);
    }

    IRIS_DEVICE Place place(u32 tile, u32 rank) const {
        const Place unit = this->unit(tile);
        return Place{(where(unit.row) * CLUSTER + rank) * ROWS, unit.col};
    }
    /// This rank's rows are where the caller has them.
    IRIS_DEVICE Slab slab(const Place& place, u32 number) const {
        const u32 depth = number * DEPTH, own = place.row - op.channel.rank * shard_rows();
        if (own < shard_rows()) return Slab{map_own, own, depth, depth};
        return Slab{map_a, place.row, depth, depth};
    }

    /// Waits for the part of a tile. It is the same as that of the tile before in most.
    class Loader {
      public:
        IRIS_DEVICE explicit Loader(const Gathering& of)
            : of(of), arrivals(launch_of(of.op)), source(of.op.channel.rank), part(0) {}

        IRIS_DEVICE void gate(const Place& place) {
            const u32 from = place.row / of.shard_rows();
            const u32 number = place.row % of.shard_rows() / (of.parts.part * CLUSTER * ROWS);
            if (from == of.op.channel.rank || (from == source && number == part)) return;
            source = from;
            part = number;
            arrivals.await(source, of.parts.first + part);
            // What the engine has written is read by copies of this thread.
            follow_with_copies();
        }

      private:
        const Gathering& of;
        flow::Arrivals arrivals;
        u32 source, part;
    };

  private:
    IRIS_DEVICE u32 shard_rows() const { return parts.shard * CLUSTER * ROWS; }

    /// The rows of clusters in the order in which they are there: this rank's own, then part by part those
    /// of its peers, of which the one before this rank sends it its part first.
    IRIS_DEVICE u32 where(u32 turn) const {
        const u32 size = op.channel.size, rank = op.channel.rank, shard = parts.shard;
        if (turn < shard) return rank * shard + turn;
        const u32 others = size - 1, of_part = parts.part * others, whole = shard / parts.part;
        u32 part = (turn - shard) / of_part;
        part = part < whole ? part : whole;
        const u32 begin = part * parts.part, left = shard - begin;
        const u32 height = left < parts.part ? left : parts.part;
        const u32 within = turn - shard - part * of_part;
        const u32 source = (rank + size - 1 - within / height) % size;
        return source * shard + begin + within % height;
    }

    const Parts& parts;
    const OpArgs& op;
    const TensorMap& map_own;
};

IRIS_GEMM_KERNEL iris_gemm_gather(IRIS_ARGS TensorMap own, IRIS_ARGS TensorMap all, IRIS_ARGS TensorMap b,
                                  IRIS_ARGS TensorMap c, IRIS_ARGS Arguments args, IRIS_ARGS Parts parts,
                                  IRIS_ARGS OpArgs op) {
    multiply_whole(Gathering(args, parts, op, own, all), b, c, args.deadline_ns);
}
