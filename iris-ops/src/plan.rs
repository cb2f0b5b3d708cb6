//! Plans: variants, tiles and memory of an operator's calls. Each rank computes its plan by itself.
//!
//! This file is long because everything that a plan states about its calls and its memory is here.

pub(crate) mod composed;
mod fingerprint;
mod launches;
pub(crate) mod on_device;
mod predicted;
mod shapes;
pub(crate) mod words;

pub use shapes::Shapes;

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Once};

use iris_heap::{ALIGNMENT, DType, Request as Block, Segment};
use iris_kernels::program::{Areas, Sizes};
use iris_kernels::schedule::{Grid, SplitGrid, Units, part_of};
use iris_kernels::{GemmRequest, Library};
use iris_sync::LINE_WORDS;
use iris_sync::barrier::Members;

use crate::error::{Error, Result};
use crate::ll_items;
use crate::memory_needs::{Extent, Needs, OWN_WORDS, SLOT_ALIGNMENT};
use crate::op_names::{ChoiceReason, Op, Variant};
use crate::op_row::{self, Form, Memory, Part, Row, Tiles};
use crate::options::{Request, Shard, StagingLayout, TileShape};
use crate::split::split;
use crate::topology::Topology;
use crate::tune::{self, GemmKind};

/// Plan of an operator: the variant and tile for each size of call, and the memory that the
/// operator needs. Making a plan does not communicate. It reads this machine's tuning file, once
/// per process; an invalid file is an [`Error::Tuning`].
///
/// A call uses the first [`Choice`] whose `max_size` is at least the call's number of rows (or of
/// elements of a part). The workspace is sized for the largest choice, so one operator serves calls
/// of all sizes.
#[derive(Clone, Debug)]
pub struct Plan {
    pub(crate) ranks: Topology,
    pub(crate) request: Request,
    /// Choices of variant and tile, by ascending size of call; never empty. The last choice is for
    /// the largest call.
    choices: Vec<Choice>,
    /// Guard that makes the plan log its tuning data once, not once for every operator made from
    /// the plan.
    logged: Arc<Once>,
    /// Plans of the operators within this node that together make up an operator over several
    /// nodes; `None` on one node.
    composed: Option<Arc<composed::Composed>>,
}

/// Variant and tile for the calls of one range of sizes, up to `max_size`.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Choice {
    /// Maximum number of rows of a call (or of elements of a part) for which the choice is made.
    pub max_size: usize,
    /// Variant that these calls run.
    pub variant: Variant,
    /// Shape of a tile in these calls.
    pub tile: TileShape,
    /// Reason for the choice of the variant.
    pub why: ChoiceReason,
    pub(crate) form: &'static Form,
    pub(crate) needs: Needs,
    pub(crate) sizing: tune::Sizing,
}

impl Plan {
    /// Checks the request and makes a choice of variant and tile for each class of sizes.
    pub(crate) fn new(ranks: Topology, request: &Request) -> Result<Self> {
        Self::chosen(ranks, request).map_err(|error| error.labelled(&request.label(None)))
    }

    fn chosen(ranks: Topology, request: &Request) -> Result<Self> {
        let mut request = request.clone();
        if request.elements {
            request.m = if request.row.tiles == Tiles::All { 1 } else { ranks.size };
        }
        request.check(ranks)?;
        if ranks.nodes() > 1 {
            return Self::composed_of(ranks, request);
        }
        let ranks = tune::user::tuned(ranks)?;
        let logged = Arc::new(Once::new());
        let mut plan = Self { ranks, request, choices: Vec::new(), logged, composed: None };
        for max_size in plan.sizes() {
            let choice = plan.choose(max_size)?;
            // If two consecutive choices have the same variant and tile, only the choice for the
            // larger size is kept, because it covers both sizes.
            let alike =
                |last: &mut Choice| (last.variant, last.tile) == (choice.variant, choice.tile);
            if plan.choices.last_mut().is_some_and(alike) {
                plan.choices.pop();
            }
            plan.choices.push(choice);
        }
        // If all choices have the same variant and no choice has a measured tile, the tile of the
        // largest size is used for all sizes. A GEMM that stores its tiles to peers is an
        // exception, because its tiles follow from the rows of a call.
        let alike = |choice: &Choice| {
            choice.variant == plan.choices[0].variant
                && !choice.form.stores
                && !matches!(choice.why, ChoiceReason::Measured | ChoiceReason::Tuned)
        };
        if plan.choices.iter().all(alike) {
            plan.choices.drain(..plan.choices.len() - 1);
        }
        Ok(plan)
    }

    /// Sizes of calls at which the choice may change, ascending. The last one is the size of the
    /// largest call. If the caller requested a variant, the list has only this size, because the
    /// variant applies to all sizes. A variant with a GEMM that stores to peers is an exception,
    /// because its tiles depend on the size.
    fn sizes(&self) -> Vec<usize> {
        let largest = self.largest();
        let mut sizes = Vec::new();
        let row = self.request.row;
        let may_change = match self.request.variant {
            Some(variant) => row.form(variant).is_some_and(|form| form.stores),
            None => row.forms.len() > 1,
        };
        if may_change && !self.alone() {
            sizes = tune::sizes(self.ranks, &self.request);
            sizes.retain(|&size| size < largest);
            sizes.sort_unstable();
            sizes.dedup();
        }
        sizes.push(largest);
        sizes
    }

    /// Chooses the variant and tile for calls of up to `max_size` rows (or elements of a part).
    fn choose(&self, max_size: usize) -> Result<Choice> {
        let mut sized = self.request.clone();
        *if sized.elements { &mut sized.n } else { &mut sized.m } = max_size;
        let (variant, why) = match sized.variant {
            Some(variant) => (variant, ChoiceReason::Requested),
            None => tune::variant(self.ranks, &sized, self.request.m),
        };
        let known = || sized.row.names(|_| true);
        let unknown = || Error::invalid(self.op(), "variant", variant, known());
        let form = sized.row.form(variant).ok_or_else(unknown)?;
        // With one rank a call does not use the variant. The variant is checked anyway, so that an
        // application that was tried on one rank also runs on several.
        sized.check_form(self.ranks, form)?;
        if !self.alone() {
            sized.check_arrival(form)?;
            on_device::check_form(self.row(), form, self.ranks.device)?;
        }
        let tile = sized.tile.unwrap_or_else(|| tune::tile(self.ranks, &sized, form));
        let sized = Self { request: sized, ..self.clone() };
        sized.check_words(form, tile)?;
        sized.check_pairs(form)?;
        let needs = if self.alone() { Needs::default() } else { sized.needs(form, tile) };
        let workspace = sized
            .library_gemm(form, (max_size, tile))
            .map_or(0, |whole| whole.library_bytes().saturating_add(sized.area_bytes(form)));
        let needs = Needs { workspace: needs.workspace.max(workspace), ..needs };
        let sizing = tune::Sizing::of(self.ranks, &sized.request, form);
        Ok(Choice { max_size, variant, tile, why, form, needs, sizing })
    }

    /// Number of bytes of the matrices that the largest call of a variant keeps in the workspace.
    fn area_bytes(&self, form: &Form) -> u64 {
        let request = &self.request;
        let shape = [request.m, request.n, request.k].map(|it| it as u32);
        let dtypes = [request.dtype, request.wire_dtype(), request.output_dtype()];
        let sizes = Sizes::new(shape, self.size(), dtypes);
        sizes.map_or(0, |sizes| Areas::of(&self.program_of(form)).bytes(&sizes))
    }

    /// Sizes of the parts of the workspace that the largest call of a variant needs.
    fn needs(&self, form: &Form, tile: TileShape) -> Needs {
        let (request, size) = (&self.request, self.size());
        let grid = self.grid(form, tile);
        let split = self.split_grid(grid);
        let slot = |dtype: DType| {
            ((tile.m * tile.n * dtype.size()) as u64).next_multiple_of(SLOT_ALIGNMENT)
        };
        let (wire, output) = (slot(request.wire_dtype()), slot(request.output_dtype()));
        let (all, part) = (grid.tiles(), split.part(0).tiles());
        let owned = all.div_ceil(size);
        let a_bytes = (request.m * request.k * request.dtype.size()) as u64;
        // Needs of a variant whose tiles (partial sums or results) are sent through slots of an
        // inbox.
        let places = |tiles, places, sources, slot| Needs {
            tiles,
            places,
            sources,
            slot,
            ..Needs::default()
        };
        let needs = match form.memory {
            Memory::None => Needs::default(),
            Memory::AllTiles => places(all, all, size, wire),
            Memory::OwnedAndResults => {
                let needs = places(all, owned, size, wire);
                Needs { results: all, result_slot: output, ..needs }
            }
            Memory::PartialParts => places(split.tiles(), part, size, wire),
            Memory::Parts => places(part, part, size, output),
            Memory::OneSource => places(all, all, 1, output),
            Memory::Sums { locks } => {
                let bytes = (tile.m * tile.n * size_of::<f32>()) as u64;
                let workspace = u64::from(owned).saturating_mul(bytes);
                Needs { tiles: all, places: owned, locks, workspace, ..Needs::default() }
            }
            Memory::Signals => Needs { tiles: part, ..Needs::default() },
            Memory::Copied(rounds) => {
                Needs { tiles: rounds.saturating_mul(part), flags: 1, ..Needs::default() }
            }
            Memory::Pairs(collective) => {
                let items = self.items(collective, (request.m, request.n));
                let iris_sync::ll::Used { pairs, packs } =
                    ll_items::words(self.ranks, request, items);
                Needs { pairs, packs, ..Needs::default() }
            }
            Memory::Gathered => places(0, 1, 1, a_bytes.next_multiple_of(SLOT_ALIGNMENT)),
            Memory::Staged => {
                let flags = self.units(tile).units();
                Needs { flags, workspace: a_bytes, ..Needs::default() }
            }
        };
        let k_group = if request.row.a == Part::Shard { self.k_group() } else { 0 };
        Needs { k_group, ..needs }
    }

    /// Returns the whole-matrix GEMM of a variant for calls of up to `rows` rows; `None` if the
    /// variant has none. `tile` is the tile of the message. If a test delays or breaks message
    /// kernels, the tile GEMM replaces the whole-matrix GEMM, because the test can delay and break
    /// the tile GEMM too.
    pub(crate) fn library_gemm(
        &self,
        form: &Form,
        (rows, tile): (usize, TileShape),
    ) -> Option<GemmRequest> {
        let Request { m, n, k, dtype, library, .. } = self.request;
        let request = &self.request;
        let output = match form.gemm {
            op_row::GemmStage::None => return None,
            op_row::GemmStage::Partial if !self.alone() => request.wire_dtype(),
            _ => request.output_dtype(),
        };
        let held_up = request.fault_injection.is_by_messages();
        if held_up && (!form.has_whole_gemm() || self.alone()) {
            return None;
        }
        let signalled = form.stores.then_some([tile.m as u32, tile.n as u32]);
        let tile = tune::whole_tile(self.ranks, request);
        let library = if held_up { Library::None } else { library };
        let (backend, tile) = (self.ranks.device.backend, (tile.m as u32, tile.n as u32));
        let [gated, exchanges] = [GemmKind::Gated, GemmKind::Exchanging]
            .map(|kind| !held_up && tune::takes_part(self.ranks, request, kind));
        let shape = [m, n, k];
        Some(GemmRequest {
            library,
            backend,
            shape,
            rows,
            dtype,
            output,
            tile,
            signalled,
            gated,
            exchanges,
            batch_invariant: request.batch_invariant,
            vendor_bits: &self.ranks.tuning().vendor_bits,
            k_parts: request.k_parts(self.ranks),
            beside: request.reserve_sms > 0,
        })
    }

    /// Number of columns of A, at most K, that a staged gather fetches as one unit.
    fn k_group(&self) -> u32 {
        let columns = self.request.columns_per_flag(self.ranks.device.backend);
        columns.min(self.request.k.max(1)) as u32
    }

    /// Units of A (pieces that are fetched at once) of the staged gather in the largest call.
    fn units(&self, tile: TileShape) -> Units {
        let request = &self.request;
        Units {
            shard: request.shard,
            size: self.size(),
            m: request.m as u32,
            k: request.k as u32,
            tile_m: tile.m as u32,
            k_group: self.k_group(),
            m_contiguous: request.staged.layout == StagingLayout::MContiguous,
        }
    }

    /// Operator for which the plan was made.
    pub fn op(&self) -> Op {
        self.request.op()
    }

    /// Rank, number of ranks and device for which the plan was made.
    pub fn topology(&self) -> Topology {
        self.ranks
    }

    /// Request from which the plan was made, with the maximum sizes of a call.
    pub fn request(&self) -> &Request {
        &self.request
    }

    /// Choices of variant and tile, by ascending size of call.
    pub fn choices(&self) -> &[Choice] {
        &self.choices
    }

    /// Returns the choice for a call of `size` rows. For a message of elements, `size` is the
    /// number of elements of a part.
    pub fn at(&self, size: usize) -> &Choice {
        &self.choices[self.index_at(size)]
    }

    pub(crate) fn index_at(&self, size: usize) -> usize {
        let after = self.choices.iter().position(|choice| size <= choice.max_size);
        after.unwrap_or(self.choices.len() - 1)
    }

    /// Variant that the largest call runs.
    pub fn variant(&self) -> Variant {
        self.at(self.largest()).variant
    }

    /// Shape of a tile that the largest call has.
    pub fn tile(&self) -> TileShape {
        self.at(self.largest()).tile
    }

    /// Size of the largest call, as a number of rows, or of elements of a part.
    pub(crate) fn largest(&self) -> usize {
        if self.request.elements { self.request.n } else { self.request.m }
    }

    /// Rows that `rank` owns in a call of `m` rows, for operators that split rows over the ranks; none
    /// for a number that is no rank of the world.
    pub fn rows_of(&self, rank: usize, m: usize) -> Range<usize> {
        match rank < self.ranks.size {
            true => split(m, self.ranks.size, rank),
            false => m..m,
        }
    }

    /// Rank that owns row `row` in a call of `m` rows, for operators that split rows over the ranks;
    /// `None` if the call has no such row.
    pub fn owner(&self, row: usize, m: usize) -> Option<usize> {
        let [row, m] = [row, m].map(u32::try_from);
        let (row, m) = (row.ok()?, m.ok()?);
        (row < m).then(|| part_of(m, self.size(), row) as usize)
    }

    /// Number of bytes, padding included, that the operator takes in the data segment of every
    /// rank.
    pub fn data_bytes(&self) -> u64 {
        if let Some(composed) = &self.composed {
            return composed.data_bytes();
        }
        let blocks = self.extent().data_blocks().into_iter().map(|(_, bytes)| bytes);
        blocks.chain(self.trace_block().map(|block| block.bytes)).fold(0, |sum, bytes| {
            sum.saturating_add(bytes.div_ceil(ALIGNMENT).saturating_mul(ALIGNMENT))
        })
    }

    /// Number of bytes, padding included, that the operator takes in the signal segment of every
    /// rank.
    pub fn signal_bytes(&self) -> u64 {
        if let Some(composed) = &self.composed {
            return composed.sum(Plan::signal_bytes);
        }
        self.extent().signal_bytes().next_multiple_of(ALIGNMENT)
    }

    /// Number of 32-bit device-local words, padding included, that the operator takes on every
    /// rank.
    pub fn device_words(&self) -> u64 {
        if let Some(composed) = &self.composed {
            return composed.sum(Plan::device_words);
        }
        let line = u64::from(LINE_WORDS);
        let words = self.extent().device_words() as u64;
        words.next_multiple_of(line) + (OWN_WORDS as u64).next_multiple_of(line)
    }

    /// Smallest workspace capacity that is enough for all choices of the plan.
    pub(crate) fn extent(&self) -> Extent {
        let none = Extent::new(self.size());
        self.choices.iter().fold(none, |extent, choice| extent.with(&choice.needs))
    }

    /// Memory block for the trace buffer; `None` if the plan has no trace.
    pub(crate) fn trace_block(&self) -> Option<Block> {
        let spans = self.request.trace_spans;
        let bytes = iris_kernels::trace::buffer_bytes(spans) as u64;
        (spans > 0).then(|| Block::new(Segment::Data, bytes, "trace"))
    }

    /// Grid of tiles in the largest call of a variant.
    pub(crate) fn grid(&self, form: &Form, tile: TileShape) -> Grid {
        self.grid_of(form, tile, (self.request.m, self.request.n))
    }

    /// Grid of tiles of a call's product or message. For an all-gather before a GEMM, the grid is
    /// that of A. If A is split by columns, it is the grid of A's transpose, so that ranks always
    /// own rows.
    fn grid_of(&self, form: &Form, tile: TileShape, (m, n): (usize, usize)) -> Grid {
        let Request { k, shard, .. } = self.request;
        let gathered = form.gemm == op_row::GemmStage::Gathered && !self.alone();
        let (rows, cols, tile) = match shard {
            _ if !gathered => (m, n, tile),
            Shard::Rows => (m, k, tile),
            Shard::Columns => (k, m, TileShape { m: tile.n, n: tile.m }),
        };
        let [rows, cols, tile_m, tile_n] = [rows, cols, tile.m, tile.n].map(|it| it as u32);
        Grid { rows, cols, tile_m, tile_n }
    }

    /// Grid whose rows are split over the ranks, so that each tile lies within one rank's rows.
    pub(crate) fn split_grid(&self, grid: Grid) -> SplitGrid {
        SplitGrid { grid, size: self.size() }
    }

    pub(crate) fn size(&self) -> u32 {
        self.ranks.size as u32
    }

    pub(crate) fn row(&self) -> &'static Row {
        self.request.row
    }

    /// Set of the ranks that take part in a barrier; all ranks if the request names none.
    pub(crate) fn members(&self) -> Members {
        match &self.request.members {
            None => Members::all(self.size()),
            Some(ranks) => Members::from_bits(ranks.iter().fold(0, |bits, rank| bits | 1 << rank)),
        }
    }

    /// Whether the world has only one rank; calls then do not communicate.
    pub(crate) fn alone(&self) -> bool {
        self.ranks.size == 1
    }

    /// Whether the plan is for the CPU; otherwise it is for a GPU.
    pub(crate) fn on_cpu(&self) -> bool {
        self.ranks.device.backend.traits().host_threads
    }
}

impl fmt::Display for Plan {
    /// Formats the plan as one line: request, device, the device from which tuning data was taken
    /// if it is another one, choices, memory. Example: `all_reduce of f32, rank 0 of 4 on cpu:
    /// two_shot up to 512 by tiles of 4 x 4096 (predicted); 8192 bytes of data, 20480 of signals`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Topology { rank, size, device, .. } = self.ranks;
        write!(f, "{}, rank {rank} of {size} on {device}", self.request.label(None))?;
        if self.ranks.nodes() > 1 {
            write!(f, " of {} nodes, in each", self.ranks.nodes())?;
        }
        if let Some(gpu) = self.borrowed_tuning() {
            write!(f, ", tuning data of an {gpu}")?;
        }
        if self.request.batch_invariant {
            f.write_str(", batch invariant")?;
        }
        f.write_str(": ")?;
        for (index, Choice { max_size, variant, tile, why, .. }) in self.choices.iter().enumerate()
        {
            let comma = if index == 0 { "" } else { ", " };
            match self.choices.len() {
                _ if self.row().c == Part::None => write!(f, "{comma}{variant}")?,
                1 => write!(f, "{variant} by tiles of {tile}")?,
                _ => write!(f, "{comma}{variant} up to {max_size} by tiles of {tile}")?,
            }
            match why {
                ChoiceReason::Requested => {}
                ChoiceReason::Tuned => f.write_str(" (measured here)")?,
                ChoiceReason::Measured => f.write_str(" (measured)")?,
                ChoiceReason::Predicted => f.write_str(" (predicted)")?,
            }
        }
        write!(f, "; {} bytes of data, {} of signals", self.data_bytes(), self.signal_bytes())
    }
}
