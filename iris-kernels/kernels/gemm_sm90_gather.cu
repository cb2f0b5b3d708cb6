// The product of an A that comes from all ranks while it is multiplied: what this rank has of it first, then
// what the others have, part by part as copy engines bring it. A is split by rows, or by columns: then each
// tile begins with this rank's columns.

// The loader calls nothing: a call would take more registers than it keeps, and products would go one by one.
#define IRIS_COLD IRIS_DEVICE
#include "iris/args.h"
#include "iris/gemm/whole.h"

using namespace iris;
using namespace iris::gemm;

/// How A comes; as iris_kernels::gemm::gathering::Units on the host. Rows are counted in those of the tiles of
/// a cluster, columns in slabs.
struct Parts {
    /// What comes from one rank, of all rows or all columns.
    u32 rows, slabs;
    /// A part of that, but the last, which may have less.
    u32 part_rows, part_slabs;
    /// Numbers of signals: of the first part, from a part to the one below, to the one on the right.
    u32 first, down, right;
    /// Whether columns are split, not rows.
    u32 columns;
};

class Gathering : public Whole {
  public:
    static constexpr bool BEHIND_OPEN = true;

    IRIS_DEVICE Gathering(const Arguments& args, const Parts& parts, const OpArgs& op, const TensorMap& own,
                          const TensorMap& all, const TensorMap& c)
        : Whole(args, all, c), parts(parts), op(op), map_own(own) {}

    IRIS_DEVICE void prefetch() const {
        prefetch_map(map_own);
        Whole::prefetch();
    }

    IRIS_DEVICE Place place(u32 tile, u32 rank) const {
        const Place unit = this->unit(tile);
        const Arriving arriving{parts.rows, parts.part_rows, op.channel.size, op.channel.rank};
        const u32 row = parts.columns == 1 ? unit.row : arriving.row(unit.row);
        return Place{(row * CLUSTER + rank) * ROWS, unit.col};
    }

    class Loader {
      public:
        IRIS_DEVICE explicit Loader(const Gathering& of)
            : of(of), arrivals(launch_of(of.op)), source(~0u), part(0), there(0) {}

        /// To the end of what comes from one rank, or of its part.
        IRIS_DEVICE Run run(const Place& place, u32 number) {
            const Parts& parts = of.parts;
            const bool columns = parts.columns == 1;
            const u32 rank = of.op.channel.rank, size = of.op.channel.size, rows = parts.rows * UNIT;
            const u32 turn = columns ? number / parts.slabs : 0, begin = turn * parts.slabs;
            const u32 from = columns ? (rank + size - turn) % size : place.row / rows;
            const u32 depth = columns ? (from - turn) * parts.slabs * DEPTH : 0, end = begin + parts.slabs;
            // This rank's part is where the caller has it.
            if (from == rank) return Run{of.map_own, place.row % rows, 0u - begin * DEPTH, depth, end};
            gate(from, place.row % rows / UNIT / parts.part_rows, number - begin);
            return Run{of.map_a, place.row, depth, depth, there < parts.slabs ? begin + there : end};
        }

      private:
        /// Waits for the part of a slab, unless that is known to be there.
        IRIS_DEVICE void gate(u32 from, u32 down, u32 slab) {
            if (from != source || down != part) {
                source = from;
                part = down;
                there = 0;
            }
            if (slab < there) return;
            const Parts& parts = of.parts;
            const u32 right = slab / parts.part_slabs;
            port::take_turn();
            arrivals.wait_part(source, parts.first + down * parts.down + right * parts.right);
            // What the engine has written is read by copies of this thread.
            follow_with_copies();
            there = (right + 1) * parts.part_slabs;
        }

        const Gathering& of;
        flow::Arrivals arrivals;
        /// From whom came last, which rows, and how many slabs of them are there.
        u32 source, part, there;
    };

  private:
    static constexpr u32 UNIT = CLUSTER * ROWS;

    const Parts& parts;
    const OpArgs& op;
    const TensorMap& map_own;
};

IRIS_GEMM_KERNEL iris_gemm_gather(IRIS_ARGS TensorMap own, IRIS_ARGS TensorMap all, IRIS_ARGS TensorMap b,
                                  IRIS_ARGS TensorMap c, IRIS_ARGS Arguments args, IRIS_ARGS Parts parts,
                                  IRIS_ARGS OpArgs op) {
    multiply_whole(Gathering(args, parts, op, own, all, c), b, args.deadline_ns);
}
