use iris_sync::flow::AccumulateTiles;

use crate::args::{Matrix, counter};
use crate::cpu::body::partial::{Partial, bytes, in_slot};
use crate::cpu::view;
use crate::cpu::words::Words;
use crate::dtype::values;
use crate::schedule::Grid;

pub(crate) struct Accumulate<'a> {
    pub(crate) partial: Partial<'a>,
    pub(crate) words: &'a Words<'a>,
    pub(crate) grid: Grid,
    pub(crate) atomic: bool,
}

impl Accumulate<'_> {
    /// Slot of `tile` in the f32 workspace of rank `owner`, as a matrix.
    fn workspace(&self, owner: u32, tile: u32) -> Matrix {
        let args = self.partial.args;
        let place = u64::from(tile / args.channel.size);
        let bytes = u64::from(args.tile_m) * u64::from(args.tile_n) * 4;
        self.partial.tile_at(owner, args.workspace + place * bytes, 0)
    }
}

impl AccumulateTiles for Accumulate<'_> {
    fn zero(&mut self, tile: u32) {
        let me = self.partial.args.channel.rank;
        self.partial.sum.fill(0.0);
        let (workspace, area) = (self.workspace(me, tile), in_slot(self.grid.tile(tile)));
        view::store(&workspace, area, &self.partial.sum, self.partial.ld());
    }

    fn produce(&mut self, tile: u32) {
        self.partial.produce(self.grid.tile(tile));
        // Partials are rounded to the transfer type before they are added, so that the sums equal
        // those of the other variants.
        let wire = self.partial.args.wire;
        (values(wire).round)(&mut self.partial.sum);
    }

    fn add(&mut self, owner: u32, tile: u32) {
        let (workspace, area) = (self.workspace(owner, tile), in_slot(self.grid.tile(tile)));
        let ld = self.partial.ld();
        if self.atomic {
            view::add_atomic(&workspace, area, &self.partial.sum, ld);
        } else {
            view::load(&workspace, area, &mut self.partial.sum, ld, true);
            view::store(&workspace, area, &self.partial.sum, ld);
        }
        if owner != self.partial.args.channel.rank {
            self.words.count(counter::PUSHED, bytes(area, 0));
        }
    }

    fn convert(&mut self, owner: u32, tile: u32) {
        let (workspace, area) = (self.workspace(owner, tile), self.grid.tile(tile));
        let ld = self.partial.ld();
        view::load(&workspace, in_slot(area), &mut self.partial.sum, ld, false);
        if owner != self.partial.args.channel.rank {
            self.words.count(counter::PULLED, bytes(area, 0));
        }
        self.partial.finish(area);
    }
}
