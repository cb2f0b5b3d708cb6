use iris_sync::Aborted;
use iris_sync::flow::{self, CopiedTiles, DeliverTiles, Delivery, Launch};

use crate::args::{Matrix, counter, producer};
use crate::cpu::body::partial::{Partial, bytes, in_slot};
use crate::cpu::view;
use crate::cpu::words::Words;
use crate::schedule::{Grid, SplitGrid, Tile, split};

/// Data movement of an op: which tiles go from which rank to which rank, and their positions in A
/// and C.
#[derive(Clone, Copy)]
pub(crate) enum TileRoutes {
    /// All-gather: each rank's rows go to all ranks; C has the rows of all ranks.
    AllGather(SplitGrid),
    /// All-to-all: block `to` of each rank's rows goes to rank `to`. C has one block per source
    /// rank.
    AllToAll(SplitGrid),
    /// Broadcast: the root's matrix goes to all ranks.
    Broadcast { grid: Grid, root: u32 },
}

impl TileRoutes {
    /// Position, in the sender's A or product, of tile number `tile` of the data for rank `to`.
    fn source(&self, to: u32, tile: u32) -> Tile {
        match self {
            // A sender has only its own rows, in A or in the product. Rows are counted from the
            // sender's first row, whoever receives them.
            TileRoutes::AllGather(_) | TileRoutes::Broadcast { .. } => self.area(to, to, tile),
            TileRoutes::AllToAll(grid) => {
                let area = grid.part(to).tile(tile);
                Tile { row: area.row + split(grid.grid.rows, grid.size, to).start, ..area }
            }
        }
    }

    /// Position of `tile` in the data that rank `from` sends to rank `to`; rows are counted from
    /// the first row of that data.
    fn area(&self, from: u32, to: u32, tile: u32) -> Tile {
        match self {
            TileRoutes::AllGather(grid) => grid.part(from).tile(tile),
            TileRoutes::AllToAll(grid) => grid.part(to).tile(tile),
            TileRoutes::Broadcast { grid, .. } => grid.tile(tile),
        }
    }

    /// Index of `source` among the sources of an inbox; 0 for a broadcast, which has one source
    /// only.
    fn place(&self, source: u32) -> u32 {
        if matches!(self, TileRoutes::Broadcast { .. }) { 0 } else { source }
    }

    /// Number of rows that C has at rank `to`.
    fn rows_at(&self, to: u32) -> u32 {
        match self {
            TileRoutes::AllGather(grid) => grid.grid.rows,
            TileRoutes::AllToAll(grid) => grid.size * grid.part(to).rows,
            TileRoutes::Broadcast { grid, .. } => grid.rows,
        }
    }

    /// Position, in C of rank `to`, of `tile` of the data that rank `from` sends to rank `to`.
    fn target(&self, from: u32, to: u32, tile: u32) -> Tile {
        let area = self.area(from, to, tile);
        let first = match self {
            TileRoutes::AllGather(grid) => split(grid.grid.rows, grid.size, from).start,
            TileRoutes::AllToAll(grid) => from * grid.part(to).rows,
            TileRoutes::Broadcast { .. } => 0,
        };
        Tile { row: area.row + first, ..area }
    }
}

pub(crate) struct Deliver<'a> {
    pub(crate) partial: Partial<'a>,
    pub(crate) words: &'a Words<'a>,
    pub(crate) plan: TileRoutes,
}

/// Numbers of tiles that ranks send to each other, for [`flow::deliver`](iris_sync::flow::deliver);
/// the second field is the number of this rank.
pub(crate) struct Sent(pub(crate) TileRoutes, pub(crate) u32);

impl Delivery for Sent {
    fn produced(&self) -> u32 {
        let Sent(plan, me) = *self;
        match plan {
            TileRoutes::AllGather(grid) => grid.part(me).tiles(),
            // Part 0 has the largest number of tiles, because split() gives the remainder to the
            // first parts.
            TileRoutes::AllToAll(grid) => grid.part(0).tiles(),
            TileRoutes::Broadcast { grid, root } => {
                if root == me {
                    grid.tiles()
                } else {
                    0
                }
            }
        }
    }

    fn sent(&self, from: u32, to: u32) -> u32 {
        match self.0 {
            TileRoutes::AllGather(grid) => grid.part(from).tiles(),
            TileRoutes::AllToAll(grid) => grid.part(to).tiles(),
            TileRoutes::Broadcast { grid, root } => {
                if root == from {
                    grid.tiles()
                } else {
                    0
                }
            }
        }
    }
}

impl Deliver<'_> {
    fn product(&self) -> bool {
        self.partial.args.producer != producer::LOAD
    }

    /// Writes `tile` of this rank's data for rank `to` to the position `place` of the matrix
    /// `target`.
    fn write(&mut self, to: u32, tile: u32, target: &Matrix, place: Tile) {
        if self.product() {
            view::store(target, place, &self.partial.sum, self.partial.ld());
        } else {
            let args = self.partial.args;
            let me = args.channel.rank;
            let from = match self.plan {
                TileRoutes::AllToAll(_) => self.plan.source(to, tile),
                _ => self.plan.area(me, to, tile),
            };
            let matrix = match self.plan {
                // Matrix that contains the data: C on a rank that relays, because a relay forwards
                // data that it has received into C; otherwise A.
                TileRoutes::Broadcast { root, .. } if root != me => &args.c,
                _ => &args.a,
            };
            view::copy(matrix, from, target, place, &mut self.partial.scratch);
        }
    }
}

impl Deliver<'_> {
    /// Lets workgroups do the copies of a transfer in place of copy engines; `first` is the number
    /// of the transfer's first signal. If A is gathered by columns, this rank's own part is copied
    /// too. If A is gathered by rows, later kernels read the own part from A in place.
    pub(crate) fn copies(
        &mut self,
        launch: &Launch<'_, Words<'_>>,
        first: u32,
    ) -> Result<(), Aborted> {
        let sent = Sent(self.plan, launch.channel.rank);
        let parts = if self.partial.args.shard == 1 { sent.produced() } else { 0 };
        for part in (launch.index..parts).step_by(launch.count as usize) {
            self.produce(part);
        }
        flow::copies(launch, first, &sent, self)
    }
}

impl CopiedTiles for Deliver<'_> {
    fn copy(&mut self, peer: u32, part: u32) {
        self.push(peer, part, 0, true);
    }
}

impl DeliverTiles for Deliver<'_> {
    fn produce(&mut self, tile: u32) {
        let me = self.partial.args.channel.rank;
        if matches!(self.plan, TileRoutes::AllToAll(grid) if tile >= grid.part(me).tiles()) {
            return;
        }
        if self.product() {
            let area = self.plan.area(me, me, tile);
            self.partial.produce(area);
            self.partial.epilogue(area);
        }
        let (c, place) = (self.partial.args.c, self.plan.target(me, me, tile));
        self.write(me, tile, &c, place);
    }

    fn push(&mut self, peer: u32, tile: u32, parity: u32, direct: bool) {
        let me = self.partial.args.channel.rank;
        let dtype = self.partial.args.c.dtype;
        let area = self.plan.target(me, peer, tile);
        let (target, place) = if direct {
            (self.partial.peers_c(peer, self.plan.rows_at(peer)), area)
        } else {
            (self.partial.slot(peer, self.plan.place(me), tile, parity, dtype), in_slot(area))
        };
        self.write(peer, tile, &target, place);
        self.words.count(counter::PUSHED, bytes(area, dtype));
    }

    fn take(&mut self, source: u32, tile: u32, parity: u32) {
        let args = self.partial.args;
        let me = args.channel.rank;
        let area = self.plan.target(source, me, tile);
        let slot = self.partial.slot(me, self.plan.place(source), tile, parity, args.c.dtype);
        view::copy(&slot, in_slot(area), &args.c, area, &mut self.partial.scratch);
    }
}
