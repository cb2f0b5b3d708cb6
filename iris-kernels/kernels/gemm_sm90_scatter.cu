// GEMM whose rows of C are owned by ranks, overlapped with the exchange of tiles. Either each owner
// adds up the partials of all ranks for its rows, or each rank multiplies only the rows of C that
// it owns. A finished tile that another rank owns is stored at its owner, and its signal is raised
// there. Tiles that peers have stored at this rank are added, and then a residual. If the op
// requires it, results go to all ranks.

// Functions that are normally not inlined are inlined here. A call would need more registers than the loading
// thread of the GEMM has, and the compiler would then serialise the matrix instructions.
#define IRIS_COLD IRIS_DEVICE
#include "iris/args.h"
#include "iris/gemm/whole.h"

using namespace iris;
using namespace iris::gemm;

/// Largest number of peers to which a launch stores. 1: there are two ranks.
#ifndef IRIS_GEMM_PEERS
#define IRIS_GEMM_PEERS 7
#endif
constexpr u32 PEERS = IRIS_GEMM_PEERS;

/// Whether a tile that this rank owns is the sum of the rounded parts in the order of ranks, then bias, then
/// residual. Otherwise the unrounded product of this rank comes first, and the bias after the residual.
#ifndef IRIS_GEMM_IN_ORDER
#define IRIS_GEMM_IN_ORDER 0
#endif

/// Tensor maps of one matrix at each peer, to which this rank stores tiles; in the order of Channel::peer.
struct Peers {
    TensorMap map[PEERS];
};

/// Division of C into the blocks of ranks; same layout as iris_kernels::gemm::scattering::Blocks on
/// the host.
struct Blocks {
    /// `rows`: number of rows that the first rank owns, in units of a cluster's tile rows; no rank owns more.
    /// `span`: number of tiles of each owner in a round of the order Rounds.
    u32 rows, span;
    /// Signal numbers: number of the first partial (`first`), number of the first result
    /// (`results`), and number of signals per GROUP_ROWS rows (`across`). Each consumer's rows of
    /// each tile have one signal, in row-major order within a rank's block.
    u32 first, results, across;
    /// 1 if A has the rows of all ranks, so that partials are added; 0 if A has only this rank's
    /// rows.
    u32 adds;
    /// 1 if results are sent to all ranks, else 0.
    u32 sends;
};

class Scattering : public Whole {
  public:
    static constexpr bool ADDS = true, SPREADS = true, AFTER_OPEN = true;
    static constexpr bool IN_ORDER = IRIS_GEMM_IN_ORDER, PAIR = PEERS == 1;

    IRIS_DEVICE Scattering(const Arguments& args, const Blocks& blocks, const OpArgs& op, const TensorMap& a,
                           const TensorMap& c, const TensorMap& inbox, const TensorMap& residual,
                           const Peers& owners, const Peers& all, const Peers& direct)
        : Whole(args, a, c), blocks(blocks), op(op), map_inbox(inbox), map_residual(residual),
          owners(owners), all(all), direct(direct) {}

    IRIS_DEVICE void prefetch() const {
        Whole::prefetch();
        if (blocks.adds == 1) prefetch_map(map_inbox);
        if (has_residual()) prefetch_map(map_residual);
        for (u32 i = 0; i + 1 < op.channel.size; ++i) {
            if (blocks.adds == 1) prefetch_map(owners.map[i]);
            if (blocks.sends == 1) prefetch_map(all.map[i]);
        }
    }

    IRIS_DEVICE u32 tiles() const { return owned() * turns(); }

    /// Position of `tile`, with rows counted as if all ranks owned the same number of rows. run()
    /// converts these row numbers to rows of A.
    IRIS_DEVICE Place place(u32 tile, u32 rank) const {
        const Rounds::Turn turn = Rounds{owned(), blocks.span, turns()}.at(tile);
        const Place unit = this->unit(turn.tile);
        const u32 owner = blocks.adds == 1 ? (op.channel.rank + 1 + turn.rank) % op.channel.size : 0;
        return Place{((owner * blocks.rows + unit.row) * CLUSTER + rank) * ROWS, unit.col};
    }
    IRIS_DEVICE u32 parts(const Place& place) const {
        return blocks.adds == 1 && is_own(place) ? op.channel.size : 0;
    }
    IRIS_DEVICE u32 own_part() const { return op.channel.rank; }
    IRIS_DEVICE u32 addends(const Place& place) const {
        return blocks.adds == 1 && is_own(place) ? op.channel.size - 1 + has_residual() : 0;
    }

    class Loader : public Whole::Loader {
      public:
        IRIS_DEVICE explicit Loader(const Scattering& of)
            : Whole::Loader(of), scattering(of), arrivals(launch_of(of.op)) {}

        IRIS_DEVICE Run run(const Place& place, u32) const {
            const Scattering& of = scattering;
            const u32 first = of.blocks.adds == 1 ? of.owned_by(place.row / of.rows()).start : 0;
            return Run{of.map_a, first + place.row % of.rows(), 0, 0, of.slabs()};
        }
        /// Source of addend number `i` for a tile that this rank owns: the peers' partials in
        /// ascending order of ranks, then this rank's residual.
        IRIS_DEVICE Addend addend(const Place& place, u32 i) {
            const Scattering& of = scattering;
            const u32 rank = of.op.channel.rank, source = i + (i >= rank), row = place.row % of.rows();
            if (i + 1 == of.op.channel.size) return Addend{of.map_residual, row, place.col};
            const u32 len = of.owned_by(rank).len();
            port::take_turn();
            for (u32 group = 0; group < GROUPS; ++group) {
                const u32 at = row + group * GROUP_ROWS;
                if (at < len) arrivals.wait_part(source, of.blocks.first + of.signal(at, place.col));
            }
            // Orders this thread's asynchronous copies, which read what the sender of the signal
            // has stored, after the wait.
            follow_with_copies();
            return Addend{of.map_inbox, source * len + row, place.col};
        }

      private:
        const Scattering& scattering;
        flow::Arrivals arrivals;
    };

    class Storer {
      public:
        IRIS_DEVICE explicit Storer(const Scattering& of)
            : of(of), departures(launch_of(of.op)), directs(0) {
            if (of.blocks.sends == 0) return;
            for (u32 i = 0; i + 1 < of.op.channel.size; ++i) {
                directs |= u32(departures.is_direct(of.op.channel.peer(i + 1))) << i;
            }
        }

        IRIS_DEVICE void store(u32 from, const Place& place, u32 group, u32 chunk) const {
            const u32 rank = of.op.channel.rank, size = of.op.channel.size;
            const u32 row = place.row % of.rows() + group * GROUP_ROWS, col = place.col + chunk * CHUNK_COLS;
            if (of.is_own(place)) store_chunk(from, of.map_c, row, col);
            if (!departures.may_store()) return;
            if (!of.is_own(place)) {
                const u32 owner = place.row / of.rows();
                store_chunk(from, of.owners.map[(owner + size - rank) % size - 1], row, col);
            } else if (of.blocks.sends == 1) {
                if (chunk == 0) hold<Hold::Storing>(rank);
                for (u32 i = 0; i + 1 < size; ++i) {
                    const Peers& to = (directs >> i & 1) == 1 ? of.direct : of.all;
                    store_chunk(from, to.map[i], row, col);
                }
            }
        }
        IRIS_DEVICE void stored(const Place& place, u32 group) const {
            const bool own = of.is_own(place);
            if ((own && of.blocks.sends == 0) || !departures.may_store()) return;
            await_stores();
            follow_copies();
            const u32 owner = own ? of.op.channel.rank : place.row / of.rows();
            const u32 row = place.row % of.rows() + group * GROUP_ROWS, number = of.signal(row, place.col);
            // The last tile may have fewer rows than other tiles.
            if (row >= of.owned_by(owner).len()) return;
            if (!own) return departures.signal_part(owner, of.blocks.first + number);
            for (u32 step = 1; step < of.op.channel.size; ++step) {
                departures.signal_part(of.op.channel.peer(step), of.blocks.results + number);
            }
        }

      private:
        const Scattering& of;
        const flow::Departures departures;
        /// Set of peers whose C is written directly: one bit each, in the order of Channel::peer.
        u32 directs;
    };

    /// Adds the bias, once per element, at the rank that owns the element's row.
    IRIS_DEVICE void finish(const Place& place, u32 group, float (&sums)[WIDTH / 2]) const {
        if (args.bias != 0 && is_own(place)) Whole::finish(place, group, sums);
    }

  private:
    /// Number of rows in one rank's block of tiles, the same for all ranks.
    IRIS_DEVICE u32 rows() const { return blocks.rows * CLUSTER * ROWS; }
    /// Rows of C that `owner` owns.
    IRIS_DEVICE Range owned_by(u32 owner) const { return split(op.m, op.channel.size, owner); }
    /// Number of cluster tiles (one tile for each workgroup of a cluster) in one rank's block.
    IRIS_DEVICE u32 owned() const { return blocks.rows * args.col_tiles; }
    IRIS_DEVICE bool has_residual() const { return op.residual.address != 0; }
    /// Number of ranks whose tiles this rank multiplies.
    IRIS_DEVICE u32 turns() const { return blocks.adds == 1 ? op.channel.size : 1; }
    IRIS_DEVICE bool is_own(const Place& place) const {
        return blocks.adds == 0 || place.row / rows() == op.channel.rank;
    }
    /// Number of the signal for the rows of a tile that one consumer multiplies. `row` and `col` are the
    /// first row and column of these rows within a rank's block.
    IRIS_DEVICE u32 signal(u32 row, u32 col) const {
        return row / GROUP_ROWS * blocks.across + col / WIDTH;
    }

    const Blocks& blocks;
    const OpArgs& op;
    const TensorMap &map_inbox, &map_residual;
    const Peers &owners, &all, &direct;
};

IRIS_GEMM_KERNEL iris_gemm_scatter(IRIS_ARGS TensorMap a, IRIS_ARGS TensorMap b, IRIS_ARGS TensorMap c,
                                   IRIS_ARGS TensorMap inbox, IRIS_ARGS TensorMap residual, IRIS_ARGS Peers owners,
                                   IRIS_ARGS Peers all, IRIS_ARGS Peers direct, IRIS_ARGS Arguments args,
                                   IRIS_ARGS Blocks blocks, IRIS_ARGS OpArgs op) {
    const Scattering scattering(args, blocks, op, a, c, inbox, residual, owners, all, direct);
    multiply_whole(scattering, b, args.deadline_ns);
}
