// The tiles of C as they arrive, for a user's kernel that runs beside an op. Waiting is that of the
// op itself: the same words, orders, deadlines and faults.
//
// Only what peers write straight into C has a signal here. This rank's own tiles have none: they are
// there when the op is over, for a kernel that is launched behind it on a stream.
#ifndef IRIS_TILES_H
#define IRIS_TILES_H

#include "iris/flow/deliver.h"
#include "iris/schedule.h"

namespace iris {

/// Which words say that a tile has come.
enum class Arrival : u32 {
    /// Tile t is the result of its owner, t mod size.
    Results,
    /// The rows of C are split over the ranks, and each sends its own.
    Parts,
    /// All tiles come from the root.
    Root,
    /// Tiles come from the root, or by one of the other ranks.
    Relays,
};

/// One call of an op, as it is handed out: iris_kernels::args::TileView on the host. The two words
/// of the channel that number the call are copies of its own.
struct TileView {
    HeapView heap;
    Channel channel;
    Record record;
    u32 rows, cols, tile_m, tile_n;
    Arrival arrival;
    u32 root;
    /// Workgroups of the op.
    u32 groups;
};
static_assert(IRIS_OFFSET_OF(TileView, record) == 1128, "record");
static_assert(IRIS_OFFSET_OF(TileView, rows) == 1172, "rows");
static_assert(sizeof(TileView) == 1200, "as iris_kernels::args::TileView");

class Tiles {
  public:
    IRIS_DEVICE explicit Tiles(const TileView& view)
        : view(view), grid{view.rows, view.cols, view.tile_m, view.tile_n},
          parts{grid, view.channel.size},
          wg(Launch{view.heap, view.channel, view.record, port::workgroup(), port::workgroups(),
                    Trace(0, 0, 0, 0)}) {}

    /// Tiles of C.
    IRIS_DEVICE u32 count() const { return split() ? parts.tiles() : grid.tiles(); }
    /// Where `tile` lies in C.
    IRIS_DEVICE Tile area(u32 tile) const { return split() ? parts.tile(tile) : grid.tile(tile); }
    /// The rank that writes it.
    IRIS_DEVICE u32 source(u32 tile) const {
        if (split()) return parts.owner(tile);
        const u32 me = view.channel.rank, size = view.channel.size;
        if (view.arrival == Arrival::Results) return owner_of(tile, size);
        if (view.arrival == Arrival::Root || me == view.root) return view.root;
        const u32 relay = flow::Relays{grid.tiles(), view.root, size}.relay(tile);
        return relay == me ? view.root : relay;
    }
    /// Whether this rank itself writes it: such a tile is not waited for.
    IRIS_DEVICE bool own(u32 tile) const { return source(tile) == view.channel.rank; }

    /// Wait until a peer's tile has come. All threads together; they may read it then, by port::read
    /// or Remote::get. False, on all threads, when the call cannot be finished: a deadline passed,
    /// somebody gave up, or a peer does not write C where this rank has it. To wait for an own tile
    /// is a fault, too: nobody would come.
    [[nodiscard]] IRIS_DEVICE bool wait(u32 tile) {
        const u32 from = source(tile), me = view.channel.rank;
        if (from == me) return refuse(FaultKind::NoProgress, tile, me, -1);
        bool direct;
        if (!wg.direct(from, direct)) return false;
        if (!direct) {
            return refuse(FaultKind::Mismatch, tile, from, static_cast<i32>(Field::Direct));
        }
        return view.arrival == Arrival::Results
                   ? wg.wait_result(from, tile)
                   : wg.wait_tile(from, split() ? tile - parts.first(from) : tile);
    }

  private:
    IRIS_DEVICE bool split() const { return view.arrival == Arrival::Parts; }
    /// Leave a fault.
    IRIS_DEVICE bool refuse(FaultKind kind, u32 tile, u32 rank, i32 field) const {
        if (port::thread() == 0) {
            give_up(wg.m,
                    Fault{kind, static_cast<i32>(view.channel.op), wg.call().number(),
                          static_cast<i32>(tile), static_cast<i32>(rank), 0, 1, field});
        }
        return false;
    }

    const TileView& view;
    const Grid grid;
    const SplitGrid parts;
    Workgroup wg;
};

} // namespace iris

#endif
