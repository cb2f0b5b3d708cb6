// All-gather then GEMM, overlapped: A arrives from all ranks while it is multiplied. This rank's
// own part of A is multiplied first, then the peers' parts as copy engines deliver them. A is split
// by rows or by columns. If A is split by columns, each tile begins with this rank's columns, or, if the
// bits of a tile must be those of a GEMM of the whole A, with the first rank's.

// Functions that are normally not inlined are inlined here. A call would need more registers than the loading
// thread of the GEMM has, and the compiler would then serialise the matrix instructions.
#define IRIS_COLD IRIS_DEVICE
#include "iris/args.h"
#include "iris/gemm/whole.h"

using namespace iris;
using namespace iris::gemm;

/// Division of A into parts; same layout as iris_kernels::gemm::gathering::Units on the host. Rows
/// are counted in units of a cluster's tile rows, columns in slabs.
struct Parts {
    /// Number of rows and of slabs that come from one rank.
    u32 rows, slabs;
    /// Number of rows and of slabs in a part; the last part may have fewer.
    u32 part_rows, part_slabs;
    /// Signal numbers: number of the first part (`first`), increment from a part to the part below
    /// it (`down`), and increment from a part to the part on its right (`right`).
    u32 first, down, right;
    /// 0 if A is split by rows, 1 if by columns. `in_order`: 1 if columns are multiplied in their order.
    u32 columns, in_order;
};

class Gathering : public Whole {
  public:
    static constexpr bool AFTER_OPEN = true;

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

        /// Slabs from `number` on that can be loaded in one run. The run ends where the data of one
        /// rank ends, or where the part that has arrived ends.
        IRIS_DEVICE Run run(const Place& place, u32 number) {
            const Parts& parts = of.parts;
            const bool columns = parts.columns == 1;
            const u32 rank = of.op.channel.rank, size = of.op.channel.size, rows = parts.rows * UNIT;
            const u32 turn = columns ? number / parts.slabs : 0, begin = turn * parts.slabs;
            const u32 turned = parts.in_order == 1 ? turn : (rank + size - turn) % size;
            const u32 from = columns ? turned : place.row / rows;
            const u32 depth = columns ? (from - turn) * parts.slabs * DEPTH : 0, end = begin + parts.slabs;
            // This rank's own part is read from the caller's A.
            if (from == rank) return Run{of.map_own, place.row % rows, 0u - begin * DEPTH, depth, end};
            gate(from, place.row % rows / UNIT / parts.part_rows, number - begin);
            return Run{of.map_a, place.row, depth, depth, there < parts.slabs ? begin + there : end};
        }

      private:
        /// Waits until the part that contains `slab` has arrived. Does not wait if an earlier wait
        /// has shown this already.
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
            // Orders this thread's asynchronous copies, which read what the copy engine has
            // written, after the wait.
            follow_with_copies();
            there = (right + 1) * parts.part_slabs;
        }

        const Gathering& of;
        flow::Arrivals arrivals;
        /// Source rank of the last wait, row part of the last wait, and number of slabs of that
        /// source that have arrived.
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
