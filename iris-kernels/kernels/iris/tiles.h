// Waits for tiles of C in a user's kernel that runs concurrently with an op. The waits use the
// words, memory orders, deadlines and faults of the op itself.
//
// Only tiles that peers write directly into C have a signal here. This rank's own tiles have no
// signal: they are complete when the op has ended. So a kernel that is launched after the op on the
// same stream can read them.
#ifndef IRIS_TILES_H
#define IRIS_TILES_H

#include "iris/flow/deliver.h"
#include "iris/schedule.h"

namespace iris {

/// Kind of the synchronisation words that signal the arrival of a tile of C.
enum class Arrival : u32 {
    /// Words that signal a reduced tile in a two-shot all-reduce. Rank t mod size reduces tile t and signals
    /// it.
    Results,
    /// Signal words of the ranks' own rows: the rows of C are split over the ranks, and each rank
    /// sends its part.
    Parts,
    /// Signal words of the root, which sends all tiles of a broadcast.
    Root,
    /// Signal words of the root, or of the rank that relays the tile, in a broadcast with relays.
    Relays,
};

/// One call of an op, as passed to a user's kernel; same layout as iris_kernels::args::TileView.
/// The two words with the number of the call, to which the channel points, are copies of the op's
/// words.
struct TileView {
    HeapView heap;
    Channel channel;
    Record record;
    u32 rows, cols, tile_m, tile_n;
    Arrival arrival;
    u32 root;
    /// Number of workgroups of the op's launch.
    u32 groups, padding;
};
static_assert(IRIS_OFFSET_OF(TileView, record) == 1132, "record");
static_assert(IRIS_OFFSET_OF(TileView, rows) == 1176, "rows");
static_assert(sizeof(TileView) == 1208, "the layout of iris_kernels::args::TileView has another size");

class Tiles {
  public:
    IRIS_DEVICE explicit Tiles(const TileView& view)
        : view(view), grid{view.rows, view.cols, view.tile_m, view.tile_n},
          parts{grid, view.channel.size},
          wg(Launch{view.heap, view.channel, view.record, port::workgroup(), port::workgroups(),
                    Trace(0, 0, 0, 0)}) {}

    /// Number of tiles of C.
    IRIS_DEVICE u32 count() const { return split() ? parts.tiles() : grid.tiles(); }
    /// Position of `tile` in C.
    IRIS_DEVICE Tile area(u32 tile) const { return split() ? parts.tile(tile) : grid.tile(tile); }
    /// Rank whose workgroups write `tile` of C on this rank.
    IRIS_DEVICE u32 source(u32 tile) const {
        if (split()) return parts.owner(tile);
        const u32 me = view.channel.rank, size = view.channel.size;
        if (view.arrival == Arrival::Results) return owner_of(tile, size);
        if (view.arrival == Arrival::Root || me == view.root) return view.root;
        const u32 relay = flow::Relays{grid.tiles(), view.root, size}.relay(tile);
        return relay == me ? view.root : relay;
    }
    /// Whether this rank itself writes `tile`; a kernel must not wait for such a tile.
    IRIS_DEVICE bool own(u32 tile) const { return source(tile) == view.channel.rank; }

    /// Wait until a peer's tile has arrived. All threads call this function together, and may then
    /// read the tile by port::read or Remote::get. Returns false on all threads if the call cannot
    /// be finished: a deadline passed, a rank gave up, or a peer does not write C directly. To wait
    /// for a tile of this rank itself is a fault too, because such a tile has no signal.
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
    /// Record a fault for the refused wait; returns false.
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
