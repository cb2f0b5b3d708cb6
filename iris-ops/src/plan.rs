//! Plans: what an op will do and what it needs, computed by each rank for itself.

use iris_heap::{DType, Request, Segment};
use iris_kernels::Kernel;
use iris_kernels::schedule::{Grid, SplitGrid};
use iris_sync::barrier::Members;
use iris_sync::{Channel, Shape};

use crate::config::{Options, Ranks, TileShape};
use crate::error::{Error, Result};

/// Every block of the heap begins at a multiple of this.
const ALIGNMENT: u64 = 1024;

/// What an op will do and what it needs of the heap. Pure: making one talks to nobody.
#[derive(Clone, Debug)]
pub struct Plan {
    pub(crate) op: &'static str,
    pub(crate) variant: &'static str,
    pub(crate) ranks: Ranks,
    pub(crate) options: Options,
    pub(crate) tile: TileShape,
    pub(crate) needs: Needs,
    /// Whether N and K are the same on all ranks.
    pub(crate) common: (bool, bool),
    /// Whether there is a product in it.
    pub(crate) product: bool,
}

/// What the workspace of an op consists of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Needs {
    /// Tiles with a signal.
    pub(crate) tiles: u32,
    /// Flags of a staged gather.
    pub(crate) flags: u32,
    /// A lock a tile.
    pub(crate) locks: bool,
    /// Places for tiles in the inbox, a source and parity.
    pub(crate) places: u32,
    /// Sources that have such places.
    pub(crate) sources: u32,
    /// Bytes of a place.
    pub(crate) slot: u64,
    /// Places in the result inbox, a parity.
    pub(crate) results: u32,
    /// Bytes of such a place.
    pub(crate) result_slot: u64,
    /// Bytes of the f32 workspace or the staging buffer.
    pub(crate) workspace: u64,
    /// Columns of A in a unit of a staged gather.
    pub(crate) k_group: u32,
}

impl Needs {
    pub(crate) fn inbox_bytes(&self) -> u64 {
        (2 * u64::from(self.sources) * u64::from(self.places)).saturating_mul(self.slot)
    }

    pub(crate) fn results_bytes(&self) -> u64 {
        (2 * u64::from(self.results)).saturating_mul(self.result_slot)
    }
}

/// Words are numbered with 32 bits: so many tiles and units there may be.
fn check_words(op: &'static str, ranks: Ranks, options: &Options, tile: TileShape) -> Result<()> {
    // A split may add a short tile for each rank.
    let blocks = |total: usize, each: usize| (total.div_ceil(each) + ranks.size) as u64;
    let rows = blocks(options.m, tile.m);
    let tiles = rows * blocks(options.n, tile.n);
    let units = rows * blocks(options.k, options.columns_per_flag());
    let words = tiles.saturating_mul(2 * ranks.size as u64).saturating_add(units);
    let limit = 1 << 30;
    if words <= limit {
        return Ok(());
    }
    Err(Error::Invalid {
        op,
        what: "signals and flags".into(),
        value: format!("{words}, with tiles of {} x {}", tile.m, tile.n),
        expected: format!("at most {limit}: larger tiles or groups of K"),
    })
}

impl Plan {
    /// Check the options and begin a plan.
    pub(crate) fn begin(
        op: &'static str,
        variant: &'static str,
        ranks: Ranks,
        options: &Options,
        (common, product): ((bool, bool), bool),
    ) -> Result<Self> {
        options.check(op, ranks)?;
        let tile = options.tile.unwrap_or_else(|| crate::tune::tile((op, variant), ranks, options));
        check_words(op, ranks, options, tile)?;
        let options = options.clone();
        Ok(Self { op, variant, ranks, options, tile, needs: Needs::default(), common, product })
    }

    /// The name of the op.
    pub fn op(&self) -> &'static str {
        self.op
    }

    /// The variant, chosen if the choice was left to the plan.
    pub fn variant(&self) -> &'static str {
        self.variant
    }

    /// The shape of a tile.
    pub fn tile(&self) -> TileShape {
        self.tile
    }

    /// The rank it was made for.
    pub fn ranks(&self) -> Ranks {
        self.ranks
    }

    /// What was asked.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Bytes of the data segment that the op takes on every rank, gaps for alignment included.
    pub fn data_bytes(&self) -> u64 {
        self.requests().iter().fold(0, |sum, (_, bytes)| {
            sum.saturating_add(bytes.div_ceil(ALIGNMENT).saturating_mul(ALIGNMENT))
        })
    }

    /// Bytes of the signal segment that the op takes on every rank.
    pub fn signal_bytes(&self) -> u64 {
        let (_, words) = Channel::lay_out(self.channel_shape(0, 0), 0, 0, 0);
        (u64::from(words.signal) * 4).next_multiple_of(ALIGNMENT)
    }

    /// The parts of the data segment, by name.
    pub(crate) fn requests(&self) -> Vec<(&'static str, u64)> {
        let trace = match self.options.trace_spans {
            0 => 0,
            spans => iris_kernels::trace::buffer_bytes(spans) as u64,
        };
        let Needs { workspace, .. } = self.needs;
        let parts = [
            ("inbox", self.needs.inbox_bytes()),
            ("results", self.needs.results_bytes()),
            ("workspace", workspace),
            ("trace", trace),
        ];
        parts.into_iter().filter(|&(_, bytes)| bytes > 0).collect()
    }

    /// All of its memory that peers reach: the signals, then [`requests`](Self::requests).
    pub(crate) fn all_requests(&self) -> Vec<Request> {
        let (_, words) = Channel::lay_out(self.channel_shape(0, 0), 0, 0, 0);
        let signals = Request::new(Segment::Signal, u64::from(words.signal) * 4, "signals");
        let data = self.requests().into_iter();
        std::iter::once(signals)
            .chain(data.map(|(name, bytes)| Request::new(Segment::Data, bytes, name)))
            .collect()
    }

    pub(crate) fn channel_shape(&self, op: u32, sequence: u32) -> Shape {
        let Needs { tiles, flags, locks, .. } = self.needs;
        Shape { op, size: self.ranks.size as u32, tiles, flags, locks, sequence }
    }

    /// Everything that all ranks must have the same, by name.
    pub(crate) fn fingerprint(&self) -> Vec<(&'static str, String)> {
        let options = &self.options;
        let mut items = vec![
            ("op", self.op.to_string()),
            ("variant", self.variant.to_string()),
            ("m", options.m.to_string()),
        ];
        if self.common.0 {
            items.push(("n", options.n.to_string()));
        }
        if self.common.1 {
            items.push(("k", options.k.to_string()));
        }
        items.extend([
            ("dtype", options.dtype.to_string()),
            ("output", options.output_dtype().to_string()),
            ("wire", options.wire_dtype().to_string()),
            ("tile", format!("{} x {}", self.tile.m, self.tile.n)),
            ("epilogue", format!("{:?}", options.epilogue)),
            ("shard", format!("{:?}", options.shard)),
            ("staging", format!("{:?}", options.staging)),
            ("k_per_flag", format!("{:?}", options.k_per_flag)),
            ("k_block", options.k_block.to_string()),
            ("root", options.root.to_string()),
            ("members", format!("{:?}", options.members)),
            ("trace_spans", options.trace_spans.to_string()),
            ("first_call", options.first_call.to_string()),
            ("injected", format!("{:?}", options.injected)),
        ]);
        items
    }

    /// Workgroups that have something to do in a call of `m` rows; of those that fetch there may be
    /// `fetchers` more.
    pub(crate) fn work(&self, m: usize, fetchers: u32) -> u32 {
        let grid = Grid { rows: m as u32, ..self.grid() };
        let split = SplitGrid { grid, ..self.split_grid() };
        let tiles = match (self.op, self.variant) {
            _ if self.alone() => grid.tiles(),
            ("all_gather" | "all_to_all" | "matmul_all_gather", _) => split.part(0).tiles(),
            ("reduce_scatter" | "matmul_reduce_scatter", _) => split.tiles(),
            ("all_gather_matmul", "staged") => split.tiles().saturating_add(fetchers),
            ("all_gather_matmul", _) => split.tiles(),
            _ => grid.tiles(),
        };
        let most = if self.product { u32::MAX } else { crate::tune::MESSAGE_GROUPS };
        tiles.clamp(1, most)
    }

    /// The largest product as a grid of tiles.
    pub(crate) fn grid(&self) -> Grid {
        Grid {
            rows: self.options.m as u32,
            cols: self.options.n as u32,
            tile_m: self.tile.m as u32,
            tile_n: self.tile.n as u32,
        }
    }

    /// The same with rows split over the ranks.
    pub(crate) fn split_grid(&self) -> SplitGrid {
        SplitGrid { grid: self.grid(), size: self.ranks.size as u32 }
    }

    /// Bytes of a tile of this type.
    pub(crate) fn slot(&self, dtype: DType) -> u64 {
        ((self.tile.m * self.tile.n * dtype.size()) as u64).next_multiple_of(128)
    }

    pub(crate) fn size(&self) -> u32 {
        self.ranks.size as u32
    }

    /// The ranks of a barrier, one bit each.
    pub(crate) fn members(&self) -> u64 {
        match &self.options.members {
            None => iris_sync::barrier::Members::all(self.size()).bits(),
            Some(ranks) => ranks.iter().fold(0, |bits, rank| bits | 1 << rank),
        }
    }

    /// The kernels that its calls launch.
    pub(crate) fn kernels(&self) -> Vec<Kernel> {
        let members = Members::all(self.size());
        let barrier = Kernel::Barrier { phase: 0, members, last: false };
        match (self.op, self.variant) {
            ("barrier", _) => vec![barrier],
            ("all_reduce" | "matmul_all_reduce", _) if !self.alone() => {
                let launches = crate::matmul_all_reduce::kernels(self);
                launches.into_iter().map(|(kernel, _)| kernel).collect()
            }
            ("all_gather_matmul", "baseline") if !self.alone() => {
                vec![Kernel::Gather, barrier, Kernel::Gathered]
            }
            _ => vec![self.kernel()],
        }
    }

    /// The kernel of an op, or of a variant, that launches one.
    pub(crate) fn kernel(&self) -> Kernel {
        match (self.op, self.variant) {
            ("matmul", _) => Kernel::Local,
            _ if self.alone() => Kernel::Local,
            ("reduce_scatter" | "matmul_reduce_scatter", _) => Kernel::ReduceScatter,
            ("all_gather_matmul", "pull") => Kernel::Pull,
            ("all_gather_matmul", "staged") => Kernel::Staged,
            ("all_to_all", _) => Kernel::AllToAll,
            ("broadcast", _) => Kernel::Broadcast,
            _ => Kernel::AllGather,
        }
    }

    /// Whether there is nobody to talk to.
    pub(crate) fn alone(&self) -> bool {
        self.ranks.size == 1
    }

    /// One-shot: places for all tiles of all sources.
    pub(crate) fn needs_one_shot(mut self) -> Self {
        let tiles = self.grid().tiles();
        let slot = self.slot(self.options.wire_dtype());
        self.needs = Needs { tiles, places: tiles, sources: self.size(), slot, ..self.needs };
        self
    }

    /// Two-shot: places for the tiles of an owner, and for all results.
    pub(crate) fn needs_two_shot(mut self) -> Self {
        let tiles = self.grid().tiles();
        self.needs = Needs {
            tiles,
            places: tiles.div_ceil(self.size()),
            sources: self.size(),
            slot: self.slot(self.options.wire_dtype()),
            results: tiles,
            result_slot: self.slot(self.options.output_dtype()),
            ..self.needs
        };
        self
    }

    /// Reduce-scatter: places for the tiles of the largest part.
    pub(crate) fn needs_scatter(mut self) -> Self {
        let split = self.split_grid();
        self.needs = Needs {
            tiles: split.tiles(),
            places: split.part(0).tiles(),
            sources: self.size(),
            slot: self.slot(self.options.wire_dtype()),
            ..self.needs
        };
        self
    }

    /// Accumulating: an f32 tile and a lock for each tile of an owner.
    pub(crate) fn needs_accumulate(mut self, locks: bool) -> Self {
        let tiles = self.grid().tiles();
        let places = tiles.div_ceil(self.size());
        let bytes = (self.tile.m * self.tile.n * 4) as u64;
        let workspace = (2 * u64::from(places)).saturating_mul(bytes);
        self.needs = Needs { tiles, places, locks, workspace, ..self.needs };
        self
    }

    /// All-gather and all-to-all: places for the largest part of every source.
    pub(crate) fn needs_parts(mut self) -> Self {
        let tiles = self.split_grid().part(0).tiles();
        let slot = self.slot(self.options.output_dtype());
        self.needs = Needs { tiles, places: tiles, sources: self.size(), slot, ..self.needs };
        self
    }

    /// Broadcast: places for all tiles of one source.
    pub(crate) fn needs_broadcast(mut self) -> Self {
        let tiles = self.grid().tiles();
        let slot = self.slot(self.options.output_dtype());
        self.needs = Needs { tiles, places: tiles, sources: 1, slot, ..self.needs };
        self
    }
}
