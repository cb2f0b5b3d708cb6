// The product whose rows ranks own: of the sum over all ranks, of which each adds up what it owns, or of a C whose
// rows are multiplied by their owners. What others own is stored to them as it is finished, and signalled; what
// they have stored here is added; and what this rank owns goes to all, where they want it.

// The loader calls nothing: a call would take more registers than it keeps, and products would go one by one.
#define IRIS_COLD IRIS_DEVICE
#include "iris/args.h"
#include "iris/gemm/whole.h"

using namespace iris;
using namespace iris::gemm;

/// Most peers that a launch stores to.
constexpr u32 PEERS = 7;

/// Where something is stored at each peer, in the order of Channel::peer.
struct Peers {
    TensorMap map[PEERS];
};

/// As iris_kernels::gemm::scattering::Blocks on the host.
struct Blocks {
    /// What one rank owns, in rows of tiles of a cluster; and how many of its tiles are taken before as many of
    /// the next rank's.
    u32 rows, span;
    /// Signals: one for the rows of a consumer in each tile, row by row of what a rank owns. Of partials, and
    /// of results.
    u32 first, results, across;
    /// Whether A has the rows of all ranks, whose partials are to be added; else it has this rank's.
    u32 adds;
    /// Whether results go to all.
    u32 sends;
    u32 reserved;
};

class Scattering : public Whole {
  public:
    static constexpr bool ADDS = true, SPREADS = true;

    IRIS_DEVICE Scattering(const Arguments& args, const Blocks& blocks, const OpArgs& op, const TensorMap& a,
                           const TensorMap& c, const TensorMap& inbox, const Peers& owners, const Peers& all)
        : Whole(args, a, c), blocks(blocks), op(op), map_inbox(inbox), owners(owners), all(all) {}

    IRIS_DEVICE void prefetch() const {
        Whole::prefetch();
        if (blocks.adds == 1) prefetch_map(map_inbox);
        for (u32 i = 0; i + 1 < op.channel.size; ++i) {
            if (blocks.adds == 1) prefetch_map(owners.map[i]);
            if (blocks.sends == 1) prefetch_map(all.map[i]);
        }
    }

    IRIS_DEVICE u32 tiles() const { return owned() * turns(); }

    /// In rounds: so many tiles of the next rank's, as many of the one after it, and this rank's own last, so
    /// that what others need of a round, and what they wait for first, comes before what waits for them.
    IRIS_DEVICE Place place(u32 tile, u32 rank) const {
        const u32 size = op.channel.size, begin = tile / (blocks.span * turns()) * blocks.span;
        const u32 left = owned() - begin, width = left < blocks.span ? left : blocks.span;
        const u32 within = tile - begin * turns(), turn = within / width;
        const Place unit = this->unit(begin + within - turn * width);
        u32 owner = 0;
        if (blocks.adds == 1) owner = (op.channel.rank + 1 + turn) % size;
        return Place{((owner * blocks.rows + unit.row) * CLUSTER + rank) * ROWS, unit.col};
    }
    IRIS_DEVICE u32 addends(const Place& place) const {
        return blocks.adds == 1 && is_own(place) ? op.channel.size - 1 : 0;
    }

    class Loader : public Whole::Loader {
      public:
        IRIS_DEVICE explicit Loader(const Scattering& of)
            : Whole::Loader(of), scattering(of), arrivals(launch_of(of.op)) {}

        /// The others' in ascending order of their ranks.
        IRIS_DEVICE Addend addend(const Place& place, u32 i) {
            const Scattering& of = scattering;
            const u32 source = i + (i >= of.op.channel.rank), row = place.row % of.rows();
            for (u32 group = 0; group < GROUPS; ++group) {
                arrivals.wait_part(source, of.blocks.first + of.signal(row + group * GROUP_ROWS, place.col));
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
            const u32 rank = of.op.channel.rank, size = of.op.channel.size;
            const u32 row = place.row % of.rows() + group * GROUP_ROWS, col = place.col + chunk * CHUNK_COLS;
            if (of.is_own(place)) store_chunk(from, of.map_c, row, col);
            if (!departures.may_store()) return;
            if (!of.is_own(place)) {
                const u32 owner = place.row / of.rows();
                store_chunk(from, of.owners.map[(owner + size - rank) % size - 1], row, col);
            } else if (of.blocks.sends == 1) {
                for (u32 i = 0; i + 1 < size; ++i) store_chunk(from, of.all.map[i], row, col);
            }
        }
        IRIS_DEVICE void stored(const Place& place, u32 group) const {
            const bool own = of.is_own(place);
            if ((own && of.blocks.sends == 0) || !departures.may_store()) return;
            await_stores();
            follow_copies();
            const u32 number = of.signal(place.row % of.rows() + group * GROUP_ROWS, place.col);
            if (!own) return departures.signal_part(place.row / of.rows(), of.blocks.first + number);
            for (u32 step = 1; step < of.op.channel.size; ++step) {
                departures.signal_part(of.op.channel.peer(step), of.blocks.results + number);
            }
        }

      private:
        const Scattering& of;
        const flow::Departures departures;
    };

    /// The bias is added once, where the sums are.
    IRIS_DEVICE void finish(const Place& place, u32 group, float (&sums)[WIDTH / 2]) const {
        if (args.bias != 0 && is_own(place)) Whole::finish(place, group, sums);
    }

  private:
    /// Rows that one rank owns, and its tiles.
    IRIS_DEVICE u32 rows() const { return blocks.rows * CLUSTER * ROWS; }
    IRIS_DEVICE u32 owned() const { return blocks.rows * args.col_tiles; }
    /// How many ranks' tiles this one multiplies.
    IRIS_DEVICE u32 turns() const { return blocks.adds == 1 ? op.channel.size : 1; }
    IRIS_DEVICE bool is_own(const Place& place) const {
        return blocks.adds == 0 || place.row / rows() == op.channel.rank;
    }
    IRIS_DEVICE u32 signal(u32 row, u32 col) const {
        return row / GROUP_ROWS * blocks.across + col / WIDTH;
    }

    const Blocks& blocks;
    const OpArgs& op;
    const TensorMap& map_inbox;
    const Peers &owners, &all;
};

IRIS_GEMM_KERNEL iris_gemm_scatter(IRIS_ARGS TensorMap a, IRIS_ARGS TensorMap b, IRIS_ARGS TensorMap c,
                                   IRIS_ARGS TensorMap inbox, IRIS_ARGS Peers owners, IRIS_ARGS Peers all,
                                   IRIS_ARGS Arguments args, IRIS_ARGS Blocks blocks, IRIS_ARGS OpArgs op) {
    multiply_whole(Scattering(args, blocks, op, a, c, inbox, owners, all), b, args.deadline_ns);
}
