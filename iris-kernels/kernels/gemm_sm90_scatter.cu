// The product of which each rank owns some rows of the sum over all ranks: what others own is multiplied first,
// and stored to its owner as it is finished; this rank's own comes last, and what the others have stored here is
// added to it.

// The loader calls nothing: a call would take more registers than it keeps, and products would go one by one.
#define IRIS_COLD IRIS_DEVICE
#include "iris/args.h"
#include "iris/gemm/whole.h"

using namespace iris;
using namespace iris::gemm;

/// Most peers that a launch stores to.
constexpr u32 PEERS = 7;

/// Where this rank's part of what a peer owns is stored, in the order of Channel::peer.
struct Owners {
    TensorMap map[PEERS];
};

/// As iris_kernels::gemm::scattering::Blocks on the host.
struct Blocks {
    /// What one rank owns, in rows of tiles of a cluster.
    u32 rows;
    /// Signals: one for the rows of a consumer in each tile, row by row of what a rank owns.
    u32 first, across;
    u32 reserved;
};

class Scattering : public Whole {
  public:
    static constexpr bool ADDS = true, SPREADS = true;

    IRIS_DEVICE Scattering(const Arguments& args, const Blocks& blocks, const OpArgs& op, const TensorMap& a,
                           const TensorMap& c, const TensorMap& inbox, const Owners& owners)
        : Whole(args, a, c), blocks(blocks), op(op), map_inbox(inbox), owners(owners) {}

    IRIS_DEVICE void prefetch() const {
        Whole::prefetch();
        prefetch_map(map_inbox);
        for (u32 i = 0; i + 1 < op.channel.size; ++i) prefetch_map(owners.map[i]);
    }

    /// Rows of the next rank first, and this rank's own last.
    IRIS_DEVICE Place place(u32 tile, u32 rank) const {
        const Place unit = this->unit(tile);
        const u32 row = unit.row + (op.channel.rank + 1) * blocks.rows, all = op.channel.size * blocks.rows;
        return Place{((row < all ? row : row - all) * CLUSTER + rank) * ROWS, unit.col};
    }
    IRIS_DEVICE u32 addends(const Place& place) const {
        return owner_of(place) == op.channel.rank ? op.channel.size - 1 : 0;
    }

    class Loader : public Whole::Loader {
      public:
        IRIS_DEVICE explicit Loader(const Scattering& of)
            : Whole::Loader(of), scattering(of), arrivals(launch_of(of.op)) {}

        /// The others' in ascending order of their ranks.
        IRIS_DEVICE Addend addend(const Place& place, u32 i) {
            const Scattering& of = scattering;
            const u32 source = i + (i >= of.op.channel.rank), row = place.row - of.op.channel.rank * of.rows();
            for (u32 group = 0; group < GROUPS; ++group) {
                arrivals.wait_part(source, of.signal(row + group * GROUP_ROWS, place.col));
            }
            // What the owner of the signal has stored is read by copies of this thread.
            follow_with_copies();
            return Addend{of.map_inbox, source * of.rows() + row, place.col};
        }

      private:
        const Scattering& scattering;
        flow::Arrivals arrivals;
    };

    class Storer {
      public:
        IRIS_DEVICE explicit Storer(const Scattering& of) : of(of), departures(launch_of(of.op)) {}

        IRIS_DEVICE void store(u32 from, const Place& place, u32 group, u32 chunk) const {
            const u32 rank = of.op.channel.rank, size = of.op.channel.size, owner = of.owner_of(place);
            const u32 row = place.row - owner * of.rows() + group * GROUP_ROWS;
            const u32 col = place.col + chunk * CHUNK_COLS;
            if (owner == rank) store_chunk(from, of.map_c, row, col);
            else if (departures.may_store()) {
                store_chunk(from, of.owners.map[(owner + size - rank) % size - 1], row, col);
            }
        }
        IRIS_DEVICE void stored(const Place& place, u32 group) const {
            const u32 owner = of.owner_of(place);
            if (owner == of.op.channel.rank || !departures.may_store()) return;
            await_stores();
            follow_copies();
            const u32 row = place.row - owner * of.rows() + group * GROUP_ROWS;
            departures.signal_part(owner, of.signal(row, place.col));
        }

      private:
        const Scattering& of;
        const flow::Departures departures;
    };

    /// The bias is added once, where the sums are.
    IRIS_DEVICE void finish(const Place& place, u32 group, float (&sums)[WIDTH / 2]) const {
        if (args.bias != 0 && owner_of(place) == op.channel.rank) Whole::finish(place, group, sums);
    }

  private:
    /// Rows that one rank owns.
    IRIS_DEVICE u32 rows() const { return blocks.rows * CLUSTER * ROWS; }
    IRIS_DEVICE u32 owner_of(const Place& place) const { return place.row / rows(); }
    IRIS_DEVICE u32 signal(u32 row, u32 col) const {
        return blocks.first + row / GROUP_ROWS * blocks.across + col / WIDTH;
    }

    const Blocks& blocks;
    const OpArgs& op;
    const TensorMap& map_inbox;
    const Owners& owners;
};

IRIS_GEMM_KERNEL iris_gemm_scatter(IRIS_ARGS TensorMap a, IRIS_ARGS TensorMap b, IRIS_ARGS TensorMap c,
                                   IRIS_ARGS TensorMap inbox, IRIS_ARGS Owners owners, IRIS_ARGS Arguments args,
                                   IRIS_ARGS Blocks blocks, IRIS_ARGS OpArgs op) {
    multiply_whole(Scattering(args, blocks, op, a, c, inbox, owners), b, args.deadline_ns);
}
