use iris_sync::flow::{Owners, ReduceTiles, Turns};

use crate::args::{counter, producer};
use crate::cpu::body::partial::{Partial, bytes, in_slot};
use crate::cpu::view;
use crate::cpu::words::Words;
use crate::schedule::{Grid, SplitGrid, Tile};

/// Assignment of tiles to owners, the ranks that reduce them. The partials of a tile are added in
/// the order of ranks.
#[derive(Clone, Copy)]
pub(crate) enum TileOwners {
    /// One-shot: every rank reduces every tile.
    OneShot(Grid),
    /// Two-shot: tiles are owned round-robin.
    TwoShot(Grid, u32),
    /// Reduce-scatter: each rank owns (reduces) all tiles of one block of rows.
    Scatter(SplitGrid),
}

impl TileOwners {
    /// Position of tile number `tile` in the whole product.
    fn tile(&self, tile: u32) -> Tile {
        match self {
            TileOwners::OneShot(grid) | TileOwners::TwoShot(grid, _) => grid.tile(tile),
            TileOwners::Scatter(split) => split.tile(tile),
        }
    }

    /// Position of tile number `tile` in C of the rank that reduces the tile.
    fn result(&self, tile: u32) -> Tile {
        match self {
            TileOwners::Scatter(split) => {
                let owner = split.owner(tile);
                split.part(owner).tile(tile - split.first(owner))
            }
            _ => self.tile(tile),
        }
    }

    /// Index of the slot of tile number `tile` among the slots of one source in an inbox.
    fn place(&self, tile: u32) -> u32 {
        match self {
            TileOwners::OneShot(_) => tile,
            TileOwners::TwoShot(_, size) => tile / size,
            TileOwners::Scatter(split) => tile - split.first(split.owner(tile)),
        }
    }
}

impl Owners for TileOwners {
    fn most(&self) -> u32 {
        match self {
            TileOwners::OneShot(grid) => grid.tiles(),
            TileOwners::TwoShot(grid, size) => turns(grid, *size).most(),
            // Part 0 has the largest number of tiles, because split() gives the remainder to the
            // first parts.
            TileOwners::Scatter(split) => split.part(0).tiles(),
        }
    }

    fn owned(&self, owner: u32, place: u32) -> Option<u32> {
        match self {
            TileOwners::OneShot(grid) => (place < grid.tiles()).then_some(place),
            TileOwners::TwoShot(grid, size) => turns(grid, *size).owned(owner, place),
            TileOwners::Scatter(split) => {
                (place < split.part(owner).tiles()).then(|| split.first(owner) + place)
            }
        }
    }
}

fn turns(grid: &Grid, owners: u32) -> Turns {
    Turns { tiles: grid.tiles(), owners }
}

pub(crate) struct Reduce<'a> {
    pub(crate) partial: Partial<'a>,
    pub(crate) words: &'a Words<'a>,
    pub(crate) plan: TileOwners,
}

impl Reduce<'_> {
    fn put(&mut self, peer: u32, tile: u32, parity: u32) -> u64 {
        let (partial, area) = (&self.partial, self.plan.tile(tile));
        let (me, wire) = (partial.args.channel.rank, partial.args.wire);
        let slot = partial.slot(peer, me, self.plan.place(tile), parity, wire);
        view::store(&slot, in_slot(area), &partial.sum, partial.ld());
        bytes(area, wire)
    }
}

impl ReduceTiles for Reduce<'_> {
    fn at_once(&self) -> bool {
        self.partial.args.producer == producer::LOAD
    }

    fn produce(&mut self, tile: u32) {
        self.partial.produce(self.plan.tile(tile));
    }

    fn push(&mut self, peer: u32, tile: u32, parity: u32) {
        let bytes = self.put(peer, tile, parity);
        self.words.count(counter::PUSHED, bytes);
    }

    fn keep(&mut self, tile: u32, parity: u32) {
        let me = self.partial.args.channel.rank;
        self.put(me, tile, parity);
    }

    fn reduce(&mut self, tile: u32, parity: u32) {
        let place = self.plan.place(tile);
        let area = in_slot(self.plan.tile(tile));
        let args = self.partial.args;
        let (me, size) = (args.channel.rank, args.channel.size);
        for source in 0..size {
            let slot = self.partial.slot(me, source, place, parity, args.wire);
            let ld = self.partial.ld();
            view::load(&slot, area, &mut self.partial.sum, ld, source != 0);
        }
        self.partial.finish(self.plan.result(tile));
    }

    fn push_result(&mut self, peer: u32, tile: u32, parity: u32, direct: bool) {
        let (partial, area) = (&self.partial, self.plan.tile(tile));
        let (target, place) = if direct {
            (partial.peers_c(peer, partial.args.c.rows), area)
        } else {
            (partial.result(peer, tile, parity), in_slot(area))
        };
        view::store(&target, place, &partial.sum, partial.ld());
        self.words.count(counter::PUSHED, bytes(area, partial.args.c.dtype));
    }

    fn take_result(&mut self, tile: u32, parity: u32) {
        let area = self.plan.tile(tile);
        let args = self.partial.args;
        let slot = self.partial.result(args.channel.rank, tile, parity);
        view::copy(&slot, in_slot(area), &args.c, area, &mut self.partial.scratch);
    }
}
