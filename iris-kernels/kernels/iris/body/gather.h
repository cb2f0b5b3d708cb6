// Bodies (code that moves and multiplies tiles) of an all-gather before a matrix product, for its three
// variants: push and barrier, pull, and staged.
#ifndef IRIS_BODY_GATHER_H
#define IRIS_BODY_GATHER_H

#include "iris/gemm/product.h"
#include "iris/body/partial.h"

namespace iris {

IRIS_DEVICE Units units_of(const OpArgs& args) {
    return Units{args.shard == 0 ? Shard::Rows : Shard::Columns,
                 args.channel.size,
                 args.m,
                 args.k,
                 args.tile_m,
                 args.k_group,
                 args.m_contiguous == 1};
}

/// Views of the shards of A: in this rank's own A, in a peer's A, in the inbox, or in the staging
/// buffer. A view begins at the first element of the shard, except the view of the staging buffer,
/// which begins at the first element of the whole A.
struct Shards {
    const OpArgs& args;
    const Units units;
    IRIS_DEVICE explicit Shards(const OpArgs& args) : args(args), units(units_of(args)) {}

    /// Shard of A that rank `source` has, in the memory of `source`.
    IRIS_DEVICE View own(u32 source) const {
        const View a = View::of(args.a);
        if (source == args.channel.rank) return a;
        // Leading dimension of the shard. If the shard's rows are contiguous (`pulled_ld` is 0),
        // this is its width, which differs between ranks.
        const Range line = a.transposed ? units.shard_rows(source) : units.shard_cols(source);
        const u64 ld = args.pulled_ld == 0 ? line.len() : args.pulled_ld;
        return View{args.heap.address(source, args.pulled), ld, a.dtype, a.transposed};
    }
    /// Part of the inbox of rank `at` that holds the shard of `source` within the gathered A.
    IRIS_DEVICE View inbox(u32 at, u32 source, u32 parity) const {
        const u64 address = args.heap.address(at, args.inbox + u64(parity) * args.slot);
        const View whole{address, args.k, args.a.dtype, false};
        return whole.from(units.shard_rows(source).start, units.shard_cols(source).start);
    }
    IRIS_DEVICE View staging() const {
        const bool across = args.m_contiguous == 1;
        const u64 address = args.heap.address(args.heap.rank, args.workspace);
        return View{address, across ? args.m : args.k, args.a.dtype, across};
    }
};

/// Body that writes this rank's shard to the inboxes of all ranks, `tile_m` rows at a time.
class GatherBody {
  public:
    IRIS_DEVICE explicit GatherBody(const OpArgs& args) : args(args), shards(args) {}

    IRIS_DEVICE u32 parts() const { return shards.units.row_block_shares().of(args.channel.rank); }

    IRIS_DEVICE void push_part(u32 peer, u32 part, u32 parity) {
        const u32 me = args.channel.rank, row = part * args.tile_m;
        const u32 rows = min_of(args.tile_m, shards.units.shard_rows(me).len() - row);
        const u32 cols = shards.units.shard_cols(me).len();
        copy_view(shards.inbox(peer, me, parity).from(row, 0), View::of(args.a).from(row, 0), rows,
                  cols);
        if (peer != me) {
            count_bytes(args, Counter::Pushed, bytes_of(Tile{row, 0, rows, cols}, args.a.dtype));
        }
    }

  private:
    const OpArgs& args;
    const Shards shards;
};

/// Body that multiplies shards in place. PULLS: shards are read from the peers' own memory, not
/// from the inbox.
template <bool PULLS> class GatheredBody {
  public:
    IRIS_DEVICE GatheredBody(const OpArgs& args, Product::Shared& shared)
        : shards(args), args(args), product(shared), last(~0u), block(0) {
        product.clear();
    }

    const Shards shards;

    // Number of columns of tiles, and number of tiles of C. Tiles are numbered row block by row
    // block, in the order in which this rank processes the row blocks.
    IRIS_DEVICE u32 across() const { return div_up(args.n, args.tile_n); }
    IRIS_DEVICE u32 tiles() const { return shards.units.row_blocks() * across(); }
    /// Row block of `tile`. The row block is needed for each source or unit and again for the
    /// store, so the last result is cached: to compute it takes more instructions than to multiply
    /// a slab.
    IRIS_DEVICE u32 block_of(u32 tile) {
        if (tile != last) {
            last = tile;
            block = shards.units.row_block_at(tile / across(), args.channel.rank);
        }
        return block;
    }

    IRIS_DEVICE void multiply(u32 tile, u32 source, u32 parity) {
        const Units& units = shards.units;
        const Units::Block block = units.row_block(block_of(tile));
        if (units.shard == Shard::Rows && block.source != source) return;
        const View a = PULLS ? shards.own(source)
                             : shards.inbox(args.channel.rank, source, parity);
        const Range k = units.shard_cols(source);
        const Tile at = area(tile, block);
        const u32 row = at.row - units.shard_rows(source).start;
        add(a.from(row, 0), k.start, k.len(), at);
        if (PULLS && source != args.channel.rank) {
            count_bytes(args, Counter::Pulled, bytes_of(Tile{0, 0, at.rows, k.len()}, FACTOR));
        }
    }

    /// Copies unit `unit` of A from its source rank to the staging buffer.
    IRIS_DEVICE void fetch(u32 unit) {
        const Units& units = shards.units;
        const u32 source = units.source(unit);
        const Tile part = units.area(unit);
        const View from = shards.own(source).from(part.row - units.shard_rows(source).start,
                                                  part.col - units.shard_cols(source).start);
        copy_view(shards.staging().from(part.row, part.col), from, part.rows, part.cols);
        count_bytes(args, Counter::Pulled, bytes_of(part, FACTOR));
    }

    /// Multiplies unit `unit` of A for `tile`; this rank's own units are read in place.
    IRIS_DEVICE void multiply_unit(u32 tile, u32 unit) {
        const Units& units = shards.units;
        const u32 source = units.source(unit);
        const Tile part = units.area(unit);
        const View a = source == args.channel.rank
                           ? shards.own(source).from(part.row - units.shard_rows(source).start,
                                                     part.col - units.shard_cols(source).start)
                           : shards.staging().from(part.row, part.col);
        add(a, part.col, part.cols, area(tile, units.row_block(block_of(tile))));
    }

    IRIS_DEVICE void store(u32 tile) {
        const Tile at = area(tile, shards.units.row_block(block_of(tile)));
        const View c = View::of(args.c).from(at.row, at.col);
        product.emit([&](u32 row, u32 col, Values& values) {
            if (row >= at.rows || col >= at.cols) return;
            const u32 count = min_of(WIDTH, at.cols - col);
            finish_values(args, at.col + col, count, values);
            c.store(row, col, count, values);
        });
        product.clear();
    }

  private:
    IRIS_DEVICE Tile area(u32 tile, const Units::Block& block) const {
        const u32 col = tile % across() * args.tile_n;
        return Tile{block.row, col, block.rows, min_of(args.tile_n, args.n - col)};
    }
    /// Adds to the current tile the product of `a`, which begins at the tile's first row, and of
    /// `depth` rows of B from row `k` on.
    IRIS_DEVICE void add(const View& a, u32 k, u32 depth, const Tile& at) {
        product.multiply(a, View::of(args.b).from(k, at.col), at.rows, at.cols, depth);
    }

    const OpArgs& args;
    Product product;
    /// Cache of block_of(): tile of the last call, and the row block of that tile.
    u32 last, block;
};

/// Functions that the skeleton flow::staged needs: which staging unit is fetched as the first, second
/// and so on, and which units a tile reads.
struct StagingPlan {
    const Units units_;
    const u32 rank;
    GatheredBody<true>& body;

    IRIS_DEVICE u32 units() const { return units_.units(); }
    IRIS_DEVICE u32 source(u32 unit) const { return units_.source(unit); }
    IRIS_DEVICE u32 unit_at(u32 position) const { return units_.unit_at(position, rank); }
    IRIS_DEVICE u32 tiles() const { return body.tiles(); }
    IRIS_DEVICE u32 needs(u32 tile) const { return units_.needs(body.block_of(tile)); }
    IRIS_DEVICE u32 need(u32 tile, u32 i) const { return units_.need(body.block_of(tile), rank, i); }
};

} // namespace iris

#endif
